// What a math warpgroup of the expert GEMM does with its sums: registers -> global memory.
#pragma once
#include "courier.cuh"
#include "ptx.cuh"

namespace tileoverlap {

constexpr int WARPGROUP = 128;

// A 4 x 4 transposition within each four lanes: lane q ends with column q.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&v)[4], int q) {
    bool odd = q & 1, high = q & 2;
    uint32_t got = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    (odd ? v[0] : v[1]) = got;
    got = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    (odd ? v[2] : v[3]) = got;
    got = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
    (high ? v[0] : v[2]) = got;
    got = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
    (high ? v[1] : v[3]) = got;
}

// Writes a warpgroup's 64 x 256 sums, 16 bytes a store.
template <typename T>
__device__ __forceinline__ void store(const float (&sums)[128], T* c, int row, int rows, int column, int n) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, q = lane % 4;
    int in_tile = warp * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool inside = in_tile + half * 8 < rows;
        T* line = c + static_cast<size_t>(row + in_tile + half * 8) * n;
#pragma unroll
        for (int group = 0; group < 8; group++) {
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = (group * 4 + j) * 4 + half * 2;
                v[j] = pack(sums[at], sums[at + 1], T{});
            }
            transpose_in_quad(v, q);
            int at = column + group * 32 + q * 8;
            if (inside && at < n) *reinterpret_cast<uint4*>(line + at) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

// What becomes of gate and up.
template <typename T>
struct Gate {
    T* up;
    T* hidden;
    const float* row_weights;
    float alpha, limit, shift;
    int stride;

    // NaN passes through, as it does in torch.
    __device__ __forceinline__ float hidden_of(float g, float u) const {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
        return __fdividef(g, 1 + __expf(-alpha * g)) * (u + shift);
    }
};

// Writes a warpgroup's 64 x 128 sums of the gate, of up, and the hidden rows of both.
template <typename T>
__device__ __forceinline__ void store_gated(const float (&sums)[128], T* gate, const Gate<T>& with, int row, int rows,
                                            int column, int n) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, q = lane % 4;
    int in_tile = warp * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool inside = in_tile + half * 8 < rows;
        int64_t line = row + in_tile + half * 8;
        float weight = inside ? with.row_weights[line] : 0;
#pragma unroll
        for (int group = 0; group < 4; group++) {
            uint32_t g[4], u[4], h[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = (group * 4 + j) * 4 + half * 2;
                g[j] = pack(sums[at], sums[at + 1], T{});
                u[j] = pack(sums[64 + at], sums[64 + at + 1], T{});
                // From rounded values, as backward will have them.
                float2 gate_pair = unpack(g[j], T{}), up_pair = unpack(u[j], T{});
                h[j] = pack(with.hidden_of(gate_pair.x, up_pair.x) * weight,
                            with.hidden_of(gate_pair.y, up_pair.y) * weight, T{});
            }
            transpose_in_quad(g, q);
            transpose_in_quad(u, q);
            transpose_in_quad(h, q);
            int at = column + group * 32 + q * 8;
            if (inside && at < n) {
                *reinterpret_cast<uint4*>(gate + line * with.stride + at) = make_uint4(g[0], g[1], g[2], g[3]);
                *reinterpret_cast<uint4*>(with.up + line * with.stride + at) = make_uint4(u[0], u[1], u[2], u[3]);
                *reinterpret_cast<uint4*>(with.hidden + line * n + at) = make_uint4(h[0], h[1], h[2], h[3]);
            }
        }
    }
}

}  // namespace tileoverlap
