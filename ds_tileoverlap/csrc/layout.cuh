// Where every row goes: routes are counted, counts shared with the peers, and every position computed on the device.
// Letters: T tokens of this rank, k choices, E experts, W ranks; S rows sent, U rows received (one for each token and
// rank, grouped by rank, this rank's own among them), R expert rows.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "tile_signal.cuh"

extern "C" {

enum { TILEOVERLAP_BLOCK_TOKENS = 256 };

struct TileOverlapCount {
    const int* experts;       // [T, k], -1 for a dropped route
    int num_tokens, num_choices, num_experts, num_ranks, rank;
    int word;                 // the last of this rank's counts: for the caller
    int* block_counts;        // [blocks, E + W] routes to each expert and rows for each rank before every 256 tokens
    // Sharing: a row of E + W + 1 counts goes to every rank.
    int* const* peer_counts;  // [W] [2, W, stride] at each rank, halves in turn
    int stride;
    uint32_t* const* peer_ready;  // [W] the word of this rank at each rank
    const uint32_t* ready;        // [W] the last epoch whose counts came from each rank
    uint32_t* epoch;              // advanced by one
    uint32_t* targets;            // [W] advanced by the records that must come from each rank, 16 bytes a count
    int* counts;              // [W, E + W + 1] on the device
    int* bases;               // [2 E + 2 W + 1] where this rank's rows start, see Bases in layout.cu
    int* host_counts;         // the same, mapped host memory
    TileOverlapFailure* host_failure;  // mapped host memory: a copy of the failure
    uint32_t* host_ready;     // mapped host memory; the epoch, once the host has the others
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

struct TileOverlapPlace {
    const int* experts;       // [T, k]
    const float* weights;     // [T, k]
    const int* block_counts;  // of TileOverlapCount
    const int* bases;
    int num_tokens, num_choices, num_experts, num_ranks, rank;
    int returns_sums;         // what the slots are for
    int* sent_tokens;         // [S]
    int* choice_slots;        // [T, k] the sent row that carries a choice, -1: dropped
    int* token_slots;         // [T, k] the same where a choice is the first on its rank, else -1
    int* slots;               // [T, k] where a choice's result is summed from, see TileOverlapSum
    // Records: for every sent row its k expert rows at the receiver (-1: none) and k weights, padded to 16 bytes.
    void* const* peer_buffers;
    int64_t generation_bytes;
    uint32_t* const* peer_arrived;
    const uint32_t* consumed;
    const uint32_t* epoch;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

struct TileOverlapReceive {
    const void* received;     // this rank's records
    int64_t generation_bytes;
    int num_received, num_choices, num_ranks, num_experts, rank;
    const int* counts;
    int* choice_rows;         // [U, k]
    int* row_sources;         // [R] the received row
    float* row_weights;       // [R]
    int* row_offsets;         // [E / W + 1]
    const uint32_t* arrived;
    const uint32_t* targets;
    const uint32_t* epoch;
    uint32_t* const* peer_consumed;  // [W] the word at each rank that says what was read here
    int* finished;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

int tileoverlap_count(const TileOverlapCount* arguments, cudaStream_t stream);
int tileoverlap_place(const TileOverlapPlace* arguments, cudaStream_t stream);
int tileoverlap_receive(const TileOverlapReceive* arguments, cudaStream_t stream);
}
