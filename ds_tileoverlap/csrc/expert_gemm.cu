// The expert GEMM. A cluster of two CTAs takes one item at a time: two 128 x 256 tiles that share operand B (two bands
// of rows, one column tile) or, for the last band of an expert, operand A (one band, two column tiles). The shared
// operand is loaded once, half by each CTA, and multicast. GATED: the first half of a tile's columns are the gate's, the
// second half the same columns of up, so that one thread holds both and can make the hidden row of them.
//
//   loader      one thread a CTA fills a ring of shared-memory stages
//   clerk       one thread a CTA: claims items and hands them to both CTAs through a queue (in CTA 0 only), and
//               publishes what is finished, so that no math warp waits for memory
//   2 couriers  a warp each: carry rows to peers, and put in place what came from peers
//   2 x math    a warpgroup each for 64 rows: WGMMA, then registers -> global memory while the other one multiplies
#include "expert_gemm.cuh"

#include "gemm_tiles.cuh"
#include "launch.cuh"
#include "sums.cuh"
#include "tile_signal.cuh"

namespace tileoverlap {
namespace {

constexpr int LOADER = 0, CLERK = 1, NUM_COURIERS = 2;  // warps of the first warpgroup; the rest are couriers
using Memory = CourierMemory<8192>;  // of each courier
constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + NUM_COURIERS * sizeof(Memory);
// Warps that read the queue: the loader, the clerk and eight math warps in each CTA.
constexpr int QUEUE_READERS = 2 * 10;

struct Shared : Pipeline {
    uint64_t stored[2][QUEUE];  // a warpgroup's part of the item in this place of the queue is in global memory
};

__host__ __device__ constexpr int columns_of_tile(bool gated) { return gated ? TILE_N / 2 : TILE_N; }

// One CTA's view of an item.
struct Tile {
    int row, rows, expert, column, band, column_tile;
    bool is_last, shares_b, is_remote;
};

template <int GATED>
__device__ __forceinline__ Tile tile_of(int4 raw, uint32_t rank) {
    Tile tile;
    tile.is_last = raw.x < 0;
    tile.shares_b = raw.y > TILE_M;
    tile.expert = raw.z & (TILEOVERLAP_REMOTE - 1);
    tile.is_remote = raw.z & TILEOVERLAP_REMOTE;
    int second = tile.shares_b ? rank : 0;
    tile.row = raw.x + second * TILE_M;
    tile.rows = min(raw.y - second * TILE_M, TILE_M);
    tile.band = raw.w + second;
    tile.column_tile = (static_cast<uint32_t>(raw.z) >> 16) + (tile.shares_b ? 0 : rank);
    tile.column = tile.column_tile * columns_of_tile(GATED);
    return tile;
}

// Operand B of one stage. Where the item shares it, each CTA loads half for both. The second half comes from a map of its
// own if gated.
template <int B_TRANSPOSED, int GATED>
__device__ __forceinline__ void load_b(uint8_t* b, const CUtensorMap* map, const CUtensorMap* second_map, uint64_t* full,
                                       const Tile& tile, int k, uint32_t rank) {
    int second_column = GATED ? tile.column : tile.column + TILE_N / 2;
    if (tile.shares_b) {
        b += rank * (B_BYTES / 2);
        int column = rank ? second_column : tile.column;
        if (GATED && rank) map = second_map;
        if constexpr (B_TRANSPOSED) {
            load_box_to_both(b, map, full, column, k);
            load_box_to_both(b + B_BYTES / 4, map, full, column + 64, k);
        } else {
            load_box_to_both(b, map, full, k, column);
        }
    } else if constexpr (B_TRANSPOSED) {
        for (int i = 0; i < 4; i++) load_box(b + i * (B_BYTES / 4), map, full, tile.column + i * 64, k);
    } else {
        load_box(b, map, full, k, tile.column);
        load_box(b + B_BYTES / 2, GATED ? second_map : map, full, k, second_column);
    }
}

// Operand A of one stage; an item that does not share B shares this.
__device__ __forceinline__ void load_a(uint8_t* a, const CUtensorMap* map, uint64_t* full, const Tile& tile, int k,
                                       uint32_t rank) {
    if (tile.shares_b) {
        load_box(a, map, full, k, tile.row);
        load_box(a + A_BYTES / 2, map, full, k, tile.row + TILE_M / 2);
    } else {
        load_box_to_both(a + rank * (A_BYTES / 2), map, full, k, tile.row + rank * (TILE_M / 2));
    }
}

// One pair of operands.
struct Operands {
    const CUtensorMap* a;
    const CUtensorMap* b;  // [experts]
    int k;

    __device__ int num_blocks() const { return (k + TILE_K - 1) / TILE_K; }
};

// One thread.
template <int B_TRANSPOSED, int GATED>
__device__ void load(Shared& shared, uint8_t* stages, Operands operands, Operands second, const CUtensorMap* up_maps,
                     const TileOverlapArrivals& arrivals, TileOverlapTrace* trace, uint32_t rank) {
    QueueReader queue;
    Ring<STAGES> ring;
    int mapped = -1;
    while (true) {
        Tile tile = tile_of<GATED>(queue.read(shared), rank);
        if (tile.is_last) return;
        barrier_expect(&shared.item_full[queue.ring.slot], 16);  // the next item in this slot
        queue.release(shared);
        queue.ring.advance();
        if (tile.expert != mapped) {
            acquire_map(operands.b + tile.expert);
            if (second.k) acquire_map(second.b + tile.expert);
            if (GATED) acquire_map(up_maps + tile.expert);
            mapped = tile.expert;
        }
        uint64_t claimed = traced_time(trace);
        wait_for_band(arrivals, tile.band);
        record(trace, TILE_STARTED, tile.band, tile.column_tile, -1, claimed);
        auto each_stage = [&](const Operands& pair) {
            for (int block = 0; block < pair.num_blocks(); block++) {
                barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                uint64_t* full = &shared.full[ring.slot];
                uint8_t* a = stages + ring.slot * STAGE_BYTES;
                barrier_expect(full, STAGE_BYTES);
                load_a(a, pair.a, full, tile, block * TILE_K, rank);
                load_b<B_TRANSPOSED, GATED>(a + A_BYTES, pair.b + tile.expert, up_maps + tile.expert, full, tile,
                                            block * TILE_K, rank);
                ring.advance();
            }
        };
        each_stage(operands);
        each_stage(second);
    }
}

template <typename T, int B_TRANSPOSED, int GATED>
__device__ void multiply(Shared& shared, const uint8_t* stages, T* c, const Gate<T>& gate, int n, int num_blocks,
                         int group, uint32_t rank) {
    QueueReader queue;
    Multiplier<T, 0, B_TRANSPOSED> multiplier(shared, stages, group);
    int lane = threadIdx.x % 32;
    float sums[128];
    while (true) {
        Tile tile = tile_of<GATED>(queue.read(shared), rank);
        if (tile.is_last) return;
        __syncwarp();
        if (lane == 0) queue.release(shared);
        int row = tile.row + group * 64, rows = tile.rows - group * 64;
        if (rows > 0 && tile.column < n) {
            multiplier.multiply(sums, num_blocks);
            if constexpr (GATED)
                store_gated(sums, c, gate, row, rows, tile.column, n);
            else
                store(sums, c, row, rows, tile.column, n);
        } else {
            multiplier.skip(num_blocks);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.stored[group][queue.ring.slot]);
        queue.ring.advance();
    }
}

// Keeps its place in the queue until both warpgroups have stored, so none of them is ever a whole queue ahead of it.
template <int GATED, typename Scheduler>
__device__ void keep_books(Shared& shared, Scheduler scheduler, uint32_t* signals, uint32_t* panel_left,
                           int panel_tiles, uint32_t epoch, int n, TileOverlapTrace* trace, uint32_t rank) {
    QueueReader queue;
    int column_tiles = (n + columns_of_tile(GATED) - 1) / columns_of_tile(GATED);
    for (int i = 0; i < QUEUE && rank == 0; i++) scheduler.send_next(shared);
    while (true) {
        Tile tile = tile_of<GATED>(queue.read(shared), rank);
        if (tile.is_last) return;
        uint64_t ready = 0;
        for (int group = 0; group < 2; group++) {
            barrier_wait(&shared.stored[group][queue.ring.slot], queue.ring.parity);
            ready = traced_time(trace);
            if (signals != nullptr && tile.column < n)
                publish(signals + (static_cast<size_t>(tile.band) * column_tiles + tile.column_tile) * 2 + group, epoch);
        }
        if (panel_left != nullptr && tile.is_remote && tile.column < n)
            add_to(panel_left + tile.column_tile / panel_tiles, -1u);
        if (tile.column < n) record(trace, TILE_MADE, tile.band, tile.column_tile, -1, ready);
        queue.release(shared);
        queue.ring.advance();
        if (rank == 0) scheduler.send_next(shared);
    }
}

template <typename T, int B_TRANSPOSED, int GATED>
__global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
    expert_gemm(const __grid_constant__ CUtensorMap a_map, const CUtensorMap* b_maps,
                const __grid_constant__ CUtensorMap a2_map, const CUtensorMap* b2_maps, const CUtensorMap* up_maps, T* c,
                Gate<T> gate, const int4* items, const int* num_items, int* claimed, uint32_t* signals,
                const uint32_t* epoch, uint32_t* panel_left, int panel_tiles, int n, int k, int k2,
                TileOverlapTrace* trace, const __grid_constant__ TileOverlapCourier courier,
                const __grid_constant__ TileOverlapArrivals arrivals) {
    extern __shared__ uint8_t dynamic[];
    __shared__ Shared shared;
    uint8_t* stages = aligned_shared(dynamic, 1024);
    uint32_t rank = cluster_rank();
    int group = threadIdx.x / WARPGROUP;
    const Operands operands = {&a_map, b_maps, k}, second = {&a2_map, b2_maps, k2};

    if (threadIdx.x == 0) {
        for (int i = 0; i < QUEUE; i++)
            for (int group = 0; group < 2; group++) barrier_init(&shared.stored[group][i], 4);
        shared.init(QUEUE_READERS);
    }
    cluster_sync();

    if (group == 0) {
        give_registers<REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == LOADER) {
            if (lane == 0) load<B_TRANSPOSED, GATED>(shared, stages, operands, second, up_maps, arrivals, trace, rank);
        } else if (warp == CLERK) {
            auto item_of = [&](int claim) { return __ldg(items + claim); };
            Scheduler<decltype(item_of)> scheduler = {item_of, *num_items, claimed, static_cast<int>(gridDim.x / 2)};
            if (lane == 0)
                keep_books<GATED>(shared, scheduler, signals, panel_left, panel_tiles, signals ? *epoch : 0, n, trace,
                                  rank);
        } else {
            Memory& memory = reinterpret_cast<Memory*>(stages + STAGES * STAGE_BYTES)[warp - (CLERK + 1)];
            run_courier<T>(courier, gridDim.x * NUM_COURIERS, memory);
            place_arrivals(arrivals, gridDim.x * NUM_COURIERS, memory);
        }
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        int num_blocks = operands.num_blocks() + second.num_blocks();
        multiply<T, B_TRANSPOSED, GATED>(shared, stages, c, gate, n, num_blocks, group - 1, rank);
    }
    cluster_sync();  // no CTA leaves while the other may still write to its shared memory
}

static_assert(sizeof(CUtensorMap) == TILEOVERLAP_MAP_BYTES);

template <typename T, int B_TRANSPOSED, int GATED>
int launch(const TileOverlapGemm& gemm, const TileOverlapCourier& courier, const TileOverlapArrivals& arrivals,
           cudaStream_t stream) {
    CUtensorMap a_map = {}, a2_map = {};
    if (gemm.num_rows > 0)
        if (int error = encode(&a_map, gemm.a, gemm.num_rows, gemm.k, TILE_M / 2, gemm.is_half)) return error;
    if (gemm.k2 > 0 && gemm.num_rows > 0)
        if (int error = encode(&a2_map, gemm.a2, gemm.num_rows, gemm.k2, TILE_M / 2, gemm.is_half)) return error;
    if (int error = allow_shared_memory<expert_gemm<T, B_TRANSPOSED, GATED>>(SHARED_BYTES)) return error;
    Gate<T> gate = {static_cast<T*>(gemm.up), static_cast<T*>(gemm.hidden), gemm.row_weights,
                    gemm.alpha, gemm.limit, gemm.shift, gemm.stride};
    expert_gemm<T, B_TRANSPOSED, GATED><<<gemm.num_sms / 2 * 2, THREADS, SHARED_BYTES, stream>>>(
        a_map, static_cast<const CUtensorMap*>(gemm.b_maps), a2_map, static_cast<const CUtensorMap*>(gemm.b2_maps),
        static_cast<const CUtensorMap*>(gemm.up_maps), static_cast<T*>(gemm.c), gate,
        reinterpret_cast<const int4*>(gemm.items), gemm.num_items, gemm.claimed, gemm.signals, gemm.epoch,
        gemm.panel_left, gemm.panel_tiles, gemm.n, gemm.k, gemm.k2, gemm.trace, courier, arrivals);
    return cudaGetLastError();
}

template <typename T>
int launch_typed(const TileOverlapGemm& gemm, const TileOverlapCourier& courier, const TileOverlapArrivals& arrivals,
                 cudaStream_t stream) {
    if (gemm.up_maps != nullptr && gemm.b_is_transposed) return cudaErrorNotSupported;
    if (gemm.up_maps != nullptr) return launch<T, 0, 1>(gemm, courier, arrivals, stream);
    return gemm.b_is_transposed ? launch<T, 1, 0>(gemm, courier, arrivals, stream)
                                : launch<T, 0, 0>(gemm, courier, arrivals, stream);
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_encode_weights(void* maps, const void* const* weights, int count, int64_t rows,
                                          int64_t columns, int is_half, int b_is_transposed) {
    // As columns of B come 128 at a time, or 64 where they are contiguous.
    for (int i = 0; i < count; i++) {
        int error = tileoverlap::encode(static_cast<CUtensorMap*>(maps) + i, weights[i], rows, columns,
                                        b_is_transposed ? 64 : 128, is_half);
        if (error) return error;
    }
    return 0;
}

extern "C" int tileoverlap_expert_gemm(const TileOverlapGemm* gemm, const TileOverlapCourier* courier,
                                       const TileOverlapArrivals* arrivals, cudaStream_t stream) {
    using namespace tileoverlap;
    if (gemm->num_rows == 0 && courier->errand == NOTHING && arrivals->missing == nullptr) return 0;
    return gemm->is_half ? launch_typed<__half>(*gemm, *courier, *arrivals, stream)
                         : launch_typed<__nv_bfloat16>(*gemm, *courier, *arrivals, stream);
}
