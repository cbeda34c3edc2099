// The expert GEMM in plain C++: item by item as scheduled, with the same signals, waits and couriers.
#include "expert_gemm.cuh"

#include <algorithm>
#include <cmath>
#include <thread>

#include "arrivals.cuh"
#include "sums.cuh"

namespace tileoverlap {
namespace {

struct Map { const void* weight; int64_t rows, columns; };
constexpr int TILE_N = 256, BAND = 128, COURIERS = 4;

template <typename T>
void run(const TileOverlapGemm& gemm, const TileOverlapCourier& courier, const TileOverlapArrivals& arrivals) {
    auto couriers = [&] {
        using Memory = CourierMemory<2048>;
        emulation::launch("couriers", COURIERS / 4, 128, 4 * sizeof(Memory), [&] {
            Memory& memory = emulation::dynamic<Memory>()[threadIdx.x / 32];
            run_courier<T>(courier, COURIERS, memory);
            place_arrivals(arrivals, COURIERS, memory);
        });
    };
    emulation::delay("expert_gemm");
    // Couriers are there from the beginning, the GEMM takes its time.
    std::thread beside(couriers);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    int tile_n = gemm.up_maps ? TILE_N / 2 : TILE_N, column_tiles = (gemm.n + tile_n - 1) / tile_n;
    int64_t stride = gemm.up_maps ? gemm.stride : gemm.n;
    const T* a = static_cast<const T*>(gemm.a);
    auto dot = [&](const T* a, const void* maps, int expert, int column, int k) {
        const Map& map = *reinterpret_cast<const Map*>(static_cast<const char*>(maps) + expert * 128);
        const T* b = static_cast<const T*>(map.weight);
        float sum = 0;
        for (int i = 0; i < k; i++)
            sum += to_float(a[i]) * to_float(gemm.b_is_transposed ? b[i * map.columns + column] : b[column * map.columns + i]);
        return sum;
    };
    for (int index = 0; index < *gemm.num_items; index++) {
        TileOverlapItem item = gemm.items[index];
        bool is_remote = item.expert & TILEOVERLAP_REMOTE, shares_b = item.rows > BAND;
        int expert = item.expert & (TILEOVERLAP_REMOTE - 1);
        for (int cta = 0; cta < 2; cta++) {
            int row = item.row + (shares_b ? cta * BAND : 0), rows = min(shares_b ? item.rows - cta * BAND : item.rows, BAND);
            int tile = item.column_tile + (shares_b ? 0 : cta), band = item.band + (shares_b ? cta : 0);
            if (tile >= column_tiles) continue;
            emulation::launch(nullptr, 1, 1, 0, [&] {
                uint64_t claimed = traced_time(gemm.trace);
                wait_for_band(arrivals, band);
                record(gemm.trace, TILE_STARTED, band, tile, -1, claimed);
            });
            for (int r = row; r < row + rows; r++)
                for (int column = tile * tile_n; column < min((tile + 1) * tile_n, gemm.n); column++) {
                    float sum = dot(a + static_cast<int64_t>(r) * gemm.k, gemm.b_maps, expert, column, gemm.k);
                    if (gemm.k2)
                        sum += dot(static_cast<const T*>(gemm.a2) + static_cast<int64_t>(r) * gemm.k2, gemm.b2_maps, expert,
                                   column, gemm.k2);
                    T& gate = static_cast<T*>(gemm.c)[r * stride + column] = from_float(sum, T{});
                    if (!gemm.up_maps) continue;
                    sum = dot(a + static_cast<int64_t>(r) * gemm.k, gemm.up_maps, expert, column, gemm.k);
                    T& up = static_cast<T*>(gemm.up)[r * stride + column] = from_float(sum, T{});
                    float g = std::min(to_float(gate), gemm.limit);
                    float u = std::clamp(to_float(up), -gemm.limit, gemm.limit) + gemm.shift;
                    float hidden = g / (1 + std::exp(-gemm.alpha * g)) * u * gemm.row_weights[r];
                    static_cast<T*>(gemm.hidden)[static_cast<int64_t>(r) * gemm.n + column] = from_float(hidden, T{});
                }
            uint64_t ready = traced_time(gemm.trace);
            for (int group = 0; gemm.signals && group < 2; group++)
                publish(gemm.signals + (static_cast<int64_t>(band) * column_tiles + tile) * 2 + group, *gemm.epoch);
            if (gemm.panel_left && is_remote) add_to(gemm.panel_left + tile / gemm.panel_tiles, -1u);
            emulation::launch(nullptr, 1, 1, 0, [&] { record(gemm.trace, TILE_MADE, band, tile, -1, ready); });
        }
    }
    beside.join();
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_encode_weights(void* maps, const void* const* weights, int count, int64_t rows,
                                          int64_t columns, int, int) {
    for (int i = 0; i < count; i++) {
        tileoverlap::Map map = {weights[i], rows, columns};
        std::memcpy(static_cast<char*>(maps) + i * 128, &map, sizeof(map));
    }
    return 0;
}

extern "C" int tileoverlap_expert_gemm(const TileOverlapGemm* gemm, const TileOverlapCourier* courier,
                                       const TileOverlapArrivals* arrivals, cudaStream_t) {
    if (gemm->num_rows == 0 && courier->errand == NOTHING && arrivals->missing == nullptr) return 0;
    if (gemm->is_half)
        tileoverlap::run<__half>(*gemm, *courier, *arrivals);
    else
        tileoverlap::run<__nv_bfloat16>(*gemm, *courier, *arrivals);
    return 0;
}

// Holds up kernels of the calling thread, see emulation::delays_ms.
extern "C" void emulation_delay(const char* kernel, double ms, unsigned seed) {
    emulation::delays_ms[kernel] = ms;
    emulation::random.seed(seed);
}
