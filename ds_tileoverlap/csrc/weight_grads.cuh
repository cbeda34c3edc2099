// The gradient of every expert's weight: C_e = G_e^T X_e, summed over the rows of expert e.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

extern "C" {

struct TileOverlapWeightGrads {
    const void* grads;       // [num_rows, n] of the projection's results, contiguous, as the next
    const void* rows;        // [num_rows, k] what the projection read
    void* c;                 // [num_experts, n, k], contiguous; 0 for an expert without rows
    const int* row_offsets;  // [num_experts + 1] on the device: where the rows of each expert begin
    void* maps;              // [2, num_experts] CUtensorMap in device memory, made and used by the call
    int* claimed;            // on the device; 0 before and after every call
    int num_experts, num_rows, n, k;
    int is_half;             // 0: bfloat16, 1: float16
    int num_sms;             // how many SMs it may take
};

// Enqueues two kernels; returns a CUresult / cudaError_t, 0 for success.
int tileoverlap_weight_grads(const TileOverlapWeightGrads* arguments, cudaStream_t stream);
}
