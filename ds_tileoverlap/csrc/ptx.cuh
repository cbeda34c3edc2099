// The Hopper instructions that the kernels use, one function each. No torch headers here or in any kernel file.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace tileoverlap {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// The first multiple of so many bytes in it; the compiler still knows that this is shared memory.
__device__ __forceinline__ uint8_t* aligned_shared(uint8_t* memory, uint32_t bytes) {
    return memory + (-shared_address(memory) & (bytes - 1));
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ int sm_index() {
    int index;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
    return index;
}

// The address of the same shared variable in another CTA of the cluster.
__device__ __forceinline__ uint32_t in_cta(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// --- mbarrier -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the cluster and to the bulk copy engine; a barrier of all threads follows.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_arrive_in_cta(uint64_t* barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                     in_cta(shared_address(barrier), rank))
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// A place in a ring of barriers and the parity of the round it is in.
template <int DEPTH>
struct Ring {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == DEPTH) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// --- bulk copies ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}

// The same box lands at the same place in both CTAs of the cluster and counts at the barrier of each.
__device__ __forceinline__ void load_box_to_both(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3))
        : "memory");
}

// Bytes are a multiple of 16, as the addresses are.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(to),
        "r"(shared_address(from)), "r"(bytes)
        : "memory");
}
// Until the memory that this thread's bulk stores read may be used again.
__device__ __forceinline__ void bulk_stores_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Until all but the last so many of this thread's bulk stores are in place.
template <int PENDING>
__device__ __forceinline__ void bulk_stores_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A thread's own loads to shared memory, past the bulk copy engine.
__device__ __forceinline__ void load_16_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void loads_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void loads_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A tensor map in global memory gets another number of rows. It is used by later kernels, which acquire it.
__device__ __forceinline__ void set_map_rows(CUtensorMap* map, uint32_t rows) {
    asm volatile(
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 1, %1;\n"
        "fence.proxy.tensormap::generic.release.gpu;" ::"l"(__cvta_generic_to_global(map)),
        "r"(rows)
        : "memory");
}

// Before a tensor map that lies in global memory is used by a CTA.
__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

template <typename Vector>
__device__ __forceinline__ Vector load_shared_16(const void* pointer) {
    Vector value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared_address(pointer))
                 : "memory");
    return value;
}

// Sends 16 bytes to the shared memory of a CTA of the cluster and counts them at its barrier.
__device__ __forceinline__ void send_16(void* to, int4 value, uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            in_cta(shared_address(to), rank)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(in_cta(shared_address(barrier), rank))
        : "memory");
}

// Between ordinary writes to global memory and bulk copies that read them.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- warpgroup matrix multiply --------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define TILEOVERLAP_8(d, i)                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define TILEOVERLAP_64(d, i)                                                                                      \
    TILEOVERLAP_8(d, i), TILEOVERLAP_8(d, i + 8), TILEOVERLAP_8(d, i + 16), TILEOVERLAP_8(d, i + 24),             \
        TILEOVERLAP_8(d, i + 32), TILEOVERLAP_8(d, i + 40), TILEOVERLAP_8(d, i + 48), TILEOVERLAP_8(d, i + 56)
#define TILEOVERLAP_WGMMA_256(TYPE)                                                                                   \
    asm volatile(                                                                                                     \
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %130, 0;\n"                                                           \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                                  \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "   \
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "   \
        "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "   \
        "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "  \
        "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "      \
        "%123, %124, %125, %126, %127}, %128, %129, keep, 1, 1, %131, %132;\n}\n"                                     \
        : TILEOVERLAP_64(d, 0), TILEOVERLAP_64(d, 64)                                                                 \
        : "l"(a), "l"(b), "r"(accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED))

// d[64 x 256] (+)= a[64 x 16] b[256 x 16]^T, from shared-memory descriptors; asynchronous. A transposed operand lies in
// memory k by k.
template <typename T, int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        TILEOVERLAP_WGMMA_256("bf16");
    } else {
        TILEOVERLAP_WGMMA_256("f16");
    }
}

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

// --- registers ------------------------------------------------------------------------------------------------------

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace tileoverlap
