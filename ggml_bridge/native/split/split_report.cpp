// The C interface to what is held and what was done.

#include "error.h"
#include "stats.h"

using namespace oallama;

namespace {

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
