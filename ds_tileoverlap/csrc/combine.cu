// Return and sum. A CTA of the return has three warps: one claims parts of segments and waits for the tiles that they
// touch, one loads them chunk by chunk into a ring in shared memory, one stores each chunk to the peer.
#include "combine.cuh"

#include "ptx.cuh"

namespace tileoverlap {
namespace {

constexpr int CHUNK = 16384, SLOTS = 13, UNREAD = 4, PARTS = 4;
constexpr int RING_BYTES = CHUNK * SLOTS;
constexpr int MAX_PEERS = 128;
// Halves of a receive buffer, used in turn: the half of this epoch was last used so many epochs ago.
constexpr uint32_t GENERATIONS = 2;

struct Part {
    const char* from;
    char* to;
    int bytes;  // 0: no more come
    int peer;
};

struct Chunk {
    char* to;
    int bytes;  // 0: no more come
    int peer;
};

struct SharedRing {
    uint64_t full[SLOTS], empty[SLOTS];
    uint64_t part_full[PARTS], part_empty[PARTS];
    Chunk chunks[SLOTS];
    Part parts[PARTS];
    uint32_t sent[MAX_PEERS];  // 16 bytes a count
    bool is_free[MAX_PEERS];   // the peer has read what this generation of its buffer held
};

// One warp. False once a deadline has passed.
__device__ bool wait_for_segment(const TileOverlapReturn& args, SharedRing& ring, const TileOverlapSegment& segment,
                                 int place, uint32_t epoch) {
    int lane = threadIdx.x;
    bool in_time = true;
    if (lane == 0 && !ring.is_free[segment.peer]) {
        const uint32_t* consumed = args.peer_consumed + segment.peer;
        in_time = wait_until([&] { return reached(read_peer_signal(consumed), epoch - GENERATIONS); }, args.limit_ns);
        if (!in_time)
            report(args.failure, PEER_CONSUMED, segment.peer, place, epoch - GENERATIONS, read_peer_signal(consumed));
        ring.is_free[segment.peer] = true;
    }
    const uint32_t* signals = args.signals + static_cast<size_t>(segment.band) * args.signals_per_band;
    int count = segment.bands * args.signals_per_band;
    for (int i = lane; i < count && in_time; i += 32) {
        in_time = wait_until([&] { return reached(read_signal(signals + i), epoch); }, args.limit_ns);
        if (!in_time)
            report(args.failure, TILE_READY, -1, segment.band + i / args.signals_per_band, epoch, read_signal(signals + i));
    }
    return __all_sync(~0u, in_time);
}

// Warp 0: claims parts of segments and hands them on once their tiles are ready, ahead of the copies.
__device__ void claim_parts(const TileOverlapReturn& args, SharedRing& ring) {
    Ring<PARTS> place;
    int lane = threadIdx.x, current = 0, ready = -1;
    int count = *args.num_segments, num_parts = args.segments[count].first_part;
    uint32_t epoch = *args.epoch;
    bool in_time = true;
    auto put = [&](const Part& part) {
        if (lane == 0) {
            barrier_wait(&ring.part_empty[place.slot], place.parity ^ 1);
            ring.parts[place.slot] = part;
            barrier_arrive(&ring.part_full[place.slot]);
        }
        __syncwarp();
        place.advance();
    };
    int next = lane == 0 ? atomicAdd(args.claimed, 1) : 0;
    while (true) {
        int claim = __shfl_sync(~0u, next, 0);
        // Every CTA is refused once; the last one to be leaves the counter as it was found.
        if (lane == 0 && claim == num_parts + static_cast<int>(gridDim.x) - 1) *args.claimed = 0;
        if (claim >= num_parts) break;
        if (lane == 0) next = atomicAdd(args.claimed, 1);  // its answer comes while this part is waited for
        while (claim >= args.segments[current + 1].first_part) current++;
        TileOverlapSegment segment = args.segments[current];
        if (ready != current && in_time) {
            in_time = wait_for_segment(args, ring, segment, current, epoch);
            fence_async_proxy();
            ready = current;
        }
        // After a deadline the rest is claimed but not sent: the owner reports what did not come.
        if (!in_time) continue;
        int64_t start = static_cast<int64_t>(claim - segment.first_part) * TILEOVERLAP_PART;
        int64_t bytes = min(static_cast<int64_t>(segment.rows) * args.row_bytes - start, int64_t{TILEOVERLAP_PART});
        put({static_cast<const char*>(args.rows) + static_cast<int64_t>(segment.row) * args.row_bytes + start,
             static_cast<char*>(args.peer_buffers[segment.peer]) + epoch % GENERATIONS * args.generation_bytes +
                 static_cast<int64_t>(segment.peer_row) * args.row_bytes + start,
             static_cast<int>(bytes), segment.peer});
    }
    put({nullptr, nullptr, 0, 0});
}

// One thread: loads parts, chunk by chunk.
__device__ void load_parts(SharedRing& ring, uint8_t* slots) {
    Ring<PARTS> parts;
    Ring<SLOTS> place;
    while (true) {
        barrier_wait(&ring.part_full[parts.slot], parts.parity);
        Part part = ring.parts[parts.slot];
        barrier_arrive(&ring.part_empty[parts.slot]);
        parts.advance();
        fence_async_proxy();
        int at = 0;
        do {
            int bytes = min(CHUNK, part.bytes - at);
            barrier_wait(&ring.empty[place.slot], place.parity ^ 1);
            ring.chunks[place.slot] = {part.to + at, bytes, part.peer};
            if (bytes == 0) {
                barrier_arrive(&ring.full[place.slot]);
                return;
            }
            barrier_expect(&ring.full[place.slot], bytes);
            load_bulk(slots + place.slot * CHUNK, part.from + at, bytes, &ring.full[place.slot]);
            place.advance();
            at += bytes;
        } while (at < part.bytes);
    }
}

// One thread: stores chunks to the peers and says at the end how much went to each.
__device__ void store_chunks(const TileOverlapReturn& args, SharedRing& ring, const uint8_t* slots) {
    Ring<SLOTS> place, read;
    for (int stored = 0;; stored++) {
        barrier_wait(&ring.full[place.slot], place.parity);
        Chunk chunk = ring.chunks[place.slot];
        if (chunk.bytes == 0) break;
        store_bulk(chunk.to, slots + place.slot * CHUNK, chunk.bytes);
        bulk_commit();
        ring.sent[chunk.peer] += chunk.bytes / 16;
        place.advance();
        if (stored >= UNREAD) {
            bulk_wait_read<UNREAD>();
            barrier_arrive(&ring.empty[read.slot]);
            read.advance();
        }
    }
    bulk_wait<0>();
    fence_async_proxy();
    for (int peer = 0; peer < args.num_peers; peer++)
        if (ring.sent[peer]) add_to_peer(args.peer_arrived[peer], ring.sent[peer]);
}

__global__ void __launch_bounds__(96, 1) __cluster_dims__(2, 1, 1)
    return_segments(const __grid_constant__ TileOverlapReturn args) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ SharedRing ring;
    for (int i = threadIdx.x; i < args.num_peers; i += blockDim.x) ring.sent[i] = 0, ring.is_free[i] = false;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], 1);
        }
        for (int i = 0; i < PARTS; i++) {
            barrier_init(&ring.part_full[i], 1);
            barrier_init(&ring.part_empty[i], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 32) claim_parts(args, ring);
    if (threadIdx.x == 32) load_parts(ring, slots);
    if (threadIdx.x == 64) store_chunks(args, ring, slots);
}

// One thread a peer.
__global__ void begin_return(const __grid_constant__ TileOverlapBegin args) {
    int local = args.num_experts / args.num_ranks;
    if (threadIdx.x == 0) *args.epoch += 1;
    for (int peer = threadIdx.x; peer < args.num_ranks; peer += blockDim.x) {
        if (peer == args.rank) continue;
        uint32_t rows = 0;
        for (int e = 0; e < local; e++) rows += args.counts[args.rank * args.counts_stride + peer * local + e];
        args.targets[peer] += rows * (args.row_bytes / 16);
    }
}

__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }

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
    // Sums without all their rows become NaN: nobody trains on them before the host raises.
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
                for (int i = 0; i < AT_ONCE; i++) {
                    uint32_t words[4] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float2 pair = unpack(words[j], T{});
                        sums[2 * j] += pair.x;
                        sums[2 * j + 1] += pair.y;
                    }
                }
            }
            uint4 out = make_uint4(pack(sums[0], sums[1], T{}), pack(sums[2], sums[3], T{}),
                                   pack(sums[4], sums[5], T{}), pack(sums[6], sums[7], T{}));
            static_cast<uint4*>(args.sums)[static_cast<size_t>(token) * vectors + column] = out;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(args.finished, 1) == static_cast<int>(gridDim.x) - 1) {
            *args.finished = 0;
            __threadfence_system();
            for (int peer = 0; peer < args.num_peers; peer++) publish_to_peer(args.peer_consumed[peer], *args.epoch);
        }
    }
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_begin_return(const TileOverlapBegin* arguments, cudaStream_t stream) {
    tileoverlap::begin_return<<<1, 128, 0, stream>>>(*arguments);
    return cudaGetLastError();
}

extern "C" int tileoverlap_return(const TileOverlapReturn* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    if (arguments->num_peers > MAX_PEERS) return cudaErrorInvalidValue;
    static cudaError_t prepared =
        cudaFuncSetAttribute(return_segments, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES);
    if (prepared) return prepared;
    return_segments<<<arguments->num_sms, 96, RING_BYTES, stream>>>(*arguments);
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
