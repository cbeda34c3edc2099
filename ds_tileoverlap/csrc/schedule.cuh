// From the exchanged counts to flat lists: which tiles the expert GEMM makes in which order, which runs of rows go
// home, and where every choice's row is found there.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "combine.cuh"
#include "expert_gemm.cuh"

extern "C" {

struct TileOverlapSchedule {
    const int* counts;             // [num_ranks, counts_stride]; row r starts with rank r's routes to each expert
    int counts_stride;
    int num_ranks, rank, num_experts;  // experts over all ranks
    int n;                         // columns of the GEMM's result
    int row_bytes;                 // of a returned row
    int aligns_owners;             // 1: every owner's rows start a tile; 0: only every expert's do
    int bands_per_segment;
    TileOverlapItem* items;
    int* num_items;
    TileOverlapSegment* segments;
    int* num_segments;
    int* slot_bases;               // [num_experts] the slot of this rank's first route to each expert; < -1: local row -2 - v
};

struct TileOverlapSlots {
    const int* experts;     // [num_tokens, num_choices], -1 for a dropped route
    const int* slot_bases;  // [num_experts]
    int* block_counts;      // [ceil(num_tokens / TILEOVERLAP_SLOT_TOKENS), num_experts] scratch
    int* slots;             // [num_tokens, num_choices], see TileOverlapSum
    int num_tokens, num_choices, num_experts;
};

enum { TILEOVERLAP_SLOT_TOKENS = 256, TILEOVERLAP_MAX_EXPERTS = 1024 };

int tileoverlap_schedule(const TileOverlapSchedule* arguments, cudaStream_t stream);
int tileoverlap_slots(const TileOverlapSlots* arguments, cudaStream_t stream);
}
