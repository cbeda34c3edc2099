// The owner's side of a return, and couriers with SMs of their own.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "arrivals.cuh"
#include "courier.cuh"

extern "C" {

enum TileOverlapCargo { ROWS_HOME = 0, SUMS_HOME = 1, TOKENS_OUT = 2 };

// Starts a use of a receive buffer: the next epoch, how much must have come from each peer at its end, and how much is
// left of what is counted down meanwhile. Where began is not null it ends when every peer is so far: work that waits for
// peers and keeps the whole GPU meanwhile must not start before they are about to come.
struct TileOverlapBegin {
    const int* counts;        // as in TileOverlapSchedule
    int counts_stride;
    int num_ranks, rank, num_experts;
    int what;                 // a TileOverlapCargo: what comes
    int row_bytes;
    uint32_t* epoch;
    uint32_t* targets;        // [peers] 16 bytes a count, since the beginning
    const uint32_t* to_do;    // [num_left]
    uint32_t* left;           // [num_left] set to that
    int num_left;
    uint32_t* const* peer_began;  // [peers] the word of this rank at each peer
    const uint32_t* began;        // [peers] the last use that each peer has begun, or null
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

struct TileOverlapSum {
    const void* received;     // [.., width] rows from the peers
    const void* local;        // [.., width] the GEMM's result
    const int* slots;         // [num_tokens, num_choices]; v >= 0: received row v, -1: none, v < -1: local row -2 - v
    void* sums;               // [num_tokens, width]
    const uint32_t* arrived;  // [peers] what came from each peer, 16 bytes a count
    const uint32_t* targets;  // [peers] what must have come
    const uint32_t* epoch;
    uint32_t* const* peer_consumed;  // [peers] the word at each peer that says what was read here
    int* finished;            // 0 before and after every call
    TileOverlapFailure* failure;
    int64_t generation_bytes;
    uint64_t limit_ns;
    int num_tokens, num_choices, width, num_peers, is_half, num_sms;
    TileOverlapTrace* trace;  // or null
};

// One float32 a row of this rank's experts, to the owners of the rows' tokens and choices.
struct TileOverlapScalars {
    const float* values;      // [R]
    const int* index;         // [U, num_choices] the rows of a received row's choices, -1: none
    const TileOverlapSumRun* runs;  // [num_peers - 1] which received rows are whose
    const int* choice_slots;  // [num_tokens, num_choices] the sent row that carries a choice, -1: dropped
    const int* slots;         // [num_tokens, num_choices]; v < -1: the choice is this rank's own row -2 - v
    int own_first, own_end;   // the sent rows that went to this rank itself
    float* results;           // [num_tokens, num_choices], 0 for a dropped choice
    int num_tokens, num_choices, num_peers;
    const uint32_t* epoch;
    const uint32_t* targets;  // [num_peers] what must come
    const void* received;     // records of num_choices values, padded to 16 bytes
    int64_t generation_bytes;
    const uint32_t* arrived;
    const uint32_t* consumed;
    void* const* peer_buffers;
    uint32_t* const* peer_arrived;
    uint32_t* const* peer_consumed;
    int* finished;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

// The first sends, the second waits for what comes.
int tileoverlap_send_scalars(const TileOverlapScalars* arguments, cudaStream_t stream);
int tileoverlap_collect_scalars(const TileOverlapScalars* arguments, cudaStream_t stream);
int tileoverlap_begin(const TileOverlapBegin* arguments, cudaStream_t stream);
int tileoverlap_run_couriers(const TileOverlapCourier* courier, const TileOverlapArrivals* arrivals, int is_half,
                             int num_sms, cudaStream_t stream);
int tileoverlap_sum(const TileOverlapSum* arguments, cudaStream_t stream);
}
