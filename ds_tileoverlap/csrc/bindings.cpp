// What Python calls. Tensors come as addresses, so that no torch header has to be compiled; the Python functions beside
// the kernels check shapes and dtypes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "combine.cuh"
#include "expert_gemm.cuh"
#include "schedule.cuh"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

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
    module.attr("PART") = static_cast<int>(TILEOVERLAP_PART);
    module.attr("ITEM_BYTES") = sizeof(TileOverlapItem);
    module.attr("SEGMENT_BYTES") = sizeof(TileOverlapSegment);
    module.attr("MAX_PEERS") = static_cast<int>(TILEOVERLAP_MAX_PEERS);
    module.attr("MAX_PANELS") = static_cast<int>(TILEOVERLAP_MAX_PANELS);
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
        py::kw_only(), py::arg("maps"), py::arg("weights"), py::arg("rows"), py::arg("columns"), py::arg("is_half"),
        py::arg("b_is_transposed"));

    module.def(
        "schedule",
        [](Address counts, int counts_stride, int num_ranks, int rank, int num_experts, int n, int row_bytes,
           bool aligns_owners, int bands_per_segment, int panel_tiles, int num_panels, Address panel_done,
           Address panel_targets, Address sum_runs, Address items, Address num_items, Address segments,
           Address num_segments, Address slot_bases, Address stream) {
            TileOverlapSchedule arguments = {at<int>(counts), counts_stride, num_ranks, rank, num_experts, n, row_bytes,
                                             aligns_owners, bands_per_segment, panel_tiles, num_panels,
                                             at<uint32_t>(panel_done), at<uint32_t>(panel_targets),
                                             at<TileOverlapSumRun>(sum_runs), at<TileOverlapItem>(items),
                                             at<int>(num_items), at<TileOverlapSegment>(segments),
                                             at<int>(num_segments), at<int>(slot_bases)};
            check(tileoverlap_schedule(&arguments, stream_of(stream)), "schedule");
        },
        py::kw_only(), py::arg("counts"), py::arg("counts_stride"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("num_experts"), py::arg("n"), py::arg("row_bytes"), py::arg("aligns_owners"),
        py::arg("bands_per_segment"), py::arg("panel_tiles"), py::arg("num_panels"), py::arg("panel_done"),
        py::arg("panel_targets"), py::arg("sum_runs"), py::arg("items"), py::arg("num_items"), py::arg("segments"),
        py::arg("num_segments"), py::arg("slot_bases"), py::arg("stream"));

    module.def(
        "slots",
        [](Address experts, Address slot_bases, Address token_slots, int own_first, int own_end, Address block_counts,
           Address slots, int num_tokens, int num_choices, int num_experts, Address stream) {
            TileOverlapSlots arguments = {at<int>(experts), at<int>(slot_bases), at<int>(token_slots), own_first, own_end,
                                          at<int>(block_counts), at<int>(slots), num_tokens, num_choices, num_experts};
            check(tileoverlap_slots(&arguments, stream_of(stream)), "slots");
        },
        py::kw_only(), py::arg("experts"), py::arg("slot_bases"), py::arg("token_slots"), py::arg("own_first"),
        py::arg("own_end"), py::arg("block_counts"), py::arg("slots"), py::arg("num_tokens"), py::arg("num_choices"),
        py::arg("num_experts"), py::arg("stream"));

    // What couriers carry and where to; kept by Python for the length of one call.
    py::class_<TileOverlapCourier>(module, "Courier")
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
           Address epoch, Address panel_done, int panel_tiles, int num_rows, int n, int k, bool is_half,
           bool b_is_transposed, int num_sms, const TileOverlapCourier& courier, Address stream) {
            TileOverlapGemm arguments = {at<void>(a), at<void>(b_maps), at<void>(c), at<TileOverlapItem>(items),
                                         at<int>(num_items), at<int>(claimed), at<uint32_t>(signals),
                                         at<uint32_t>(epoch), at<uint32_t>(panel_done), panel_tiles, num_rows, n, k,
                                         is_half, b_is_transposed, num_sms};
            check(tileoverlap_expert_gemm(&arguments, &courier, stream_of(stream)), "expert_gemm");
        },
        py::kw_only(), py::arg("a"), py::arg("b_maps"), py::arg("c"), py::arg("items"), py::arg("num_items"),
        py::arg("claimed"), py::arg("signals"), py::arg("epoch"), py::arg("panel_done"), py::arg("panel_tiles"),
        py::arg("num_rows"), py::arg("n"), py::arg("k"), py::arg("is_half"), py::arg("b_is_transposed"),
        py::arg("num_sms"), py::arg("courier"), py::arg("stream"));

    module.def(
        "begin_return",
        [](Address counts, int counts_stride, int num_ranks, int rank, int num_experts, bool returns_sums, int row_bytes,
           Address epoch, Address targets, Address stream) {
            TileOverlapBegin arguments = {at<int>(counts), counts_stride, num_ranks, rank, num_experts, returns_sums,
                                          row_bytes, at<uint32_t>(epoch), at<uint32_t>(targets)};
            check(tileoverlap_begin_return(&arguments, stream_of(stream)), "begin_return");
        },
        py::kw_only(), py::arg("counts"), py::arg("counts_stride"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("num_experts"), py::arg("returns_sums"), py::arg("row_bytes"), py::arg("epoch"), py::arg("targets"),
        py::arg("stream"));

    module.def(
        "run_couriers",
        [](const TileOverlapCourier& courier, bool is_half, int num_sms, Address stream) {
            check(tileoverlap_return(&courier, is_half, num_sms, stream_of(stream)), "run_couriers");
        },
        py::kw_only(), py::arg("courier"), py::arg("is_half"), py::arg("num_sms"), py::arg("stream"));

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
        py::kw_only(), py::arg("received"), py::arg("local"), py::arg("slots"), py::arg("sums"), py::arg("arrived"),
        py::arg("targets"), py::arg("epoch"), py::arg("peer_consumed"), py::arg("finished"), py::arg("failure"),
        py::arg("generation_bytes"), py::arg("limit_ns"), py::arg("num_tokens"), py::arg("num_choices"),
        py::arg("width"), py::arg("num_peers"), py::arg("is_half"), py::arg("num_sms"), py::arg("stream"));
}
