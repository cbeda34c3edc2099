// How finished work is announced and awaited. A signal is a word that holds the epoch of its last use, or counts on
// from use to use: it is never reset, so nothing has to be cleared, and an old signal is never taken for a new one.
// Comparisons are by signed difference, so that the words may wrap.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

extern "C" {

// What a wait that passed its deadline was waiting for, in device memory; the first one of a rank is kept.
struct TileOverlapFailure {
    int32_t kind;      // 0: none; otherwise a TileOverlapWait
    int32_t peer;      // place in the group of the rank waited for
    int32_t place;     // segment, band or item
    uint32_t expected;
    uint32_t seen;
};

enum TileOverlapWait {
    TILE_READY = 1,
    PEER_CONSUMED = 2,
    ROWS_ARRIVED = 3,
    COUNTS_READY = 4,
    ROUTES_ARRIVED = 5,
    PEER_BEGAN = 6,
    ROWS_PLACED = 7
};
}

#ifdef __CUDACC__

namespace tileoverlap {

// Halves of a receive buffer: the half of this epoch was last used so many epochs ago.
constexpr uint32_t GENERATIONS = 2;

__device__ __forceinline__ const char* half_of(const void* buffer, uint32_t epoch, int64_t generation_bytes) {
    return static_cast<const char*>(buffer) + epoch % GENERATIONS * generation_bytes;
}
__device__ __forceinline__ char* half_of(void* buffer, uint32_t epoch, int64_t generation_bytes) {
    return static_cast<char*>(buffer) + epoch % GENERATIONS * generation_bytes;
}

__device__ __forceinline__ void publish(uint32_t* signal, uint32_t epoch) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(signal), "r"(epoch) : "memory");
}
__device__ __forceinline__ void add_to(uint32_t* counter, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ void publish_to_peer(uint32_t* signal, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(signal), "r"(value) : "memory");
}
__device__ __forceinline__ void add_to_peer(uint32_t* counter, uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t read_signal(const uint32_t* signal) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(signal) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t read_peer_signal(const uint32_t* signal) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(signal) : "memory");
    return value;
}
// Whether a signal has come to a value or passed it.
__device__ __forceinline__ bool reached(uint32_t seen, uint32_t expected) {
    return static_cast<int32_t>(seen - expected) >= 0;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ bool has_failed(const TileOverlapFailure* failure) {
    return *static_cast<const volatile int32_t*>(&failure->kind) != 0;
}

// Polls until the condition holds for the calling thread; false after the limit, or after any other wait that was given
// up: one deadline is enough.
template <typename Condition>
__device__ __forceinline__ bool wait_until(Condition holds, const TileOverlapFailure* failure, uint64_t limit_ns,
                                           uint32_t pause_ns = 32) {
    if (holds()) return true;
    uint64_t start = nanoseconds();
    while (!holds()) {
        if (nanoseconds() - start > limit_ns || has_failed(failure)) return false;
        __nanosleep(pause_ns);
    }
    return true;
}

__device__ inline void report(TileOverlapFailure* failure, TileOverlapWait kind, int peer, int place, uint32_t expected,
                              uint32_t seen) {
    if (atomicCAS(&failure->kind, 0, static_cast<int>(kind)) != 0) return;
    failure->peer = peer;
    failure->place = place;
    failure->expected = expected;
    failure->seen = seen;
}

// All threads of a CTA wait until each peer's word has come to what is expected of it; whether all did in time.
template <typename Expected>
__device__ __forceinline__ bool all_reached(const uint32_t* words, Expected expected, int num_peers, TileOverlapWait kind,
                                            TileOverlapFailure* failure, uint64_t limit_ns) {
    bool in_time = true;
    for (int peer = threadIdx.x; peer < num_peers; peer += blockDim.x) {
        const uint32_t* word = words + peer;
        uint32_t value = expected(peer);
        if (wait_until([&] { return reached(read_peer_signal(word), value); }, failure, limit_ns)) continue;
        report(failure, kind, peer, 0, value, read_peer_signal(word));
        in_time = false;
    }
    return __syncthreads_and(in_time);
}

// One thread of each of several parties calls this after its reads; the last one tells the peers that all have read.
__device__ inline void say_read(int* finished, int parties, uint32_t* const* peer_words, int num_peers, uint32_t epoch) {
    __threadfence();
    if (atomicAdd(finished, 1) != parties - 1) return;
    *finished = 0;
    __threadfence_system();
    for (int peer = 0; peer < num_peers; peer++) publish_to_peer(peer_words[peer], epoch);
}

}  // namespace tileoverlap

#endif
