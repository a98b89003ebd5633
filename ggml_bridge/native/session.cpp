#include "session.h"

#include <algorithm>

namespace bridge {

BackendPtr init_backend(ggml_backend_dev_t device) {
    BackendPtr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        fail(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(device) + " could not be initialised");
    }
    return backend;
}

//
// Session
//

Session::Session(ggml_backend_dev_t device, int32_t n_threads) : device_(device) {
    require(n_threads > 0 && n_threads <= GGML_MAX_N_THREADS, "the number of threads must be 1 to 512");
    cpu_.set_n_threads(n_threads);
    if (!is_cpu(device)) {
        device_backend_ = init_backend(device);
    }
}

void Session::set_graph(ggml_cgraph * graph, const std::function<ggml_backend_t(ggml_tensor *)> & backend_of) {
    std::vector<ggml_backend_t>             backends;
    std::vector<ggml_backend_buffer_type_t> bufts;
    ggml_backend_buffer_type_t              pinned = ggml_backend_dev_host_buffer_type(device_); // NULL of the CPU
    if (device_backend_) {
        backends.push_back(device_backend_.get());
        bufts.push_back(ggml_backend_dev_buffer_type(device_));
    }
    backends.push_back(cpu_.get());
    bufts.push_back(pinned != nullptr ? pinned : ggml_backend_dev_buffer_type(cpu_device()));

    const int n_nodes = ggml_graph_n_nodes(graph);
    sched_.reset(ggml_backend_sched_new(backends.data(), bufts.data(), static_cast<int>(backends.size()),
                                        graph_capacity(n_nodes), /*parallel=*/false, /*op_offload=*/false));
    if (!sched_) {
        throw Error(OALLAMA_NO_MEMORY, "ggml could not create a scheduler");
    }
    for (int i = 0; i < n_nodes; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        ggml_backend_sched_set_tensor_backend(sched_.get(), node, backend_of ? backend_of(node) : device_backend());
    }
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph)) {
        fail(OALLAMA_NO_MEMORY,
             std::string("not enough memory on ") + ggml_backend_dev_name(device_) + " for the graph");
    }
    graph_ = graph;

    ggml_tensor * last   = ggml_graph_node(graph, -1);
    const bool on_device = device_backend_ && ggml_backend_sched_get_tensor_backend(sched_.get(), last) != cpu_.get();
    closing_             = on_device ? last : nullptr;
}

void Session::begin() {
    if (ggml_backend_sched_graph_compute_async(sched_.get(), graph_) != GGML_STATUS_SUCCESS) {
        fail(OALLAMA_FAILED, std::string("ggml could not compute a graph on ") + ggml_backend_dev_name(device_));
    }
}

void Session::finish() {
    float close = 0.0F;
    if (closing_ != nullptr) {
        ggml_backend_tensor_get_async(device_backend_.get(), closing_, &close, 0, sizeof close);
    }
    ggml_backend_sched_synchronize(sched_.get());
}

double Session::compute() {
    const double start = seconds_now();
    begin();
    finish();
    return seconds_now() - start;
}

double Session::compute_each(int64_t n, double launch_seconds) {
    const double seconds = compute();
    // a launch that was slower when it was measured alone must not turn a time negative
    return std::max(seconds - launch_seconds, 0.5 * seconds) / static_cast<double>(n);
}

//
// launch
//

std::unique_ptr<GraphTimer> new_launch(ggml_backend_dev_t device, int32_t n_threads) {
    auto timer          = std::make_unique<GraphTimer>(device, n_threads);
    timer->leaf_ctx     = new_context(1);
    ggml_tensor * leaf  = ggml_new_tensor_1d(timer->leaf_ctx.get(), GGML_TYPE_F32, 32);
    timer->leaf_buffer  = alloc_tensors(timer->leaf_ctx.get(), ggml_backend_dev_buffer_type(device));
    timer->graph_ctx    = new_context(1, 1);
    ggml_cgraph * graph = new_graph(timer->graph_ctx.get(), 1);
    ggml_backend_buffer_clear(timer->leaf_buffer.get(), 0);
    ggml_build_forward_expand(graph, ggml_scale(timer->graph_ctx.get(), leaf, 1.0F));
    timer->session.set_graph(graph);
    return timer;
}

double launch_seconds(gb_timer & launch) {
    constexpr int n_warmup = 4;
    constexpr int n_runs   = 15;
    for (int i = 0; i < n_warmup; i++) {
        launch.run_once();
    }
    std::vector<double> seconds;
    for (int i = 0; i < n_runs; i++) {
        seconds.push_back(launch.run_once());
    }
    return median(std::move(seconds));
}

} // namespace bridge
