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
           bool aligns_owners, int bands_per_segment, Address items, Address num_items, Address segments,
           Address num_segments, Address slot_bases, Address stream) {
            TileOverlapSchedule arguments = {at<int>(counts), counts_stride, num_ranks, rank, num_experts, n, row_bytes,
                                             aligns_owners, bands_per_segment, at<TileOverlapItem>(items),
                                             at<int>(num_items), at<TileOverlapSegment>(segments),
                                             at<int>(num_segments), at<int>(slot_bases)};
            check(tileoverlap_schedule(&arguments, stream_of(stream)), "schedule");
        },
        py::kw_only(), py::arg("counts"), py::arg("counts_stride"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("num_experts"), py::arg("n"), py::arg("row_bytes"), py::arg("aligns_owners"),
        py::arg("bands_per_segment"), py::arg("items"), py::arg("num_items"), py::arg("segments"),
        py::arg("num_segments"), py::arg("slot_bases"), py::arg("stream"));

    module.def(
        "slots",
        [](Address experts, Address slot_bases, Address block_counts, Address slots, int num_tokens, int num_choices,
           int num_experts, Address stream) {
            TileOverlapSlots arguments = {at<int>(experts), at<int>(slot_bases), at<int>(block_counts), at<int>(slots),
                                          num_tokens, num_choices, num_experts};
            check(tileoverlap_slots(&arguments, stream_of(stream)), "slots");
        },
        py::kw_only(), py::arg("experts"), py::arg("slot_bases"), py::arg("block_counts"), py::arg("slots"),
        py::arg("num_tokens"), py::arg("num_choices"), py::arg("num_experts"), py::arg("stream"));

    module.def(
        "expert_gemm",
        [](Address a, Address b_maps, Address c, Address items, Address num_items, Address claimed, Address signals,
           Address epoch, int num_rows, int n, int k, bool is_half, bool b_is_transposed, int num_sms, Address stream) {
            TileOverlapGemm arguments = {at<void>(a), at<void>(b_maps), at<void>(c), at<TileOverlapItem>(items),
                                         at<int>(num_items), at<int>(claimed), at<uint32_t>(signals),
                                         at<uint32_t>(epoch), num_rows, n, k, is_half, b_is_transposed, num_sms};
            check(tileoverlap_expert_gemm(&arguments, stream_of(stream)), "expert_gemm");
        },
        py::kw_only(), py::arg("a"), py::arg("b_maps"), py::arg("c"), py::arg("items"), py::arg("num_items"),
        py::arg("claimed"), py::arg("signals"), py::arg("epoch"), py::arg("num_rows"), py::arg("n"), py::arg("k"),
        py::arg("is_half"), py::arg("b_is_transposed"), py::arg("num_sms"), py::arg("stream"));

    module.def(
        "begin_return",
        [](Address counts, int counts_stride, int num_ranks, int rank, int num_experts, int row_bytes, Address epoch,
           Address targets, Address stream) {
            TileOverlapBegin arguments = {at<int>(counts), counts_stride, num_ranks,          rank,
                                          num_experts,     row_bytes,     at<uint32_t>(epoch), at<uint32_t>(targets)};
            check(tileoverlap_begin_return(&arguments, stream_of(stream)), "begin_return");
        },
        py::kw_only(), py::arg("counts"), py::arg("counts_stride"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("num_experts"), py::arg("row_bytes"), py::arg("epoch"), py::arg("targets"), py::arg("stream"));

    module.def(
        "return_segments",
        [](Address rows, Address segments, Address num_segments, Address claimed, Address signals, Address epoch,
           Address peer_buffers, Address peer_arrived, Address peer_consumed, Address failure, int64_t generation_bytes,
           uint64_t limit_ns, int row_bytes, int signals_per_band, int num_peers, int num_sms, Address stream) {
            TileOverlapReturn arguments = {at<void>(rows), at<TileOverlapSegment>(segments), at<int>(num_segments),
                                           at<int>(claimed), at<uint32_t>(signals), at<uint32_t>(epoch),
                                           at<void*>(peer_buffers), at<uint32_t*>(peer_arrived),
                                           at<uint32_t>(peer_consumed), at<TileOverlapFailure>(failure),
                                           generation_bytes, limit_ns, row_bytes, signals_per_band, num_peers, num_sms};
            check(tileoverlap_return(&arguments, stream_of(stream)), "return_segments");
        },
        py::kw_only(), py::arg("rows"), py::arg("segments"), py::arg("num_segments"), py::arg("claimed"),
        py::arg("signals"), py::arg("epoch"), py::arg("peer_buffers"), py::arg("peer_arrived"),
        py::arg("peer_consumed"), py::arg("failure"), py::arg("generation_bytes"), py::arg("limit_ns"),
        py::arg("row_bytes"), py::arg("signals_per_band"), py::arg("num_peers"), py::arg("num_sms"), py::arg("stream"));

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
