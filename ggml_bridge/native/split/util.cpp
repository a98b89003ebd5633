#include "util.h"

namespace oallama {

namespace {

thread_local std::string last_message;

} // namespace

void require(bool condition, const std::string & message) {
    if (!condition) {
        throw Error(OALLAMA_INVALID, message);
    }
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

void log_error(const char * message) noexcept {
    ggml_log_callback callback  = nullptr;
    void *            user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    if (callback == nullptr) {
        return;
    }
    try {
        callback(GGML_LOG_LEVEL_ERROR, ("oallama: " + std::string(message) + "\n").c_str(), user_data);
    } catch (...) {
        return; // a log line is not worth the process
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
    BufferPtr                  made(buft == nullptr ? nullptr : ggml_backend_buft_alloc_buffer(buft, size));
    return is_pinned(made.get(), device) ? std::move(made) : nullptr;
}

} // namespace oallama
