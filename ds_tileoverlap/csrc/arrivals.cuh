// Rows that have come from peers are put where the GEMM reads them, by the couriers, while it multiplies other rows.
#pragma once
#include "courier.cuh"

extern "C" {

struct TileOverlapArrivals {
    void* rows;                          // the GEMM's operand A; this rank's own rows are there already
    int row_bytes;                       // a multiple of 16
    const int* sources;                  // [rows] the received row that each of them is a copy of
    int own_first, own_end;              // the received rows that never left this rank: no buffer holds them
    const TileOverlapSegment* segments;  // which rows came from which peer, a band each; ends as in TileOverlapCourier
    const int* num_segments;
    uint32_t* missing;                   // [bands] parts that are not in place yet; null: nothing is to be done
    const void* received;                // rows from the peers
    int64_t generation_bytes;
    const uint32_t* epoch;
    const uint32_t* arrived;             // [num_peers] what came from each peer, 16 bytes a count
    const uint32_t* targets;             // [num_peers] what must have come
    uint32_t* const* peer_consumed;      // [num_peers] the word at each peer that says what was read here
    int *claimed, *finished;             // 0 before and after
    int num_peers;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};
}

#ifdef __CUDACC__

namespace tileoverlap {

// Copies one warp's share of a part: bytes of consecutive rows of the operand.
__device__ __forceinline__ void place_bytes(const TileOverlapArrivals& args, const char* received, int first_row,
                                            int64_t from, int64_t end, int lane) {
    int own = args.own_end - args.own_first;
    while (from < end) {
        int row = first_row + static_cast<int>(from / args.row_bytes), first = static_cast<int>(from % args.row_bytes);
        int last = static_cast<int>(min(end - from + first, static_cast<int64_t>(args.row_bytes)));
        int source = __ldg(args.sources + row);
        int64_t line = source < args.own_first ? source : source - own;
        copy_row(received + line * args.row_bytes,
                 static_cast<char*>(args.rows) + static_cast<int64_t>(row) * args.row_bytes, first, last, lane);
        from += last - first;
    }
}

// Runs one warp's share.
__device__ __forceinline__ void place_arrivals(const TileOverlapArrivals& args, int num_warps) {
    if (args.missing == nullptr) return;
    const char* received = half_of(args.received, *args.epoch, args.generation_bytes);
    Claims claims(args.claimed, args.segments[*args.num_segments].first_part, num_warps);
    int lane = threadIdx.x % 32, current = 0, known = -1;
    bool in_time = !has_failed(args.failure);
    for (int part; (part = claims.claim()) >= 0;) {
        while (part >= args.segments[current + 1].first_part) current++;
        TileOverlapSegment segment = args.segments[current];
        if (segment.peer != known && in_time) {
            const uint32_t* arrived = args.arrived + segment.peer;
            uint32_t target = args.targets[segment.peer];
            in_time = wait_until([&] { return reached(read_peer_signal(arrived), target); }, args.failure, args.limit_ns,
                                 256);
            if (!in_time) report(args.failure, ROWS_ARRIVED, segment.peer, 0, target, read_peer_signal(arrived));
            known = segment.peer;
        }
        in_time = __all_sync(~0u, in_time);
        if (!in_time) continue;
        int64_t start = static_cast<int64_t>(part - segment.first_part) * TILEOVERLAP_PART;
        int64_t end = min(start + TILEOVERLAP_PART, static_cast<int64_t>(segment.rows) * args.row_bytes);
        place_bytes(args, received, segment.row, start, end, lane);
        fence_async_global();  // the bulk copy engine reads what was written here
        __syncwarp();
        if (lane == 0) add_to(args.missing + segment.band, -1u);
    }
    __syncwarp();
    if (lane == 0) say_read(args.finished, num_warps, args.peer_consumed, args.num_peers, *args.epoch);
}

// Before tiles of a band are read: one thread waits until its rows are in place. After a deadline they are what they are.
__device__ __forceinline__ void wait_for_band(const TileOverlapArrivals& args, int band) {
    if (args.missing == nullptr) return;
    const uint32_t* missing = args.missing + band;
    // The couriers wait for one peer after the other, and name the one that does not come.
    uint64_t limit_ns = (args.num_peers + 1) * args.limit_ns;
    if (!wait_until([&] { return read_signal(missing) == 0; }, args.failure, limit_ns))
        report(args.failure, ROWS_PLACED, -1, band, 0, read_signal(missing));
    fence_async_global();
}

}  // namespace tileoverlap

#endif
