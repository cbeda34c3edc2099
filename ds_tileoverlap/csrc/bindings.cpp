// What Python calls. Tensors come as addresses, so that no torch header has to be compiled; the Python functions beside
// the kernels check shapes and dtypes. Arguments are the fields of the kernels' structs, by name.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "combine.cuh"
#include "expert_gemm.cuh"
#include "layout.cuh"
#include "schedule.cuh"
#include "trace.cuh"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

void check(int error, const char* what) {
    if (error)
        throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(error) + " (" +
                                 cudaGetErrorString(static_cast<cudaError_t>(error)) + ")");
}

uint64_t number(py::handle value) {
    uint64_t result = PyLong_AsUnsignedLongLongMask(value.ptr());
    if (result == ~uint64_t{0} && PyErr_Occurred()) throw py::error_already_set();
    return result;
}

template <typename T>
void assign(T*& field, py::handle value) {
    field = reinterpret_cast<T*>(number(value));
}
template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
void assign(T& field, py::handle value) {
    field = static_cast<T>(number(value));
}

void assign(float& field, py::handle value) { field = value.cast<float>(); }

// A field of a struct: how Python calls it, and how it is set.
template <typename S>
struct Field {
    const char* name;
    void (*set)(S&, py::handle);
    bool is_optional = false;  // then 0
    PyObject* key = PyUnicode_InternFromString(name);
};
template <typename S>
using Fields = std::vector<Field<S>>;

#define FIELD(name) \
    { #name, [](auto& s, py::handle value) { assign(s.name, value); } }
#define OPTIONAL(name) \
    { #name, [](auto& s, py::handle value) { assign(s.name, value); }, true }

// A struct from keyword arguments: all of its fields, and no others.
template <typename S>
S filled(const char* what, const Fields<S>& fields, const py::kwargs& values) {
    S result{};
    size_t used = 0;
    for (const Field<S>& field : fields) {
        if (PyObject* value = PyDict_GetItemWithError(values.ptr(), field.key)) {
            field.set(result, value);
            used++;
        } else if (!field.is_optional) {
            throw py::type_error(std::string(what) + ": missing argument '" + field.name + "'");
        }
    }
    if (used == values.size()) return result;
    for (auto item : values) {
        std::string name = py::str(item.first);
        bool is_known = false;
        for (const Field<S>& field : fields) is_known |= name == field.name;
        if (!is_known) throw py::type_error(std::string(what) + ": unexpected argument '" + name + "'");
    }
    return result;
}

// A struct that Python keeps for the length of one call; without arguments it is all 0.
template <typename S>
void define_struct(py::module_& module, const char* name, Fields<S> fields) {
    py::class_<S>(module, name, py::module_local()).def(py::init([=](const py::kwargs& values) {
        return values.empty() ? S{} : filled(name, fields, values);
    }));
}

// Other Python threads may run while a kernel is enqueued.
template <typename Launch>
void launch(const char* name, Launch enqueue) {
    int error;
    {
        py::gil_scoped_release others_may_run;
        error = enqueue();
    }
    check(error, name);
}

template <typename S>
void define(py::module_& module, const char* name, int (*enqueue)(const S*, cudaStream_t), Fields<S> fields) {
    module.def(
        name,
        [=](Address stream, const py::kwargs& values) {
            S arguments = filled(name, fields, values);
            launch(name, [&] { return enqueue(&arguments, reinterpret_cast<cudaStream_t>(stream)); });
        },
        py::kw_only(), py::arg("stream"));
}

// Waits on the host for a word that a kernel writes; false if it did not change within the limit.
bool wait_for_change(Address word, uint32_t old_value, double limit_s) {
    auto start = std::chrono::steady_clock::now();
    const volatile uint32_t* value = reinterpret_cast<const volatile uint32_t*>(word);
    while (*value == old_value) {
        auto waited = std::chrono::steady_clock::now() - start;
        if (waited > std::chrono::duration<double>(limit_s)) return false;
        // Counts of a step come within microseconds; longer waits leave the core to others.
        if (waited > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.attr("MAX_EXPERTS") = static_cast<int>(TILEOVERLAP_MAX_EXPERTS);
    module.attr("MAX_PEERS") = static_cast<int>(TILEOVERLAP_MAX_PEERS);
    module.attr("BLOCK_TOKENS") = static_cast<int>(TILEOVERLAP_BLOCK_TOKENS);
    module.attr("MAP_BYTES") = static_cast<int>(TILEOVERLAP_MAP_BYTES);
    module.attr("FAILURE_WORDS") = sizeof(TileOverlapFailure) / 4;
    module.attr("ROWS_HOME") = static_cast<int>(ROWS_HOME);
    module.attr("SUMS_HOME") = static_cast<int>(SUMS_HOME);
    module.attr("TOKENS_OUT") = static_cast<int>(TOKENS_OUT);
    module.attr("RETURN_ROWS") = static_cast<int>(RETURN_ROWS);
    module.attr("RETURN_SUMS") = static_cast<int>(RETURN_SUMS);

    // --- layout -----------------------------------------------------------------------------------------------------
    define(module, "count", tileoverlap_count,
           {FIELD(experts), FIELD(num_tokens), FIELD(num_choices), FIELD(num_experts), FIELD(num_ranks), FIELD(rank),
            FIELD(word), FIELD(block_counts), FIELD(peer_counts), FIELD(stride), FIELD(peer_ready), FIELD(ready),
            FIELD(epoch), FIELD(targets), FIELD(counts), FIELD(bases), FIELD(host_counts), FIELD(host_failure),
            FIELD(host_ready), FIELD(failure), FIELD(limit_ns)});
    module.def("wait_for_change", wait_for_change, py::call_guard<py::gil_scoped_release>(), py::kw_only(),
               py::arg("word"), py::arg("old_value"), py::arg("limit_s"));
    define(module, "place", tileoverlap_place,
           {FIELD(experts), FIELD(weights), FIELD(block_counts), FIELD(bases), FIELD(num_tokens), FIELD(num_choices),
            FIELD(num_experts), FIELD(num_ranks), FIELD(rank), FIELD(returns_sums), FIELD(sent_tokens),
            FIELD(choice_slots), FIELD(token_slots), FIELD(slots), FIELD(peer_buffers), FIELD(generation_bytes),
            FIELD(peer_arrived), FIELD(consumed), FIELD(epoch), FIELD(failure), FIELD(limit_ns)});
    define(module, "receive", tileoverlap_receive,
           {FIELD(received), FIELD(generation_bytes), FIELD(num_received), FIELD(num_choices), FIELD(num_ranks),
            FIELD(num_experts), FIELD(rank), FIELD(counts), FIELD(choice_rows), FIELD(row_sources), FIELD(row_weights),
            FIELD(row_offsets), FIELD(arrived), FIELD(targets), FIELD(epoch), FIELD(peer_consumed), FIELD(finished),
            FIELD(failure), FIELD(limit_ns)});

    // --- schedule ---------------------------------------------------------------------------------------------------
    define_struct<TileOverlapTiling>(
        module, "Tiling",
        {FIELD(n), FIELD(row_bytes), FIELD(aligns_owners), FIELD(bands_per_segment), FIELD(panel_tiles),
         FIELD(num_panels), FIELD(local_first), FIELD(items), FIELD(num_items), FIELD(segments), FIELD(num_segments),
         FIELD(panel_tiles_to_do), FIELD(band_parts_to_do), FIELD(sum_runs), FIELD(send_runs)});
    Fields<TileOverlapSchedule> schedule = {FIELD(counts), FIELD(counts_stride), FIELD(num_ranks), FIELD(rank),
                                            FIELD(num_experts)};
    module.def(
        "schedule",
        [schedule](const std::vector<TileOverlapTiling>& tilings, Address stream, const py::kwargs& values) {
            TileOverlapSchedule arguments = filled("schedule", schedule, values);
            for (const TileOverlapTiling& tiling : tilings) {
                if (arguments.num_tilings == TILEOVERLAP_MAX_TILINGS) throw py::value_error("schedule: too many tilings");
                arguments.tilings[arguments.num_tilings++] = tiling;
            }
            launch("schedule", [&] { return tileoverlap_schedule(&arguments, reinterpret_cast<cudaStream_t>(stream)); });
        },
        py::kw_only(), py::arg("tilings"), py::arg("stream"));

    // --- exchange and GEMM ------------------------------------------------------------------------------------------
    define(module, "begin", tileoverlap_begin,
           {FIELD(counts), FIELD(counts_stride), FIELD(num_ranks), FIELD(rank), FIELD(num_experts), FIELD(what),
            FIELD(row_bytes), FIELD(epoch), FIELD(targets), OPTIONAL(to_do), OPTIONAL(left), OPTIONAL(num_left),
            FIELD(peer_began), OPTIONAL(began), FIELD(failure), FIELD(limit_ns)});
    define_struct<TileOverlapCourier>(
        module, "Courier",
        {FIELD(errand), FIELD(rows), FIELD(row_bytes), FIELD(num_peers), FIELD(rank), FIELD(segments),
         FIELD(num_segments), OPTIONAL(signals), OPTIONAL(signals_per_band), FIELD(index), FIELD(num_choices), FIELD(runs),
         OPTIONAL(panel_left), FIELD(num_panels), FIELD(panel_bytes), FIELD(peer_buffers), FIELD(peer_arrived),
         FIELD(consumed), FIELD(generation_bytes), FIELD(epoch), FIELD(claimed), FIELD(failure), FIELD(limit_ns),
         OPTIONAL(trace)});
    define_struct<TileOverlapArrivals>(
        module, "Arrivals",
        {FIELD(rows), FIELD(row_bytes), FIELD(sources), FIELD(own_first), FIELD(own_end), FIELD(segments),
         FIELD(num_segments), FIELD(missing), FIELD(received), FIELD(generation_bytes), FIELD(epoch), FIELD(arrived),
         FIELD(targets), FIELD(peer_consumed), FIELD(claimed), FIELD(finished), FIELD(num_peers), FIELD(failure),
         FIELD(limit_ns), OPTIONAL(trace)});
    module.def(
        "encode_weights",
        [](Address maps, const std::vector<Address>& weights, int64_t rows, int64_t columns, bool is_half,
           bool b_is_transposed) {
            check(tileoverlap_encode_weights(reinterpret_cast<void*>(maps),
                                             reinterpret_cast<const void* const*>(weights.data()),
                                             static_cast<int>(weights.size()), rows, columns, is_half, b_is_transposed),
                  "encode_weights");
        },
        py::kw_only(), py::arg("maps"), py::arg("weights"), py::arg("rows"), py::arg("columns"), py::arg("is_half"),
        py::arg("b_is_transposed"));
    Fields<TileOverlapGemm> gemm = {FIELD(a), FIELD(b_maps), FIELD(c), FIELD(items), FIELD(num_items), FIELD(claimed),
                                    OPTIONAL(signals), OPTIONAL(epoch), OPTIONAL(panel_left), OPTIONAL(panel_tiles),
                                    OPTIONAL(a2), OPTIONAL(b2_maps), OPTIONAL(k2), OPTIONAL(up_maps), OPTIONAL(up),
                                    OPTIONAL(stride), OPTIONAL(hidden), OPTIONAL(row_weights), OPTIONAL(alpha),
                                    OPTIONAL(limit), OPTIONAL(shift), FIELD(num_rows), FIELD(n), FIELD(k), FIELD(is_half), FIELD(b_is_transposed), FIELD(num_sms), OPTIONAL(trace)};
    module.def(
        "expert_gemm",
        [gemm](const TileOverlapCourier& courier, const TileOverlapArrivals& arrivals, Address stream,
               const py::kwargs& values) {
            TileOverlapGemm arguments = filled("expert_gemm", gemm, values);
            launch("expert_gemm", [&] {
                return tileoverlap_expert_gemm(&arguments, &courier, &arrivals, reinterpret_cast<cudaStream_t>(stream));
            });
        },
        py::kw_only(), py::arg("courier") = TileOverlapCourier{}, py::arg("arrivals") = TileOverlapArrivals{},
        py::arg("stream"));
    module.def(
        "run_couriers",
        [](const TileOverlapCourier& courier, const TileOverlapArrivals& arrivals, bool is_half, int num_sms,
           Address stream) {
            launch("run_couriers", [&] {
                return tileoverlap_run_couriers(&courier, &arrivals, is_half, num_sms,
                                                reinterpret_cast<cudaStream_t>(stream));
            });
        },
        py::kw_only(), py::arg("courier") = TileOverlapCourier{}, py::arg("arrivals") = TileOverlapArrivals{},
        py::arg("is_half"), py::arg("num_sms"), py::arg("stream"));

    // --- combine ----------------------------------------------------------------------------------------------------
    define(module, "sum_slots", tileoverlap_sum,
           {FIELD(received), FIELD(local), FIELD(slots), FIELD(sums), FIELD(arrived), FIELD(targets), FIELD(epoch),
            FIELD(peer_consumed), FIELD(finished), FIELD(failure), FIELD(generation_bytes), FIELD(limit_ns),
            FIELD(num_tokens), FIELD(num_choices), FIELD(width), FIELD(num_peers), FIELD(is_half), FIELD(num_sms),
            OPTIONAL(trace)});
    Fields<TileOverlapScalars> scalars = {
        FIELD(values), FIELD(index), FIELD(runs), FIELD(choice_slots), FIELD(slots), FIELD(own_first), FIELD(own_end),
        OPTIONAL(results), FIELD(num_tokens), FIELD(num_choices), FIELD(num_peers), FIELD(epoch), FIELD(targets),
        FIELD(received), FIELD(generation_bytes), FIELD(arrived), FIELD(consumed), FIELD(peer_buffers),
        FIELD(peer_arrived), FIELD(peer_consumed), FIELD(finished), FIELD(failure), FIELD(limit_ns)};
    define(module, "send_scalars", tileoverlap_send_scalars, scalars);
    define(module, "collect_scalars", tileoverlap_collect_scalars, scalars);

    // --- trace ------------------------------------------------------------------------------------------------------
    module.attr("EVENT_BYTES") = sizeof(TileOverlapEvent);
    module.attr("STAGE_BEGAN") = static_cast<int>(STAGE_BEGAN);
    module.attr("STAGE_ENDED") = static_cast<int>(STAGE_ENDED);
    define(module, "mark", tileoverlap_mark, {FIELD(trace), FIELD(kind), FIELD(stage), FIELD(outer)});
    define(module, "compare_clocks", tileoverlap_compare_clocks,
           {FIELD(trace), FIELD(answers), FIELD(peer_answers), FIELD(num_peers), FIELD(rank), FIELD(rounds),
            FIELD(failure), FIELD(limit_ns)});
}
