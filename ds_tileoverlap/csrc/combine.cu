#include "combine.cuh"

namespace tileoverlap {
namespace {

// One thread a peer.
__global__ void begin_return(const __grid_constant__ TileOverlapBegin args) {
    int local = args.num_experts / args.num_ranks;
    const int* mine = args.counts + args.rank * args.counts_stride;
    if (threadIdx.x == 0) *args.epoch += 1;
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
}

// The last CTA to come here tells the peers that all of them have read.
__device__ void say_consumed(int* finished, uint32_t* const* peer_consumed, int num_peers, uint32_t epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(finished, 1) != static_cast<int>(gridDim.x) - 1) return;
    *finished = 0;
    __threadfence_system();
    for (int peer = 0; peer < num_peers; peer++) publish_to_peer(peer_consumed[peer], epoch);
}

__host__ __device__ int scalar_words(int num_choices) { return (num_choices + 3) / 4 * 4; }

__global__ void begin_scalars(const __grid_constant__ TileOverlapScalars args) {
    if (threadIdx.x == 0) *args.epoch += 1;
    for (int peer = threadIdx.x; peer < args.num_peers; peer += blockDim.x)
        if (peer != args.rank)
            args.targets[peer] += args.counts[args.rank * args.counts_stride + args.num_experts + peer] *
                                  (scalar_words(args.num_choices) / 4);
}

constexpr int SCALAR_THREADS = 256;

// One thread a received row.
__global__ void __launch_bounds__(SCALAR_THREADS) send_scalars(const __grid_constant__ TileOverlapScalars args) {
    __shared__ uint32_t sent[TILEOVERLAP_MAX_PEERS];
    uint32_t epoch = *args.epoch;
    bool in_time = true;
    for (int peer = threadIdx.x; peer < args.num_peers; peer += SCALAR_THREADS) {
        sent[peer] = 0;
        if (peer == args.rank) continue;
        const uint32_t* consumed = args.consumed + peer;
        in_time = wait_until([&] { return reached(read_peer_signal(consumed), epoch - GENERATIONS); }, args.limit_ns);
        if (!in_time) report(args.failure, PEER_CONSUMED, peer, 0, epoch - GENERATIONS, read_peer_signal(consumed));
    }
    in_time = __syncthreads_and(in_time);
    int words = scalar_words(args.num_choices), lines = 0;
    for (int i = 0; i + 1 < args.num_peers; i++) lines += args.runs[i].lines;
    for (int i = blockIdx.x * SCALAR_THREADS + threadIdx.x; i < lines && in_time; i += gridDim.x * SCALAR_THREADS) {
        int run = 0, line = i;
        while (line >= args.runs[run].lines) line -= args.runs[run++].lines;
        TileOverlapSumRun to = args.runs[run];
        const int* rows = args.index + static_cast<int64_t>(to.line + line) * args.num_choices;
        float4* record = reinterpret_cast<float4*>(static_cast<char*>(args.peer_buffers[to.peer]) +
                                                   epoch % GENERATIONS * args.generation_bytes) +
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
    bool in_time = true;
    for (int peer = threadIdx.x; peer < args.num_peers; peer += SCALAR_THREADS) {
        if (peer == args.rank) continue;
        const uint32_t* arrived = args.arrived + peer;
        uint32_t target = args.targets[peer];
        in_time = wait_until([&] { return reached(read_peer_signal(arrived), target); }, args.limit_ns);
        if (!in_time) report(args.failure, ROWS_ARRIVED, peer, 1, target, read_peer_signal(arrived));
    }
    in_time = __syncthreads_and(in_time);
    const float* received = reinterpret_cast<const float*>(static_cast<const char*>(args.received) +
                                                           *args.epoch % GENERATIONS * args.generation_bytes);
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
    say_consumed(args.finished, args.peer_consumed, args.num_peers, *args.epoch);
}

// All registers of an SM: nothing else runs beside these couriers.
constexpr int COURIER_THREADS = 512;

template <typename T>
__global__ void __launch_bounds__(COURIER_THREADS, 1) __cluster_dims__(2, 1, 1)
    couriers(const __grid_constant__ TileOverlapCourier args) {
    run_courier<T>(args, gridDim.x * COURIER_THREADS / 32);
}

constexpr int SUM_THREADS = 256, AT_ONCE = 4;

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS) sum_slots(const __grid_constant__ TileOverlapSum args) {
    bool in_time = true;
    for (int peer = threadIdx.x; peer < args.num_peers; peer += SUM_THREADS) {
        const uint32_t* arrived = args.arrived + peer;
        uint32_t target = args.targets[peer];
        in_time = wait_until([&] { return reached(read_peer_signal(arrived), target); }, args.limit_ns);
        if (!in_time) report(args.failure, ROWS_ARRIVED, peer, 0, target, read_peer_signal(arrived));
    }
    // Sums without all their rows, or after any other wait was given up, become NaN: nobody trains on them before the
    // host raises.
    if (threadIdx.x == 0) in_time &= !has_failed(args.failure);
    float start = __syncthreads_and(in_time) ? 0.0f : __int_as_float(0x7fc00000);
    int vectors = args.width / 8;
    size_t generation = *args.epoch % GENERATIONS * args.generation_bytes;
    const uint4* received = reinterpret_cast<const uint4*>(static_cast<const char*>(args.received) + generation);
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
    say_consumed(args.finished, args.peer_consumed, args.num_peers, *args.epoch);
}

__global__ void __launch_bounds__(SUM_THREADS) keep_rows(const __grid_constant__ TileOverlapKeep args) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const char*>(args.received) +
                                                       *args.epoch % GENERATIONS * args.generation_bytes);
    int64_t vectors = args.num_bytes / 16, step = static_cast<int64_t>(gridDim.x) * SUM_THREADS;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * SUM_THREADS + threadIdx.x; i < vectors; i += step)
        static_cast<uint4*>(args.kept)[i] = __ldcg(from + i);
    say_consumed(args.finished, args.peer_consumed, args.num_peers, *args.epoch);
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_begin_return(const TileOverlapBegin* arguments, cudaStream_t stream) {
    tileoverlap::begin_return<<<1, 128, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_return(const TileOverlapCourier* arguments, int is_half, int num_sms, cudaStream_t stream) {
    using namespace tileoverlap;
    if (is_half)
        couriers<__half><<<num_sms / 2 * 2, COURIER_THREADS, 0, stream>>>(*arguments);
    else
        couriers<__nv_bfloat16><<<num_sms / 2 * 2, COURIER_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_send_scalars(const TileOverlapScalars* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    if (arguments->num_peers > TILEOVERLAP_MAX_PEERS) return cudaErrorInvalidValue;
    begin_scalars<<<1, 128, 0, stream>>>(*arguments);
    send_scalars<<<64, SCALAR_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_collect_scalars(const TileOverlapScalars* arguments, cudaStream_t stream) {
    tileoverlap::collect_scalars<<<64, tileoverlap::SCALAR_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_keep(const TileOverlapKeep* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    int64_t ctas = (arguments->num_bytes / 16 + SUM_THREADS - 1) / SUM_THREADS;
    ctas = min(max(ctas, int64_t{1}), static_cast<int64_t>(arguments->num_sms) * 8);
    keep_rows<<<static_cast<int>(ctas), SUM_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_sum(const TileOverlapSum* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    int ctas = min(max(arguments->num_tokens, 1), arguments->num_sms * 8);
    if (arguments->is_half)
        sum_slots<__half><<<ctas, SUM_THREADS, 0, stream>>>(*arguments);
    else
        sum_slots<__nv_bfloat16><<<ctas, SUM_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}
