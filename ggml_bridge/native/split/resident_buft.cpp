#include "resident_buft.h"

#include <map>
#include <mutex>

#include "abi_check.h"

namespace oallama {

namespace {

struct ResidentBuft {
    BufferType                 buft; // first: ggml is given its address
    ggml_backend_buffer_type_t original;
};

ggml_backend_buffer_t alloc_original(ggml_backend_buffer_type_t buft, size_t size) {
    return ggml_backend_buft_alloc_buffer(reinterpret_cast<ResidentBuft *>(buft)->original, size);
}

} // namespace

ggml_backend_buffer_type_t resident_buft(ggml_backend_dev_t device) {
    static std::mutex                                         mutex;
    static std::map<ggml_backend_buffer_type_t, ResidentBuft> known; // never freed: schedulers keep the addresses

    const ggml_backend_buffer_type_t original = ggml_backend_dev_buffer_type(device);
    if (original == nullptr || ggml_backend_buft_is_host(original)) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    ggml_backend_buffer_type          copy = as_api3(original);
    copy.iface.alloc_buffer                = alloc_original;
    copy.iface.alloc_buffer_n              = nullptr; // else ggml would ask the device past alloc_original
    copy.iface.get_alloc_size_n            = nullptr;
    ggml_backend_buffer_type_t ours =
        known.try_emplace(original, ResidentBuft{BufferType(copy), original}).first->second.buft.get();
    return device->iface.supports_buft(device, ours) ? ours : nullptr;
}

bool is_resident_buft(ggml_backend_buffer_type_t buft) {
    return buft->iface.alloc_buffer == alloc_original;
}

} // namespace oallama
