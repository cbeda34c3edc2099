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

#include "overlap_stages.cuh"
#include "sizes.cuh"
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
void assign(double& field, py::handle value) { field = value.cast<double>(); }

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

// A struct that Python keeps; without arguments it is all 0.
template <typename S>
py::class_<S> define_struct(py::module_& module, const char* name, Fields<S> fields) {
    return py::class_<S>(module, name, py::module_local()).def(py::init([=](const py::kwargs& values) {
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

// A stage: what its kernels share comes as structs, then the stream, the rest by name.
template <typename... Shared>
struct StageOf {
    template <typename S>
    static void define(py::module_& module, const char* name, int (*enqueue)(const Shared&..., const S&, cudaStream_t),
                       Fields<S> fields) {
        module.def(name, [=](const Shared&... shared, Address stream, const py::kwargs& values) {
            S arguments = filled(name, fields, values);
            launch(name, [&] { return enqueue(shared..., arguments, reinterpret_cast<cudaStream_t>(stream)); });
        });
    }
};

template <typename S>
Fields<S> with(Fields<S> fields, const Fields<S>& more) {
    fields.insert(fields.end(), more.begin(), more.end());
    return fields;
}

// What a stage is told of its GEMM; tiles and signals it finds itself.
template <typename S>
Fields<S> gemm_fields() {
    return {FIELD(a), FIELD(b_maps), FIELD(c), OPTIONAL(a2), OPTIONAL(b2_maps), OPTIONAL(k2), OPTIONAL(up_maps),
            OPTIONAL(up), OPTIONAL(stride), OPTIONAL(hidden), OPTIONAL(row_weights), OPTIONAL(alpha), OPTIONAL(limit),
            OPTIONAL(shift), OPTIONAL(trace), FIELD(num_rows), FIELD(n), FIELD(k), FIELD(is_half),
            FIELD(b_is_transposed)};
}

template <typename S>
Fields<S> placed_fields() {
    return {FIELD(experts), FIELD(weights), FIELD(block_counts), FIELD(bases),
            FIELD(sent_tokens), FIELD(choice_slots), FIELD(token_slots), FIELD(slots)};
}

// Waits on the host for a word that a kernel writes; false if it did not change within the limit.
bool wait_for_change(const uint32_t* word, uint32_t old_value, double limit_s) {
    auto start = std::chrono::steady_clock::now();
    while (*static_cast<const volatile uint32_t*>(word) == old_value) {
        auto waited = std::chrono::steady_clock::now() - start;
        if (waited > std::chrono::duration<double>(limit_s)) return false;
        // Counts of a step come within microseconds; longer waits leave the core to others.
        if (waited > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
}

// The counts on the host, and when they are there.
struct Arrival {
    const int* host_counts;
    const uint32_t* host_ready;
    const TileOverlapFailure* host_failure;
    uint32_t ready_before;
    double limit_s;
    // How rows shall return: 1 as sums, 0 as rows, -1 as sums where those are so many times fewer.
    int sums;
    double sums_below;
    int64_t most_records;  // what half of the receive buffer holds
};

struct ArrivalAndPlacement : Arrival, tileoverlap::Placement {};

// Waits for the counts and says where this rank's rows go as soon as they are there: the device has nothing else to do.
// Returns None if they did not come in time; otherwise whether rows return as sums, whether there was room for the
// records, and the tally.
py::object wait_and_place(const tileoverlap::Exchange& all, const tileoverlap::Channel& records, Address stream,
                          ArrivalAndPlacement& given) {
    tileoverlap::Tally t;
    bool in_time, is_placed = false;
    int error = 0;
    {
        py::gil_scoped_release others_may_run;
        in_time = wait_for_change(given.host_ready, given.ready_before, given.limit_s);
        if (in_time) {
            t = tileoverlap::tally_of(given.host_counts, all.num_ranks, all.rank, all.num_experts);
            given.returns_sums = given.sums >= 0 ? given.sums : t.remote_sends < given.sums_below * t.remote_routes;
            // After a failure counts mean nothing, and the caller raises.
            is_placed = t.most_received <= given.most_records && !given.host_failure->kind;
            if (is_placed) error = place(all, records, given, reinterpret_cast<cudaStream_t>(stream));
        }
    }
    check(error, "wait_and_place");
    if (!in_time) return py::none();
    return py::make_tuple(given.returns_sums, is_placed,
                          py::make_tuple(t.all_can_overlap, t.num_rows, t.num_sent, t.num_received, t.own_sent,
                                         t.own_received, t.own_rows, t.remote_routes, t.remote_sends, t.most_received,
                                         t.most_arriving, t.most_sent_away, t.most_routed_away, t.most_routed,
                                         t.expert_counts));
}

using Tilings = std::vector<TileOverlapTiling*>;

TileOverlapSchedule schedule_of(const tileoverlap::Exchange& all, const Tilings& tilings, Address words) {
    if (tilings.size() > TILEOVERLAP_MAX_TILINGS) throw py::value_error("schedule: too many tilings");
    TileOverlapSchedule result{all.counts, all.counts_stride, all.num_ranks, all.rank, all.num_experts};
    for (TileOverlapTiling* tiling : tilings) {
        tileoverlap::move_lists(*tiling, words);
        result.tilings[result.num_tilings++] = *tiling;
    }
    return result;
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
    module.attr("SEND_ROWS") = static_cast<int>(SEND_ROWS);

    // --- layout -----------------------------------------------------------------------------------------------------
    using namespace tileoverlap;
    define_struct<Channel>(module, "Channel",
                           {FIELD(epoch), FIELD(targets), FIELD(claimed), FIELD(placed), FIELD(finished), FIELD(arrived),
                            FIELD(consumed), FIELD(began), FIELD(peer_buffers), FIELD(peer_arrived), FIELD(peer_consumed),
                            FIELD(peer_began), FIELD(received), FIELD(generation_bytes)});
    define_struct<Exchange>(module, "Exchange",
                            {FIELD(counts), FIELD(counts_stride), FIELD(num_ranks), FIELD(rank), FIELD(num_experts),
                             FIELD(num_choices), FIELD(num_tokens), FIELD(claimed_items), FIELD(num_sms), FIELD(failure),
                             FIELD(limit_ns)});
    StageOf<Exchange, Channel>::define<TileOverlapCount>(
        module, "count", count,
        {FIELD(experts), FIELD(word), FIELD(block_counts), FIELD(peer_counts), FIELD(stride), FIELD(peer_ready),
         FIELD(ready), FIELD(bases), FIELD(host_counts), FIELD(host_failure), FIELD(host_ready)});
    const Fields<ArrivalAndPlacement> arrival =
        with(placed_fields<ArrivalAndPlacement>(), {FIELD(host_counts), FIELD(host_ready), FIELD(host_failure),
                                                    FIELD(ready_before), FIELD(limit_s), FIELD(sums),
                                                    FIELD(sums_below), FIELD(most_records)});
    module.def("wait_and_place", [arrival](const Exchange& all, const Channel& records, Address stream,
                                           const py::kwargs& values) {
        ArrivalAndPlacement arguments = filled("wait_and_place", arrival, values);
        return wait_and_place(all, records, stream, arguments);
    });
    StageOf<Exchange, Channel>::define<Placement>(module, "place", place,
                                                  with(placed_fields<Placement>(), {FIELD(returns_sums)}));
    auto tiling = define_struct<TileOverlapTiling>(
        module, "Tiling",
        {FIELD(n), FIELD(row_bytes), FIELD(aligns_owners), FIELD(bands_per_segment), FIELD(panel_tiles),
         FIELD(num_panels), FIELD(local_first)});
    // Where the lists lie, and how many counters there are.
#define LIST(name) tiling.def_property_readonly(#name, [](const TileOverlapTiling& t) { return (Address)t.name; })
    LIST(items), LIST(num_items), LIST(segments), LIST(num_segments), LIST(panel_tiles_to_do), LIST(band_parts_to_do);
    LIST(sum_runs), LIST(send_runs), LIST(left), LIST(num_left), LIST(num_bands);
    module.def(
        "place_lists",
        [](const Tilings& tilings, int64_t num_words, int64_t num_rows, int num_ranks, int num_local) {
            for (TileOverlapTiling* tiling : tilings)
                num_words = place_lists(*tiling, num_words, num_rows, num_ranks, num_local);
            return num_words;
        },
        "Gives each tiling's lists offsets one after the other, from so many words on; returns where they end.");
    const Fields<Receipt> receipt = {FIELD(num_received), FIELD(choice_rows), FIELD(row_sources), FIELD(row_weights),
                                     FIELD(row_offsets)};
    module.def("schedule_and_receive", [receipt](const Exchange& all, const Channel& records, const Tilings& tilings,
                                                 Address words, Address stream, const py::kwargs& values) {
        Receipt arguments = filled("schedule_and_receive", receipt, values);
        TileOverlapSchedule schedule = schedule_of(all, tilings, words);
        launch("schedule_and_receive", [&] {
            return schedule_and_receive(all, records, schedule, arguments, reinterpret_cast<cudaStream_t>(stream));
        });
    });
    module.def("schedule", [](const Exchange& all, const Tilings& tilings, Address words, Address stream) {
        TileOverlapSchedule schedule = schedule_of(all, tilings, words);
        launch("schedule", [&] { return tileoverlap_schedule(&schedule, reinterpret_cast<cudaStream_t>(stream)); });
    });

    // --- stages -----------------------------------------------------------------------------------------------------
    const Fields<Projection> arriving = {FIELD(tokens), FIELD(sent_tokens), FIELD(row_sources), FIELD(own_first),
                                         FIELD(own_end)};
    using Travelling = StageOf<Exchange, Channel, TileOverlapTiling>;
    Travelling::define<Projection>(module, "project_arriving", project_arriving,
                                   with(gemm_fields<Projection>(), arriving));
    Travelling::define<Projection>(module, "arrive", project_arriving,
                                   with({FIELD(a), FIELD(is_half), OPTIONAL(trace)}, arriving));
    StageOf<Exchange, TileOverlapTiling>::define<TileOverlapGemm>(module, "multiply", multiply,
                                                                  gemm_fields<TileOverlapGemm>());
    const Fields<Return> returning =
        with(gemm_fields<Return>(), {FIELD(index), FIELD(sums), FIELD(comm_sms), OPTIONAL(signals)});
    Travelling::define<Return>(module, "begin_returning", begin_returning, returning);
    Travelling::define<Return>(module, "multiply_returning", multiply_returning, returning);
    Travelling::define<Return>(module, "run_couriers_home", run_couriers_home, returning);
    StageOf<Exchange, Channel>::define<TileOverlapSum>(
        module, "sum_returned", sum_returned,
        {FIELD(local), FIELD(slots), FIELD(sums), FIELD(num_tokens), FIELD(width), FIELD(is_half), OPTIONAL(trace)});
    StageOf<Exchange>::define<TileOverlapWeightGrads>(
        module, "weight_grads", weight_grads,
        {FIELD(grads), FIELD(rows), FIELD(c), FIELD(row_offsets), FIELD(maps), FIELD(num_experts), FIELD(num_rows),
         FIELD(n), FIELD(k), FIELD(is_half)});
    const Fields<TileOverlapScalars> scalars = {FIELD(values), FIELD(index), FIELD(choice_slots), FIELD(slots),
                                                FIELD(own_first), FIELD(own_end), OPTIONAL(results)};
    Travelling::define<TileOverlapScalars>(module, "send_scalars", send_scalars, scalars);
    Travelling::define<TileOverlapScalars>(module, "collect_scalars", collect_scalars, scalars);

    // --- kernels on their own -----------------------------------------------------------------------------------------
    define(module, "begin", tileoverlap_begin,
           {FIELD(counts), FIELD(counts_stride), FIELD(num_ranks), FIELD(rank), FIELD(num_experts), FIELD(what),
            FIELD(row_bytes), FIELD(epoch), FIELD(targets), OPTIONAL(to_do), OPTIONAL(left), OPTIONAL(num_left),
            FIELD(peer_began), OPTIONAL(began), FIELD(failure), FIELD(limit_ns)});
    define_struct<TileOverlapCourier>(
        module, "Courier",
        {FIELD(errand), FIELD(rows), FIELD(row_bytes), FIELD(num_peers), FIELD(rank), FIELD(segments),
         FIELD(num_segments), OPTIONAL(signals), OPTIONAL(signals_per_band), FIELD(index), FIELD(num_choices), FIELD(runs),
         OPTIONAL(panel_left), OPTIONAL(num_panels), OPTIONAL(panel_bytes), FIELD(peer_buffers), FIELD(peer_arrived),
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
    const Fields<TileOverlapGemm> gemm =
        with(gemm_fields<TileOverlapGemm>(),
             {FIELD(items), FIELD(num_items), FIELD(claimed), FIELD(num_sms), OPTIONAL(signals), OPTIONAL(epoch),
              OPTIONAL(panel_left), OPTIONAL(panel_tiles)});
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

    define(module, "sum_slots", tileoverlap_sum,
           {FIELD(received), FIELD(local), FIELD(slots), FIELD(sums), FIELD(arrived), FIELD(targets), FIELD(epoch),
            FIELD(peer_consumed), FIELD(finished), FIELD(failure), FIELD(generation_bytes), FIELD(limit_ns),
            FIELD(num_tokens), FIELD(num_choices), FIELD(width), FIELD(num_peers), FIELD(is_half), FIELD(num_sms),
            OPTIONAL(trace)});

    // --- trace ------------------------------------------------------------------------------------------------------
    module.attr("EVENT_BYTES") = sizeof(TileOverlapEvent);
    module.attr("STAGE_BEGAN") = static_cast<int>(STAGE_BEGAN);
    module.attr("STAGE_ENDED") = static_cast<int>(STAGE_ENDED);
    define(module, "mark", tileoverlap_mark, {FIELD(trace), FIELD(kind), FIELD(stage), FIELD(outer)});
    define(module, "compare_clocks", tileoverlap_compare_clocks,
           {FIELD(trace), FIELD(answers), FIELD(peer_answers), FIELD(num_peers), FIELD(rank), FIELD(rounds),
            FIELD(failure), FIELD(limit_ns)});
}
