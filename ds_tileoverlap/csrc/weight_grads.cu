// Weight gradients, in one persistent kernel. A cluster of two CTAs takes one item at a time: two 128 x 256 tiles of an
// expert's gradient that share operand B, the columns of its rows. Both operands are read through maps that end where the
// expert's rows do, so that what lies behind them counts as 0.
//
//   loader      one thread a CTA fills a ring of shared-memory stages
//   clerk       one thread of CTA 0 claims items and hands them to both CTAs through a queue
//   2 x math    a warpgroup each for 64 rows of the tile
#include "weight_grads.cuh"

#include "gemm_tiles.cuh"
#include "launch.cuh"

namespace tileoverlap {
namespace {

constexpr int LOADER = 0, CLERK = 1;  // warps of the first warpgroup
constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES;
// Warps that read the queue: the loader and eight math warps in each CTA.
constexpr int QUEUE_READERS = 2 * 9;

// The tiles of all experts, one expert after the other. The smaller operand, which stays in the cache, is gone through
// first.
struct Tiles {
    const int* row_offsets;
    int row_pairs, column_tiles;
    bool rows_first;

    __device__ int4 item(int claim) const {
        int each = row_pairs * column_tiles, expert = claim / each, tile = claim % each;
        int pair = rows_first ? tile % row_pairs : tile / column_tiles;
        int column = rows_first ? tile / row_pairs : tile % column_tiles;
        int first = __ldg(row_offsets + expert);
        return make_int4(first, __ldg(row_offsets + expert + 1) - first, expert, pair << 16 | column);
    }
};

// One CTA's view of an item: which tile of the gradient, and the expert's rows.
struct Tile {
    int expert, row, column, first, num_blocks;
    bool is_last;
};

__device__ __forceinline__ Tile tile_of(int4 item, uint32_t rank) {
    return {item.z, (item.w >> 16) * 2 * TILE_M + static_cast<int>(rank) * TILE_M, (item.w & 0xffff) * TILE_N,
            item.x, (item.y + TILE_K - 1) / TILE_K,       item.x < 0};
}

// One thread.
__device__ void load(Pipeline& shared, uint8_t* stages, const CUtensorMap* grad_maps, const CUtensorMap* row_maps,
                     uint32_t rank) {
    QueueReader queue;
    Ring<STAGES> ring;
    int mapped = -1;
    while (true) {
        Tile tile = tile_of(queue.read(shared), rank);
        if (tile.is_last) return;
        barrier_expect(&shared.item_full[queue.ring.slot], 16);  // the next item in this slot
        queue.release(shared);
        queue.ring.advance();
        const CUtensorMap *grads = grad_maps + tile.expert, *rows = row_maps + tile.expert;
        if (tile.expert != mapped) {
            acquire_map(grads);
            acquire_map(rows);
            mapped = tile.expert;
        }
        int column = tile.column + rank * (TILE_N / 2);
        for (int block = 0; block < tile.num_blocks; block++) {
            barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
            uint64_t* full = &shared.full[ring.slot];
            uint8_t *a = stages + ring.slot * STAGE_BYTES, *b = a + A_BYTES + rank * (B_BYTES / 2);
            int row = tile.first + block * TILE_K;
            barrier_expect(full, STAGE_BYTES);
            load_box(a, grads, full, tile.row, row);
            load_box(a + A_BYTES / 2, grads, full, tile.row + 64, row);
            load_box_to_both(b, rows, full, column, row);
            load_box_to_both(b + B_BYTES / 4, rows, full, column + 64, row);
            ring.advance();
        }
    }
}

template <typename T>
__device__ void multiply(Pipeline& shared, const uint8_t* stages, T* c, int n, int k, int group, uint32_t rank) {
    QueueReader queue;
    Multiplier<T, 1, 1> multiplier(shared, stages, group);
    float sums[128];
    while (true) {
        Tile tile = tile_of(queue.read(shared), rank);
        if (tile.is_last) return;
        __syncwarp();
        if (threadIdx.x % 32 == 0) queue.release(shared);
        queue.ring.advance();
        int row = tile.row + group * 64;
        if (row >= n) {
            multiplier.skip(tile.num_blocks);
            continue;
        }
        if (tile.num_blocks == 0)
            for (float& sum : sums) sum = 0;
        multiplier.multiply(sums, tile.num_blocks);
        store(sums, c + static_cast<size_t>(tile.expert) * n * k, row, n - row, tile.column, k);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
    weight_grads(const CUtensorMap* grad_maps, const CUtensorMap* row_maps, T* c, Tiles tiles, int num_items, int* claimed,
                 int n, int k) {
    extern __shared__ uint8_t dynamic[];
    __shared__ Pipeline shared;
    uint8_t* stages = aligned_shared(dynamic, 1024);
    uint32_t rank = cluster_rank();
    int group = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) shared.init(QUEUE_READERS);
    cluster_sync();

    if (group == 0) {
        give_registers<REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == LOADER && lane == 0) load(shared, stages, grad_maps, row_maps, rank);
        if (warp == CLERK && lane == 0 && rank == 0) {
            auto item_of = [&](int claim) { return tiles.item(claim); };
            Scheduler<decltype(item_of)> scheduler = {item_of, num_items, claimed, static_cast<int>(gridDim.x / 2)};
            while (!scheduler.ended) scheduler.send_next(shared);
        }
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        multiply(shared, stages, c, n, k, group - 1, rank);
    }
    cluster_sync();  // no CTA leaves while the other may still write to its shared memory
}

// Copies of both maps for every expert, which end where its rows do.
__global__ void end_maps(const __grid_constant__ CUtensorMap grads, const __grid_constant__ CUtensorMap rows,
                         const int* row_offsets, int num_experts, CUtensorMap* maps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 2 * num_experts) return;
    maps[i] = i < num_experts ? grads : rows;
    // A map of nothing would not be one; it is not used.
    set_map_rows(maps + i, max(row_offsets[i % num_experts + 1], 1));
}

template <typename T>
int launch(const TileOverlapWeightGrads& args, cudaStream_t stream) {
    CUtensorMap grads, rows;
    if (int error = encode(&grads, args.grads, args.num_rows, args.n, TILE_K, args.is_half)) return error;
    if (int error = encode(&rows, args.rows, args.num_rows, args.k, TILE_K, args.is_half)) return error;
    if (int error = allow_shared_memory<weight_grads<T>>(SHARED_BYTES)) return error;
    auto* maps = static_cast<CUtensorMap*>(args.maps);
    end_maps<<<(2 * args.num_experts + 63) / 64, 64, 0, stream>>>(grads, rows, args.row_offsets, args.num_experts, maps);
    Tiles tiles = {args.row_offsets, (args.n + 2 * TILE_M - 1) / (2 * TILE_M), (args.k + TILE_N - 1) / TILE_N,
                   args.n <= args.k};
    weight_grads<T><<<args.num_sms / 2 * 2, THREADS, SHARED_BYTES, stream>>>(
        maps, maps + args.num_experts, static_cast<T*>(args.c), tiles,
        args.num_experts * tiles.row_pairs * tiles.column_tiles, args.claimed, args.n, args.k);
    return cudaGetLastError();
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_weight_grads(const TileOverlapWeightGrads* arguments, cudaStream_t stream) {
    const TileOverlapWeightGrads& args = *arguments;
    if (args.num_rows == 0)
        return cudaMemsetAsync(args.c, 0, static_cast<size_t>(args.num_experts) * args.n * args.k * 2, stream);
    return args.is_half ? tileoverlap::launch<__half>(args, stream) : tileoverlap::launch<__nv_bfloat16>(args, stream);
}
