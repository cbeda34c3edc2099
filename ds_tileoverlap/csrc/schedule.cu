// The schedule: one CTA for each GEMM. schedule.py has the same in plain Python.
#include "schedule.cuh"

#include "launch.cuh"

namespace tileoverlap {
namespace {

constexpr int THREADS = 1024, PAIR = 2 * BAND;
// Pairs of bands that walk the columns together, so that their rows stay in the L2 cache.
constexpr int PAIRS_AT_ONCE = 8;
constexpr int MAX_RUNS = TILEOVERLAP_MAX_EXPERTS;

// Replaces n values in shared memory by what stands before each of them, and returns the total. All threads call it.
__device__ int scan(int* values, int n) {
    __shared__ int warp_sums[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, total = 0;
    for (int first = 0; first < n; first += THREADS) {
        int i = first + threadIdx.x, own = i < n ? values[i] : 0, sum = own;
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += before;
        }
        __syncthreads();
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int before = total;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) before += warp_sums[w];
            total += warp_sums[w];
        }
        if (i < n) values[i] = before + sum - own;
    }
    __syncthreads();
    return total;
}

// The last of n ascending values that is not above a given one.
__device__ int last_not_above(const int* values, int n, int value) {
    int low = 0, high = n - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (values[middle] <= value)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Rows of one expert that share tiles: all of them, or those of one owner.
struct Runs {
    int row[MAX_RUNS], rows[MAX_RUNS], remote[MAX_RUNS], band[MAX_RUNS];
    int first_item[(TILEOVERLAP_MAX_PANELS + 1) * MAX_RUNS];  // of each run in order, panel by panel, then of its local part
    int order[MAX_RUNS];           // place in the schedule -> run
    int expert_remote[MAX_RUNS], expert_row[MAX_RUNS];
    int segments[MAX_RUNS], parts[MAX_RUNS];
};

struct PairRange {
    int first, end;
    bool has_single;  // the last one is a single band
    __device__ int num_items(int column_tiles) const {
        int pairs = end - first;
        return has_single ? (pairs - 1) * column_tiles + (column_tiles + 1) / 2 : pairs * column_tiles;
    }
    __device__ int num_bands() const { return 2 * (end - first) - has_single; }
};

__device__ PairRange pairs_of(int rows, int remote, bool of_remote) {
    int all = (rows + PAIR - 1) / PAIR, touching = (remote + PAIR - 1) / PAIR;
    bool single = all > 0 && rows - (all - 1) * PAIR <= BAND;
    if (of_remote) return {0, touching, single && touching == all};
    return {touching, all, single && touching < all};
}

__global__ void __launch_bounds__(THREADS) schedule(const __grid_constant__ TileOverlapSchedule args) {
    extern __shared__ uint8_t dynamic[];
    Runs& runs = *reinterpret_cast<Runs*>(dynamic);
    const TileOverlapTiling& tiling = args.tilings[blockIdx.x];
    int ranks = args.num_ranks, local = args.num_experts / ranks, first_expert = args.rank * local;
    int per_expert = tiling.aligns_owners ? ranks : 1, num_runs = local * per_expert;
    int column_tiles = (tiling.n + TILE_N - 1) / TILE_N;
    auto count = [&](int rank, int expert) { return args.counts[rank * args.counts_stride + expert]; };
    auto owner = [&](int i) { return (args.rank + 1 + i) % ranks; };  // this rank comes last

    for (int e = threadIdx.x; e < local; e += THREADS) {
        int remote = 0;
        for (int i = 0; i + 1 < ranks; i++) remote += count(owner(i), first_expert + e);
        runs.expert_remote[e] = remote;
        runs.expert_row[e] = remote + count(args.rank, first_expert + e);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < local; e += THREADS) {
        // Experts with more remote rows first; equal ones by number.
        int place = 0, remote = runs.expert_remote[e];
        for (int other = 0; other < local; other++)
            place += runs.expert_remote[other] > remote || (runs.expert_remote[other] == remote && other < e);
        for (int i = 0; i < per_expert; i++) {
            int r = e * per_expert + i;
            runs.order[place * per_expert + i] = r;
            runs.rows[r] = tiling.aligns_owners ? count(owner(i), first_expert + e) : runs.expert_row[e];
            runs.remote[r] = tiling.aligns_owners ? (i + 1 < ranks ? runs.rows[r] : 0) : remote;
            runs.row[r] = runs.rows[r];
            runs.band[r] = (runs.rows[r] + BAND - 1) / BAND;
        }
    }
    __syncthreads();
    scan(runs.row, num_runs);
    int num_bands = scan(runs.band, num_runs);
    for (int i = threadIdx.x; tiling.band_parts_to_do && i < num_bands; i += THREADS) tiling.band_parts_to_do[i] = 0;
    scan(runs.expert_row, local);

    // Remote rows panel by panel, and all columns of the local ones before or after.
    int num_phases = (tiling.num_panels + 1) * num_runs;
    auto panel_of = [&](int phase) { return phase / num_runs - tiling.local_first; };
    auto is_of_remote = [&](int phase) { return panel_of(phase) >= 0 && panel_of(phase) < tiling.num_panels; };
    auto first_tile = [&](int phase) { return is_of_remote(phase) ? panel_of(phase) * tiling.panel_tiles : 0; };
    auto tiles = [&](int phase) {
        return is_of_remote(phase) ? max(min(tiling.panel_tiles, column_tiles - first_tile(phase)), 0) : column_tiles;
    };
    auto pairs = [&](int phase) {
        int r = runs.order[phase % num_runs];
        return pairs_of(runs.rows[r], runs.remote[r], is_of_remote(phase));
    };
    for (int i = threadIdx.x; i < num_phases; i += THREADS) runs.first_item[i] = pairs(i).num_items(tiles(i));
    for (int panel = threadIdx.x; panel < tiling.num_panels; panel += THREADS) {
        uint32_t done = 0;
        int first = (panel + tiling.local_first) * num_runs;
        for (int i = first; i < first + num_runs; i++) done += pairs(i).num_bands() * tiles(i);
        tiling.panel_tiles_to_do[panel] = done;
    }
    __syncthreads();
    int num_items = scan(runs.first_item, num_phases);
    if (threadIdx.x == 0) *tiling.num_items = num_items;
    for (int i = threadIdx.x; i < num_items; i += THREADS) {
        int phase = last_not_above(runs.first_item, num_phases, i), r = runs.order[phase % num_runs];
        PairRange range = pairs(phase);
        int columns = tiles(phase), full = range.end - range.first - range.has_single, at = i - runs.first_item[phase];
        int pair, column_tile;
        if (at < full * columns) {
            int group = at / (PAIRS_AT_ONCE * columns), size = min(PAIRS_AT_ONCE, full - group * PAIRS_AT_ONCE);
            at -= group * PAIRS_AT_ONCE * columns;
            pair = range.first + group * PAIRS_AT_ONCE + at % size;
            column_tile = at / size;
        } else {
            pair = range.end - 1;
            column_tile = 2 * (at - full * columns);
        }
        int flag = is_of_remote(phase) ? TILEOVERLAP_REMOTE : 0;
        tiling.items[i] = {runs.row[r] + pair * PAIR, min(runs.rows[r] - pair * PAIR, PAIR),
                         static_cast<uint16_t>(r / per_expert | flag),
                         static_cast<uint16_t>(first_tile(phase) + column_tile), runs.band[r] + pair * 2};
    }

    // Segments, for each expert in order and each remote owner.
    int remotes = ranks - 1, num_sends = local * remotes;
    struct Send {
        int peer, peer_row, row, rows, bands, in_band, band, bands_each;
    };
    auto send_of = [&](int i) {
        Send send;
        int place = i / remotes, index = i % remotes;
        int e = runs.order[place * per_expert] / per_expert;
        send.peer = owner(index);
        send.rows = count(send.peer, first_expert + e);
        int before = 0;
        for (int j = 0; j < index; j++) before += count(owner(j), first_expert + e);
        send.row = runs.expert_row[e] + before;
        int r = tiling.aligns_owners ? e * per_expert + index : e, offset = tiling.aligns_owners ? 0 : before;
        send.band = runs.band[r] + offset / BAND;
        send.in_band = offset % BAND;
        send.bands = send.rows ? (send.in_band + send.rows + BAND - 1) / BAND : 0;
        // One band at a time at both ends: the link starts early and little is left when the GEMM ends.
        send.bands_each = place == 0 || place == local - 1 ? 1 : tiling.bands_per_segment;
        send.peer_row = 0;
        for (int other = 0; other < first_expert + e; other++)
            if (other / local != send.peer) send.peer_row += count(send.peer, other);
        return send;
    };
    auto rows_until = [](const Send& send, int band) { return min(max(band * BAND - send.in_band, 0), send.rows); };
    int rows_each = rows_of_part(tiling.row_bytes);
    auto parts_of = [&](int rows) { return (rows + rows_each - 1) / rows_each; };
    for (int i = threadIdx.x; i < num_sends; i += THREADS) {
        Send send = send_of(i);
        int parts = 0, segments = (send.bands + send.bands_each - 1) / send.bands_each;
        for (int s = 0; s < segments; s++)
            parts += parts_of(rows_until(send, (s + 1) * send.bands_each) - rows_until(send, s * send.bands_each));
        runs.segments[i] = segments;
        runs.parts[i] = parts;
    }
    __syncthreads();
    int num_segments = scan(runs.segments, num_sends), num_parts = scan(runs.parts, num_sends);
    for (int i = threadIdx.x; i < num_sends; i += THREADS) {
        Send send = send_of(i);
        int parts = runs.parts[i], segments = (send.bands + send.bands_each - 1) / send.bands_each;
        for (int s = 0; s < segments; s++) {
            int first = rows_until(send, s * send.bands_each), end = rows_until(send, (s + 1) * send.bands_each);
            tiling.segments[runs.segments[i] + s] = {send.row + first,      end - first,
                                                   send.peer,             send.peer_row + first,
                                                   send.band + s * send.bands_each,
                                                   min(send.bands_each, send.bands - s * send.bands_each), parts, 0};
            parts += parts_of(end - first);
            // Rows of several peers may share a band.
            if (tiling.band_parts_to_do) atomicAdd(tiling.band_parts_to_do + send.band + s, parts_of(end - first));
        }
    }
    if (threadIdx.x == 0) {
        *tiling.num_segments = num_segments;
        tiling.segments[num_segments] = {0, 0, 0, 0, 0, 0, num_parts, 0};
    }

    // Sums: the received rows of each remote owner, in the order in which it sent them.
    auto sends = [&](int from, int to) { return args.counts[from * args.counts_stride + args.num_experts + to]; };
    for (int i = threadIdx.x; i < remotes; i += THREADS) {
        int peer = owner(i), line = 0, peer_row = 0;
        for (int r = 0; r < peer; r++) line += sends(r, args.rank);
        for (int r = 0; r < args.rank; r++) peer_row += r == peer ? 0 : sends(peer, r);
        tiling.sum_runs[i] = {line, sends(peer, args.rank), peer, peer_row};
        // The rank before this one first: it places rows in the order of its owners, of which this rank is the first.
        peer = owner(remotes - 1 - i);
        line = peer_row = 0;
        for (int r = 0; r < peer; r++) line += sends(args.rank, r);
        for (int r = 0; r < args.rank; r++) peer_row += r == peer ? 0 : sends(r, peer);
        tiling.send_runs[i] = {line, sends(args.rank, peer), peer, peer_row};
    }
}

}  // namespace
}  // namespace tileoverlap

extern "C" int tileoverlap_schedule(const TileOverlapSchedule* arguments, cudaStream_t stream) {
    using namespace tileoverlap;
    if (arguments->num_experts > TILEOVERLAP_MAX_EXPERTS || arguments->num_tilings > TILEOVERLAP_MAX_TILINGS)
        return cudaErrorInvalidValue;
    if (int error = allow_shared_memory<schedule>(sizeof(Runs))) return error;
    schedule<<<arguments->num_tilings, THREADS, sizeof(Runs), stream>>>(*arguments);
    return cudaGetLastError();
}
