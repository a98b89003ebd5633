#include "util.h"

#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

namespace oallama {

namespace {

thread_local std::string last_message;

} // namespace

void require(bool condition, const std::string & message) {
    if (!condition) {
        throw Error(OALLAMA_INVALID, message);
    }
}

std::string read_file(const char * variable, const char * path) {
    const std::ifstream file(path, std::ios::binary);
    std::ostringstream  text;
    text << file.rdbuf();
    require(file.good() && text.good(), std::string(variable) + " names " + path + ", which cannot be read");
    return text.str();
}

namespace {

struct ComputeBytes {
    std::mutex                            mutex;
    std::map<ggml_backend_dev_t, int64_t> on;
};

ComputeBytes & compute_bytes() {
    static auto * the_bytes = new ComputeBytes; // contexts may be freed when statics are destroyed
    return *the_bytes;
}

} // namespace

void count_compute(ggml_backend_dev_t device, int64_t bytes) {
    ComputeBytes &                    held = compute_bytes();
    const std::lock_guard<std::mutex> lock(held.mutex);
    held.on[device] += bytes;
    counters().device_compute += bytes;
}

int64_t compute_on(ggml_backend_dev_t device) {
    ComputeBytes &                    held = compute_bytes();
    const std::lock_guard<std::mutex> lock(held.mutex);
    const auto                        found = held.on.find(device);
    return found == held.on.end() ? 0 : found->second;
}

void set_last_error(const char * message) noexcept {
    try {
        last_message = message;
    } catch (...) {
        last_message.clear();
    }
}

const char * last_error() noexcept {
    return last_message.c_str();
}

void log(ggml_log_level level, const char * text) noexcept {
    ggml_log_callback callback  = nullptr;
    void *            user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    if (callback == nullptr) {
        return;
    }
    try {
        callback(level, text, user_data);
    } catch (...) {
        return; // a log line is not worth the process
    }
}

void log_error(const char * message) noexcept {
    try {
        log(GGML_LOG_LEVEL_ERROR, ("oallama: " + std::string(message) + "\n").c_str());
    } catch (const std::bad_alloc &) {
        log(GGML_LOG_LEVEL_ERROR, "oallama: out of host memory\n");
    }
}

ContextPtr new_context(int64_t n_tensors, int64_t n_graphs, int64_t n_nodes) {
    const size_t     graph  = n_graphs > 0 ? ggml_graph_overhead_custom(static_cast<size_t>(n_nodes), false) : 0;
    ggml_init_params params = {};
    params.mem_size =
        static_cast<size_t>(n_tensors) * ggml_tensor_overhead() + static_cast<size_t>(n_graphs) * graph + 1024;
    params.no_alloc = true;
    ContextPtr ctx(ggml_init(params));
    if (!ctx) {
        throw std::bad_alloc();
    }
    return ctx;
}

bool is_pinned(ggml_backend_buffer_t buffer, ggml_backend_dev_t device) {
    return buffer != nullptr && buffer->buft == ggml_backend_dev_host_buffer_type(device);
}

BufferPtr new_pinned(ggml_backend_dev_t device, size_t size) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(device);
    BufferPtr                  buffer(buft == nullptr ? nullptr : ggml_backend_buft_alloc_buffer(buft, size));
    return is_pinned(buffer.get(), device) ? std::move(buffer) : nullptr;
}

ggml_backend_dev_t cpu_device() {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        throw Error(OALLAMA_FAILED, "this ggml has no CPU device");
    }
    return device;
}

std::vector<ggml_backend_buffer_type_t> cpu_layouts() {
    std::vector<ggml_backend_buffer_type_t> bufts;
    ggml_backend_dev_t                      device = cpu_device();

    const auto get_extra_bufts = proc_address<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_dev_backend_reg(device),
                                                                                  "ggml_backend_dev_get_extra_bufts");
    if (get_extra_bufts != nullptr) {
        for (ggml_backend_buffer_type_t * buft = get_extra_bufts(device); buft != nullptr && *buft != nullptr; buft++) {
            bufts.push_back(*buft);
        }
    }
    bufts.push_back(ggml_backend_dev_buffer_type(device));
    return bufts;
}

bool multiplies_right(ggml_backend_buffer_type_t layout, const ggml_tensor * mul_mat) {
    const bool one_matrix = mul_mat->op == GGML_OP_MUL_MAT_ID || mul_mat->ne[2] * mul_mat->ne[3] == 1;
    return one_matrix || ggml_backend_buft_is_host(layout);
}

bool has_feature(ggml_backend_reg_t reg, const char * name) {
    const auto   features = proc_address<ggml_backend_get_features_t>(reg, "ggml_backend_get_features");
    const auto * feature  = features == nullptr ? nullptr : features(reg);
    for (; feature != nullptr && feature->name != nullptr; feature++) {
        if (std::strcmp(feature->name, name) == 0) {
            return true;
        }
    }
    return false;
}

Cpu::Cpu() : backend_(ggml_backend_dev_init(cpu_device(), nullptr)) {
    if (!backend_) {
        throw Error(OALLAMA_FAILED, "ggml's CPU back end could not be initialised");
    }
}

void Cpu::set_n_threads(int n_threads) {
    proc_address<ggml_backend_set_n_threads_t>(ggml_backend_dev_backend_reg(cpu_device()),
                                               "ggml_backend_set_n_threads")(backend_.get(), n_threads);
    keep_threads(n_threads);
}

// ggml without OpenMP makes threads for each graph that it computes, and joins them behind it, unless it is given some
// that stay. These sleep at once: while they spun they would take cores from llama.cpp's own.
void Cpu::keep_threads(int n_threads) {
    if (n_threads <= n_threads_kept_) {
        return;
    }
    n_threads_kept_        = n_threads;
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(cpu_device());
    if (has_feature(reg, "OPENMP")) {
        return;
    }
    const auto make = proc_address<decltype(&ggml_threadpool_new)>(reg, "ggml_threadpool_new");
    const auto end  = proc_address<decltype(&ggml_threadpool_free)>(reg, "ggml_threadpool_free");
    const auto use  = proc_address<decltype(&ggml_backend_cpu_set_threadpool)>(reg, "ggml_backend_cpu_set_threadpool");
    if (make == nullptr || end == nullptr || use == nullptr) {
        return;
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = 0;
    Threadpool more(make(&params), end);
    use(backend_.get(), more.get());
    threads_ = std::move(more);
}

void Cpu::set_abort_callback(ggml_abort_callback callback, void * data) {
    const auto set = proc_address<ggml_backend_set_abort_callback_t>(ggml_backend_dev_backend_reg(cpu_device()),
                                                                     "ggml_backend_set_abort_callback");
    if (set != nullptr) {
        set(backend_.get(), callback, data);
    }
}

} // namespace oallama
