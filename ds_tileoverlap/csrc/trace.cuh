// Device timestamps of one traced step. Kernels get a trace or null; null costs a test of a uniform value outside the
// loops that multiply and copy.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "tile_signal.cuh"

extern "C" {

enum TileOverlapMoment {
    STAGE_BEGAN = 1,
    STAGE_ENDED = 2,
    TILE_STARTED = 3,  // its rows are there; place: band, piece: column tile
    TILE_MADE = 4,     // its sums are in global memory, and are announced now
    SENT = 5,          // a part left; place: segment, or first line of the sums; piece: panel of the sums, -1 for rows
    PLACED = 6,        // a part that came is in its place; place: band
    ARRIVED = 7,       // all rows that return, waited for from start to end
    SUMMED = 8,        // a CTA's tokens
    CLOCK = 9          // rank 0: a peer's answer, asked for at start, there at end; a peer: the question is there at end
};

struct TileOverlapEvent {
    int32_t kind;    // a TileOverlapMoment
    int32_t stage;   // the innermost one that the stream was in
    int32_t place, piece, peer;
    int32_t sm;
    uint64_t start, end;  // ns of this GPU's clock
};

struct TileOverlapTrace {
    int32_t capacity;  // of events
    int32_t count;     // what was to be recorded; more than the capacity is lost
    int32_t stage;
    int32_t unused[7];
    TileOverlapEvent events[1];  // as many as the capacity
};

struct TileOverlapMark {
    TileOverlapTrace* trace;
    int kind;   // STAGE_BEGAN or STAGE_ENDED
    int stage;
    int outer;  // the stage that is gone on with after the end
};

// Answers from each peer to rank 0, so many rounds.
struct TileOverlapClocks {
    TileOverlapTrace* trace;
    const uint32_t* answers;        // [num_peers] 0 before
    uint32_t* const* peer_answers;  // [num_peers] the word of this rank at each peer
    int num_peers, rank, rounds;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

int tileoverlap_mark(const TileOverlapMark* arguments, cudaStream_t stream);
int tileoverlap_compare_clocks(const TileOverlapClocks* arguments, cudaStream_t stream);
}

#ifdef __CUDACC__

#include "ptx.cuh"

namespace tileoverlap {

// Now, where there is a trace.
__device__ __forceinline__ uint64_t traced_time(const TileOverlapTrace* trace) { return trace ? nanoseconds() : 0; }

// One thread writes an event that ends now.
__device__ __forceinline__ void record(TileOverlapTrace* trace, TileOverlapMoment kind, int place, int piece, int peer,
                                       uint64_t start) {
    if (trace == nullptr) return;
    int at = atomicAdd(&trace->count, 1);
    if (at < trace->capacity)
        trace->events[at] = {kind, trace->stage, place, piece, peer, sm_index(), start, nanoseconds()};
}

}  // namespace tileoverlap

#endif
