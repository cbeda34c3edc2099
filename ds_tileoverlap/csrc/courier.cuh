// Couriers: warps that carry rows to peers while a GEMM makes them. They are spare warps of the GEMM's own CTAs, or all
// warps of CTAs that have an SM to themselves.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "tile_signal.cuh"
#include "trace.cuh"

extern "C" {

// A run of rows that go to one peer.
struct alignas(16) TileOverlapSegment {
    int row, rows;    // where they lie in the GEMM's result
    int peer;         // place in the group
    int peer_row;     // where they go in the peer's receive buffer
    int band, bands;  // whose ready signals they wait for
    int first_part;   // how many parts the segments before it have, each of rows_of_part rows
    int unused;
};

// Sums that go to one peer: those of consecutive lines of an index.
struct TileOverlapSumRun {
    int line, lines;
    int peer;
    int peer_row;
};

enum { TILEOVERLAP_MAX_PEERS = 128, TILEOVERLAP_MAX_PANELS = 16 };
enum TileOverlapErrand { NOTHING = 0, RETURN_ROWS = 1, RETURN_SUMS = 2, SEND_ROWS = 3 };

struct TileOverlapCourier {
    int errand;                          // a TileOverlapErrand
    const void* rows;                    // the GEMM's result, contiguous
    int row_bytes;                       // a multiple of 16
    int num_peers, rank;
    // RETURN_ROWS: every row on its own, segment by segment.
    const TileOverlapSegment* segments;  // one more than there are; the last one's first_part is the number of parts
    const int* num_segments;
    const uint32_t* signals;             // [bands, signals_per_band], see TileOverlapGemm
    int signals_per_band;
    // RETURN_SUMS: the sum of the rows that a line of the index names, panel of columns by panel.
    // SEND_ROWS: the row that a line names, which is there already.
    const int* index;                    // [.., num_choices] rows, -1: none
    int num_choices;                     // at most 32; of SEND_ROWS 1
    const TileOverlapSumRun* runs;       // [num_peers - 1]
    const uint32_t* panel_left;          // see TileOverlapGemm
    int num_panels, panel_bytes;
    // The peers.
    void* const* peer_buffers;           // [num_peers] where each peer receives
    uint32_t* const* peer_arrived;       // [num_peers] the word in which each peer counts what came from here, 16 bytes a count
    const uint32_t* consumed;            // [num_peers] the last epoch whose rows each peer has read, written by the peer
    int64_t generation_bytes;            // size of one of the two halves of a receive buffer, used in turn
    const uint32_t* epoch;
    int* claimed;                        // 0 before and after every call
    TileOverlapFailure* failure;
    uint64_t limit_ns;
    TileOverlapTrace* trace;             // or null
};
}

#ifdef __CUDACC__

#include "ptx.cuh"

namespace tileoverlap {

__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }

// Adds eight values of 16 bits to float sums.
template <typename T>
__device__ __forceinline__ void add_8(float (&sums)[8], uint4 values) {
    uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = unpack(words[i], T{});
        sums[2 * i] += pair.x;
        sums[2 * i + 1] += pair.y;
    }
}
template <typename T>
__device__ __forceinline__ uint4 pack_8(const float (&sums)[8]) {
    return make_uint4(pack(sums[0], sums[1], T{}), pack(sums[2], sums[3], T{}), pack(sums[4], sums[5], T{}),
                      pack(sums[6], sums[7], T{}));
}

// Pieces of work that several warps share.
class Claims {
public:
    // A counter that is 0 before and after; all of num_warps warps claim until they are refused.
    __device__ Claims(int* claimed, int num_parts, int num_warps)
        : claimed(claimed), num_parts(num_parts), num_warps(num_warps), lane(threadIdx.x % 32) {
        if (lane == 0) next = atomicAdd(claimed, 1);
    }

    // The next piece for this warp; -1 when there are no more.
    __device__ int claim() {
        int part = __shfl_sync(~0u, next, 0);
        // Every warp is refused once; the last one to be leaves the counter as it was found.
        if (lane == 0 && part == num_parts + num_warps - 1) *claimed = 0;
        if (part >= num_parts) return -1;
        if (lane == 0) next = atomicAdd(claimed, 1);  // its answer comes while this part is carried
        return part;
    }

private:
    int* claimed;
    int num_parts, num_warps, lane, next = 0;
};

// What a warp claims at once: about 8 KB, and no more rows than lanes.
__device__ inline int rows_of_part(int row_bytes) { return min(max(8192 / row_bytes, 1), 32); }

// Some whole rows of a segment.
struct Part {
    int row, rows, peer, peer_row;  // no rows: there is no part
    int segment, band, bands;
};

// Parts of segments, which several warps share. Each is looked up while the one before is carried, as a look costs the way
// to memory; all lanes take part.
class Parts {
public:
    __device__ Parts(const TileOverlapSegment* segments, int num_segments, int row_bytes, int* claimed, int num_warps)
        : segments(segments), num_segments(num_segments), rows_each(rows_of_part(row_bytes)),
          claims(claimed, segments[num_segments].first_part, num_warps), lane(threadIdx.x % 32) {
        look_for_next();
    }

    // The next part for this warp; not called again after there was none.
    __device__ Part next() {
        if (part < 0) return Part{};
        int passed;
        while ((passed = __popc(__ballot_sync(~0u, candidate.first_part <= part))) == 32) {
            current += 31;
            look();
        }
        current += passed - 1;
        auto chosen = [&](int value) { return __shfl_sync(~0u, value, passed - 1); };
        int first = (part - chosen(candidate.first_part)) * rows_each;
        Part found = {chosen(candidate.row) + first,      min(chosen(candidate.rows) - first, rows_each),
                      chosen(candidate.peer),             chosen(candidate.peer_row) + first,
                      current, chosen(candidate.band), chosen(candidate.bands)};
        look_for_next();
        return found;
    }

private:
    __device__ void look_for_next() {
        part = claims.claim();
        if (part >= 0) look();
    }
    // Every lane at another segment, from the last one that was found.
    __device__ void look() { candidate = segments[min(current + lane, num_segments)]; }

    const TileOverlapSegment* segments;
    const int num_segments, rows_each;
    Claims claims;
    const int lane;
    int part, current = 0;
    TileOverlapSegment candidate;
};

// One warp's state: which peer it writes to, and what it has not announced there yet.
class Courier {
public:
    __device__ Courier(const TileOverlapCourier& args)
        : args(args), epoch(*args.epoch), lane(threadIdx.x % 32), in_time(!has_failed(args.failure)) {}

    // Where a row of the peer's receive buffer lies, once that half of it may be overwritten; null after a deadline.
    __device__ char* to(int new_peer, int row) {
        if (new_peer != peer) {
            announce();
            peer = new_peer;
            const uint32_t* consumed = args.consumed + peer;
            bool free = wait_until([&] { return reached(read_peer_signal(consumed), epoch - GENERATIONS); }, args.failure,
                                   args.limit_ns);
            if (!free) fail(PEER_CONSUMED, 0, epoch - GENERATIONS, read_peer_signal(consumed));
        }
        return half_of(args.peer_buffers[peer], epoch, args.generation_bytes) +
               static_cast<int64_t>(row) * args.row_bytes;
    }

    __device__ void sent(int bytes) { unannounced += bytes / 16; }

    // Says at the peer how much has come. All lanes' stores before it are visible to who reads the count.
    __device__ void announce() {
        __syncwarp();
        if (unannounced && lane == 0) add_to_peer(args.peer_arrived[peer], unannounced);
        unannounced = 0;
    }

    __device__ void fail(TileOverlapWait kind, int place, uint32_t expected, uint32_t seen) {
        report(args.failure, kind, kind == TILE_READY ? args.rank : peer, place, expected, seen);
        in_time = false;
    }

    const TileOverlapCourier& args;
    const uint32_t epoch;
    const int lane;
    bool in_time;

private:
    int peer = -1;
    uint32_t unannounced = 0;
};

// One warp copies whole chunks of COUNT * 512 bytes, with so many loads of each lane on their way at once.
template <int COUNT>
__device__ __forceinline__ void copy_chunks(const char* from, char* to, int& at, int to_byte, int lane) {
    for (; at + COUNT * 512 <= to_byte; at += COUNT * 512) {
        uint4 values[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            values[i] = __ldcg(reinterpret_cast<const uint4*>(from + at + i * 512) + lane);
#pragma unroll
        for (int i = 0; i < COUNT; i++) *(reinterpret_cast<uint4*>(to + at + i * 512) + lane) = values[i];
    }
}

// One warp copies some bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(const char* from, char* to, int bytes, int lane) {
    int at = 0;
    copy_chunks<8>(from, to, at, bytes, lane);
    copy_chunks<2>(from, to, at, bytes, lane);
    for (at += lane * 16; at < bytes; at += 512)
        *reinterpret_cast<uint4*>(to + at) = __ldcg(reinterpret_cast<const uint4*>(from + at));
}

__device__ __forceinline__ void return_rows(const TileOverlapCourier& args, int num_warps) {
    Courier courier(args);
    Parts parts(args.segments, *args.num_segments, args.row_bytes, args.claimed, num_warps);
    int ready = -1;
    for (Part part; (part = parts.next()).rows;) {
        if (ready != part.segment && courier.in_time) {
            const uint32_t* signals = args.signals + static_cast<size_t>(part.band) * args.signals_per_band;
            for (int i = courier.lane; i < part.bands * args.signals_per_band; i += 32)
                if (!wait_until([&] { return reached(read_signal(signals + i), courier.epoch); }, args.failure,
                                args.limit_ns)) {
                    courier.fail(TILE_READY, part.band + i / args.signals_per_band, courier.epoch, read_signal(signals + i));
                    break;
                }
            ready = part.segment;
        }
        int bytes = part.rows * args.row_bytes;
        char* to = courier.to(part.peer, part.peer_row);
        const char* from = static_cast<const char*>(args.rows) + static_cast<int64_t>(part.row) * args.row_bytes;
        // After a deadline the rest is claimed but not sent: the owner reports what did not come.
        courier.in_time = __all_sync(~0u, courier.in_time);
        __syncwarp();  // each lane has acquired other signals than its neighbour
        if (!courier.in_time) continue;
        uint64_t began = traced_time(args.trace);
        copy_bytes(from, to, bytes, courier.lane);
        courier.sent(bytes);
        if (courier.lane == 0) record(args.trace, SENT, part.segment, -1, part.peer, began);
    }
    courier.announce();
}

// A line of an index: the rows that it names, of which this lane has one (-1: none), and where their sum goes.
struct SumLine {
    int named_row, peer, peer_row;  // peer: -1 past the end
};

__device__ __forceinline__ SumLine sum_line(const TileOverlapCourier& args, int line, int lane) {
    int run = 0;
    while (run + 1 < args.num_peers && line >= args.runs[run].lines) line -= args.runs[run++].lines;
    if (run + 1 >= args.num_peers) return {-1, -1, 0};
    const int* named = args.index + static_cast<int64_t>(args.runs[run].line + line) * args.num_choices;
    return {lane < args.num_choices ? __ldg(named + lane) : -1, args.runs[run].peer, args.runs[run].peer_row + line};
}

__device__ inline int num_lines(const TileOverlapCourier& args) {
    int lines = 0;
    for (int i = 0; i + 1 < args.num_peers; i++) lines += args.runs[i].lines;
    return lines;
}

// Rows that need not be waited for, to every peer that one is for: lines that name one row each.
__device__ __forceinline__ void send_rows(const TileOverlapCourier& args, int num_warps) {
    Courier courier(args);
    Claims claims(args.claimed, (num_lines(args) + 1) / 2, num_warps);
    auto send = [&](const SumLine& line) {
        if (line.peer < 0) return;
        char* to = courier.to(line.peer, line.peer_row);
        courier.in_time = __all_sync(~0u, courier.in_time);
        if (!courier.in_time) return;
        int row = __shfl_sync(~0u, line.named_row, 0);
        copy_bytes(static_cast<const char*>(args.rows) + static_cast<int64_t>(row) * args.row_bytes, to, args.row_bytes,
                   courier.lane);
        courier.sent(args.row_bytes);
    };
    for (int part; (part = claims.claim()) >= 0;) {
        SumLine one = sum_line(args, 2 * part, courier.lane), other = sum_line(args, 2 * part + 1, courier.lane);
        uint64_t began = traced_time(args.trace);
        send(one);
        send(other);
        if (courier.lane == 0) record(args.trace, SENT, 2 * part, 0, one.peer, began);
    }
    courier.announce();
}

}  // namespace tileoverlap

#endif
