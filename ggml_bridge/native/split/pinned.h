// Pinned host memory of a device: memory that its copies begin and end in without holding up their caller.
//
// CUDA's and Vulkan's buffer types for it give plain memory where none is left. Only the type of the buffer tells.

#pragma once

#include "error.h"

namespace oallama {

// Whether a buffer is in this device's pinned memory. false for NULL.
bool is_pinned(ggml_backend_buffer_t buffer, ggml_backend_dev_t device);

// A buffer in pinned memory; NULL: the device has none, or none is left.
BufferPtr new_pinned(ggml_backend_dev_t device, size_t size);

} // namespace oallama
