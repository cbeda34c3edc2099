// From the exchanged counts to flat lists: which tiles the expert GEMM makes in which order, which runs of rows go
// home, and where every choice's row is found there.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "courier.cuh"
#include "expert_gemm.cuh"

extern "C" {

struct TileOverlapSchedule {
    const int* counts;             // [num_ranks, counts_stride]; row r: rank r's routes to each expert, then the rows it
    int counts_stride;             // sends to each rank (one for each token and rank)
    int num_ranks, rank, num_experts;  // experts over all ranks
    int n;                         // columns of the GEMM's result
    int row_bytes;                 // of a returned row
    int aligns_owners;             // 1: every owner's rows start a tile; 0: only every expert's do
    int bands_per_segment;
    int panel_tiles, num_panels;   // column tiles of a panel; even where there are several panels
    const uint32_t* panel_done;    // [num_panels] what the panels' counters show before this GEMM
    uint32_t* panel_targets;       // [num_panels] and after it
    TileOverlapSumRun* sum_runs;   // [num_ranks - 1] the sums that go to each peer
    TileOverlapSumRun* send_runs;  // [num_ranks - 1] the tokens that go to each peer, or null
    int local_first;               // 1: items without remote rows come first, because the others wait for peers
    TileOverlapItem* items;
    int* num_items;
    TileOverlapSegment* segments;
    int* num_segments;
    int* slot_bases;               // [num_experts] the slot of this rank's first route to each expert; < -1: local row -2 - v
};

struct TileOverlapSlots {
    const int* experts;     // [num_tokens, num_choices], -1 for a dropped route
    const int* slot_bases;  // [num_experts]
    const int* token_slots;  // null: a row comes back for each choice; else [num_tokens, num_choices] sent rows, -1 where a
                             // choice shares its row with an earlier one: a row comes back for each of them
    int own_first, own_end;  // the sent rows that went to this rank itself
    int* block_counts;      // [ceil(num_tokens / TILEOVERLAP_SLOT_TOKENS), num_experts] scratch
    int* slots;             // [num_tokens, num_choices], see TileOverlapSum
    int num_tokens, num_choices, num_experts;
};

enum { TILEOVERLAP_SLOT_TOKENS = 256, TILEOVERLAP_MAX_EXPERTS = 1024 };

int tileoverlap_schedule(const TileOverlapSchedule* arguments, cudaStream_t stream);
int tileoverlap_slots(const TileOverlapSlots* arguments, cudaStream_t stream);
}
