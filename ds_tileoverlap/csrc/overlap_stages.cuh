// The fused stages as kernels: which of them a stage queues, and with which arguments. Called by overlap_stages.py.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "combine.cuh"
#include "expert_gemm.cuh"
#include "layout.cuh"
#include "schedule.cuh"
#include "weight_grads.cuh"

namespace tileoverlap {

// One kind of row on its way between peers; names as in buffer.py.
struct Channel {
    uint32_t *epoch, *targets;
    int *claimed, *placed, *finished;
    const uint32_t *arrived, *consumed, *began;
    void* const* peer_buffers;
    uint32_t* const* peer_arrived;
    uint32_t* const* peer_consumed;
    uint32_t* const* peer_began;
    const void* received;
    int64_t generation_bytes;
};

// What is the same in all stages of a layer's forward and backward.
struct Exchange {
    const int* counts;  // [num_ranks, counts_stride] on the device
    int counts_stride, num_ranks, rank, num_experts, num_choices, num_tokens;
    int* claimed_items;
    int num_sms;
    TileOverlapFailure* failure;
    uint64_t limit_ns;
};

// Tokens that go to their experts, and the GEMM of what arrives: its A is where they are put. Without B nothing is
// multiplied.
struct Projection : TileOverlapGemm {
    const void* tokens;
    const int *sent_tokens, *row_sources;
    int own_first, own_end;  // the received rows that never left this rank
};

// A GEMM whose result goes home: as sums that lines of the index name, or row by row.
struct Return : TileOverlapGemm {
    const int* index;
    int sums, comm_sms;  // couriers are warps of the GEMM, or have SMs of their own, which the caller starts
};

// Where this rank's routes go: tensors of T tokens and k choices, see TileOverlapPlace.
struct Placement {
    const int* experts;
    const float* weights;
    const int *block_counts, *bases;
    int returns_sums;
    int *sent_tokens, *choice_slots, *token_slots, *slots;
};

// Where the routes that come here lead, see TileOverlapReceive.
struct Receipt {
    int num_received;
    int *choice_rows, *row_sources;
    float* row_weights;
    int* row_offsets;
};

// Arguments of the same name.
#define SAME(to, from, field) to.field = from.field

inline int begin(const Exchange& all, const Channel& channel, int what, int row_bytes, const uint32_t* to_do,
                 uint32_t* left, int num_left, cudaStream_t stream) {
    TileOverlapBegin begin{};
    SAME(begin, all, counts), SAME(begin, all, counts_stride), SAME(begin, all, num_ranks), SAME(begin, all, rank);
    SAME(begin, all, num_experts), SAME(begin, all, failure), SAME(begin, all, limit_ns);
    SAME(begin, channel, epoch), SAME(begin, channel, targets), SAME(begin, channel, peer_began);
    begin.what = what, begin.row_bytes = row_bytes;
    begin.to_do = to_do, begin.left = left, begin.num_left = num_left;
    // Tokens go out only when every rank is about to send them: a kernel that waits for them fills the GPU, and a rank
    // that is late may still need a collective that could not start beside it.
    begin.began = what == TOKENS_OUT ? channel.began : nullptr;
    return tileoverlap_begin(&begin, stream);
}

template <typename Arguments>
void set_sending(Arguments& to, const Exchange& all, const Channel& channel) {
    SAME(to, channel, peer_buffers), SAME(to, channel, peer_arrived), SAME(to, channel, consumed);
    SAME(to, channel, generation_bytes), SAME(to, channel, epoch);
    SAME(to, all, failure), SAME(to, all, limit_ns);
}

template <typename Arguments>
void set_receiving(Arguments& to, const Exchange& all, const Channel& channel) {
    SAME(to, channel, received), SAME(to, channel, arrived), SAME(to, channel, targets), SAME(to, channel, peer_consumed);
    SAME(to, channel, finished), SAME(to, channel, generation_bytes), SAME(to, channel, epoch);
    SAME(to, all, failure), SAME(to, all, limit_ns);
}

// What is common to all errands of couriers.
inline TileOverlapCourier courier_of(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling) {
    TileOverlapCourier courier{};
    set_sending(courier, all, channel);
    SAME(courier, channel, claimed), SAME(courier, tiling, segments), SAME(courier, tiling, num_segments);
    SAME(courier, tiling, row_bytes), SAME(courier, all, rank);
    courier.num_peers = all.num_ranks;
    return courier;
}

// Tokens to every rank that holds any of their experts, at once: nothing has to be computed before.
inline TileOverlapCourier token_courier(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling,
                                        const Projection& project) {
    TileOverlapCourier courier = courier_of(all, channel, tiling);
    courier.errand = SEND_ROWS, courier.trace = project.trace;
    courier.rows = project.tokens, courier.index = project.sent_tokens, courier.num_choices = 1;
    courier.runs = tiling.send_runs;
    return courier;
}

// What arrives from peers is copied to its places among the expert rows.
inline TileOverlapArrivals arrivals_of(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling,
                                       const Projection& project) {
    TileOverlapArrivals arrivals{};
    set_receiving(arrivals, all, channel);
    arrivals.rows = const_cast<void*>(project.a), arrivals.sources = project.row_sources;
    SAME(arrivals, project, own_first), SAME(arrivals, project, own_end), SAME(arrivals, project, trace);
    SAME(arrivals, tiling, row_bytes), SAME(arrivals, tiling, segments), SAME(arrivals, tiling, num_segments);
    arrivals.missing = tiling.left, arrivals.claimed = channel.placed, arrivals.num_peers = all.num_ranks;
    return arrivals;
}

// Expert outputs to the owners of their tokens, as soon as the tiles that they lie in are ready.
inline TileOverlapCourier output_courier(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling,
                                         const Return& home) {
    TileOverlapCourier courier = courier_of(all, channel, tiling);
    courier.trace = home.trace, courier.rows = home.c, courier.index = home.index, courier.num_choices = all.num_choices;
    courier.runs = tiling.sum_runs, courier.num_panels = tiling.num_panels;
    courier.panel_bytes = tiling.panel_tiles * TILE_N * 2;
    if (home.sums) {
        courier.errand = RETURN_SUMS, courier.panel_left = tiling.left;
    } else {
        courier.errand = RETURN_ROWS, courier.signals = home.signals;
        courier.signals_per_band = 2 * ((home.n + TILE_N - 1) / TILE_N);
    }
    return courier;
}

inline void set_tiles(TileOverlapGemm& gemm, const Exchange& all, const TileOverlapTiling& tiling) {
    gemm.items = tiling.items, gemm.num_items = tiling.num_items, gemm.claimed = all.claimed_items;
    if (!gemm.num_sms) gemm.num_sms = all.num_sms;
}

inline int multiply(const Exchange& all, const TileOverlapTiling& tiling, const TileOverlapGemm& given,
                    cudaStream_t stream) {
    TileOverlapGemm gemm = given;
    TileOverlapCourier courier{};
    TileOverlapArrivals arrivals{};
    set_tiles(gemm, all, tiling);
    return tileoverlap_expert_gemm(&gemm, &courier, &arrivals, stream);
}

// Sends tokens, puts in place what arrives, and multiplies it, this rank's own rows first.
inline int project_arriving(const Exchange& all, const Channel& tokens, const TileOverlapTiling& tiling,
                            const Projection& project, cudaStream_t stream) {
    int error = begin(all, tokens, TOKENS_OUT, tiling.row_bytes, tiling.band_parts_to_do, tiling.left, tiling.num_left,
                      stream);
    if (error) return error;
    TileOverlapCourier courier = token_courier(all, tokens, tiling, project);
    TileOverlapArrivals arrivals = arrivals_of(all, tokens, tiling, project);
    if (!project.b_maps)
        return tileoverlap_run_couriers(&courier, &arrivals, project.is_half, all.num_sms, stream);
    TileOverlapGemm gemm = project;
    set_tiles(gemm, all, tiling);
    return tileoverlap_expert_gemm(&gemm, &courier, &arrivals, stream);
}

inline int begin_returning(const Exchange& all, const Channel& returns, const TileOverlapTiling& tiling,
                           const Return& home, cudaStream_t stream) {
    int what = home.sums ? SUMS_HOME : ROWS_HOME;
    return begin(all, returns, what, tiling.row_bytes, tiling.panel_tiles_to_do, tiling.left, tiling.num_left, stream);
}

// Multiplies and sends the result home while it is made. Where couriers have SMs of their own the use of the channel has
// begun before: they start then. The GEMM waits for nobody; whatever happens to their start, nothing is held up.
inline int multiply_returning(const Exchange& all, const Channel& returns, const TileOverlapTiling& tiling,
                              const Return& home, cudaStream_t stream) {
    if (!home.comm_sms)
        if (int error = begin_returning(all, returns, tiling, home, stream)) return error;
    TileOverlapCourier nothing{}, courier = output_courier(all, returns, tiling, home);
    TileOverlapArrivals arrivals{};
    TileOverlapGemm gemm = home;
    if (home.sums) {
        gemm.panel_left = tiling.left, gemm.panel_tiles = tiling.panel_tiles;
    } else {
        gemm.epoch = returns.epoch;
    }
    gemm.num_sms = all.num_sms - home.comm_sms;
    set_tiles(gemm, all, tiling);
    return tileoverlap_expert_gemm(&gemm, home.comm_sms ? &nothing : &courier, &arrivals, stream);
}

// The couriers of the same, on SMs of their own.
inline int run_couriers_home(const Exchange& all, const Channel& returns, const TileOverlapTiling& tiling,
                             const Return& home, cudaStream_t stream) {
    TileOverlapCourier courier = output_courier(all, returns, tiling, home);
    TileOverlapArrivals arrivals{};
    return tileoverlap_run_couriers(&courier, &arrivals, home.is_half, home.comm_sms, stream);
}

// Adds up what came home: [num_tokens, width].
inline int sum_returned(const Exchange& all, const Channel& returns, const TileOverlapSum& given, cudaStream_t stream) {
    TileOverlapSum sum = given;
    set_receiving(sum, all, returns);
    SAME(sum, all, num_choices), SAME(sum, all, num_sms);
    sum.num_peers = all.num_ranks;
    return tileoverlap_sum(&sum, stream);
}

inline int weight_grads(const Exchange& all, const TileOverlapWeightGrads& given, cudaStream_t stream) {
    TileOverlapWeightGrads grads = given;
    grads.claimed = all.claimed_items;
    SAME(grads, all, num_sms);
    return tileoverlap_weight_grads(&grads, stream);
}

// One float32 a row to the owners of the rows' tokens.
inline TileOverlapScalars scalars_of(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling,
                                     TileOverlapScalars scalars) {
    set_sending(scalars, all, channel);
    set_receiving(scalars, all, channel);
    SAME(scalars, all, num_choices), SAME(scalars, all, num_tokens);
    scalars.num_peers = all.num_ranks, scalars.runs = tiling.sum_runs;
    return scalars;
}

inline int send_scalars(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling,
                             const TileOverlapScalars& values, cudaStream_t stream) {
    int record_bytes = (all.num_choices + 3) / 4 * 16;
    if (int error = begin(all, channel, SUMS_HOME, record_bytes, nullptr, nullptr, 0, stream)) return error;
    TileOverlapScalars scalars = scalars_of(all, channel, tiling, values);
    return tileoverlap_send_scalars(&scalars, stream);
}

inline int collect_scalars(const Exchange& all, const Channel& channel, const TileOverlapTiling& tiling,
                                const TileOverlapScalars& values, cudaStream_t stream) {
    TileOverlapScalars scalars = scalars_of(all, channel, tiling, values);
    return tileoverlap_collect_scalars(&scalars, stream);
}

// Tells every rank how many rows come from this one, and which of this rank's routes lie where in its own blocks.
inline int count(const Exchange& all, const Channel& records, const TileOverlapCount& given, cudaStream_t stream) {
    TileOverlapCount count = given;
    SAME(count, all, num_tokens), SAME(count, all, num_choices), SAME(count, all, num_experts);
    SAME(count, all, num_ranks), SAME(count, all, rank), SAME(count, all, failure), SAME(count, all, limit_ns);
    SAME(count, records, epoch), SAME(count, records, targets);
    count.counts = const_cast<int*>(all.counts);
    return tileoverlap_count(&count, stream);
}

// Tells every rank where its rows of this one go.
inline int place(const Exchange& all, const Channel& records, const Placement& placement, cudaStream_t stream) {
    TileOverlapPlace place{};
    set_sending(place, all, records);
    SAME(place, all, num_tokens), SAME(place, all, num_choices), SAME(place, all, num_experts);
    SAME(place, all, num_ranks), SAME(place, all, rank);
    SAME(place, placement, experts), SAME(place, placement, weights), SAME(place, placement, block_counts);
    SAME(place, placement, bases), SAME(place, placement, returns_sums), SAME(place, placement, sent_tokens);
    SAME(place, placement, choice_slots), SAME(place, placement, token_slots), SAME(place, placement, slots);
    return tileoverlap_place(&place, stream);
}

// The tiles of the GEMMs, which need only the counts, while routes travel; then where what comes here goes.
inline int schedule_and_receive(const Exchange& all, const Channel& records, const TileOverlapSchedule& schedule,
                                const Receipt& receipt, cudaStream_t stream) {
    if (schedule.num_tilings)
        if (int error = tileoverlap_schedule(&schedule, stream)) return error;
    TileOverlapReceive receive{};
    set_receiving(receive, all, records);
    SAME(receive, all, counts), SAME(receive, all, num_choices), SAME(receive, all, num_ranks);
    SAME(receive, all, num_experts), SAME(receive, all, rank);
    SAME(receive, receipt, num_received), SAME(receive, receipt, choice_rows), SAME(receive, receipt, row_sources);
    SAME(receive, receipt, row_weights), SAME(receive, receipt, row_offsets);
    return tileoverlap_receive(&receive, stream);
}
#undef SAME

}  // namespace tileoverlap
