// The C interface under sanitizers, with the real ggml: every timer on the CPU and on the emulated device, and every
// kind of refusal.
//
// usage: native_test        prints what fails; exit code 1 when anything does

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bridge.h"
#ifdef OALLAMA_EMULATED
#include "emulated/ggml-emulated.h"
#endif
#include "contention.h"
#include "split/abi_check.h"
#include "support.h"

// ggml's threads are not instrumented: the thread sanitizer does not know how they wait for each other. Our own code is
// linked in statically, so that its frames have another name.
extern "C" __attribute__((visibility("default"))) const char * __tsan_default_suppressions() {
    return "race:libggml\n";
}

namespace {

int n_failed = 0;

void check(bool condition, const std::string & what) {
    if (!condition) {
        n_failed++;
        std::printf("FAILED %s: %s\n", what.c_str(), gb_last_error());
        std::fflush(stdout);
    }
}

// Runs a timer that has just been made twice, and frees it.
void check_timer(const std::string & what, int status, gb_timer *& timer) {
    check(status == OALLAMA_OK, what + " is made");
    if (status == OALLAMA_OK) {
        double seconds[2] = {};
        check(gb_timer_run(timer, 2, seconds) == OALLAMA_OK && seconds[0] > 0.0 && seconds[1] > 0.0, what + " runs");
        gb_timer_free(timer);
        timer = nullptr;
    }
}

gb_mul_mat_params mul_mat_params(const char * device, const char * layout, int32_t type) {
    gb_mul_mat_params params = {};
    params.device            = device;
    params.layout            = layout;
    params.type              = type;
    params.k                 = 256;
    params.n                 = 64;
    params.e                 = 1;
    params.n_tokens          = 3;
    params.working_set_bytes = 1 << 16;
    params.n_threads         = 1;
    return params;
}

gb_layer_rest_params layer_rest_params(const char * device, bool flash_attn) {
    gb_layer_rest_params params = {};
    params.device               = device;
    params.n_tokens             = 3;
    params.n_kv                 = 256;
    params.n_embd               = 128;
    params.n_head               = 4;
    params.n_head_kv            = 2;
    params.head_dim_k           = 32;
    params.head_dim_v           = 32;
    params.n_ff                 = 256;
    params.n_layers             = 2;
    params.flash_attn           = flash_attn ? 1 : 0;
    params.n_threads            = 1;
    return params;
}

//
// cases
//

void test_library() {
    check(gb_abi() == GB_ABI, "the header belongs to the library");
    check(gb_open() == OALLAMA_OK, "this ggml is the expected one");
    check(std::strlen(gb_ggml_version()) > 0 && gb_ggml_commit() != nullptr, "ggml tells its version");
}

template <size_t N> std::array<uintptr_t, N> words_of(const void * memory) {
    std::array<uintptr_t, N> words;
    std::memcpy(words.data(), memory, sizeof words);
    return words;
}

// Buffer types in the layout of each API that is known.
void test_buffer_types() {
    const std::array<uintptr_t, 10> described = {1, 2, 0, 3, 4, 5, 0, 6, 7, 8}; // 8 slots, the device, the context
    ggml_backend_buffer_type        buft;
    static_assert(sizeof buft == sizeof described, "eight slots, and two pointers");
    std::memcpy(&buft, described.data(), sizeof buft);
    for (const int api : {2, 3}) {
        oallama::api_version = api;
        oallama::BufferType            made(buft);
        const ggml_backend_buffer_type again = oallama::as_api3(made.get());
        check(api == 3 ? words_of<10>(made.get()) == described
                       : words_of<8>(made.get()) == std::array<uintptr_t, 8>{1, 2, 3, 4, 5, 6, 7, 8},
              "a buffer type as API " + std::to_string(api) + " has it");
        check(words_of<10>(&again) == described, "and back");
    }
    oallama::api_version = 3;
}

// An API that is not known, and one that is another than it says.
void test_other_apis() {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(bridge::cpu_device());
    for (const auto & [api, reason] : {std::pair(4, "only 2 and 3 are known"), std::pair(2, "buffer_type")}) {
        reg->api_version = api;
        check(gb_open() == OALLAMA_MISMATCH && std::strstr(gb_last_error(), reason) != nullptr,
              "API " + std::to_string(api) + " is refused");
    }
    reg->api_version = 3;
    check(gb_open() == OALLAMA_OK, "the true API is taken");
}

// Has each back end compute, and waits for none; the first `n_right` graphs are computed as ggml does.
int n_right = 0;

ggml_status without_waiting(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    if (n_right-- > 0) {
        return ggml_backend_sched_graph_compute_async(sched, graph);
    }
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_graph_compute_async(ggml_backend_sched_get_backend(sched, i), graph);
    }
    return GGML_STATUS_SUCCESS;
}

// A scheduler that does not wait, where a back end reads another's memory, or where it is sent what that has.
void test_order() {
    const auto status = [] { return oallama::guarded([] { oallama::check_order(without_waiting); }); };
    for (const int right : {0, 1}) {
        n_right = right;
        check(status() == OALLAMA_MISMATCH && std::strstr(oallama::last_error(), "before the next one") != nullptr,
              "a scheduler that does not wait is refused, graph " + std::to_string(right));
    }
    n_right = 2;
    check(status() == OALLAMA_OK, "ggml's scheduler waits");
}

void test_types_and_devices() {
    gb_type_info type = {};
    for (int number = 0; number < gb_type_count(); number++) {
        check(gb_get_type_info(number, &type) == OALLAMA_OK, "type " + std::to_string(number) + " " + type.name);
    }
    check(gb_get_type_info(-1, &type) == OALLAMA_INVALID && gb_get_type_info(1 << 20, &type) == OALLAMA_INVALID,
          "numbers of no type are refused");

    gb_device_info device = {};
    for (int index = 0; index < gb_device_count(); index++) {
        check(gb_get_device_info(index, 1, &device) == OALLAMA_OK, std::string("device ") + device.name);
    }
    check(gb_get_device_info(1000, 1, &device) == OALLAMA_INVALID, "an index of no device is refused");

    char text[4096];
    check(gb_cpu_features(text, sizeof text) == OALLAMA_OK, "the CPU has features");
    check(gb_cpu_features(text, 1) == OALLAMA_INVALID, "an array that is too small is refused");
    void * buft = nullptr;
    check(gb_buft("CPU", nullptr, &buft) == OALLAMA_OK && buft != nullptr, "the CPU has a buffer type");
    check(gb_buft("NOBODY", nullptr, &buft) == OALLAMA_INVALID, "an unknown device is refused");
    check(gb_memory_breakdown(nullptr, nullptr, 0, nullptr, 0, nullptr, 0, nullptr) == OALLAMA_INVALID,
          "no context, no memory breakdown");
}

std::vector<std::string> layouts() {
    char text[4096];
    check(gb_cpu_layouts(text, sizeof text) == OALLAMA_OK, "the CPU has layouts");
    std::vector<std::string> names;
    const std::string        joined = text;
    for (size_t start = 0; start <= joined.size();) {
        const size_t end = std::min(joined.find('\n', start), joined.size());
        names.push_back(joined.substr(start, end - start));
        start = end + 1;
    }
    return names;
}

void test_mul_mat(const char * device, const char * layout) {
    gb_type_info type = {};
    for (int number = 0; number < gb_type_count(); number++) {
        for (int64_t n_expert_used : {0, 2}) {
            gb_get_type_info(number, &type);
            gb_mul_mat_params params = mul_mat_params(device, layout, number);
            params.e                 = n_expert_used > 0 ? 4 : 1;
            params.n_expert_used     = n_expert_used;
            int32_t supported        = 0;
            if (type.mul_mat == 0 ||
                (layout != nullptr && (gb_layout_supports(layout, number, params.k, params.n, params.e, n_expert_used,
                                                          /*sound=*/1, &supported) != OALLAMA_OK ||
                                       supported == 0))) {
                continue;
            }
            gb_timer *      timer  = nullptr;
            gb_mul_mat_info info   = {};
            const int       status = gb_mul_mat_new(&params, &info, &timer);
            std::string     what   = std::string(device) + " " + (layout == nullptr ? "-" : layout) + " " + type.name +
                                     (n_expert_used > 0 ? " MUL_MAT_ID" : " MUL_MAT");
            if (status == OALLAMA_OK) {
                check(info.n_copies >= 1, what + " has a set");
                std::vector<float> tile(static_cast<size_t>(info.tile_rows * params.k));
                check(gb_mul_mat_read(timer, GB_MUL_MAT_TILE, tile.data(),
                                      static_cast<int64_t>(tile.size() * sizeof(float))) == OALLAMA_OK,
                      what + " shows its tile");
                check(gb_mul_mat_read(timer, GB_MUL_MAT_DST, tile.data(), 1) == OALLAMA_INVALID,
                      what + " refuses a wrong size");
            }
            check_timer(what, status, timer);
        }
    }
}

void test_refusals() {
    gb_timer *        timer    = nullptr;
    gb_mul_mat_info   info     = {};
    char              ops[512] = "";
    int64_t           n_splits = 0;
    gb_mul_mat_params params   = mul_mat_params("CPU", nullptr, 2);
    params.k                   = 100;
    check(gb_mul_mat_new(&params, &info, &timer) == OALLAMA_INVALID, "a row of broken blocks is refused");
    gb_layer_rest_params rest = layer_rest_params("CPU", true);
    rest.n_kv                 = 1;
    check(gb_layer_rest_new(&rest, ops, sizeof ops, &timer) == OALLAMA_INVALID, "a cache that is too small is refused");
    check(gb_boundary_new("CPU", 64, 1, 0, 1, &n_splits, &timer) == OALLAMA_INVALID,
          "the CPU has no boundary with itself");
    check(gb_transfer_new("CPU", GB_TO_DEVICE, 1, 64, 64, &timer) == OALLAMA_UNSUPPORTED,
          "no pinned memory on the CPU");
    gb_timer_free(nullptr);
}

void test_timers(const char * device) {
    const std::string name  = device;
    gb_timer *        timer = nullptr;
    check_timer(name + " launch", gb_launch_new(device, 1, &timer), timer);
    check_timer(name + " queueing a graph", gb_launch_issue_new(device, &timer), timer);
    check_timer(name + " device to host", gb_transfer_new(device, GB_FROM_DEVICE, 0, 5000, 5000, &timer), timer);
    check_timer(name + " host to device", gb_transfer_new(device, GB_TO_DEVICE, 0, 5000, 300, &timer), timer);
    check_timer(name + " issue of a copy", gb_transfer_new(device, GB_ISSUE, 0, 5000, 5000, &timer), timer);
    char ops[4096] = "";
    for (bool flash_attn : {true, false}) {
        const gb_layer_rest_params params = layer_rest_params(device, flash_attn);
        check_timer(name + " rest of a layer", gb_layer_rest_new(&params, ops, sizeof ops, &timer), timer);
    }
}

void test_two_devices(const char * device) {
    gb_timer * timer    = nullptr;
    int64_t    n_splits = 0;
    for (int32_t on_cpu : {0, 1}) {
        check_timer("boundary", gb_boundary_new(device, 4096, 3, on_cpu, 1, &n_splits, &timer), timer);
    }
    gb_mul_mat_params   host   = mul_mat_params("CPU", nullptr, 2);
    gb_mul_mat_params   there  = mul_mat_params(device, nullptr, 2);
    const gb_contention none   = {0.0, 0.0, 0.0, -1.0};
    gb_contention       result = none;
    const auto          all    = [&result] {
        return result.first_alone > 0.0 && result.second_alone > 0.0 && result.first_with_second > 0.0 &&
               result.second_with_first >= 0.0; // none is left to the second where others take the cores
    };
    check(gb_link_contention(&host, device, 1 << 16, 0.1, &result) == OALLAMA_OK && all(), "the CPU and copies");
    result = none;
    check(gb_link_contention(&there, device, 1 << 16, 0.1, &result) == OALLAMA_OK && all(), "a device and its copies");
    result = none;
    check(gb_compute_contention(&host, &there, 0.1, &result) == OALLAMA_OK && all(), "the CPU and a device");
    check(gb_link_contention(&host, "CPU", 1 << 16, 0.1, &result) == OALLAMA_INVALID, "the CPU has no link to itself");
    double share = -1.0;
    check(gb_copy_wait(device, 0, 1 << 20, &share) == OALLAMA_OK && share >= 0.0 && share <= 1.0, "waiting for a copy");
    double halves[2] = {};
    check(gb_transfer_new(device, GB_TO_DEVICE, 0, 1 << 20, 300000, &timer) == OALLAMA_OK &&
              gb_transfer_begin(timer, &halves[0]) == OALLAMA_OK &&
              gb_transfer_finish(timer, &halves[1]) == OALLAMA_OK && halves[0] > 0.0 && halves[1] > 0.0,
          "a copy in pieces has two halves");
    gb_timer_free(timer);
    check(gb_launch_new(device, 1, &timer) == OALLAMA_OK && gb_transfer_begin(timer, &halves[0]) == OALLAMA_INVALID,
          "a launch has none");
    gb_timer_free(timer);
    check(gb_transfer_new(device, GB_TO_DEVICE, 0, 1 << 20, 0, &timer) == OALLAMA_INVALID,
          "pieces of no bytes are refused");
}

// Mul-mats of the CPU beside copies that a device makes by itself, by a clock of our own. slowed: how much longer the
// CPU takes while copies are under way. delayed: seconds by which a mul-mat holds up a copy.
void test_contention() {
    for (const auto & [slowed, delayed] : {std::pair(1.0, 0.0), std::pair(1.25, 0.0), std::pair(1.0, 0.5e-3)}) {
        double              now = 0.0, copies_end = 0.0;
        const double        mul_mat_s = 1e-3, copy_s = 4e-3;
        const bridge::Work  mul_mats = {[&, slower = slowed, delay = delayed] {
                                           const bool both = copies_end > now;
                                           copies_end += both ? delay : 0.0;
                                           now += mul_mat_s * (both ? slower : 1.0);
                                        },
                                        [] {}, 1e6};
        const bridge::Work  copies   = {[&] { copies_end = std::max(copies_end, now) + copy_s; },
                                        [&] { now = std::max(now, copies_end); }, 1e6};
        const gb_contention found =
            bridge::measure_contention(mul_mats, copies, /*on_device=*/false, 1.0, [&] { return now; });
        const auto is = [](double rate, double wanted) { return std::abs(rate / wanted - 1.0) < 0.02; };
        check(is(found.first_alone, 1e9) && is(found.second_alone, 2.5e8), "each alone has its own rate");
        check(is(found.first_with_second, 1e9 / slowed), "the first loses by how much longer it takes");
        check(is(found.second_with_first, 2.5e8 * (1.0 - delayed / mul_mat_s)),
              "the second by how much later it is done");
    }
}

} // namespace

int main() {
    test_library();
    test_buffer_types();
    test_other_apis();
    test_order();
    test_types_and_devices();
    test_refusals();
    for (const std::string & layout : layouts()) {
        test_mul_mat("CPU", layout.c_str());
    }
    test_timers("CPU");
    test_contention();
#ifdef OALLAMA_EMULATED
    check(emulated_register("name Emulated0\nmemory_bytes 268435456\nvalues real\nbytes_per_s 1e10\nflops_per_s 1e11\n"
                            "flops_float_per_s 1e11\npinned_bytes_per_s 1e10\npageable_bytes_per_s 5e9\n") ==
              OALLAMA_OK,
          "the emulated device is registered");
    test_mul_mat("Emulated0", nullptr);
    test_timers("Emulated0");
    test_two_devices("Emulated0");
    check(emulated_unregister() == OALLAMA_OK, "nothing of it is in use");
#endif
    std::printf("%d failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}
