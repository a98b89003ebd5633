// The C interface to what is held and what was done.

#include <algorithm>
#include <mutex>
#include <utility>

#include "error.h"
#include "stats.h"
#include "trace.h"

using namespace oallama;

namespace {

constexpr int64_t max_trace = int64_t{1} << 24; // spans

// Of the last trace that ended.
struct Traced {
    std::mutex                mutex;
    std::vector<oallama_span> spans;
};

Traced & traced() {
    static Traced the_traced;
    return the_traced;
}

double seconds(const std::atomic<int64_t> & nanoseconds) {
    return static_cast<double>(nanoseconds.load()) * 1e-9;
}

} // namespace

int oallama_get_memory(oallama_memory * memory) {
    return guarded([&] {
        require(memory != nullptr, "room for the result is needed");
        memory->host_weights   = counters().host_weights;
        memory->device_weights = counters().device_weights;
        memory->host_compute   = counters().host_compute;
        memory->device_compute = counters().device_compute;
        memory->n_weights      = counters().n_weights;
        memory->n_programs     = counters().n_programs;
        memory->program_bytes  = counters().program_bytes;
    });
}

int oallama_get_stats(oallama_stats * out) {
    return guarded([&] {
        require(out != nullptr, "room for the result is needed");
        const Stats & from  = stats();
        out->n_graphs       = from.n_graphs;
        out->n_phases       = from.n_phases;
        out->n_built        = from.n_built;
        out->launch_s       = seconds(from.launch_ns);
        out->host_s         = seconds(from.host_ns);
        out->wait_s         = seconds(from.wait_ns);
        out->join_s         = seconds(from.join_ns);
        out->total_s        = seconds(from.total_ns);
        out->bytes_in       = from.bytes_in;
        out->bytes_out      = from.bytes_out;
        out->bytes_streamed = from.bytes_streamed;
    });
}

int oallama_trace_start(int64_t max_spans, oallama_trace_of of) {
    return guarded([&] {
        require(max_spans > 0 && max_spans <= max_trace, "a trace keeps between 1 and 2^24 spans");
        require(of >= OALLAMA_TRACE_CALLER && of <= OALLAMA_TRACE_READ_BACK, "a trace of what is not known");
        Trace::get().start(static_cast<size_t>(max_spans), of);
    });
}

int oallama_trace_stop(int64_t * n_spans) {
    return guarded([&] {
        require(n_spans != nullptr, "room for the result is needed");
        std::vector<oallama_span>         spans = Trace::get().stop();
        const std::lock_guard<std::mutex> lock(traced().mutex);
        traced().spans = std::move(spans);
        *n_spans       = static_cast<int64_t>(traced().spans.size());
    });
}

int oallama_trace_read(oallama_span * spans, int64_t capacity) {
    return guarded([&] {
        require(spans != nullptr && capacity >= 0, "room for the spans is needed");
        const std::lock_guard<std::mutex> lock(traced().mutex);
        const size_t                      n = std::min(traced().spans.size(), static_cast<size_t>(capacity));
        std::copy_n(traced().spans.begin(), n, spans);
    });
}

int oallama_reset_stats(void) {
    return guarded([] {
        Stats & all        = stats();
        all.n_graphs       = 0;
        all.n_phases       = 0;
        all.n_built        = 0;
        all.launch_ns      = 0;
        all.host_ns        = 0;
        all.wait_ns        = 0;
        all.join_ns        = 0;
        all.total_ns       = 0;
        all.bytes_in       = 0;
        all.bytes_out      = 0;
        all.bytes_streamed = 0;
    });
}
