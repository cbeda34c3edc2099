// Rows that have come from peers are put where the GEMM reads them, by the couriers, while it multiplies other rows.
#pragma once
#include "courier.cuh"

extern "C" {

struct TileOverlapArrivals {
    void* rows;                          // the GEMM's operand A; this rank's own rows are there already
    int row_bytes;                       // a multiple of 16
    const int* sources;                  // [rows] the received row that each of them is a copy of
    int own_first, own_end;              // the received rows that never left this rank: no buffer holds them
    const TileOverlapSegment* segments;  // which rows came from which peer, a band each; ends as in TileOverlapCourier
    const int* num_segments;
    uint32_t* missing;                   // [bands] parts that are not in place yet; null: nothing is to be done
    const void* received;                // rows from the peers
    int64_t generation_bytes;
    const uint32_t* epoch;
    const uint32_t* arrived;             // [num_peers] what came from each peer, 16 bytes a count
    const uint32_t* targets;             // [num_peers] what must have come
    uint32_t* const* peer_consumed;      // [num_peers] the word at each peer that says what was read here
    int *claimed, *finished;             // 0 before and after
    int num_peers;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
    TileOverlapTrace* trace;             // or null
};
}

#ifdef __CUDACC__

#include "pieces.cuh"

namespace tileoverlap {

// One warp's copies from the receive buffer to the rows, piece by piece.
template <typename Memory>
class Placer {
public:
    __device__ Placer(const TileOverlapArrivals& args, Memory& memory)
        : lane(threadIdx.x % 32), args(args), pieces(memory), rows_each(max(HALF / args.row_bytes, 1)),
          received(half_of(args.received, *args.epoch, args.generation_bytes)) {}

    const int lane;

    // The received row that this lane's row of the part is a copy of.
    __device__ int source_of(const Part& part) const {
        if (lane >= part.rows) return 0;
        int source = __ldg(args.sources + part.row + lane);
        return source < args.own_first ? source : source - (args.own_end - args.own_first);
    }

    // Begins to copy a part: some rows at a time, or a row that is longer than a piece little by little.
    __device__ void copy(const Part& part, int source) {
        for (int first = 0; first < part.rows; first += rows_each) {
            int rows = min(part.rows - first, rows_each);
            int64_t place = static_cast<int64_t>(part.row + first) * args.row_bytes;
            int64_t received_row = __shfl_sync(~0u, source, min(first + lane, 31));
            const char* from = received + received_row * args.row_bytes;
            for (int at = 0; at < args.row_bytes; at += HALF) {
                int share = min(args.row_bytes - at, HALF);
                bool is_last = first + rows == part.rows && at + share == args.row_bytes;
                make_room();
                pieces.load({place + at, rows * share, is_last ? part.band : -1}, from + at, lane * share,
                            lane < rows ? share : 0);
            }
        }
    }

    // Returns when everything is in place, and announced.
    __device__ void finish() {
        while (pieces.size()) store_next();
        if (lane == 0) bulk_stores_wait<0>();
        announce_until(pieces.num_taken());
    }

private:
    static constexpr int HALF = Memory::HALF_BYTES;

    __device__ void make_room() {
        if (pieces.size() < 2) return;
        store_next();
        if (lane == 0) {
            bulk_stores_wait_read();
            bulk_stores_wait<1>();
        }
        announce_until(pieces.num_taken() - 1);
    }

    __device__ void store_next() {
        const uint8_t* piece = pieces.front();
        const auto& note = pieces.note_of(pieces.num_taken());
        if (lane == 0) bulk_store(static_cast<char*>(args.rows) + note.place, piece, note.bytes);
        pieces.pop();
    }

    // Says of pieces that are in place which bands are the more complete.
    __device__ void announce_until(int end) {
        for (; announced < end; announced++) {
            int band = pieces.note_of(announced).band;
            if (lane == 0 && band >= 0) add_to(args.missing + band, -1u);
        }
    }

    const TileOverlapArrivals& args;
    Pieces<Memory> pieces;
    const int rows_each;
    const char* received;
    int announced = 0;
};

// Runs one warp's share.
template <typename Memory>
__device__ __forceinline__ void place_arrivals(const TileOverlapArrivals& args, int num_warps, Memory& memory) {
    if (args.missing == nullptr) return;
    Placer<Memory> placer(args, memory);
    Parts parts(args.segments, *args.num_segments, args.row_bytes, args.claimed, num_warps);
    Part part = parts.next();
    int source = placer.source_of(part), known = -1;
    bool in_time = !has_failed(args.failure);
    while (part.rows) {
        // Its sources come while this part is copied.
        Part next = parts.next();
        int next_source = placer.source_of(next), peer = part.peer;
        if (peer != known && in_time) {
            placer.finish();  // before a wait that may be long
            const uint32_t* arrived = args.arrived + peer;
            uint32_t target = args.targets[peer];
            in_time = wait_until([&] { return reached(read_peer_signal(arrived), target); }, args.failure, args.limit_ns,
                                 256);
            if (!in_time) report(args.failure, ROWS_ARRIVED, peer, 0, target, read_peer_signal(arrived));
            known = peer;
            fence_async_global();  // the bulk copy engine reads what a peer wrote
        }
        in_time = __all_sync(~0u, in_time);
        if (in_time) {
            uint64_t began = traced_time(args.trace);
            placer.copy(part, source);
            if (placer.lane == 0) record(args.trace, PLACED, part.band, 0, peer, began);
        }
        part = next, source = next_source;
    }
    placer.finish();
    __syncwarp();
    if (placer.lane == 0) say_read(args.finished, num_warps, args.peer_consumed, args.num_peers, *args.epoch);
}

// Before tiles of a band are read: one thread waits until its rows are in place. After a deadline they are what they are.
__device__ __forceinline__ void wait_for_band(const TileOverlapArrivals& args, int band) {
    if (args.missing == nullptr) return;
    const uint32_t* missing = args.missing + band;
    // The couriers wait for one peer after the other, and name the one that does not come.
    uint64_t limit_ns = (args.num_peers + 1) * args.limit_ns;
    if (!wait_until([&] { return read_signal(missing) == 0; }, args.failure, limit_ns))
        report(args.failure, ROWS_PLACED, -1, band, 0, read_signal(missing));
    fence_async_global();
}

}  // namespace tileoverlap

#endif
