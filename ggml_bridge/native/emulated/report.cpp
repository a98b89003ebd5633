// The C interface to what the device did, and to what it takes.

#include "ggml-emulated.h"

#include "the_device.h"

using namespace emulated;
using oallama::guarded;
using oallama::require;

namespace {

Device & known_device() {
    if (the_emulated() == nullptr) {
        throw oallama::Error(OALLAMA_INVALID, "there is no emulated device yet; call emulated_register first");
    }
    return emulated_device();
}

} // namespace

int emulated_get_stats(emulated_stats * stats) {
    return guarded([&] {
        require(stats != nullptr, "room for the result is needed");
        const Device & device = known_device();
        const Ends     ends   = device.time.ends();
        *stats                = {};
        stats->n_ends         = ends.n;
        stats->late_median_s  = ends.median_s;
        stats->late_p99_s     = ends.p99_s;
        stats->late_max_s     = ends.max_s;
        stats->late_s         = ends.late_s;
        stats->n_overruns     = ends.n_overruns;
        stats->n_shared       = ends.n_shared;
        stats->busy_in_s      = ends.busy_s[engine_in];
        stats->busy_out_s     = ends.busy_s[engine_out];
        stats->busy_compute_s = ends.busy_s[engine_compute];
        stats->bytes_in       = device.bytes_in;
        stats->bytes_out      = device.bytes_out;
        stats->n_graphs       = device.n_graphs;
        stats->n_captured     = device.n_captured;
        stats->device_bytes   = device.device_bytes;
        stats->pinned_bytes   = static_cast<int64_t>(device.pinned.n_bytes());
        stats->n_allocations  = device.n_allocations;
    });
}

int emulated_reset_stats(void) {
    return guarded([] {
        Device & device = known_device();
        device.time.reset_ends();
        device.bytes_in = device.bytes_out = device.n_graphs = device.n_captured = 0;
    });
}

int emulated_rest(void) {
    return guarded([] { known_device().time.rest(); });
}

int emulated_mul_mat_seconds(int32_t type, int64_t k, int64_t n, int64_t e, int64_t n_expert_used, int64_t n_tokens,
                             double * seconds) {
    return guarded([&] {
        require(seconds != nullptr, "room for the result is needed");
        require(type >= 0 && type < GGML_TYPE_COUNT && k > 0 && n > 0 && e > 0 && n_tokens > 0 && n_expert_used >= 0 &&
                    n_expert_used <= e,
                "there is no such mul-mat");
        const int64_t block = ggml_blck_size(static_cast<ggml_type>(type)); // 0: a type that ggml has no more
        require(block > 0 && k % block == 0, "there are no rows of so many elements of this type");
        *seconds =
            mul_mat_seconds(known_device().parameters, static_cast<ggml_type>(type), k, n, e, n_expert_used, n_tokens);
    });
}
