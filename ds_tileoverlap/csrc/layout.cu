#include "layout.cuh"

#include "courier.cuh"
#include "launch.cuh"
#include "schedule.cuh"

namespace tileoverlap {
namespace {

constexpr int TOKENS = TILEOVERLAP_BLOCK_TOKENS, GROUPS = TOKENS / 32, SHARE_THREADS = 512;

// For every 32 tokens and key (an expert, or E + a rank) a word with the bits of the tokens that go there.
struct Marks {
    uint32_t* words;
    int keys;

    __device__ uint32_t& at(int group, int key) { return words[group * keys + key]; }
    __device__ void mark(int key) { atomicOr(&at(threadIdx.x / 32, key), 1u << threadIdx.x % 32); }
    // How many earlier tokens of the same 32 are marked.
    __device__ int before(int key) { return __popc(at(threadIdx.x / 32, key) & ((1u << threadIdx.x % 32) - 1)); }
};

__device__ Marks mark_routes(uint32_t* words, const int* experts, int num_tokens, int num_choices, int num_experts,
                             int num_ranks) {
    Marks marks = {words, num_experts + num_ranks};
    for (int i = threadIdx.x; i < GROUPS * marks.keys; i += blockDim.x) words[i] = 0;
    __syncthreads();
    int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS + threadIdx.x;
    for (int j = 0; token < num_tokens && j < num_choices; j++) {
        int expert = experts[token * num_choices + j];
        if (expert < 0) continue;
        marks.mark(expert);
        marks.mark(num_experts + expert / (num_experts / num_ranks));
    }
    __syncthreads();
    return marks;
}

__global__ void __launch_bounds__(TOKENS) count_routes(const __grid_constant__ TileOverlapCount args) {
    extern __shared__ uint32_t words[];
    Marks marks =
        mark_routes(words, args.experts, args.num_tokens, args.num_choices, args.num_experts, args.num_ranks);
    for (int key = threadIdx.x; key < marks.keys; key += blockDim.x) {
        int count = 0;
        for (int group = 0; group < GROUPS; group++) count += __popc(marks.at(group, key));
        args.block_counts[static_cast<int64_t>(blockIdx.x) * marks.keys + key] = count;
    }
}

__host__ __device__ int record_words(int num_choices) { return (2 * num_choices + 3) / 4 * 4; }

// Where what this rank sends starts, once all counts are known.
struct Bases {
    int* row;     // [E] the first row of its routes to an expert, at the expert's rank
    int* place;   // [E] the first returned row of those routes, where every row returns on its own
    int* sent;    // [W + 1] the first row sent to a rank
    int* record;  // [W] its first record at a rank

    __device__ Bases(int* words, int experts, int ranks)
        : row(words), place(words + experts), sent(words + 2 * experts), record(words + 2 * experts + ranks + 1) {}
};

__device__ void find_bases(const int* counts, int experts, int ranks, int rank, Bases bases) {
    int local = experts / ranks;
    auto count = [&](int r, int key) { return counts[r * (experts + ranks + 1) + key]; };
    auto next = [&](int r) { return r + 1 < ranks ? r + 1 : 0; };
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int home = e / local, row = 0, place = 0;
        for (int other = home * local; other < e; other++)
            for (int r = 0; r < ranks; r++) row += count(r, other);
        // Owners come in the order home + 1, home + 2, .., home.
        for (int r = next(home); r != rank; r = next(r)) row += count(r, e);
        for (int other = 0; other < e; other++)
            if (other / local != rank) place += count(rank, other);
        bases.row[e] = row;
        bases.place[e] = place;
    }
    for (int r = threadIdx.x; r <= ranks; r += blockDim.x) {
        int sent = 0, record = 0;
        for (int other = 0; other < r; other++) sent += count(rank, experts + other);
        bases.sent[r] = sent;
        for (int other = 0; other < rank && r < ranks; other++) record += count(other, experts + r);
        if (r < ranks) bases.record[r] = record;
    }
}

__global__ void __launch_bounds__(SHARE_THREADS) share_counts(const __grid_constant__ TileOverlapCount args, int num_blocks) {
    int keys = args.num_experts + args.num_ranks, row = keys + 1;
    uint32_t epoch = *args.epoch + 1;
    int64_t half = epoch % GENERATIONS * static_cast<int64_t>(args.num_ranks) * args.stride;
    for (int key = threadIdx.x; key < row; key += blockDim.x) {
        int count = key < keys ? 0 : args.word;
        for (int block = 0; key < keys && block < num_blocks; block++)
            count += args.block_counts[static_cast<int64_t>(block) * keys + key];
        for (int peer = 0; peer < args.num_ranks; peer++)
            args.peer_counts[peer][half + args.rank * args.stride + key] = count;
    }
    __syncthreads();
    for (int peer = threadIdx.x; peer < args.num_ranks; peer += blockDim.x) {
        __threadfence_system();
        publish_to_peer(args.peer_ready[peer], epoch);
    }
    bool in_time =
        all_reached(args.ready, [=](int) { return epoch; }, args.num_ranks, COUNTS_READY, args.failure, args.limit_ns);
    const int* mine = args.peer_counts[args.rank] + half;
    for (int r = 0; r < args.num_ranks; r++)
        for (int key = threadIdx.x; key < row; key += blockDim.x) {
            // Without all counts nothing may be done with any: the host sees none and raises.
            int count = in_time ? __ldcg(mine + r * args.stride + key) : 0;
            args.counts[r * row + key] = args.host_counts[r * row + key] = count;
        }
    // What any wait of this rank was given up for until now.
    constexpr int WORDS = sizeof(TileOverlapFailure) / 4;
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x)
        reinterpret_cast<int*>(args.host_failure)[i] = __ldcg(reinterpret_cast<const int*>(args.failure) + i);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *args.epoch = epoch;
        publish_to_peer(args.host_ready, epoch);
    }
}

// Replaces the counts of blocks by what the blocks before them have, key by key.
__device__ void accumulate_blocks(int* block_counts, int keys, int num_blocks) {
    constexpr int AT_ONCE = 16;
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        int before = 0;
        for (int first = 0; first < num_blocks; first += AT_ONCE) {
            int counts[AT_ONCE];
            int* block = block_counts + static_cast<int64_t>(first) * keys + key;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) counts[i] = first + i < num_blocks ? block[i * keys] : 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (first + i < num_blocks) block[i * keys] = before;
                before += counts[i];
            }
        }
    }
}

// Runs while the host, which has the counts, goes on.
__global__ void __launch_bounds__(SHARE_THREADS) find_places(const __grid_constant__ TileOverlapCount args,
                                                             int num_blocks) {
    int row = args.num_experts + args.num_ranks + 1;
    accumulate_blocks(args.block_counts, args.num_experts + args.num_ranks, num_blocks);
    for (int r = threadIdx.x; r < args.num_ranks; r += blockDim.x)
        args.targets[r] += args.counts[r * row + args.num_experts + args.rank] * (record_words(args.num_choices) / 4);
    find_bases(args.counts, args.num_experts, args.num_ranks, args.rank,
               Bases(args.bases, args.num_experts, args.num_ranks));
}

__global__ void __launch_bounds__(TOKENS) place_tokens(const __grid_constant__ TileOverlapPlace args) {
    extern __shared__ uint32_t words[];
    int experts = args.num_experts, ranks = args.num_ranks, local = experts / ranks, keys = experts + ranks;
    int* before = reinterpret_cast<int*>(words + GROUPS * keys);  // [GROUPS, keys] tokens of earlier groups and blocks
    const Bases bases(const_cast<int*>(args.bases), experts, ranks);
    Marks marks = mark_routes(words, args.experts, args.num_tokens, args.num_choices, experts, ranks);
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        int count = args.block_counts[static_cast<int64_t>(blockIdx.x) * keys + key];
        for (int group = 0; group < GROUPS; group++) {
            before[group * keys + key] = count;
            count += __popc(marks.at(group, key));
        }
    }
    uint32_t epoch = *args.epoch;
    bool in_time = all_reached(
        args.consumed, [=](int) { return epoch - GENERATIONS; }, ranks, PEER_CONSUMED, args.failure, args.limit_ns);

    int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS + threadIdx.x, first = token * args.num_choices;
    auto place_of = [&](int key) { return before[threadIdx.x / 32 * keys + key] + marks.before(key); };
    int own_sent = bases.sent[args.rank + 1] - bases.sent[args.rank];
    for (int j = 0; token < args.num_tokens && j < args.num_choices; j++) {
        int expert = args.experts[first + j];
        if (expert < 0) {
            args.choice_slots[first + j] = args.token_slots[first + j] = args.slots[first + j] = -1;
            continue;
        }
        int home = expert / local, sent = bases.sent[home] + place_of(experts + home);
        bool is_first = true;
        for (int i = 0; i < j; i++) {
            int other = args.experts[first + i];
            is_first &= other < 0 || other / local != home;
        }
        args.choice_slots[first + j] = sent;
        args.token_slots[first + j] = is_first ? sent : -1;
        int slot;
        if (home == args.rank)
            slot = -2 - (bases.row[expert] + place_of(expert));
        else if (!args.returns_sums)
            slot = bases.place[expert] + place_of(expert);
        else if (!is_first)
            slot = -1;
        else
            slot = home > args.rank ? sent - own_sent : sent;  // nothing comes back from this rank itself
        args.slots[first + j] = slot;
        if (!is_first) continue;
        args.sent_tokens[sent] = static_cast<int>(token);
        if (!in_time) continue;
        int4* record = reinterpret_cast<int4*>(half_of(args.peer_buffers[home], epoch, args.generation_bytes)) +
                       static_cast<int64_t>(bases.record[home] + place_of(experts + home)) *
                           (record_words(args.num_choices) / 4);
        auto word = [&](int i) {
            int choice = i % args.num_choices;
            if (i >= 2 * args.num_choices) return 0;
            if (i >= args.num_choices) return __float_as_int(args.weights[first + choice]);
            int other = args.experts[first + choice];
            return other >= 0 && other / local == home ? bases.row[other] + place_of(other) : -1;
        };
        for (int i = 0; i < record_words(args.num_choices) / 4; i++)
            record[i] = make_int4(word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3));
    }
    __syncthreads();
    for (int r = threadIdx.x; r < ranks && in_time; r += blockDim.x) {
        int sent = 0;
        for (int group = 0; group < GROUPS; group++) sent += __popc(marks.at(group, experts + r));
        if (sent == 0) continue;
        __threadfence_system();
        add_to_peer(args.peer_arrived[r], sent * (record_words(args.num_choices) / 4));
    }
}

constexpr int RECEIVE_THREADS = 256;

__global__ void __launch_bounds__(RECEIVE_THREADS) receive_records(const __grid_constant__ TileOverlapReceive args) {
    // No ranks: the kernel is only loaded.
    int local = args.num_ranks ? args.num_experts / args.num_ranks : -1, row = args.num_experts + args.num_ranks + 1;
    bool in_time = all_reached(
        args.arrived, [&](int r) { return args.targets[r]; }, args.num_ranks, ROUTES_ARRIVED, args.failure, args.limit_ns);
    const int* records = reinterpret_cast<const int*>(half_of(args.received, *args.epoch, args.generation_bytes));
    int total = args.num_received * args.num_choices;
    if (!in_time) {
        // Later kernels still read these: places that exist, weights that nobody trains on.
        int first = blockIdx.x * RECEIVE_THREADS + threadIdx.x, step = gridDim.x * RECEIVE_THREADS, num_rows = 0;
        for (int r = 0; r < args.num_ranks; r++)
            for (int e = 0; e < local; e++) num_rows += args.counts[r * row + args.rank * local + e];
        for (int i = first; i < total; i += step) args.choice_rows[i] = -1;
        for (int i = first; i < num_rows; i += step) {
            args.row_sources[i] = 0;
            args.row_weights[i] = __int_as_float(0x7fc00000);
        }
    }
    for (int i = blockIdx.x * RECEIVE_THREADS + threadIdx.x; i < total && in_time; i += gridDim.x * RECEIVE_THREADS) {
        int u = i / args.num_choices, choice = i % args.num_choices;
        const int* record = records + static_cast<int64_t>(u) * record_words(args.num_choices);
        int expert_row = __ldcg(record + choice);
        args.choice_rows[i] = expert_row;
        if (expert_row < 0) continue;
        args.row_sources[expert_row] = u;
        args.row_weights[expert_row] = __int_as_float(__ldcg(record + args.num_choices + choice));
    }
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e <= local; e += RECEIVE_THREADS) {
            int offset = 0;
            for (int other = 0; other < e; other++)
                for (int r = 0; r < args.num_ranks; r++)
                    offset += args.counts[r * row + args.rank * local + other];
            args.row_offsets[e] = offset;
        }
    __syncthreads();
    if (threadIdx.x == 0) say_read(args.finished, gridDim.x, args.peer_consumed, args.num_ranks, *args.epoch);
}

int num_blocks(int num_tokens) { return (num_tokens + TOKENS - 1) / TOKENS; }

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_count(const TileOverlapCount* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    const TileOverlapCount& args = *arguments;
    if (args.num_experts > TILEOVERLAP_MAX_EXPERTS || args.num_ranks > TILEOVERLAP_MAX_PEERS)
        return cudaErrorInvalidValue;
    int blocks = num_blocks(args.num_tokens), bytes = GROUPS * (args.num_experts + args.num_ranks) * 4;
    if (blocks) count_routes<<<blocks, TOKENS, bytes, stream>>>(args);
    share_counts<<<1, SHARE_THREADS, 0, stream>>>(args, blocks);
    find_places<<<1, SHARE_THREADS, 0, stream>>>(args, blocks);
    return cudaGetLastError();
}

extern "C" int tileoverlap_place(const TileOverlapPlace* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    const TileOverlapPlace& args = *arguments;
    auto bytes = [](int experts, int ranks) { return 2 * GROUPS * (experts + ranks) * 4; };
    if (int error = allow_shared_memory<place_tokens>(bytes(TILEOVERLAP_MAX_EXPERTS, TILEOVERLAP_MAX_PEERS)))
        return error;
    if (int blocks = num_blocks(args.num_tokens))
        place_tokens<<<blocks, TOKENS, bytes(args.num_experts, args.num_ranks), stream>>>(args);
    return cudaGetLastError();
}

extern "C" int tileoverlap_receive(const TileOverlapReceive* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    int64_t total = static_cast<int64_t>(arguments->num_received) * arguments->num_choices;
    int blocks = static_cast<int>(min(max((total + RECEIVE_THREADS - 1) / RECEIVE_THREADS, int64_t{1}), int64_t{256}));
    receive_records<<<blocks, RECEIVE_THREADS, 0, stream>>>(*arguments);
    return cudaGetLastError();
}
