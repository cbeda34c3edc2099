// From the exchanged counts to flat lists: which tiles the expert GEMM makes in which order, and which runs of rows travel.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "courier.cuh"
#include "expert_gemm.cuh"

extern "C" {

enum { TILEOVERLAP_MAX_EXPERTS = 1024, TILEOVERLAP_MAX_TILINGS = 4 };

// The lists of one GEMM.
struct TileOverlapTiling {
    int n;                         // columns of the GEMM's result
    int row_bytes;                 // of a row that travels
    int aligns_owners;             // 1: every owner's rows start a tile; 0: only every expert's do
    int bands_per_segment;
    int panel_tiles, num_panels;   // column tiles of a panel; even where there are several panels
    int local_first;               // 1: items without remote rows come first, because the others wait for peers
    TileOverlapItem* items;
    int* num_items;
    TileOverlapSegment* segments;
    int* num_segments;
    uint32_t* panel_tiles_to_do;   // [num_panels] tiles of items with rows that travel
    uint32_t* band_parts_to_do;    // [bands] parts of rows from peers, or null; then bands_per_segment is 1
    TileOverlapSumRun* sum_runs;   // [num_ranks - 1] the sums that go to each peer
    TileOverlapSumRun* send_runs;  // [num_ranks - 1] the tokens that go to each peer
    // Not read here: counters of what is left to do in a use of the lists, and what they start from.
    uint32_t* left;
    int num_left, num_bands;       // num_bands is an upper limit
};

struct TileOverlapSchedule {
    const int* counts;             // [num_ranks, counts_stride]; row r: rank r's routes to each expert, then the rows it
    int counts_stride;             // sends to each rank (one for each token and rank)
    int num_ranks, rank, num_experts;  // experts over all ranks
    int num_tilings;
    TileOverlapTiling tilings[TILEOVERLAP_MAX_TILINGS];
};

int tileoverlap_schedule(const TileOverlapSchedule* arguments, cudaStream_t stream);
}

namespace tileoverlap {

// Rows of a band, columns of a column tile.
constexpr int BAND = 128, TILE_N = 256;

}  // namespace tileoverlap
