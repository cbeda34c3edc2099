// What Python calls. Tensors come as addresses, so that no torch header has to be compiled; the Python functions beside
// the kernels check shapes and dtypes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "combine.cuh"
#include "expert_gemm.cuh"
#include "layout.cuh"
#include "schedule.cuh"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

// Other Python threads may run while a kernel is enqueued.
using LaunchGuard = py::call_guard<py::gil_scoped_release>;

void check(int error, const char* what) {
    if (error)
        throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(error) + " (" +
                                 cudaGetErrorString(static_cast<cudaError_t>(error)) + ")");
}

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.attr("MAX_EXPERTS") = static_cast<int>(TILEOVERLAP_MAX_EXPERTS);
    module.attr("SLOT_TOKENS") = static_cast<int>(TILEOVERLAP_SLOT_TOKENS);
    module.attr("BLOCK_TOKENS") = static_cast<int>(TILEOVERLAP_BLOCK_TOKENS);
    module.attr("PART") = static_cast<int>(TILEOVERLAP_PART);
    module.attr("ITEM_BYTES") = sizeof(TileOverlapItem);
    module.attr("SEGMENT_BYTES") = sizeof(TileOverlapSegment);
    module.attr("MAX_PEERS") = static_cast<int>(TILEOVERLAP_MAX_PEERS);
    module.attr("MAX_PANELS") = static_cast<int>(TILEOVERLAP_MAX_PANELS);
    module.attr("ROWS_HOME") = static_cast<int>(ROWS_HOME);
    module.attr("SUMS_HOME") = static_cast<int>(SUMS_HOME);
    module.attr("TOKENS_OUT") = static_cast<int>(TOKENS_OUT);
    module.attr("RETURN_ROWS") = static_cast<int>(RETURN_ROWS);
    module.attr("RETURN_SUMS") = static_cast<int>(RETURN_SUMS);
    module.attr("MAP_BYTES") = 128;

    module.def(
        "encode_weights",
        [](Address maps, const std::vector<Address>& weights, int64_t rows, int64_t columns, bool is_half,
           bool b_is_transposed) {
            std::vector<const void*> pointers;
            for (Address weight : weights) pointers.push_back(at<const void>(weight));
            check(tileoverlap_encode_weights(at<void>(maps), pointers.data(), static_cast<int>(pointers.size()), rows,
                                             columns, is_half, b_is_transposed),
                  "encode_weights");
        },
        LaunchGuard(), py::kw_only(), py::arg("maps"), py::arg("weights"), py::arg("rows"), py::arg("columns"), py::arg("is_half"),
        py::arg("b_is_transposed"));

    module.def(
        "schedule",
        [](Address counts, int counts_stride, int num_ranks, int rank, int num_experts, int n, int row_bytes,
           bool aligns_owners, int bands_per_segment, int panel_tiles, int num_panels, Address panel_done,
           Address panel_targets, Address sum_runs, Address send_runs, bool local_first, Address items, Address num_items, Address segments,
           Address num_segments, Address slot_bases, Address stream) {
            TileOverlapSchedule arguments = {at<int>(counts), counts_stride, num_ranks, rank, num_experts, n, row_bytes,
                                             aligns_owners, bands_per_segment, panel_tiles, num_panels,
                                             at<uint32_t>(panel_done), at<uint32_t>(panel_targets),
                                             at<TileOverlapSumRun>(sum_runs), at<TileOverlapSumRun>(send_runs),
                                             local_first, at<TileOverlapItem>(items),
                                             at<int>(num_items), at<TileOverlapSegment>(segments),
                                             at<int>(num_segments), at<int>(slot_bases)};
            check(tileoverlap_schedule(&arguments, stream_of(stream)), "schedule");
        },
        LaunchGuard(), py::kw_only(), py::arg("counts"), py::arg("counts_stride"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("num_experts"), py::arg("n"), py::arg("row_bytes"), py::arg("aligns_owners"),
        py::arg("bands_per_segment"), py::arg("panel_tiles"), py::arg("num_panels"), py::arg("panel_done"),
        py::arg("panel_targets"), py::arg("sum_runs"), py::arg("send_runs") = 0, py::arg("local_first") = false,
        py::arg("items"), py::arg("num_items"), py::arg("segments"),
        py::arg("num_segments"), py::arg("slot_bases"), py::arg("stream"));

    module.def(
        "slots",
        [](Address experts, Address slot_bases, Address token_slots, int own_first, int own_end, Address block_counts,
           Address slots, int num_tokens, int num_choices, int num_experts, Address stream) {
            TileOverlapSlots arguments = {at<int>(experts), at<int>(slot_bases), at<int>(token_slots), own_first, own_end,
                                          at<int>(block_counts), at<int>(slots), num_tokens, num_choices, num_experts};
            check(tileoverlap_slots(&arguments, stream_of(stream)), "slots");
        },
        LaunchGuard(), py::kw_only(), py::arg("experts"), py::arg("slot_bases"), py::arg("token_slots"), py::arg("own_first"),
        py::arg("own_end"), py::arg("block_counts"), py::arg("slots"), py::arg("num_tokens"), py::arg("num_choices"),
        py::arg("num_experts"), py::arg("stream"));

    // Where the rows of operand A lie; kept by Python for the length of one call.
    py::class_<TileOverlapGather>(module, "Gather", py::module_local())
        .def(py::init<>())
        .def(py::init([](Address sources, int own_first, int own_end, Address own_tokens, Address tokens, Address received,
                         int64_t generation_bytes, Address arrived, Address targets, Address epoch, int num_peers,
                         Address failure, uint64_t limit_ns) {
                 return TileOverlapGather{at<int>(sources), own_first, own_end, at<int>(own_tokens), at<void>(tokens),
                                          at<void>(received), generation_bytes, at<uint32_t>(arrived),
                                          at<uint32_t>(targets), at<uint32_t>(epoch), num_peers,
                                          at<TileOverlapFailure>(failure), limit_ns};
             }),
             py::kw_only(), py::arg("sources"), py::arg("own_first"), py::arg("own_end"), py::arg("own_tokens"),
             py::arg("tokens"), py::arg("received"), py::arg("generation_bytes"), py::arg("arrived"), py::arg("targets"),
             py::arg("epoch"), py::arg("num_peers"), py::arg("failure"), py::arg("limit_ns"));

    // What couriers carry and where to; kept by Python for the length of one call.
    py::class_<TileOverlapCourier>(module, "Courier", py::module_local())
        .def(py::init<>())
        .def(py::init([](int errand, Address rows, int row_bytes, int num_peers, int rank, Address segments,
                         Address num_segments, Address signals, int signals_per_band, Address index, int num_choices,
                         Address sum_runs, Address panel_done, Address panel_targets, int num_panels, int panel_bytes,
                         Address peer_buffers, Address peer_arrived, Address peer_consumed, int64_t generation_bytes,
                         Address epoch, Address claimed, Address failure, uint64_t limit_ns) {
                 return TileOverlapCourier{errand, at<void>(rows), row_bytes, num_peers, rank,
                                           at<TileOverlapSegment>(segments), at<int>(num_segments), at<uint32_t>(signals),
                                           signals_per_band, at<int>(index), num_choices,
                                           at<TileOverlapSumRun>(sum_runs), at<uint32_t>(panel_done),
                                           at<uint32_t>(panel_targets), num_panels, panel_bytes,
                                           at<void*>(peer_buffers), at<uint32_t*>(peer_arrived),
                                           at<uint32_t>(peer_consumed), generation_bytes, at<uint32_t>(epoch),
                                           at<int>(claimed), at<TileOverlapFailure>(failure), limit_ns};
             }),
             py::kw_only(), py::arg("errand"), py::arg("rows"), py::arg("row_bytes"), py::arg("num_peers"),
             py::arg("rank"), py::arg("segments"), py::arg("num_segments"), py::arg("signals"),
             py::arg("signals_per_band"), py::arg("index"), py::arg("num_choices"), py::arg("sum_runs"),
             py::arg("panel_done"), py::arg("panel_targets"), py::arg("num_panels"), py::arg("panel_bytes"),
             py::arg("peer_buffers"), py::arg("peer_arrived"), py::arg("peer_consumed"), py::arg("generation_bytes"),
             py::arg("epoch"), py::arg("claimed"), py::arg("failure"), py::arg("limit_ns"));

    module.def(
        "expert_gemm",
        [](Address a, Address b_maps, Address c, Address items, Address num_items, Address claimed, Address signals,
           Address epoch, Address panel_done, int panel_tiles, int num_rows, int n, int k, Address a2, Address b2_maps,
           int k2, bool is_half, bool b_is_transposed, int num_sms, const TileOverlapCourier& courier, const TileOverlapGather& gather,
           Address stream) {
            TileOverlapGemm arguments = {at<void>(a), at<void>(b_maps), at<void>(c), at<TileOverlapItem>(items),
                                         at<int>(num_items), at<int>(claimed), at<uint32_t>(signals),
                                         at<uint32_t>(epoch), at<uint32_t>(panel_done), panel_tiles, at<void>(a2),
                                         at<void>(b2_maps), k2, num_rows, n, k, is_half, b_is_transposed, num_sms};
            check(tileoverlap_expert_gemm(&arguments, &gather, &courier, stream_of(stream)), "expert_gemm");
        },
        LaunchGuard(), py::kw_only(), py::arg("a"), py::arg("b_maps"), py::arg("c"), py::arg("items"), py::arg("num_items"),
        py::arg("claimed"), py::arg("signals"), py::arg("epoch"), py::arg("panel_done"), py::arg("panel_tiles"),
        py::arg("num_rows"), py::arg("n"), py::arg("k"), py::arg("a2") = 0, py::arg("b2_maps") = 0, py::arg("k2") = 0,
        py::arg("is_half"), py::arg("b_is_transposed"),
        py::arg("num_sms"), py::arg("courier"), py::arg("gather") = TileOverlapGather{}, py::arg("stream"));

    module.def(
        "count",
        [](Address experts, int num_tokens, int num_choices, int num_experts, int num_ranks, int rank, int word,
           Address block_counts, Address peer_counts, int stride, Address peer_ready, Address ready, Address epoch,
           Address targets, Address counts, Address bases, Address host_counts, Address host_ready, Address failure,
           uint64_t limit_ns, Address stream) {
            TileOverlapCount arguments = {at<int>(experts), num_tokens, num_choices, num_experts, num_ranks, rank, word,
                                          at<int>(block_counts), at<int*>(peer_counts), stride,
                                          at<uint32_t*>(peer_ready), at<uint32_t>(ready), at<uint32_t>(epoch),
                                          at<uint32_t>(targets), at<int>(counts), at<int>(bases), at<int>(host_counts),
                                          at<uint32_t>(host_ready), at<TileOverlapFailure>(failure), limit_ns};
            check(tileoverlap_count(&arguments, stream_of(stream)), "count");
        },
        LaunchGuard(), py::kw_only(), py::arg("experts"), py::arg("num_tokens"), py::arg("num_choices"), py::arg("num_experts"),
        py::arg("num_ranks"), py::arg("rank"), py::arg("word"), py::arg("block_counts"), py::arg("peer_counts"),
        py::arg("stride"), py::arg("peer_ready"), py::arg("ready"), py::arg("epoch"), py::arg("targets"),
        py::arg("counts"), py::arg("bases"), py::arg("host_counts"), py::arg("host_ready"), py::arg("failure"),
        py::arg("limit_ns"), py::arg("stream"));

    // Waits on the host for a word that a kernel writes; false if it did not change within the limit.
    module.def(
        "wait_for_change",
        [](Address word, uint32_t old_value, double limit_s) {
            py::gil_scoped_release others_may_run;
            auto start = std::chrono::steady_clock::now();
            volatile uint32_t* value = at<volatile uint32_t>(word);
            for (uint64_t looks = 1; *value == old_value; looks++) {
                auto waited = std::chrono::steady_clock::now() - start;
                if (waited > std::chrono::duration<double>(limit_s)) return false;
                // Counts of a step come within microseconds; longer waits leave the core to others.
                if (waited > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(100));
            }
            std::atomic_thread_fence(std::memory_order_acquire);
            return true;
        },
        py::kw_only(), py::arg("word"), py::arg("old_value"), py::arg("limit_s"));

    module.def(
        "place",
        [](Address experts, Address weights, Address block_counts, Address bases, int num_tokens, int num_choices,
           int num_experts, int num_ranks, int rank, bool returns_sums, Address sent_tokens, Address choice_slots,
           Address token_slots, Address slots, Address peer_buffers, int64_t generation_bytes, Address peer_arrived,
           Address peer_consumed, Address epoch, Address failure, uint64_t limit_ns, Address stream) {
            TileOverlapPlace arguments = {at<int>(experts), at<float>(weights), at<int>(block_counts), at<int>(bases),
                                          num_tokens, num_choices, num_experts, num_ranks, rank, returns_sums,
                                          at<int>(sent_tokens), at<int>(choice_slots), at<int>(token_slots),
                                          at<int>(slots), at<void*>(peer_buffers), generation_bytes,
                                          at<uint32_t*>(peer_arrived), at<uint32_t>(peer_consumed),
                                          at<uint32_t>(epoch), at<TileOverlapFailure>(failure), limit_ns};
            check(tileoverlap_place(&arguments, stream_of(stream)), "place");
        },
        LaunchGuard(), py::kw_only(), py::arg("experts"), py::arg("weights"), py::arg("block_counts"), py::arg("bases"),
        py::arg("num_tokens"), py::arg("num_choices"), py::arg("num_experts"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("returns_sums"), py::arg("sent_tokens"), py::arg("choice_slots"), py::arg("token_slots"),
        py::arg("slots"), py::arg("peer_buffers"), py::arg("generation_bytes"), py::arg("peer_arrived"),
        py::arg("peer_consumed"), py::arg("epoch"), py::arg("failure"), py::arg("limit_ns"), py::arg("stream"));

    module.def(
        "receive",
        [](Address buffer, int64_t generation_bytes, int num_received, int num_choices, int num_ranks, int num_experts,
           int rank, Address counts, Address choice_rows, Address row_sources, Address row_weights, Address row_offsets,
           Address arrived, Address targets, Address epoch, Address peer_read, Address finished, Address failure,
           uint64_t limit_ns, Address stream) {
            TileOverlapReceive arguments = {at<void>(buffer), generation_bytes, num_received, num_choices, num_ranks,
                                            num_experts, rank, at<int>(counts), at<int>(choice_rows),
                                            at<int>(row_sources), at<float>(row_weights), at<int>(row_offsets),
                                            at<uint32_t>(arrived), at<uint32_t>(targets), at<uint32_t>(epoch),
                                            at<uint32_t*>(peer_read), at<int>(finished),
                                            at<TileOverlapFailure>(failure), limit_ns};
            check(tileoverlap_receive(&arguments, stream_of(stream)), "receive");
        },
        LaunchGuard(), py::kw_only(), py::arg("buffer"), py::arg("generation_bytes"), py::arg("num_received"), py::arg("num_choices"),
        py::arg("num_ranks"), py::arg("num_experts"), py::arg("rank"), py::arg("counts"), py::arg("choice_rows"),
        py::arg("row_sources"), py::arg("row_weights"), py::arg("row_offsets"), py::arg("arrived"), py::arg("targets"),
        py::arg("epoch"), py::arg("peer_read"), py::arg("finished"), py::arg("failure"), py::arg("limit_ns"),
        py::arg("stream"));

    module.def(
        "begin_return",
        [](Address counts, int counts_stride, int num_ranks, int rank, int num_experts, int what, int row_bytes,
           Address epoch, Address targets, Address stream) {
            TileOverlapBegin arguments = {at<int>(counts), counts_stride, num_ranks, rank, num_experts, what,
                                          row_bytes, at<uint32_t>(epoch), at<uint32_t>(targets)};
            check(tileoverlap_begin_return(&arguments, stream_of(stream)), "begin_return");
        },
        LaunchGuard(), py::kw_only(), py::arg("counts"), py::arg("counts_stride"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("num_experts"), py::arg("what"), py::arg("row_bytes"), py::arg("epoch"), py::arg("targets"),
        py::arg("stream"));

    module.def(
        "run_couriers",
        [](const TileOverlapCourier& courier, bool is_half, int num_sms, Address stream) {
            check(tileoverlap_return(&courier, is_half, num_sms, stream_of(stream)), "run_couriers");
        },
        LaunchGuard(), py::kw_only(), py::arg("courier"), py::arg("is_half"), py::arg("num_sms"), py::arg("stream"));

    module.def(
        "keep_rows",
        [](Address received, int64_t generation_bytes, Address epoch, Address kept, int64_t num_bytes,
           Address peer_consumed, Address finished, int num_peers, int num_sms, Address stream) {
            TileOverlapKeep arguments = {at<void>(received), generation_bytes, at<uint32_t>(epoch), at<void>(kept),
                                         num_bytes, at<uint32_t*>(peer_consumed), at<int>(finished), num_peers, num_sms};
            check(tileoverlap_keep(&arguments, stream_of(stream)), "keep_rows");
        },
        LaunchGuard(), py::kw_only(), py::arg("received"), py::arg("generation_bytes"), py::arg("epoch"), py::arg("kept"),
        py::arg("num_bytes"), py::arg("peer_consumed"), py::arg("finished"), py::arg("num_peers"), py::arg("num_sms"),
        py::arg("stream"));

    module.def(
        "scalars",
        [](bool collects, Address values, Address index, Address sum_runs, Address choice_slots, Address slots, int own_first,
           int own_end, Address results, int num_tokens, int num_choices, int num_peers, int rank, Address counts,
           int counts_stride, int num_experts, Address epoch, Address targets, Address received,
           int64_t generation_bytes, Address arrived, Address consumed, Address peer_buffers, Address peer_arrived,
           Address peer_consumed, Address finished, Address failure, uint64_t limit_ns, Address stream) {
            TileOverlapScalars arguments = {at<float>(values), at<int>(index), at<TileOverlapSumRun>(sum_runs),
                                            at<int>(choice_slots), at<int>(slots), own_first, own_end,
                                            at<float>(results), num_tokens, num_choices, num_peers, rank,
                                            at<int>(counts), counts_stride, num_experts, at<uint32_t>(epoch),
                                            at<uint32_t>(targets), at<void>(received), generation_bytes,
                                            at<uint32_t>(arrived), at<uint32_t>(consumed), at<void*>(peer_buffers),
                                            at<uint32_t*>(peer_arrived), at<uint32_t*>(peer_consumed),
                                            at<int>(finished), at<TileOverlapFailure>(failure), limit_ns};
            check((collects ? tileoverlap_collect_scalars : tileoverlap_send_scalars)(&arguments, stream_of(stream)),
                  "scalars");
        },
        LaunchGuard(), py::kw_only(), py::arg("collects"), py::arg("values"), py::arg("index"), py::arg("sum_runs"), py::arg("choice_slots"),
        py::arg("slots"), py::arg("own_first"), py::arg("own_end"), py::arg("results"), py::arg("num_tokens"),
        py::arg("num_choices"), py::arg("num_peers"), py::arg("rank"), py::arg("counts"), py::arg("counts_stride"),
        py::arg("num_experts"), py::arg("epoch"), py::arg("targets"), py::arg("received"), py::arg("generation_bytes"),
        py::arg("arrived"), py::arg("consumed"), py::arg("peer_buffers"), py::arg("peer_arrived"),
        py::arg("peer_consumed"), py::arg("finished"), py::arg("failure"), py::arg("limit_ns"), py::arg("stream"));

    module.def(
        "sum_slots",
        [](Address received, Address local, Address slots, Address sums, Address arrived, Address targets, Address epoch,
           Address peer_consumed, Address finished, Address failure, int64_t generation_bytes, uint64_t limit_ns,
           int num_tokens, int num_choices, int width, int num_peers, bool is_half, int num_sms, Address stream) {
            TileOverlapSum arguments = {at<void>(received), at<void>(local), at<int>(slots), at<void>(sums),
                                        at<uint32_t>(arrived), at<uint32_t>(targets), at<uint32_t>(epoch),
                                        at<uint32_t*>(peer_consumed), at<int>(finished),
                                        at<TileOverlapFailure>(failure), generation_bytes, limit_ns, num_tokens,
                                        num_choices, width, num_peers, is_half, num_sms};
            check(tileoverlap_sum(&arguments, stream_of(stream)), "sum_slots");
        },
        LaunchGuard(), py::kw_only(), py::arg("received"), py::arg("local"), py::arg("slots"), py::arg("sums"), py::arg("arrived"),
        py::arg("targets"), py::arg("epoch"), py::arg("peer_consumed"), py::arg("finished"), py::arg("failure"),
        py::arg("generation_bytes"), py::arg("limit_ns"), py::arg("num_tokens"), py::arg("num_choices"),
        py::arg("width"), py::arg("num_peers"), py::arg("is_half"), py::arg("num_sms"), py::arg("stream"));
}
