#include "combine.cuh"

#include "arrivals.cuh"
#include "launch.cuh"
#include "sums.cuh"

namespace tileoverlap {
namespace {

__global__ void begin_use(const __grid_constant__ TileOverlapBegin args) {
    int local = args.num_ranks ? args.num_experts / args.num_ranks : 0;
    const int* mine = args.counts + args.rank * args.counts_stride;
    uint32_t epoch = *args.epoch + 1;
    for (int i = threadIdx.x; i < args.num_left; i += blockDim.x) args.left[i] = args.to_do[i];
    for (int peer = threadIdx.x; peer < args.num_ranks; peer += blockDim.x) {
        if (peer == args.rank) continue;
        uint32_t rows = 0;
        if (args.what == ROWS_HOME)
            for (int e = 0; e < local; e++) rows += mine[peer * local + e];
        else if (args.what == SUMS_HOME)
            rows = mine[args.num_experts + peer];
        else
            rows = args.counts[peer * args.counts_stride + args.num_experts + args.rank];
        args.targets[peer] += rows * (args.row_bytes / 16);
    }
    __syncthreads();
    if (threadIdx.x == 0) *args.epoch = epoch;
    if (args.began == nullptr) return;
    for (int peer = threadIdx.x; peer < args.num_ranks; peer += blockDim.x) publish_to_peer(args.peer_began[peer], epoch);
    all_reached(args.began, [=](int) { return epoch; }, args.num_ranks, PEER_BEGAN, args.failure, args.limit_ns);
}

__device__ int scalar_words(int num_choices) { return (num_choices + 3) / 4 * 4; }

constexpr int SCALAR_THREADS = 256;

// One thread a received row.
__global__ void __launch_bounds__(SCALAR_THREADS) send_scalars(const __grid_constant__ TileOverlapScalars args) {
    __shared__ uint32_t sent[TILEOVERLAP_MAX_PEERS];
    uint32_t epoch = *args.epoch;
    for (int peer = threadIdx.x; peer < args.num_peers; peer += SCALAR_THREADS) sent[peer] = 0;
    bool in_time = all_reached(args.consumed, [=](int) { return epoch - GENERATIONS; }, args.num_peers, PEER_CONSUMED,
                               args.failure, args.limit_ns);
    int words = scalar_words(args.num_choices), lines = 0;
    for (int i = 0; i + 1 < args.num_peers; i++) lines += args.runs[i].lines;
    for (int i = blockIdx.x * SCALAR_THREADS + threadIdx.x; i < lines && in_time; i += gridDim.x * SCALAR_THREADS) {
        int run = 0, line = i;
        while (line >= args.runs[run].lines) line -= args.runs[run++].lines;
        TileOverlapSumRun to = args.runs[run];
        const int* rows = args.index + static_cast<int64_t>(to.line + line) * args.num_choices;
        float4* record = reinterpret_cast<float4*>(half_of(args.peer_buffers[to.peer], epoch, args.generation_bytes)) +
                         static_cast<int64_t>(to.peer_row + line) * (words / 4);
        auto value = [&](int choice) {
            int row = choice < args.num_choices ? rows[choice] : -1;
            return row >= 0 ? args.values[row] : 0.0f;
        };
        for (int j = 0; j < words; j += 4) record[j / 4] = make_float4(value(j), value(j + 1), value(j + 2), value(j + 3));
        atomicAdd(sent + to.peer, words / 4);
    }
    __syncthreads();
    for (int peer = threadIdx.x; peer < args.num_peers; peer += SCALAR_THREADS) {
        if (!sent[peer]) continue;
        __threadfence_system();
        add_to_peer(args.peer_arrived[peer], sent[peer]);
    }
}

__global__ void __launch_bounds__(SCALAR_THREADS) collect_scalars(const __grid_constant__ TileOverlapScalars args) {
    bool in_time = all_reached(args.arrived, [&](int peer) { return args.targets[peer]; }, args.num_peers, ROWS_ARRIVED,
                               args.failure, args.limit_ns);
    const float* received = reinterpret_cast<const float*>(half_of(args.received, *args.epoch, args.generation_bytes));
    int64_t total = static_cast<int64_t>(args.num_tokens) * args.num_choices;
    for (int64_t i = blockIdx.x * SCALAR_THREADS + threadIdx.x; i < total; i += gridDim.x * SCALAR_THREADS) {
        int sent = args.choice_slots[i], slot = args.slots[i];
        float value = in_time ? 0.0f : __int_as_float(0x7fc00000);
        if (in_time && sent >= 0) {
            bool is_own = sent >= args.own_first && sent < args.own_end;
            int64_t line = sent < args.own_first ? sent : sent - (args.own_end - args.own_first);
            value = is_own ? args.values[-2 - slot]
                           : __ldcg(received + line * scalar_words(args.num_choices) + i % args.num_choices);
        }
        args.results[i] = value;
    }
    __syncthreads();
    if (threadIdx.x == 0) say_read(args.finished, gridDim.x, args.peer_consumed, args.num_peers, *args.epoch);
}

// All registers of an SM: nothing else runs beside these couriers.
constexpr int COURIER_THREADS = 512;
using Memory = CourierMemory<4096>;
constexpr int COURIER_BYTES = COURIER_THREADS / 32 * sizeof(Memory) + 128;

template <typename T>
__global__ void __launch_bounds__(COURIER_THREADS, 1) __cluster_dims__(2, 1, 1)
    couriers(const __grid_constant__ TileOverlapCourier courier, const __grid_constant__ TileOverlapArrivals arrivals) {
    extern __shared__ uint8_t dynamic[];
    Memory& memory = reinterpret_cast<Memory*>(aligned_shared(dynamic, 128))[threadIdx.x / 32];
    int num_warps = gridDim.x * COURIER_THREADS / 32;
    run_courier<T>(courier, num_warps, memory);
    place_arrivals(arrivals, num_warps, memory);
}

// One CTA waits for all rows, so that the GPU is free for others until they have come.
__global__ void __launch_bounds__(128) wait_for_rows(const __grid_constant__ TileOverlapSum args) {
    uint64_t start = traced_time(args.trace);
    all_reached(args.arrived, [&](int peer) { return args.targets[peer]; }, args.num_peers, ROWS_ARRIVED, args.failure,
                args.limit_ns);
    if (threadIdx.x == 0) record(args.trace, ARRIVED, 0, 0, -1, start);
}

constexpr int SUM_THREADS = 256, AT_ONCE = 4;

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS) sum_slots(const __grid_constant__ TileOverlapSum args) {
    uint64_t began = traced_time(args.trace);
    // Sums after any wait that was given up become NaN: nobody trains on them before the host raises.
    float start = has_failed(args.failure) ? __int_as_float(0x7fc00000) : 0.0f;
    int vectors = args.width / 8;
    const uint4* received = reinterpret_cast<const uint4*>(half_of(args.received, *args.epoch, args.generation_bytes));
    const uint4* local = static_cast<const uint4*>(args.local);
    for (int token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
        const int* slots = args.slots + static_cast<size_t>(token) * args.num_choices;
        for (int column = threadIdx.x; column < vectors; column += SUM_THREADS) {
            float sums[8] = {start, start, start, start, start, start, start, start};
            for (int first = 0; first < args.num_choices; first += AT_ONCE) {
                uint4 rows[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    int slot = first + i < args.num_choices ? __ldg(slots + first + i) : -1;
                    const uint4* from = slot >= 0 ? received + static_cast<size_t>(slot) * vectors
                                                  : local + static_cast<size_t>(-2 - slot) * vectors;
                    rows[i] = slot == -1 ? make_uint4(0, 0, 0, 0) : __ldcg(from + column);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) add_8<T>(sums, rows[i]);
            }
            static_cast<uint4*>(args.sums)[static_cast<size_t>(token) * vectors + column] = pack_8<T>(sums);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) record(args.trace, SUMMED, blockIdx.x, 0, -1, began);
    if (threadIdx.x == 0) say_read(args.finished, gridDim.x, args.peer_consumed, args.num_peers, *args.epoch);
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_begin(const TileOverlapBegin* arguments, cudaStream_t stream) {
    tileoverlap::begin_use<<<1, 512, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

template <typename T>
static int run_couriers(const TileOverlapCourier& courier, const TileOverlapArrivals& arrivals, int num_sms,
                        cudaStream_t stream) {
    using namespace tileoverlap;
    if (int error = allow_shared_memory<couriers<T>>(COURIER_BYTES)) return error;
    couriers<T><<<num_sms / 2 * 2, COURIER_THREADS, COURIER_BYTES, stream>>>(courier, arrivals);
    return cudaGetLastError();
}

extern "C" int tileoverlap_run_couriers(const TileOverlapCourier* courier, const TileOverlapArrivals* arrivals, int is_half,
                                        int num_sms, cudaStream_t stream) {
    return is_half ? run_couriers<__half>(*courier, *arrivals, num_sms, stream)
                   : run_couriers<__nv_bfloat16>(*courier, *arrivals, num_sms, stream);
}

extern "C" int tileoverlap_send_scalars(const TileOverlapScalars* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    if (arguments->num_peers > TILEOVERLAP_MAX_PEERS) return cudaErrorInvalidValue;
    send_scalars<<<64, SCALAR_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_collect_scalars(const TileOverlapScalars* arguments, cudaStream_t stream) {
    tileoverlap::collect_scalars<<<64, tileoverlap::SCALAR_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_sum(const TileOverlapSum* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    int ctas = min(max(arguments->num_tokens, 1), arguments->num_sms * 8);
    wait_for_rows<<<1, 128, 0, stream>>>(*arguments);
    if (arguments->is_half)
        sum_slots<__half><<<ctas, SUM_THREADS, 0, stream>>>(*arguments);
    else
        sum_slots<__nv_bfloat16><<<ctas, SUM_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}
