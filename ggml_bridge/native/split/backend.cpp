#include "backend.h"

#include <cstring>

namespace oallama {

namespace {

struct BackendContext {
    std::shared_ptr<SplitBackend> split;  // NULL: the device computed nothing when this was made
    ggml_backend_dev_t            memory; // whose memory results are in; NULL: the host's
};

BackendContext & context_of(ggml_backend_t backend) {
    return *static_cast<BackendContext *>(backend->context);
}

// Throws OALLAMA_FAILED for a backend that was made while its device computed nothing: llama.cpp has given its results
// memory of the wrong kind.
SplitBackend & split_of(ggml_backend_t backend) {
    if (context_of(backend).split == nullptr) {
        throw Error(OALLAMA_FAILED,
                    "this context was made before the plan that puts blocks on a device was loaded; make it anew");
    }
    return *context_of(backend).split;
}

const char * oallama_backend_get_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(backend->device);
}

void oallama_backend_free(ggml_backend_t backend) {
    delete &context_of(backend);
    delete backend;
}

ggml_status oallama_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_status computed = GGML_STATUS_FAILED;
    const int   status   = logged([&] { computed = split_of(backend).compute(graph, context_of(backend).memory); });
    return status == OALLAMA_OK          ? computed
           : status == OALLAMA_NO_MEMORY ? GGML_STATUS_ALLOC_FAILED
                                         : GGML_STATUS_FAILED;
}

// llama.cpp makes the copy, which waits for the device. Until then the link is free.
bool oallama_backend_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst,
                                      const ggml_tensor * /*src*/, ggml_tensor * /*dst*/) {
    try {
        if (backend_src != backend_dst && context_of(backend_dst).split) {
            context_of(backend_dst).split->device_computes();
        }
    } catch (const std::exception & error) {
        log_error(error.what());
    }
    return false;
}

void oallama_backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph,
                                    ggml_backend_graph_optimize_params * params) {
    // graph_compute meets the same, and can say so
    guarded([&] { split_of(backend).prepare(graph, context_of(backend).memory, params); });
}

const ggml_backend_i oallama_backend_i = {
    /* .get_name            = */ oallama_backend_get_name,
    /* .free                = */ oallama_backend_free,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ oallama_backend_cpy_tensor_async,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ oallama_backend_graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ oallama_backend_graph_optimize,
};

ggml_guid_t oallama_backend_guid() {
    static ggml_guid guid = {0x6f, 0x61, 0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x2d,
                             0x73, 0x70, 0x6c, 0x69, 0x74, 0x2d, 0x30, 0x31};
    return &guid;
}

void oallama_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    if (context_of(backend).split) {
        logged([&] { context_of(backend).split->host().set_n_threads(n_threads); });
    }
}

void oallama_backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    if (context_of(backend).split) {
        context_of(backend).split->host().set_abort_callback(callback, data);
    }
}

} // namespace

ggml_backend_t new_backend(ggml_backend_dev_t device, std::shared_ptr<SplitBackend> split, ggml_backend_dev_t memory) {
    auto context     = std::make_unique<BackendContext>(BackendContext{std::move(split), memory});
    auto backend     = new ggml_backend{oallama_backend_guid(), oallama_backend_i, device, nullptr};
    backend->context = context.release();
    return backend;
}

void * backend_proc_address(const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(oallama_backend_set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(oallama_backend_set_abort_callback);
    }
    return nullptr;
}

} // namespace oallama
