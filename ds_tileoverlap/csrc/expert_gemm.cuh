// Grouped GEMM over a rank's experts: C[rows of e] = A[rows of e] B_e^T for every expert e, in one persistent kernel;
// or two of them, gate and up, and what a SwiGLU makes of both.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "arrivals.cuh"
#include "courier.cuh"

extern "C" {

// One piece of work for a cluster of two CTAs.
struct TileOverlapItem {
    int row;               // first row
    int rows;              // rows of the expert from there on, 1 to 256
    uint16_t expert;       // whose B; TILEOVERLAP_REMOTE is added where rows of the item have to travel
    uint16_t column_tile;  // first column / 256, or 128 of gate and up
    int band;              // index of the first row's band in the ready signals
};

enum { TILEOVERLAP_REMOTE = 0x8000, TILEOVERLAP_MAP_BYTES = 128 };

struct TileOverlapGemm {
    const void* a;           // [num_rows, k], contiguous
    const void* b_maps;      // [experts] CUtensorMap in device memory, made by tileoverlap_encode_weights
    void* c;                 // [num_rows, n], contiguous
    const TileOverlapItem* items;
    const int* num_items;    // on the device
    int* claimed;            // on the device; 0 before and after every call
    uint32_t* signals;       // [bands, ceil(n / 256), 2] on the device, or null
    const uint32_t* epoch;   // on the device; the value that a finished half tile writes to its signal
    uint32_t* panel_left;    // [panels] on the device, or null: counts down finished tiles of items with rows that travel
    int panel_tiles;         // column tiles in a panel
    // A second pair of operands whose product is added: C = A B^T + A2 B2^T; k2 = 0: there is none.
    const void* a2;          // [num_rows, k2]
    const void* b2_maps;
    int k2;
    // Gate and up in one: B and C above are the gate's, an item's column tile is 128 columns of both; null: plain.
    const void* up_maps;
    void* up;                // [num_rows, n]
    int stride;              // elements from row to row of the gate's C and of up
    void* hidden;            // [num_rows, n], contiguous; see below
    const float* row_weights;  // [num_rows]
    // hidden = row_weights * g sigmoid(alpha g) * (u + shift), where g = min(gate, limit) and u = up within +-limit
    float alpha, limit, shift;
    int num_rows, n, k;
    int is_half;             // 0: bfloat16, 1: float16
    int b_is_transposed;     // 0: B_e is [n, k], 1: B_e is [k, n]
    int num_sms;             // how many SMs it may take
    TileOverlapTrace* trace;  // or null
};

// Encodes the tensor map of each expert's weight [rows, columns], contiguous, into host memory.
int tileoverlap_encode_weights(void* maps, const void* const* weights, int count, int64_t rows, int64_t columns,
                               int is_half, int b_is_transposed);
// Enqueues the GEMM. Both return a CUresult / cudaError_t, 0 for success.
// Two warps of each CTA run the couriers' errand, then put in place what arrives: rows of A that tiles wait for.
int tileoverlap_expert_gemm(const TileOverlapGemm* gemm, const TileOverlapCourier* courier,
                            const TileOverlapArrivals* arrivals, cudaStream_t stream);
}
