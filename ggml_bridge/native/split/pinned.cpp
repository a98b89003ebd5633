#include "pinned.h"

namespace oallama {

bool is_pinned(ggml_backend_buffer_t buffer, ggml_backend_dev_t device) {
    return buffer != nullptr && buffer->buft == ggml_backend_dev_host_buffer_type(device);
}

BufferPtr new_pinned(ggml_backend_dev_t device, size_t size) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(device);
    BufferPtr                  made(buft == nullptr ? nullptr : ggml_backend_buft_alloc_buffer(buft, size));
    return is_pinned(made.get(), device) ? std::move(made) : nullptr;
}

} // namespace oallama
