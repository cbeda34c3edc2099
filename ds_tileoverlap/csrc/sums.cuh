// Couriers that add rows up before they carry them, and the choice of a courier's errand.
#pragma once
#include "courier.cuh"
#include "pieces.cuh"

namespace tileoverlap {

// Two lines, over one panel of columns.
struct SumTask {
    SumLine one, other;
    int first_line, panel;  // panel: -1 if there is no task

    __device__ int from_byte(const TileOverlapCourier& args) const { return panel * args.panel_bytes; }
    __device__ int to_byte(const TileOverlapCourier& args) const {
        return min(from_byte(args) + args.panel_bytes, args.row_bytes);
    }
};

__device__ __forceinline__ SumTask sum_task(const TileOverlapCourier& args, int part, int parts_each_panel, int lane) {
    if (part < 0) return {{-1, -1, 0}, {-1, -1, 0}, 0, -1};
    int first = part % parts_each_panel * 2;
    return {sum_line(args, first, lane), sum_line(args, first + 1, lane), first, part / parts_each_panel};
}

// So many bytes of a row are loaded and added at once, 16 at a time by each lane.
constexpr int COLUMNS = 2048, VECTORS = COLUMNS / 512;

// Rows on their way to the lanes' registers, in a ring. Each lane loads and reads the same 16 bytes of every 512: no lane
// waits for another.
template <typename Memory>
class RowRing {
public:
    static constexpr int SLOTS = sizeof(Memory::halves) / COLUMNS;

    __device__ explicit RowRing(Memory& memory) : own(memory.halves[0] + threadIdx.x % 32 * 16) {}

    __device__ int size() const { return begun - taken; }

    // Some bytes of a row.
    __device__ void load(const char* from, int bytes) {
        uint8_t* to = own + begun++ % SLOTS * COLUMNS;
        int lane_byte = threadIdx.x % 32 * 16;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (v * 512 + lane_byte < bytes) load_16_async(to + v * 512, from + v * 512 + lane_byte);
        loads_commit();
    }

    // The oldest one, where this lane's bytes begin.
    __device__ const uint8_t* take() {
        if (size() == SLOTS)
            loads_wait<SLOTS - 1>();
        else
            loads_wait<0>();
        return own + taken++ % SLOTS * COLUMNS;
    }

private:
    uint8_t* own;
    unsigned begun = 0, taken = 0;
};

// The way through the rows of a task: line by line, then columns, then the rows that the line names.
class TaskRows {
public:
    __device__ TaskRows(const TileOverlapCourier& args, const SumTask& task)
        : named(task.one.named_row), named_next(task.other.named_row), from_byte(task.from_byte(args)),
          to_byte(task.to_byte(args)), at(to_byte) {
        next_columns();
    }

    __device__ bool is_empty() const { return lines_left < 0; }

    template <typename Memory>
    __device__ void load_next(const TileOverlapCourier& args, RowRing<Memory>& ring) {
        int64_t row = __shfl_sync(~0u, named, __ffs(left) - 1);
        ring.load(static_cast<const char*>(args.rows) + row * args.row_bytes + at, min(to_byte - at, COLUMNS));
        left &= left - 1;
        if (!left) next_columns();
    }

private:
    __device__ void next_columns() {
        at += COLUMNS;
        left = __ballot_sync(~0u, named >= 0);
        while (at >= to_byte && --lines_left >= 0) {
            if (lines_left == 0) named = named_next;
            left = __ballot_sync(~0u, named >= 0);
            at = left ? from_byte : to_byte;
        }
    }

    int named, named_next, from_byte, to_byte;
    int lines_left = 2, at;
    uint32_t left;  // the lanes whose rows are still to come, of these columns
};

// Sums in float32, in the order of the choices. While some rows are added the next ones are loaded.
template <typename T, typename Memory>
class Summer {
public:
    __device__ Summer(const TileOverlapCourier& args, Memory& memory) : courier(args), args(args), ring(memory) {}

    __device__ void run(int num_warps) {
        int parts_each_panel = (num_lines(args) + 1) / 2, lane = courier.lane;
        Claims claims(args.claimed, parts_each_panel * args.num_panels, num_warps);
        SumTask task = sum_task(args, claims.claim(), parts_each_panel, lane);
        TaskRows rows(args, task);
        while (task.panel >= 0) {
            // Its lines of the index come while this task is worked on.
            SumTask next = sum_task(args, claims.claim(), parts_each_panel, lane);
            wait_for_panel(task.panel);
            bool is_of_next = false;
            auto load_more = [&] {
                if (rows.is_empty() && !is_of_next && next.panel == ready) {
                    is_of_next = true;
                    rows = TaskRows(args, next);
                }
                if (!rows.is_empty()) rows.load_next(args, ring);
            };
            if (courier.in_time) {
                for (int i = ring.size(); i < Ring::SLOTS; i++) load_more();
                uint64_t began = traced_time(args.trace);
                add_up(task.one, task, load_more);
                add_up(task.other, task, load_more);
                if (lane == 0 && task.from_byte(args) < task.to_byte(args))
                    record(args.trace, SENT, task.first_line, task.panel, task.one.peer, began);
            }
            if (!is_of_next) rows = TaskRows(args, next);
            task = next;
        }
        // After a deadline something may still be on its way to the memory of a CTA that ends.
        loads_wait<0>();
        courier.announce();
    }

private:
    using Ring = RowRing<Memory>;

    __device__ void wait_for_panel(int panel) {
        if (panel == ready || !courier.in_time) return;
        const uint32_t* left = args.panel_left + panel;
        // Every courier looks at the same word: not too often.
        if (!wait_until([&] { return read_signal(left) == 0; }, args.failure, args.limit_ns, 256))
            courier.fail(TILE_READY, panel, 0, read_signal(left));
        courier.in_time = __all_sync(~0u, courier.in_time);
        ready = panel;
    }

    template <typename LoadMore>
    __device__ void add_up(const SumLine& line, const SumTask& task, LoadMore load_more) {
        int from_byte = task.from_byte(args), to_byte = task.to_byte(args);
        if (line.peer < 0 || to_byte <= from_byte) return;
        char* to = courier.to(line.peer, line.peer_row);
        courier.in_time = __all_sync(~0u, courier.in_time);
        if (!courier.in_time) return;
        int num_rows = __popc(__ballot_sync(~0u, line.named_row >= 0)), own = courier.lane * 16;
        for (int at = from_byte; at < to_byte; at += COLUMNS) {
            float sums[VECTORS][8] = {};
            int bytes = min(to_byte - at, COLUMNS);
            for (int i = 0; i < num_rows; i++) {
                const uint8_t* row = ring.take();
#pragma unroll
                for (int v = 0; v < VECTORS; v++) add_8<T>(sums[v], load_shared_16<uint4>(row + v * 512));
                load_more();
            }
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (v * 512 + own < bytes) *reinterpret_cast<uint4*>(to + at + own + v * 512) = pack_8<T>(sums[v]);
        }
        courier.sent(to_byte - from_byte);
    }

    Courier courier;
    const TileOverlapCourier& args;
    Ring ring;
    int ready = -1;
};

// Runs one warp's share of the errand.
template <typename T, typename Memory>
__device__ __forceinline__ void run_courier(const TileOverlapCourier& args, int num_warps, Memory& memory) {
    if (args.errand == SEND_ROWS) send_rows(args, num_warps);
    if (args.errand == RETURN_ROWS) return_rows(args, num_warps);
    if (args.errand == RETURN_SUMS) Summer<T, Memory>(args, memory).run(num_warps);
}

}  // namespace tileoverlap
