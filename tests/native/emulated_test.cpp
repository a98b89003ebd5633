// The emulated device for the sanitizers: streams, events, copies and graphs from two threads, with values and without;
// and what no caller in Python can ask of it. Prints what failed, and at the end "N failed".

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
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

// The device, registered for one test, after which nothing of it is left.
class Card {
  public:
    explicit Card(bool real, const std::string & more = "") {
        const std::string text =
            "name Emulated0\ndescription a test\nmemory_bytes 67108864\nbytes_per_s 1e10\nflops_per_s 1e11\n"
            "flops_float_per_s 1e11\npinned_bytes_per_s 1e9\npageable_bytes_per_s 5e8\nkernel_s 1e-6\n"
            "launch_s 1e-6\ncopy_s 1e-6\ncopy_issue_s 1e-6\nsynchronize_s 1e-6\n" +
            std::string(real ? "values real\ncpu -1\n" : "values drawn\ncpu 0\n") + more;
        expect(emulated_register(text.c_str()) == 0, "the device is registered");
    }
    Card(const Card &)             = delete;
    Card & operator=(const Card &) = delete;
    ~Card() {
        expect(stats().device_bytes == 0 && stats().pinned_bytes == 0, "no memory is held");
        expect(emulated_rest() == 0 && emulated_unregister() == 0, "it can be left");
    }

    static emulated_stats stats() {
        emulated_stats found = {};
        expect(emulated_get_stats(&found) == 0, "it tells what it did");
        return found;
    }
};

ggml_backend_dev_t device() {
    return ggml_backend_dev_by_name("Emulated0");
}

oallama::BackendPtr new_stream() {
    return oallama::BackendPtr(ggml_backend_dev_init(device(), nullptr));
}

void launch(const oallama::BackendPtr & stream, ggml_cgraph * graph) {
    expect(ggml_backend_graph_compute_async(stream.get(), graph) == GGML_STATUS_SUCCESS, "a graph is launched");
}

// Tensors of n elements in device memory, and the graph sum = x + x.
struct Sum {
    explicit Sum(int64_t n)
        : x(ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n)), other(ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n)),
          number(ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 4)), sum(ggml_add(ctx.get(), x, x)),
          buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device()))) {
        ggml_build_forward_expand(graph, sum);
    }

    oallama::ContextPtr ctx   = oallama::new_context(4, 2, 4);
    ggml_cgraph *       graph = ggml_new_graph_custom(ctx.get(), 4, false);
    ggml_cgraph *       empty = ggml_new_graph_custom(ctx.get(), 4, false);
    ggml_tensor *       x;
    ggml_tensor *       other;
    ggml_tensor *       number;
    ggml_tensor *       sum;
    oallama::BufferPtr  buffer;
};

// Streams x in pieces on one stream and computes on another, with an event between them.
void add_in_pieces(bool real, int n_rounds) {
    constexpr int64_t         n       = 3 * (1 << 16) + 5;
    const oallama::BackendPtr copies  = new_stream();
    const oallama::BackendPtr compute = new_stream();
    const Sum                 made(n);
    const auto                pinned = ggml_backend_dev_host_buffer_type(device());
    const oallama::BufferPtr  host(ggml_backend_buft_alloc_buffer(pinned, 4 * n));
    expect(std::strcmp(ggml_backend_buft_name(pinned), "Emulated0_Host") == 0, "pinned memory has its name");
    auto *                     in    = static_cast<float *>(ggml_backend_buffer_get_base(host.get()));
    const ggml_backend_event_t ready = ggml_backend_event_new(device());
    std::vector<float>         out(n);
    for (int round = 0; round < n_rounds; round++) {
        for (int64_t i = 0; i < n; i++) {
            in[i] = static_cast<float>(i % 1000 + round);
        }
        const int32_t ids[4] = {round, 1, 2, 3};
        ggml_backend_tensor_set_async(copies.get(), made.number, ids, 0, sizeof ids);
        const size_t half = 4 * (n / 2);
        ggml_backend_tensor_set_async(copies.get(), made.x, in, 0, half);
        ggml_backend_tensor_set_async(copies.get(), made.x, in + n / 2, half, 4 * n - half);
        ggml_backend_event_record(ready, copies.get());
        ggml_backend_event_wait(compute.get(), ready);
        launch(compute, made.graph);
        ggml_backend_tensor_get_async(compute.get(), made.sum, out.data(), 0, 4 * n);
        ggml_backend_synchronize(compute.get());
        ggml_backend_event_synchronize(ready);
        int32_t back[4] = {};
        ggml_backend_tensor_get(made.number, back, 0, sizeof back);
        expect(std::memcmp(ids, back, sizeof ids) == 0, "whole numbers are real");
        bool right = true;
        for (size_t i = 0; i < n; i++) {
            right = right && (real ? out[i] == 2.0F * in[i] : out[i] >= -1.0F && out[i] <= 1.0F);
        }
        expect(right, real ? "the sum is right" : "noise is within its bounds");
    }
    ggml_backend_event_free(ready);
}

void add_in_two_threads(bool real) {
    const Card  card(real);
    std::thread other([&] { add_in_pieces(real, 20); });
    add_in_pieces(real, 20);
    other.join();
}

// Graphs that all take longer than their modelled time: each one waits for those before, and time passes only once.
void be_late() {
    const Card                card(true, "bytes_per_s 1e14\nflops_per_s 1e15\nflops_float_per_s 1e15\n");
    const oallama::BackendPtr stream = new_stream();
    const Sum                 made(1 << 20);
    expect(emulated_reset_stats() == 0, "it counts anew");
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; i++) {
        launch(stream, made.graph);
    }
    ggml_backend_synchronize(stream.get());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    expect(Card::stats().n_overruns > 0, "it was late");
    expect(Card::stats().late_s > 0.0 && Card::stats().late_s <= elapsed.count(), "no longer than time has passed");
}

// A model is loaded in no time. A copy into its memory after a graph takes what any copy does.
void write_weights() {
    constexpr size_t          n_bytes = 1 << 20;
    const Card                card(false);
    const oallama::BackendPtr stream = new_stream();
    const Sum                 made(n_bytes / sizeof(float));
    ggml_backend_buffer_set_usage(made.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const std::vector<char> bytes(n_bytes);
    for (const bool loaded : {false, true}) {
        expect(emulated_reset_stats() == 0, "it counts anew");
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_tensor_set(made.x, bytes.data(), 0, n_bytes);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        expect(Card::stats().bytes_in == (loaded ? int64_t{n_bytes} : 0), "a loaded model's weights are copied");
        expect(!loaded || elapsed.count() >= n_bytes / 5e8, "and that takes time");
        launch(stream, made.empty);
    }
}

// Captures a graph that was launched twice alike, as CUDA does, until something of it lies elsewhere.
void capture() {
    const Card                card(true);
    const oallama::BackendPtr stream = new_stream();
    const Sum                 made(64);
    const auto                captured = [&](int n_launches) {
        expect(emulated_reset_stats() == 0, "it counts anew");
        for (int i = 0; i < n_launches; i++) {
            launch(stream, made.graph);
        }
        expect(Card::stats().n_graphs == n_launches, "every launch counts");
        return Card::stats().n_captured;
    };
    expect(captured(2) == 0, "the second launch captures");
    expect(captured(3) == 3, "later ones are of what was captured");
    std::swap(made.x->data, made.other->data);
    expect(captured(3) == 1, "a tensor that lies elsewhere has it captured anew");
    ggml_backend_synchronize(stream.get());
}

// A mul-mat by experts takes as long as reading those that its tokens use.
void read_the_experts_that_are_used() {
    const Card                card(false);
    constexpr int32_t         n_used = 32;
    const oallama::BackendPtr stream = new_stream();
    const oallama::ContextPtr ctx    = oallama::new_context(4, 1, 4);
    ggml_tensor *             w      = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 1024, 320, n_used); // 0.13 ms each
    ggml_tensor *             x      = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 1024, 1, 1);
    ggml_tensor *             ids    = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_used, 1);
    ggml_cgraph *             graph  = ggml_new_graph_custom(ctx.get(), 4, false);
    ggml_build_forward_expand(graph, ggml_mul_mat_id(ctx.get(), w, x, ids));
    const oallama::BufferPtr memory(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(device())));
    const double one     = 1024.0 * 320.0 * 4.0 / 1e10;
    const auto   seconds = [&](const std::vector<int32_t> & experts) {
        ggml_backend_tensor_set(ids, experts.data(), 0, ggml_nbytes(ids));
        double least = 1.0;
        for (int i = 0; i < 10; i++) {
            const auto start = std::chrono::steady_clock::now();
            launch(stream, graph);
            ggml_backend_synchronize(stream.get());
            least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        return least;
    };
    std::vector<int32_t> experts(n_used, 7);
    const double         same = seconds(experts);
    expect(same >= one && same < n_used / 2.0 * one, "one expert is read once");
    std::iota(experts.begin(), experts.end(), 0);
    expect(seconds(experts) >= n_used * one, "all of them are read");
}

// More bytes than any device has, beside those that are held.
void refuse_too_much() {
    const Card               card(true);
    const auto               buft = ggml_backend_dev_buffer_type(device());
    const oallama::BufferPtr held(ggml_backend_buft_alloc_buffer(buft, 64));
    for (const size_t bytes : {size_t{INT64_MAX}, SIZE_MAX, size_t{1} << 62U}) {
        const oallama::BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, bytes));
        expect(buffer == nullptr && Card::stats().device_bytes == 64, "too much is refused");
    }
}

// Callbacks without a result: the process lives on, and every later graph fails.
void run_out_of_memory() {
    for (int call = 0; call < 3; call++) {
        const Card                 card(true);
        const oallama::BackendPtr  stream = new_stream();
        const Sum                  made(4);
        const ggml_backend_event_t event     = ggml_backend_event_new(device());
        float                      values[4] = {};
        launch(stream, made.empty);
        out_of_memory = true;
        switch (call) {
            case 0: ggml_backend_event_record(event, stream.get()); break;
            case 1: ggml_backend_tensor_set(made.x, values, 0, sizeof values); break;
            default: ggml_backend_tensor_get(made.x, values, 0, sizeof values); break;
        }
        const ggml_backend_event_t second = ggml_backend_event_new(device());
        out_of_memory                     = false;
        expect(second == nullptr, "there is no event without memory");
        expect(ggml_backend_graph_compute_async(stream.get(), made.empty) == GGML_STATUS_ALLOC_FAILED, "a graph fails");
        ggml_backend_event_synchronize(event);
        ggml_backend_event_free(event);
    }
}

} // namespace

int main() {
    add_in_two_threads(/*real=*/true);
    add_in_two_threads(/*real=*/false);
    be_late();
    write_weights();
    capture();
    read_the_experts_that_are_used();
    refuse_too_much();
    run_out_of_memory();
    std::printf("%d failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}
