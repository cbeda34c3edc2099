// Couriers: warps that carry rows to peers while a GEMM makes them. They are spare warps of the GEMM's own CTAs, or all
// warps of CTAs that have an SM to themselves.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "tile_signal.cuh"
#include "trace.cuh"

extern "C" {

// A run of rows that go to one peer.
struct TileOverlapSegment {
    int row, rows;    // where they lie in the GEMM's result
    int peer;         // place in the group
    int peer_row;     // where they go in the peer's receive buffer
    int band, bands;  // whose ready signals they wait for
    int first_part;   // how many parts of TILEOVERLAP_PART bytes the segments before it have
    int unused;
};

// Sums that go to one peer: those of consecutive lines of an index.
struct TileOverlapSumRun {
    int line, lines;
    int peer;
    int peer_row;
};

enum { TILEOVERLAP_PART = 8192, TILEOVERLAP_MAX_PEERS = 128, TILEOVERLAP_MAX_PANELS = 16 };
enum TileOverlapErrand { NOTHING = 0, RETURN_ROWS = 1, RETURN_SUMS = 2 };

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
    const int* index;                    // [.., num_choices] rows, -1: none
    int num_choices;                     // at most 32
    const TileOverlapSumRun* runs;       // [num_peers - 1]
    const uint32_t* panel_left;          // see TileOverlapGemm; null: nothing to wait for
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
__device__ __forceinline__ void copy_row(const char* from, char* to, int from_byte, int to_byte, int lane) {
    int at = from_byte;
    copy_chunks<8>(from, to, at, to_byte, lane);
    copy_chunks<2>(from, to, at, to_byte, lane);
    for (at += lane * 16; at < to_byte; at += 512)
        *reinterpret_cast<uint4*>(to + at) = __ldcg(reinterpret_cast<const uint4*>(from + at));
}

__device__ __forceinline__ void return_rows(const TileOverlapCourier& args, int num_warps) {
    Courier courier(args);
    Claims claims(args.claimed, args.segments[*args.num_segments].first_part, num_warps);
    int current = 0, ready = -1;
    for (int part; (part = claims.claim()) >= 0;) {
        while (part >= args.segments[current + 1].first_part) current++;
        TileOverlapSegment segment = args.segments[current];
        if (ready != current && courier.in_time) {
            const uint32_t* signals = args.signals + static_cast<size_t>(segment.band) * args.signals_per_band;
            for (int i = courier.lane; i < segment.bands * args.signals_per_band; i += 32)
                if (!wait_until([&] { return reached(read_signal(signals + i), courier.epoch); }, args.failure,
                                args.limit_ns)) {
                    courier.fail(TILE_READY, segment.band + i / args.signals_per_band, courier.epoch, read_signal(signals + i));
                    break;
                }
            ready = current;
        }
        int64_t start = static_cast<int64_t>(part - segment.first_part) * TILEOVERLAP_PART;
        int bytes = static_cast<int>(
            min(static_cast<int64_t>(segment.rows) * args.row_bytes - start, static_cast<int64_t>(TILEOVERLAP_PART)));
        char* to = courier.to(segment.peer, segment.peer_row) + start;
        const char* from = static_cast<const char*>(args.rows) + static_cast<int64_t>(segment.row) * args.row_bytes + start;
        // After a deadline the rest is claimed but not sent: the owner reports what did not come.
        courier.in_time = __all_sync(~0u, courier.in_time);
        __syncwarp();  // each lane has acquired other signals than its neighbour
        if (!courier.in_time) continue;
        uint64_t began = traced_time(args.trace);
        copy_row(from, to, 0, bytes, courier.lane);
        courier.sent(bytes);
        if (courier.lane == 0) record(args.trace, SENT, current, -1, segment.peer, began);
    }
    courier.announce();
}

// The sum of up to 32 rows, of which lane i names the i-th (-1: none), over some bytes of each: in order, in float32.
// VECTORS * ROWS 16-byte loads of each lane are on their way at once.
template <typename T, int VECTORS, int ROWS>
__device__ __forceinline__ void sum_named_rows(const char* rows, int64_t row_bytes, int named_row, char* to,
                                               int from_byte, int to_byte, int lane) {
    uint32_t all_named = __ballot_sync(~0u, named_row >= 0);
    for (int at = from_byte + lane * 16; at - lane * 16 < to_byte; at += 512 * VECTORS) {
        float sums[VECTORS][8] = {};
        for (uint32_t named = all_named; named;) {
            uint4 values[ROWS][VECTORS];
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                int row = named ? __shfl_sync(~0u, named_row, __ffs(named) - 1) : -1;
                named &= named - 1;
                const char* from = rows + row * row_bytes + at;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    values[j][v] = make_uint4(0, 0, 0, 0);
                    if (row >= 0 && at + v * 512 < to_byte)
                        values[j][v] = __ldcg(reinterpret_cast<const uint4*>(from + v * 512));
                }
            }
#pragma unroll
            for (int j = 0; j < ROWS; j++)
#pragma unroll
                for (int v = 0; v < VECTORS; v++) add_8<T>(sums[v], values[j][v]);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (at + v * 512 < to_byte) *reinterpret_cast<uint4*>(to + at + v * 512) = pack_8<T>(sums[v]);
    }
}

struct SumLine {
    int named_row, peer, peer_row;  // named_row: this lane's; peer: -1 past the end
};

__device__ __forceinline__ SumLine sum_line(const TileOverlapCourier& args, int line, int lane) {
    int run = 0;
    while (run + 1 < args.num_peers && line >= args.runs[run].lines) line -= args.runs[run++].lines;
    if (run + 1 >= args.num_peers) return {-1, -1, 0};
    const int* named = args.index + static_cast<int64_t>(args.runs[run].line + line) * args.num_choices;
    return {lane < args.num_choices ? __ldg(named + lane) : -1, args.runs[run].peer, args.runs[run].peer_row + line};
}

template <typename T, bool COPIES>
__device__ __forceinline__ void carry_sum(const TileOverlapCourier& args, Courier& courier, SumLine line, int from_byte,
                                          int to_byte) {
    if (line.peer < 0) return;
    char* to = courier.to(line.peer, line.peer_row);
    courier.in_time = __all_sync(~0u, courier.in_time);
    if (!courier.in_time || to_byte <= from_byte) return;
    const char* rows = static_cast<const char*>(args.rows);
    if constexpr (COPIES)
        copy_row(rows + static_cast<int64_t>(__shfl_sync(~0u, line.named_row, 0)) * args.row_bytes, to, from_byte, to_byte,
                 courier.lane);
    else
        sum_named_rows<T, 2, 4>(rows, args.row_bytes, line.named_row, to, from_byte, to_byte, courier.lane);
    courier.sent(to_byte - from_byte);
}

// COPIES: every sum has one row.
template <typename T, bool COPIES>
__device__ __forceinline__ void return_sums(const TileOverlapCourier& args, int num_warps) {
    Courier courier(args);
    int num_lines = 0, ready = -1;
    for (int i = 0; i + 1 < args.num_peers; i++) num_lines += args.runs[i].lines;
    int blocks = (num_lines + 1) / 2;  // lines go in twos
    Claims claims(args.claimed, blocks * args.num_panels, num_warps);
    for (int part; (part = claims.claim()) >= 0;) {
        int panel = part / blocks, first = part % blocks * 2;
        // These lines of the index come while the panel is waited for.
        SumLine one = sum_line(args, first, courier.lane), other = sum_line(args, first + 1, courier.lane);
        if (panel != ready && args.panel_left != nullptr && courier.in_time) {
            const uint32_t* left = args.panel_left + panel;
            // Every courier looks at the same word: not too often.
            if (!wait_until([&] { return read_signal(left) == 0; }, args.failure, args.limit_ns, 256))
                courier.fail(TILE_READY, panel, 0, read_signal(left));
            ready = panel;
        }
        int from_byte = panel * args.panel_bytes, to_byte = min(from_byte + args.panel_bytes, args.row_bytes);
        uint64_t began = traced_time(args.trace);
        carry_sum<T, COPIES>(args, courier, one, from_byte, to_byte);
        carry_sum<T, COPIES>(args, courier, other, from_byte, to_byte);
        if (courier.lane == 0 && from_byte < to_byte) record(args.trace, SENT, first, panel, one.peer, began);
    }
    courier.announce();
}

// Runs one warp's share of the errand.
template <typename T>
__device__ __forceinline__ void run_courier(const TileOverlapCourier& args, int num_warps) {
    if (args.errand == RETURN_ROWS) return_rows(args, num_warps);
    if (args.errand == RETURN_SUMS && args.num_choices > 1) return_sums<T, false>(args, num_warps);
    if (args.errand == RETURN_SUMS && args.num_choices == 1) return_sums<T, true>(args, num_warps);
}

}  // namespace tileoverlap

#endif
