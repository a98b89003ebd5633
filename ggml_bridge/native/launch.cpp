// Seconds to launch a graph, to queue one, and to leave the CPU for a device and come back.

#include <algorithm>
#include <set>

#include "session.h"

namespace bridge {

namespace {

constexpr int64_t max_excursions = 256;

// 16 MiB: up to some tenths of a millisecond
constexpr int64_t work_columns = 1024;
constexpr int64_t work_rows    = 4096;

// Seconds that queueing a graph takes from the thread that does it: in the call, and after it, where a thread of the
// driver takes its core. Measured as how much later fixed work is done that begins with the call. Two graphs take
// turns, so that a backend's cache of its last graph does not count.
class LaunchIssue : public gb_timer {
  public:
    explicit LaunchIssue(ggml_backend_dev_t device)
        : device_(ggml_backend_dev_name(device)), backend_(init_backend(device)) {
        constexpr int     n_nodes   = 4; // gate, up, GLU, down
        constexpr int     n_tensors = n_nodes + 2;
        constexpr int64_t n         = 32;
        for (Ffn & ffn : ffns_) {
            ffn.ctx               = new_context(n_tensors, n_nodes);
            ggml_context * ctx    = ffn.ctx.get();
            ggml_tensor *  input  = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n);
            ggml_tensor *  weight = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n);
            ggml_tensor *  gate   = ggml_mul_mat(ctx, weight, input);
            ggml_tensor *  up     = ggml_mul_mat(ctx, weight, input);
            ffn.result            = ggml_mul_mat(ctx, weight, ggml_swiglu_split(ctx, gate, up));
            ffn.graph             = new_graph(ctx, n_nodes);
            ggml_build_forward_expand(ffn.graph, ffn.result);
            ffn.buffer = alloc_tensors(ctx, ggml_backend_dev_buffer_type(device));
            ggml_backend_buffer_clear(ffn.buffer.get(), 0);
        }
    }

    double run_once() override {
        const double alone       = work();
        const Ffn &  ffn         = ffns_[next_];
        next_                    = (next_ + 1) % n_graphs;
        const double      start  = seconds_now();
        const ggml_status status = ggml_backend_graph_compute_async(backend_.get(), ffn.graph);
        work();
        const double both = seconds_now() - start;
        if (status != GGML_STATUS_SUCCESS) {
            fail(OALLAMA_FAILED, "ggml could not compute a graph on " + device_);
        }
        float close = 0.0F; // over RPC only an answer says that the device is idle again
        ggml_backend_tensor_get_async(backend_.get(), ffn.result, &close, 0, sizeof close);
        ggml_backend_synchronize(backend_.get());
        return std::max(both - alone, 1e-9);
    }

  private:
    static constexpr int n_graphs = 2;

    struct Ffn {
        ContextPtr    ctx;
        BufferPtr     buffer;
        ggml_cgraph * graph  = nullptr;
        ggml_tensor * result = nullptr;
    };

    double work() {                     // seconds
        constexpr int n_steps = 400000; // some tenths of a millisecond: longer than a driver's thread is awake
        const double  start   = seconds_now();
        for (int i = 0; i < n_steps; i++) {
            state_ = state_ * 6364136223846793005U + 1442695040888963407U;
        }
        return seconds_now() - start;
    }

    std::string       device_;
    Ffn               ffns_[n_graphs];
    BackendPtr        backend_;
    int               next_  = 0;
    volatile uint64_t state_ = 1;
};

// A chain of operations on one activation: the first on the CPU, then turns of device and CPU. Between two excursions
// the CPU has some tenths of a millisecond of work, as it has in a model: until then threads of a driver, or of a
// worker, have gone to sleep and must be woken again.
std::unique_ptr<GraphTimer> new_boundary(ggml_backend_dev_t device, int64_t n_bytes, int64_t n_excursions, bool on_cpu,
                                         int32_t n_threads) {
    require(n_bytes > 0 && n_bytes <= int64_t{1} << 31, "an activation must be of 1 byte to 2 GiB");
    require(n_excursions > 0 && n_excursions <= max_excursions, "the number of excursions must be 1 to 256");
    require(!is_cpu(device), "the CPU has no boundary with itself");

    auto          timer      = std::make_unique<GraphTimer>(device, n_threads);
    const int64_t n_elements = ceil_div(n_bytes, static_cast<int64_t>(sizeof(float)));
    timer->leaf_ctx          = new_context(3);
    ggml_context * leafs     = timer->leaf_ctx.get();
    ggml_tensor *  node      = ggml_new_tensor_1d(leafs, GGML_TYPE_F32, n_elements);
    ggml_tensor *  weight    = ggml_new_tensor_2d(leafs, GGML_TYPE_F32, work_columns, work_rows);
    ggml_tensor *  input     = ggml_new_tensor_1d(leafs, GGML_TYPE_F32, work_columns);
    timer->leaf_buffer       = alloc_tensors(leafs, ggml_backend_dev_buffer_type(cpu_device()));
    ggml_backend_buffer_clear(timer->leaf_buffer.get(), 0);

    const int64_t n_nodes         = 2 + 3 * n_excursions;
    timer->graph_ctx              = new_context(n_nodes, n_nodes);
    ggml_context *          ctx   = timer->graph_ctx.get();
    ggml_cgraph *           graph = new_graph(ctx, n_nodes);
    std::set<ggml_tensor *> on_device;
    for (int64_t i = 0; i <= n_excursions; i++) {
        if (i > 0) {
            node = ggml_scale(ctx, node, 1.0F);
            on_device.insert(node);
        }
        node = ggml_scale(ctx, node, 1.0F);
        ggml_build_forward_expand(graph, node);
        if (i < n_excursions) {
            ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weight, input));
        }
    }
    Session & session = timer->session;
    session.set_graph(graph, [&](ggml_tensor * tensor) {
        return on_device.count(tensor) > 0 && !on_cpu ? session.device_backend() : session.cpu_backend();
    });
    session.compute();
    return timer;
}

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_launch_new(const char * device, int32_t n_threads, gb_timer ** timer) {
    return guarded([&] { *timer = new_launch(find_device(device), n_threads).release(); });
}

int gb_launch_issue_new(const char * device, gb_timer ** timer) {
    return guarded([&] { *timer = new LaunchIssue(find_device(device)); });
}

int gb_boundary_new(const char * device, int64_t n_bytes, int64_t n_excursions, int32_t on_cpu, int32_t n_threads,
                    int64_t * n_splits, gb_timer ** timer) {
    return guarded([&] {
        auto made = new_boundary(find_device(device), n_bytes, n_excursions, on_cpu != 0, n_threads);
        *n_splits = made->session.n_splits();
        *timer    = made.release();
    });
}
