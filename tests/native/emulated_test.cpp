// The emulated device for the sanitizers: streams, events, copies and graphs from two threads, with values and without.
// Prints what failed, and at the end "N failed".

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../../ggml_bridge/native/split/util.h"
#include "ggml-emulated.h"
#include "refused_memory.h"

namespace {

int n_failed = 0;

void expect(bool condition, const char * what) {
    if (!condition) {
        std::printf("FAILED: %s\n", what);
        n_failed++;
    }
}

std::string parameters(bool real, const char * more = "") {
    return std::string("name Emulated0\ndescription a test\nmemory_bytes 67108864\nbytes_per_s 1e10\nflops_per_s 1e11\n"
                       "flops_float_per_s 1e11\npinned_bytes_per_s 1e9\npageable_bytes_per_s 5e8\nkernel_s 1e-6\n"
                       "launch_s 1e-6\ncopy_s 1e-6\ncopy_issue_s 1e-6\nsynchronize_s 1e-6\n") +
           (real ? "values real\ncpu -1\n" : "values drawn\ncpu 0\n") + more;
}

// x + x on the device, streamed in pieces on one stream and computed on another, an event between them.
void add_in_pieces(bool real, int n_rounds) {
    constexpr int64_t   n      = 3 * (1 << 16) + 5;
    ggml_backend_dev_t  device = ggml_backend_dev_by_name("Emulated0");
    oallama::BackendPtr copies(ggml_backend_dev_init(device, nullptr));
    oallama::BackendPtr compute(ggml_backend_dev_init(device, nullptr));
    oallama::ContextPtr ctx    = oallama::new_context(4, 1, 4);
    ggml_tensor *       x      = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n);
    ggml_tensor *       number = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 4);
    ggml_tensor *       y      = ggml_add(ctx.get(), x, x);
    ggml_cgraph *       graph  = ggml_new_graph_custom(ctx.get(), 4, false);
    ggml_build_forward_expand(graph, y);
    oallama::BufferPtr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)));
    oallama::BufferPtr host(ggml_backend_buft_alloc_buffer(ggml_backend_dev_host_buffer_type(device), 4 * n));
    expect(buffer && host, "memory is there");
    expect(std::strcmp(ggml_backend_buft_name(ggml_backend_dev_host_buffer_type(device)), "Emulated0_Host") == 0,
           "pinned memory has its name");
    auto *                     in    = static_cast<float *>(ggml_backend_buffer_get_base(host.get()));
    const ggml_backend_event_t ready = ggml_backend_event_new(device);
    std::vector<float>         out(n);
    for (int round = 0; round < n_rounds; round++) {
        for (int64_t i = 0; i < n; i++) {
            in[i] = static_cast<float>(i % 1000 + round);
        }
        const int32_t ids[4] = {round, 1, 2, 3};
        ggml_backend_tensor_set_async(copies.get(), number, ids, 0, sizeof ids);
        const size_t half = 4 * (n / 2);
        ggml_backend_tensor_set_async(copies.get(), x, in, 0, half);
        ggml_backend_tensor_set_async(copies.get(), x, in + n / 2, half, 4 * n - half);
        ggml_backend_event_record(ready, copies.get());
        ggml_backend_event_wait(compute.get(), ready);
        expect(ggml_backend_graph_compute_async(compute.get(), graph) == GGML_STATUS_SUCCESS, "a graph is launched");
        ggml_backend_tensor_get_async(compute.get(), y, out.data(), 0, 4 * n);
        ggml_backend_synchronize(compute.get());
        ggml_backend_event_synchronize(ready);
        int32_t back[4] = {};
        ggml_backend_tensor_get(number, back, 0, sizeof back);
        expect(std::memcmp(ids, back, sizeof ids) == 0, "whole numbers are real");
        bool right = true;
        for (int64_t i = 0; i < n; i++) {
            right = right && (real ? out[static_cast<size_t>(i)] == 2.0F * in[i]
                                   : out[static_cast<size_t>(i)] >= -1.0F && out[static_cast<size_t>(i)] <= 1.0F);
        }
        expect(right, real ? "the sum is right" : "noise is within its bounds");
    }
    ggml_backend_event_free(ready);
}

void run(bool real, int n_rounds) {
    expect(emulated_register(parameters(real).c_str()) == 0, "the device is registered");
    std::thread other([&] { add_in_pieces(real, n_rounds); });
    add_in_pieces(real, n_rounds);
    other.join();
    emulated_stats stats = {};
    expect(emulated_get_stats(&stats) == 0 && stats.n_ends > 0 && stats.device_bytes == 0 && stats.pinned_bytes == 0,
           "nothing is left");
    expect(emulated_rest() == 0 && emulated_reset_stats() == 0 && emulated_unregister() == 0, "it can be left");
}

// Graphs that all take longer than their modelled time: each one waits for those before, and time passes only once.
void be_late() {
    constexpr int     n_graphs = 20;
    const std::string slow     = parameters(true);
    const std::string rates    = "\nbytes_per_s 1e10\nflops_per_s 1e11\nflops_float_per_s 1e11\n";
    std::string       fast     = slow;
    expect(slow.find(rates) != std::string::npos, "rates can be replaced");
    fast.replace(slow.find(rates), rates.size(), "\nbytes_per_s 1e14\nflops_per_s 1e15\nflops_float_per_s 1e15\n");
    expect(emulated_register(fast.c_str()) == 0, "the device is registered");
    {
        ggml_backend_dev_t  device = ggml_backend_dev_by_name("Emulated0");
        oallama::BackendPtr backend(ggml_backend_dev_init(device, nullptr));
        oallama::ContextPtr ctx   = oallama::new_context(4, 1, 4);
        ggml_tensor *       x     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 1 << 20);
        ggml_cgraph *       graph = ggml_new_graph_custom(ctx.get(), 4, false);
        ggml_build_forward_expand(graph, ggml_add(ctx.get(), x, x));
        oallama::BufferPtr buffer(
            ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)));
        ggml_backend_synchronize(backend.get());
        expect(emulated_reset_stats() == 0, "it counts anew");
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < n_graphs; i++) {
            expect(ggml_backend_graph_compute_async(backend.get(), graph) == GGML_STATUS_SUCCESS,
                   "a graph is launched");
        }
        ggml_backend_synchronize(backend.get());
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        emulated_stats                      stats   = {};
        expect(emulated_get_stats(&stats) == 0 && stats.n_overruns > 0, "it was late");
        expect(stats.late_s > 0.0 && stats.late_s <= elapsed.count(), "no longer than time has passed");
    }
    expect(emulated_unregister() == 0, "it can be left");
}

// A model is loaded in no time. What comes into its memory after a graph takes what any copy does.
void write_weights() {
    constexpr size_t n_bytes = 1 << 20;
    expect(emulated_register(parameters(false).c_str()) == 0, "the device is registered");
    {
        ggml_backend_dev_t  device = ggml_backend_dev_by_name("Emulated0");
        oallama::BackendPtr backend(ggml_backend_dev_init(device, nullptr));
        oallama::ContextPtr ctx    = oallama::new_context(2, 1, 4);
        ggml_tensor *       weight = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_bytes / sizeof(float));
        ggml_cgraph *       empty  = ggml_new_graph_custom(ctx.get(), 4, false);
        oallama::BufferPtr  buffer(
            ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)));
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        const std::vector<char> bytes(n_bytes);
        for (const bool loaded : {false, true}) {
            expect(emulated_reset_stats() == 0, "it counts anew");
            const auto start = std::chrono::steady_clock::now();
            ggml_backend_tensor_set(weight, bytes.data(), 0, n_bytes);
            const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
            emulated_stats                      stats   = {};
            expect(emulated_get_stats(&stats) == 0, "it tells what it did");
            expect(stats.bytes_in == (loaded ? int64_t{n_bytes} : 0), "weights are copied where a model is loaded");
            expect(!loaded || elapsed.count() >= n_bytes / 5e8, "and that takes time");
            expect(ggml_backend_graph_compute_async(backend.get(), empty) == GGML_STATUS_SUCCESS, "a graph runs");
        }
    }
    expect(emulated_unregister() == 0, "it can be left");
}

// As CUDA: what was launched twice alike is captured, until something of it lies elsewhere.
void capture() {
    expect(emulated_register(parameters(true).c_str()) == 0, "the device is registered");
    {
        ggml_backend_dev_t  device = ggml_backend_dev_by_name("Emulated0");
        oallama::BackendPtr backend(ggml_backend_dev_init(device, nullptr));
        oallama::ContextPtr ctx   = oallama::new_context(4, 1, 4);
        ggml_tensor *       x     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 64);
        ggml_tensor *       other = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 64);
        ggml_cgraph *       graph = ggml_new_graph_custom(ctx.get(), 4, false);
        ggml_build_forward_expand(graph, ggml_add(ctx.get(), x, x));
        oallama::BufferPtr buffer(
            ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)));
        const auto captured = [&](int n_launches) {
            expect(emulated_reset_stats() == 0, "it counts anew");
            for (int i = 0; i < n_launches; i++) {
                expect(ggml_backend_graph_compute_async(backend.get(), graph) == GGML_STATUS_SUCCESS, "it is launched");
            }
            emulated_stats stats = {};
            expect(emulated_get_stats(&stats) == 0 && stats.n_graphs == n_launches, "every launch counts");
            return stats.n_captured;
        };
        expect(captured(2) == 0, "the second launch captures");
        expect(captured(3) == 3, "later ones are of what was captured");
        std::swap(x->data, other->data);
        expect(captured(3) == 1, "a tensor that lies elsewhere has it captured anew");
        ggml_backend_synchronize(backend.get());
    }
    expect(emulated_unregister() == 0, "it can be left");
}

void lose() {
    expect(emulated_register(parameters(true, "lost_after 1\n").c_str()) == 0, "the device is registered");
    oallama::BackendPtr backend(ggml_backend_dev_init(ggml_backend_dev_by_name("Emulated0"), nullptr));
    oallama::ContextPtr ctx   = oallama::new_context(2, 1, 4);
    ggml_cgraph *       empty = ggml_new_graph_custom(ctx.get(), 4, false);
    expect(ggml_backend_graph_compute_async(backend.get(), empty) == GGML_STATUS_SUCCESS, "it works at first");
    expect(ggml_backend_graph_compute_async(backend.get(), empty) == GGML_STATUS_FAILED, "then it is lost");
    expect(emulated_register(parameters(true).c_str()) != 0, "it is in use");
    backend.reset();
    expect(emulated_unregister() == 0, "it can be left");
}

void refuse_one_allocation() {
    expect(emulated_register(parameters(true, "fail_alloc 2\n").c_str()) == 0, "the device is registered");
    const auto buft = ggml_backend_dev_buffer_type(ggml_backend_dev_by_name("Emulated0"));
    for (int n = 1; n <= 3; n++) {
        const oallama::BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, 64));
        expect((buffer == nullptr) == (n == 2), "the second allocation alone is refused");
    }
    expect(emulated_unregister() == 0, "it can be left");
}

// No pinned allocation fails, as on CUDA: only the buffer's type tells that its memory is plain.
void pin_no_more() {
    for (const char * limit : {"fail_alloc 2\n", "pinned_bytes 100\n"}) {
        expect(emulated_register(parameters(true, limit).c_str()) == 0, "the device is registered");
        const auto buft = ggml_backend_dev_host_buffer_type(ggml_backend_dev_by_name("Emulated0"));
        {
            const oallama::BufferPtr first(ggml_backend_buft_alloc_buffer(buft, 64));
            const oallama::BufferPtr second(ggml_backend_buft_alloc_buffer(buft, 64));
            expect(first->buft == buft, "there is pinned memory");
            expect(second && second->buft == ggml_backend_cpu_buffer_type(),
                   "plain memory is given where it cannot be");
        }
        const oallama::BufferPtr third(ggml_backend_buft_alloc_buffer(buft, 64));
        expect(third->buft == buft, "and pinned memory when there is some again");
    }
    expect(emulated_unregister() == 0, "it can be left");
}

// More than any device has, beside what is held.
void refuse_too_much() {
    expect(emulated_register(parameters(true).c_str()) == 0, "the device is registered");
    const auto               buft = ggml_backend_dev_buffer_type(ggml_backend_dev_by_name("Emulated0"));
    const oallama::BufferPtr held(ggml_backend_buft_alloc_buffer(buft, 64));
    for (const size_t bytes : {size_t{INT64_MAX}, SIZE_MAX, size_t{1} << 62U}) {
        const oallama::BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, bytes));
        emulated_stats           stats = {};
        expect(emulated_get_stats(&stats) == 0 && buffer == nullptr && stats.device_bytes == 64, "too much is refused");
    }
    expect(emulated_unregister() != 0, "it is in use");
}

// Callbacks that have no result to say it by: the process lives on, and no graph is believed after them.
void run_out_of_memory() {
    for (int call = 0; call < 3; call++) {
        expect(emulated_register(parameters(true).c_str()) == 0, "the device is registered");
        ggml_backend_dev_t         device = ggml_backend_dev_by_name("Emulated0");
        oallama::BackendPtr        backend(ggml_backend_dev_init(device, nullptr));
        oallama::ContextPtr        ctx   = oallama::new_context(2, 1, 4);
        ggml_tensor *              x     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 4);
        ggml_cgraph *              empty = ggml_new_graph_custom(ctx.get(), 4, false);
        const ggml_backend_event_t event = ggml_backend_event_new(device);
        oallama::BufferPtr         buffer(
            ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device)));
        float values[4] = {};
        expect(ggml_backend_graph_compute_async(backend.get(), empty) == GGML_STATUS_SUCCESS, "it works at first");
        ggml_backend_event_t second = nullptr;
        out_of_memory               = true;
        switch (call) {
            case 0: ggml_backend_event_record(event, backend.get()); break;
            case 1: ggml_backend_tensor_set(x, values, 0, sizeof values); break;
            default: ggml_backend_tensor_get(x, values, 0, sizeof values); break;
        }
        second        = ggml_backend_event_new(device);
        out_of_memory = false;
        expect(second == nullptr, "there is no event without memory");
        expect(ggml_backend_graph_compute_async(backend.get(), empty) == GGML_STATUS_ALLOC_FAILED, "a graph fails");
        ggml_backend_event_synchronize(event);
        ggml_backend_event_free(event);
        buffer.reset();
        backend.reset();
        expect(emulated_unregister() == 0, "it can be left");
    }
}

} // namespace

int main() {
    run(true, 20);
    run(false, 20);
    be_late();
    write_weights();
    capture();
    lose();
    refuse_one_allocation();
    pin_no_more();
    refuse_too_much();
    expect(emulated_unregister() == 0, "it can be left");
    run_out_of_memory();
    expect(emulated_register("memory_bytes none\n") != 0 && std::strlen(emulated_last_error()) > 0, "it says why");
    std::printf("%d failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}
