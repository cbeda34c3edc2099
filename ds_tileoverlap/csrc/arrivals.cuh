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
    TileOverlapTrace* trace;             // or null
};
}

#ifdef __CUDACC__

namespace tileoverlap {

// One warp's copies, in units of 16 bytes: one a lane, then the ones 32 units further.
class Placer {
public:
    __device__ explicit Placer(const TileOverlapArrivals& args)
        : lane(threadIdx.x % 32), args(args),
          received(reinterpret_cast<const uint4*>(half_of(args.received, *args.epoch, args.generation_bytes))),
          row_units(args.row_bytes / 16), rows_on(32 / row_units), units_on(32 % row_units) {}

    const int lane;

    // Says that the last part is in place. All lanes' stores before it are visible to who sees the count.
    __device__ void announce() {
        if (pending < 0) return;
        fence_async_global();  // the bulk copy engine reads what was written here
        __syncwarp();
        if (lane == 0) add_to(args.missing + pending, -1u);
        pending = -1;
    }

    // Copies some units of a band's rows from there on; the part before is announced while the first of them are on
    // their way.
    __device__ void copy(const TileOverlapSegment& segment, int start, int count) {
        row = segment.row + (start + lane) / row_units;
        within = (start + lane) % row_units;
        to = static_cast<uint4*>(args.rows) + static_cast<int64_t>(segment.row) * row_units + start + lane;
        int left = count;
        for (; left >= 8 * 32; left -= 8 * 32) copy_units<8, true>(left);
        for (; left > 0; left -= 2 * 32) copy_units<2, false>(left);
        pending = segment.band;
    }

private:
    // COUNT units a lane, all of which there are, or as many as are left.
    template <int COUNT, bool ALL>
    __device__ void copy_units(int left) {
        uint4 values[COUNT];
        uint32_t from[COUNT];
        auto is_there = [&](int i) { return ALL || i * 32 + lane < left; };
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int source = is_there(i) ? __ldg(args.sources + row) : 0;
            from[i] = (source < args.own_first ? source : source - (args.own_end - args.own_first)) * row_units + within;
            row += rows_on;
            within += units_on;
            if (within >= row_units) within -= row_units, row++;
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (is_there(i)) values[i] = __ldcg(received + from[i]);
        if (COUNT * 32 + lane < left) prefetch(args.sources + row);
        announce();
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (is_there(i)) to[i * 32] = values[i];
        to += COUNT * 32;
    }

    const TileOverlapArrivals& args;
    const uint4* received;
    const int row_units, rows_on, units_on;  // of a row; 32 units further
    int pending = -1;                        // the band of the part that is copied but not announced
    // Of this lane's next unit: the row and the place in it, and where it goes.
    int row = 0, within = 0;
    uint4* to = nullptr;
};

// Runs one warp's share.
__device__ __forceinline__ void place_arrivals(const TileOverlapArrivals& args, int num_warps) {
    if (args.missing == nullptr) return;
    Placer placer(args);
    Claims claims(args.claimed, args.segments[*args.num_segments].first_part, num_warps);
    int current = 0, known = -1;
    bool in_time = !has_failed(args.failure);
    for (int part; (part = claims.claim()) >= 0;) {
        while (part >= args.segments[current + 1].first_part) current++;
        TileOverlapSegment segment = args.segments[current];
        if (segment.peer != known && in_time) {
            placer.announce();  // before a wait that may be long
            const uint32_t* arrived = args.arrived + segment.peer;
            uint32_t target = args.targets[segment.peer];
            in_time = wait_until([&] { return reached(read_peer_signal(arrived), target); }, args.failure, args.limit_ns,
                                 256);
            if (!in_time) report(args.failure, ROWS_ARRIVED, segment.peer, 0, target, read_peer_signal(arrived));
            known = segment.peer;
        }
        in_time = __all_sync(~0u, in_time);
        if (!in_time) continue;
        constexpr int UNITS = TILEOVERLAP_PART / 16;
        int start = (part - segment.first_part) * UNITS;
        uint64_t began = traced_time(args.trace);
        placer.copy(segment, start, min(segment.rows * (args.row_bytes / 16) - start, UNITS));
        if (placer.lane == 0) record(args.trace, PLACED, segment.band, 0, segment.peer, began);
    }
    placer.announce();
    __syncwarp();
    if (placer.lane == 0) say_read(args.finished, num_warps, args.peer_consumed, args.num_peers, *args.epoch);
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
