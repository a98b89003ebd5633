// The device interface: what ggml may ask of a device of ours.

#pragma once

#include <atomic>
#include <string>

#include "ggml_backend_abi.h"

namespace oallama {

struct DeviceContext {
    std::string                name;
    std::string                description;
    bool                       resident = false;   // its results are in a device's memory, not the host's
    ggml_backend_buffer_type_t named    = nullptr; // it computes nothing, but makes this known by name

    // The device whose memory a resident device uses. NULL: no plan has blocks there, and it computes nothing. Other
    // threads read it while plans are loaded and freed.
    std::atomic<ggml_backend_dev_t> memory{nullptr};
};

extern const ggml_backend_device_i oallama_device_i; // of devices whose context is a DeviceContext

// Says that a loaded plan names a device, until it has been released as often. While all plans name the same one,
// results in host memory are by default in its pinned memory, as those of ggml's CPU device are in llama.cpp.
void add_partner(ggml_backend_dev_t device);
void remove_partner(ggml_backend_dev_t device);

} // namespace oallama
