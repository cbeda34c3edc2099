// Enough of CUDA to run the package's index, courier and sum kernels on a CPU: one fiber for each thread of a CTA, one
// CTA after the other. Barriers and warp exchanges switch fibers; a wait for a peer gives the core to other processes.
#pragma once
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

using std::max;
using std::min;

struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = void*;
using cudaError_t = int;
enum { cudaErrorInvalidValue = 1, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline int cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(int) { return "emulated"; }
template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, int) { return 0; }
inline int cudaGetDevice(int* device) { return *device = 0; }

namespace emulation {

enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, FINISHED };

struct Dim { int x; };

// A fiber starts as a context and then goes on by jumps, which unlike contexts cost no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool started;
    State state;
    Dim thread;
};

struct Block {
    Dim block, grid, size;
    std::vector<Fiber> fibers;
    jmp_buf scheduler;
    Fiber* running = nullptr;
    std::function<void()> body;
    std::map<int, std::vector<char>> shared;
    std::vector<char> dynamic;
    std::vector<uint64_t> exchange;  // one word a thread
    int all = 1;
};

inline thread_local Block* block = nullptr;

inline void pause(State state) {
    Block* b = block;
    b->running->state = state;
    if (_setjmp(b->running->place) == 0) _longjmp(b->scheduler, 1);
}

inline void enter() {
    block->body();
    block->running->state = FINISHED;
    _longjmp(block->scheduler, 1);
}

inline void resume(Block& b, Fiber& fiber) {
    b.running = &fiber;
    if (_setjmp(b.scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// Whether every fiber of a range waits there or has finished; then they may all go on.
inline void open(Block& b, size_t first, size_t end, State barrier) {
    bool any = false;
    for (size_t i = first; i < end; i++) {
        if (b.fibers[i].state != barrier && b.fibers[i].state != FINISHED) return;
        any |= b.fibers[i].state == barrier;
    }
    for (size_t i = first; any && i < end; i++)
        if (b.fibers[i].state == barrier) b.fibers[i].state = READY;
}

// How long each kernel of this thread is held up before it starts; "*": every one, at random up to so long.
inline thread_local std::map<std::string, double> delays_ms;
inline thread_local std::minstd_rand random;

inline void delay(const std::string& kernel) {
    double ms = 0;
    if (auto found = delays_ms.find("*"); found != delays_ms.end()) ms = found->second * random() / random.max();
    if (auto found = delays_ms.find(kernel); found != delays_ms.end()) ms = found->second;
    if (ms > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

inline void launch(const char* kernel, int grid, int size, size_t dynamic_bytes, std::function<void()> body) {
    if (kernel) delay(kernel);
    constexpr size_t STACK = 64 * 1024;
    static thread_local std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() < static_cast<size_t>(size)) stacks.emplace_back(new char[STACK]);
    Block b;
    b.grid = {grid}, b.size = {size}, b.body = std::move(body);
    b.fibers.resize(size);
    for (int index = 0; index < grid; index++) {
        block = &b;
        b.block = {index};
        b.shared.clear();
        b.dynamic.assign(dynamic_bytes + 16, 0x5a);
        b.exchange.assign(size, 0);
        for (int i = 0; i < size; i++) {
            Fiber& fiber = b.fibers[i];
            getcontext(&fiber.context);
            fiber.context.uc_stack = {stacks[i].get(), 0, STACK};
            fiber.started = false;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 0);
            fiber.state = READY;
            fiber.thread = {i};
        }
        for (bool alive = true; alive;) {
            alive = false;
            for (Fiber& fiber : b.fibers) {
                if (fiber.state == READY) resume(b, fiber);
            }
            for (size_t first = 0; first < b.fibers.size(); first += 32)
                open(b, first, min(first + 32, b.fibers.size()), AT_WARP_BARRIER);
            open(b, 0, b.fibers.size(), AT_BLOCK_BARRIER);
            for (Fiber& fiber : b.fibers) alive |= fiber.state != FINISHED;
        }
    }
    block = nullptr;
}

template <typename T, int KEY>
T& shared() {
    std::vector<char>& bytes = block->shared[KEY];
    if (bytes.empty()) bytes.assign(sizeof(T) + 16, 0x5a);
    return *reinterpret_cast<T*>(bytes.data());
}
template <typename T>
T* dynamic() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(block->dynamic.data()) + 15) & ~uintptr_t{15}); }

template <typename T>
T exchange(T value, int from) {
    static_assert(sizeof(T) <= 8);
    int warp = block->running->thread.x / 32 * 32;
    std::memcpy(&block->exchange[block->running->thread.x], &value, sizeof(T));
    pause(AT_WARP_BARRIER);
    T result;
    std::memcpy(&result, &block->exchange[warp + from], sizeof(T));
    pause(AT_WARP_BARRIER);
    return result;
}

}  // namespace emulation

#define threadIdx (emulation::block->running->thread)
#define blockIdx (emulation::block->block)
#define blockDim (emulation::block->size)
#define gridDim (emulation::block->grid)

inline void __syncthreads() { emulation::pause(emulation::AT_BLOCK_BARRIER); }
inline int __syncthreads_and(int value) {
    if (!value) emulation::block->all = 0;
    __syncthreads();
    int all = emulation::block->all;
    __syncthreads();
    emulation::block->all = 1;
    __syncthreads();
    return all;
}
inline void __syncwarp() { emulation::pause(emulation::AT_WARP_BARRIER); }
template <typename T>
T __shfl_sync(unsigned, T value, int from) { return emulation::exchange(value, from); }
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
    int lane = threadIdx.x % 32;
    return emulation::exchange(value, lane >= step ? lane - step : lane);
}
inline unsigned __ballot_sync(unsigned, int value) {
    unsigned result = 0;
    for (int lane = 0; lane < 32; lane++) result |= static_cast<unsigned>(emulation::exchange(value, lane) != 0) << lane;
    return result;
}
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == ~0u; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(value); }
inline float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) {
    sched_yield();
    emulation::pause(emulation::READY);
}
template <typename T>
T __ldg(const T* pointer) { return *pointer; }
template <typename T>
T __ldcg(const T* pointer) { return *const_cast<const volatile T*>(pointer); }
inline uint4 __ldcg(const uint4* pointer) { return *pointer; }
template <typename T, typename V>
T atomicAdd(T* pointer, V value) { return __atomic_fetch_add(pointer, static_cast<T>(value), __ATOMIC_SEQ_CST); }
template <typename T, typename V>
T atomicOr(T* pointer, V value) { return __atomic_fetch_or(pointer, static_cast<T>(value), __ATOMIC_SEQ_CST); }
inline int atomicCAS(int* pointer, int expected, int value) {
    __atomic_compare_exchange_n(pointer, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
