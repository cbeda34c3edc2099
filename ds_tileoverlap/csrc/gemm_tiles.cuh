// What kernels that multiply tiles of 128 x 256 share: a ring of shared-memory stages, a queue of items for a cluster of
// two CTAs, and how a math warpgroup adds up what lies in the stages.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "epilogue.cuh"
#include "ptx.cuh"

namespace tileoverlap {

constexpr int TILE_M = 128, TILE_N = 256, TILE_K = 64;
constexpr int STAGES = 4, QUEUE = 3;
constexpr int THREADS = 3 * WARPGROUP;
constexpr int REGISTERS = 104, MATH_REGISTERS = 200;
// The kernel starts with as many registers for each thread; math warps would wait forever for more than others give up.
static_assert(REGISTERS + 2 * MATH_REGISTERS <= 3 * (65536 / THREADS / 8 * 8));
constexpr int A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;

struct Pipeline {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t item_full[QUEUE], item_empty[QUEUE];
    int4 items[QUEUE];

    // One thread, before a barrier of the cluster. Readers are warps of both CTAs that read the queue.
    __device__ void init(int queue_readers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], 2 * 8);  // the math warps of both CTAs
        }
        for (int i = 0; i < QUEUE; i++) {
            barrier_init(&item_full[i], 1);
            barrier_init(&item_empty[i], queue_readers);
        }
        barrier_init_fence();
        for (int i = 0; i < QUEUE; i++) barrier_expect(&item_full[i], 16);
    }
};

// A warp's (or one thread's) place in the queue of items.
struct QueueReader {
    Ring<QUEUE> ring;

    __device__ __forceinline__ int4 read(Pipeline& shared) {
        barrier_wait(&shared.item_full[ring.slot], ring.parity);
        return load_shared_16<int4>(&shared.items[ring.slot]);
    }
    // The slot may be used again once every reader has said so; one thread of the warp calls this.
    __device__ __forceinline__ void release(Pipeline& shared) { barrier_arrive_in_cta(&shared.item_empty[ring.slot], 0); }
};

// Claims items for the cluster; one thread of CTA 0. The last item that a cluster gets has a negative x.
template <typename ItemOf>
struct Scheduler {
    ItemOf item_of;  // claim -> int4
    int count;
    int* claimed;
    int num_clusters;
    Ring<QUEUE> ring{};
    bool ended = false;

    __device__ void send_next(Pipeline& shared) {
        if (ended) return;
        int claim = atomicAdd(claimed, 1);
        int4 item = claim < count ? item_of(claim) : make_int4(-1, 0, 0, 0);
        // Every cluster is refused once; the last one to be leaves the counter as it was found.
        if (claim == count + num_clusters - 1) *claimed = 0;
        barrier_wait(&shared.item_empty[ring.slot], ring.parity ^ 1);
        send_16(&shared.items[ring.slot], item, &shared.item_full[ring.slot], 0);
        send_16(&shared.items[ring.slot], item, &shared.item_full[ring.slot], 1);
        ring.advance();
        ended = claim >= count;
    }
};

// The shared-memory descriptor of an operand whose rows of 128 bytes are swizzled, 8 rows to 1024 bytes. The address
// and the offset to the next 64 columns of a transposed operand are in units of 16 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t next_columns) {
    constexpr uint64_t SWIZZLED_128 = uint64_t{1} << 62, NEXT_8_ROWS = uint64_t{1024 / 16} << 32;
    return SWIZZLED_128 | NEXT_8_ROWS | (next_columns << 16 | address);
}

// A math warpgroup's view of the stages. A transposed operand lies there k by k: of A two boxes, of B four of
// 64 k x 64 columns.
template <typename T, int A_TRANSPOSED, int B_TRANSPOSED>
class Multiplier {
public:
    __device__ Multiplier(Pipeline& shared, const uint8_t* stages, int group)
        : shared(shared), first_a((shared_address(stages) & 0x3ffff) / 16 + group * (A_BYTES / 2 / 16)),
          first_b((shared_address(stages) & 0x3ffff) / 16 + A_BYTES / 16) {}

    // The sum over the next blocks; its first value is written, not added, if there is any block.
    __device__ __forceinline__ void multiply(float (&sums)[128], int num_blocks) {
        int last = 0;
        for (int block = 0; block < num_blocks; block++) {
            barrier_wait(&shared.full[ring.slot], ring.parity);
            uint32_t a = first_a + ring.slot * (STAGE_BYTES / 16), b = first_b + ring.slot * (STAGE_BYTES / 16);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < TILE_K / 16; step++)
                wgmma_256<T, A_TRANSPOSED, B_TRANSPOSED>(sums, descriptor(a + step * A_STEP, 1),
                                                         descriptor(b + step * B_STEP, B_NEXT), (block | step) != 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (block > 0) release(last);
            last = ring.slot;
            ring.advance();
        }
        wgmma_wait<0>();
        if (num_blocks > 0) release(last);
    }

    // Passes blocks that this warpgroup has no rows for.
    __device__ __forceinline__ void skip(int num_blocks) {
        for (int block = 0; block < num_blocks; block++) {
            barrier_wait(&shared.full[ring.slot], ring.parity);
            release(ring.slot);
            ring.advance();
        }
    }

private:
    // Sixteen k further: 16 rows of a transposed operand, otherwise 32 bytes along each row.
    static constexpr uint32_t A_STEP = A_TRANSPOSED ? 16 * 128 / 16 : 2, B_STEP = B_TRANSPOSED ? 16 * 128 / 16 : 2;
    static constexpr uint32_t B_NEXT = B_TRANSPOSED ? B_BYTES / 4 / 16 : 1;

    __device__ __forceinline__ void release(int slot) {
        int lane = threadIdx.x % 32;
        if (lane < 2) barrier_arrive_in_cta(&shared.empty[slot], lane);
    }

    Pipeline& shared;
    const uint32_t first_a, first_b;  // within this CTA, in units of 16 bytes
    Ring<STAGES> ring;
};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    static EncodeTiled function = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
        return reinterpret_cast<EncodeTiled>(found);
    }();
    return function;
}

// A row-major [rows, columns] matrix, read in boxes of box_rows x 64 columns.
inline int encode(CUtensorMap* map, const void* matrix, uint64_t rows, uint64_t columns, uint32_t box_rows, int is_half) {
    if (encode_tiled() == nullptr) return cudaErrorNotSupported;
    cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * 2};
    cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
    return encode_tiled()(map, is_half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                          const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace tileoverlap
