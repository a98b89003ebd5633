// Buffers in the device's memory and in pinned host memory, as ggml sees them.

#include <array>
#include <cstring>
#include <memory>

#include "../split/abi_check.h"
#include "device.h"

namespace emulated {

namespace {

constexpr size_t  alignment   = 128; // ggml-cuda's
constexpr int64_t row_padding = 512; // elements that ggml-cuda's matrix kernels may read beyond a row

//
// buffer interface
//

void emulated_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    delete static_cast<DeviceRange *>(buffer->context);
    device_of(buffer->buft).device_bytes -= static_cast<int64_t>(buffer->size);
}

void * emulated_buffer_get_base(ggml_backend_buffer_t buffer) {
    return static_cast<DeviceRange *>(buffer->context)->address();
}

void emulated_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                                   size_t size) {
    const Device & device = device_of(buffer->buft);
    if (device.parameters.real_values) {
        std::memset(device.memory_of(tensor, offset, size), value, size);
    }
}

void emulated_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                                size_t size) {
    Device & device = device_of(buffer->buft);
    attempt(device, [&] { device.upload(device.new_stream(), tensor, data, offset, size, /*wait=*/true); });
}

void emulated_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                                size_t size) {
    Device & device = device_of(buffer->buft);
    attempt(device, [&] { device.download(device.new_stream(), tensor, data, offset, size, /*wait=*/true); });
}

bool emulated_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    Device & device = device_of(buffer->buft);
    if (!device.has(src)) {
        return false; // of another device it is copied through the host
    }
    attempt(device, [&] {
        const StreamPtr stream = device.new_stream();
        device.copy_within(stream, src, dst);
        device.time.finish(*stream);
    });
    return true;
}

void emulated_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    if (device_of(buffer->buft).parameters.real_values) {
        const auto * range = static_cast<DeviceRange *>(buffer->context);
        std::memset(range->behind(range->address(), range->size()), value, range->size());
    }
}

const ggml_backend_buffer_i emulated_buffer_i = {
    /* .free_buffer   = */ emulated_buffer_free_buffer,
    /* .get_base      = */ emulated_buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ emulated_buffer_memset_tensor,
    /* .set_tensor    = */ emulated_buffer_set_tensor,
    /* .get_tensor    = */ emulated_buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ emulated_buffer_cpy_tensor,
    /* .clear         = */ emulated_buffer_clear,
    /* .reset         = */ nullptr,
};

//
// buffer type interface
//

const char * emulated_buft_get_name(ggml_backend_buffer_type_t buft) {
    return device_of(buft).parameters.name.c_str();
}

ggml_backend_buffer_t emulated_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    Device & device = device_of(buft);
    if (device.refuses_allocation() || size > static_cast<size_t>(device.parameters.memory_bytes)) {
        return nullptr;
    }
    const auto wanted = static_cast<int64_t>(size);
    if (device.device_bytes.fetch_add(wanted) > device.parameters.memory_bytes - wanted) {
        device.device_bytes -= wanted;
        return nullptr;
    }
    try {
        return ggml_backend_buffer_init(buft, emulated_buffer_i, new DeviceRange(size, device.n_graphs_ever), size);
    } catch (const std::bad_alloc &) {
        device.device_bytes -= wanted;
        return nullptr;
    }
}

size_t emulated_buft_get_alignment(ggml_backend_buffer_type_t /*buft*/) {
    return alignment;
}

size_t emulated_buft_get_alloc_size(ggml_backend_buffer_type_t /*buft*/, const ggml_tensor * tensor) {
    size_t        size = ggml_nbytes(tensor);
    const int64_t rest = tensor->ne[0] % row_padding;
    if (ggml_is_quantized(tensor->type) && rest != 0) {
        size += ggml_row_size(tensor->type, row_padding - rest);
    }
    return size;
}

const char * emulated_host_buft_get_name(ggml_backend_buffer_type_t buft) {
    return device_of(buft).host_name.c_str();
}

void emulated_host_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    device_of(buffer->buft).pinned.free(buffer->context);
}

void emulated_host_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
}

// Allocates pinned memory. Where there is none, silently allocates plain memory, as ggml-cuda does.
ggml_backend_buffer_t emulated_host_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    Device &                 device = device_of(buft);
    const oallama::BufferPtr plain(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), alignment));
    if (!plain) {
        return nullptr;
    }
    try {
        void * const memory = device.refuses_allocation() ? nullptr : device.pinned.allocate(size);
        if (memory == nullptr) {
            return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
        }
        ggml_backend_buffer_i iface = plain->iface;
        iface.free_buffer           = emulated_host_buffer_free_buffer;
        iface.clear                 = emulated_host_buffer_clear;
        return ggml_backend_buffer_init(buft, iface, memory, size);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

bool emulated_host_buft_is_host(ggml_backend_buffer_type_t /*buft*/) {
    return true;
}

const ggml_backend_buffer_type_i emulated_buft_i = {
    /* .get_name         = */ emulated_buft_get_name,
    /* .alloc_buffer     = */ emulated_buft_alloc_buffer,
    /* .alloc_buffer_n   = */ nullptr,
    /* .get_alignment    = */ emulated_buft_get_alignment,
    /* .get_max_size     = */ nullptr,
    /* .get_alloc_size   = */ emulated_buft_get_alloc_size,
    /* .get_alloc_size_n = */ nullptr,
    /* .is_host          = */ nullptr,
};

const ggml_backend_buffer_type_i emulated_host_buft_i = {
    /* .get_name         = */ emulated_host_buft_get_name,
    /* .alloc_buffer     = */ emulated_host_buft_alloc_buffer,
    /* .alloc_buffer_n   = */ nullptr,
    /* .get_alignment    = */ emulated_buft_get_alignment,
    /* .get_max_size     = */ nullptr,
    /* .get_alloc_size   = */ nullptr,
    /* .get_alloc_size_n = */ nullptr,
    /* .is_host          = */ emulated_host_buft_is_host,
};

using BufferTypes = std::array<std::unique_ptr<oallama::BufferType>, most_devices>;

BufferTypes buffer_types(const ggml_backend_buffer_type_i & iface) {
    BufferTypes bufts;
    for (size_t i = 0; i < most_devices; i++) {
        bufts[i] = std::make_unique<oallama::BufferType>(ggml_backend_buffer_type{iface, &the_devices[i], nullptr});
    }
    return bufts;
}

} // namespace

ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t dev) {
    static const BufferTypes bufts = buffer_types(emulated_buft_i);
    return bufts[number_of(dev)]->get();
}

// One for all devices, as CUDA has it: what is pinned is so for each of them.
ggml_backend_buffer_type_t host_buft() {
    static oallama::BufferType buft({emulated_host_buft_i, &the_devices[0], nullptr});
    return buft.get();
}

} // namespace emulated
