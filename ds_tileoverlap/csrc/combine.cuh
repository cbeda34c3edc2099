// The return of expert rows to the owners of their tokens, while the expert GEMM still makes them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "tile_signal.cuh"

extern "C" {

// A run of rows that go to one rank.
struct TileOverlapSegment {
    int row, rows;    // where they lie in the GEMM's result
    int peer;         // place in the group
    int peer_row;     // where they go in the peer's receive buffer
    int band, bands;  // whose ready signals they wait for
    int first_part;   // how many parts of TILEOVERLAP_PART bytes the segments before it have
    int unused;
};

enum { TILEOVERLAP_PART = 65536 };

// Starts a use of the receive buffers: the next epoch, and how much must have come from each peer at its end.
struct TileOverlapBegin {
    const int* counts;             // as in TileOverlapSchedule
    int counts_stride;
    int num_ranks, rank, num_experts;
    int row_bytes;
    uint32_t* epoch;
    uint32_t* targets;             // [peers] 16 bytes a count, since the beginning
};

struct TileOverlapReturn {
    const void* rows;                    // the GEMM's result, contiguous
    const TileOverlapSegment* segments;  // one more than there are; the last one's first_part is the number of parts
    const int* num_segments;
    int* claimed;                        // 0 before and after every call
    const uint32_t* signals;             // [bands, signals_per_band], see TileOverlapGemm
    const uint32_t* epoch;
    void* const* peer_buffers;           // [peers] where each peer receives
    uint32_t* const* peer_arrived;       // [peers] the word in which each peer counts what came from here, 16 bytes a count
    const uint32_t* peer_consumed;       // [peers] the last epoch whose rows each peer has read, written by the peer
    TileOverlapFailure* failure;
    int64_t generation_bytes;            // size of one of the two halves of a receive buffer, used in turn
    uint64_t limit_ns;
    int row_bytes;                       // a multiple of 16
    int signals_per_band;
    int num_peers;
    int num_sms;
};

struct TileOverlapSum {
    const void* received;                // [.., width] rows from the peers
    const void* local;                   // [.., width] the GEMM's result
    const int* slots;                    // [num_tokens, num_choices]; v >= 0: received row v, -1: none, v < -1: local row -2 - v
    void* sums;                          // [num_tokens, width]
    const uint32_t* arrived;             // [peers] what came from each peer, 16 bytes a count
    const uint32_t* targets;             // [peers] what must have come
    const uint32_t* epoch;
    uint32_t* const* peer_consumed;      // [peers] the word at each peer that says what was read here
    int* finished;                       // 0 before and after every call
    TileOverlapFailure* failure;
    int64_t generation_bytes;
    uint64_t limit_ns;
    int num_tokens, num_choices, width, num_peers, is_half, num_sms;
};

int tileoverlap_begin_return(const TileOverlapBegin* arguments, cudaStream_t stream);
int tileoverlap_return(const TileOverlapReturn* arguments, cudaStream_t stream);
int tileoverlap_sum(const TileOverlapSum* arguments, cudaStream_t stream);
}
