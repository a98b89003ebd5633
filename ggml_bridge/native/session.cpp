#include "session.h"

#include <algorithm>
#include <cstring>

namespace bridge {

namespace {

bool openmp(ggml_backend_reg_t cpu_reg) {
    const auto get_features = proc_address<ggml_backend_get_features_t>(cpu_reg, "ggml_backend_get_features");
    if (get_features == nullptr) {
        return false;
    }
    for (const ggml_backend_feature * feature = get_features(cpu_reg); feature->name != nullptr; feature++) {
        if (std::strcmp(feature->name, "OPENMP") == 0) {
            return true;
        }
    }
    return false;
}

} // namespace

BackendPtr init_backend(ggml_backend_dev_t device) {
    BackendPtr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(device) +
                                        " could not be initialised" + ggml_reason());
    }
    return backend;
}

//
// CpuBackend
//

CpuBackend::CpuBackend(int32_t n_threads) : backend_(init_backend(cpu_device())) {
    require(n_threads > 0 && n_threads <= GGML_MAX_N_THREADS, "the number of threads must be 1 to 512");
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(cpu_device());

    const auto set_n_threads = proc_address<ggml_backend_set_n_threads_t>(reg, "ggml_backend_set_n_threads");
    if (set_n_threads == nullptr) {
        throw Error(OALLAMA_FAILED, "the CPU backend does not let its threads be set");
    }
    set_n_threads(backend_.get(), n_threads);

    if (n_threads > 1 && !openmp(reg)) {
        const auto create = proc_address<ggml_threadpool_new_t>(reg, "ggml_threadpool_new");
        const auto attach = proc_address<ggml_backend_cpu_set_threadpool_t>(reg, "ggml_backend_cpu_set_threadpool");
        threadpool_free_  = proc_address<ggml_threadpool_free_t>(reg, "ggml_threadpool_free");
        if (create != nullptr && attach != nullptr && threadpool_free_ != nullptr) {
            ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
            threadpool_                   = create(&params);
            attach(backend_.get(), threadpool_);
        }
    }
}

CpuBackend::~CpuBackend() {
    backend_.reset();
    if (threadpool_ != nullptr) {
        threadpool_free_(threadpool_);
    }
}

//
// Session
//

Session::Session(ggml_backend_dev_t device, int32_t n_threads) : device_(device), cpu_(n_threads) {
    if (!is_cpu(device)) {
        device_backend_ = init_backend(device);
    }
}

void Session::new_sched(ggml_cgraph * graph) {
    ggml_backend_t             backends[2] = {};
    ggml_backend_buffer_type_t bufts[2]    = {};
    int                        n_backends  = 0;
    ggml_backend_buffer_type_t pinned      = ggml_backend_dev_host_buffer_type(device_); // NULL of the CPU
    if (device_backend_) {
        bufts[n_backends]      = ggml_backend_dev_buffer_type(device_);
        backends[n_backends++] = device_backend_.get();
    }
    bufts[n_backends]      = pinned != nullptr ? pinned : ggml_backend_dev_buffer_type(cpu_device());
    backends[n_backends++] = cpu_.get();

    const int n_nodes = ggml_graph_n_nodes(graph);
    require(n_nodes > 0, "an empty graph cannot be timed");
    sched_.reset(ggml_backend_sched_new(backends, bufts, n_backends, graph_capacity(n_nodes), /*parallel=*/false,
                                        /*op_offload=*/false));
    if (!sched_) {
        throw Error(OALLAMA_NO_MEMORY, "ggml could not create a scheduler");
    }
}

void Session::alloc(ggml_cgraph * graph) {
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph)) {
        throw Error(OALLAMA_NO_MEMORY, std::string("not enough memory on ") + ggml_backend_dev_name(device_) +
                                           " for the graph" + ggml_reason());
    }
    graph_ = graph;

    ggml_tensor * last   = ggml_graph_node(graph, -1);
    const bool on_device = device_backend_ && ggml_backend_sched_get_tensor_backend(sched_.get(), last) != cpu_.get();
    closing_             = on_device ? last : nullptr;
}

void Session::begin() {
    const ggml_status status = ggml_backend_sched_graph_compute_async(sched_.get(), graph_);
    if (status != GGML_STATUS_SUCCESS) {
        throw Error(OALLAMA_FAILED,
                    std::string("ggml could not compute a graph on ") + ggml_backend_dev_name(device_) + ggml_reason());
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

//
// Launch
//

Launch::Launch(ggml_backend_dev_t device, int32_t n_threads)
    : leaf_ctx_(new_context(1)), graph_ctx_(new_context(1, 1)), session_(device, n_threads) {
    ggml_tensor * leaf = ggml_new_tensor_1d(leaf_ctx_.get(), GGML_TYPE_F32, 32);
    leaf_buffer_       = alloc_tensors(leaf_ctx_.get(), ggml_backend_dev_buffer_type(device));
    ggml_backend_buffer_clear(leaf_buffer_.get(), 0);

    ggml_cgraph * graph = new_graph(graph_ctx_.get(), 1);
    ggml_build_forward_expand(graph, ggml_scale(graph_ctx_.get(), leaf, 1.0F));
    session_.set_graph(graph, [&](ggml_tensor *) { return session_.device_backend(); });
}

double Launch::median_seconds() {
    constexpr int n_warmup = 4;
    constexpr int n_runs   = 15;
    for (int i = 0; i < n_warmup; i++) {
        run_once();
    }
    std::vector<double> seconds;
    for (int i = 0; i < n_runs; i++) {
        seconds.push_back(run_once());
    }
    std::nth_element(seconds.begin(), seconds.begin() + n_runs / 2, seconds.end());
    return seconds[n_runs / 2];
}

} // namespace bridge
