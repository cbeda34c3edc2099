// The experts' weight gradients in plain C++.
#include "weight_grads.cuh"

#include "ptx.cuh"

namespace {

template <typename T>
void run(const TileOverlapWeightGrads& args) {
    const T *grads = static_cast<const T*>(args.grads), *rows = static_cast<const T*>(args.rows);
    for (int expert = 0; expert < args.num_experts; expert++)
        for (int64_t i = 0; i < args.n; i++)
            for (int64_t j = 0; j < args.k; j++) {
                float sum = 0;
                for (int64_t row = args.row_offsets[expert]; row < args.row_offsets[expert + 1]; row++)
                    sum += to_float(grads[row * args.n + i]) * to_float(rows[row * args.k + j]);
                static_cast<T*>(args.c)[(expert * args.n + i) * args.k + j] = from_float(sum, T{});
            }
}

}  // namespace

extern "C" int tileoverlap_weight_grads(const TileOverlapWeightGrads* arguments, cudaStream_t) {
    arguments->is_half ? run<__half>(*arguments) : run<__nv_bfloat16>(*arguments);
    return 0;
}
