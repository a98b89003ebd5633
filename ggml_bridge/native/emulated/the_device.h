// The emulated device of this process, as ggml's callbacks and the C interface find it.

#pragma once

#include "../split/util.h"
#include "device.h"

namespace emulated {

// NULL before it is registered for the first time.
std::unique_ptr<Device> & the_emulated();

inline Device & emulated_device() {
    return *the_emulated();
}

// Runs what a callback without a result asks for. Where that fails, for want of host memory, graphs fail from then on.
template <typename F> void attempt(F && f) noexcept {
    if (oallama::logged(f) != OALLAMA_OK) {
        emulated_device().failed = true;
    }
}

extern ggml_backend_device the_device;
ggml_backend_buffer_type_t device_buft(); // its memory
ggml_backend_buffer_type_t host_buft();   // pinned host memory

} // namespace emulated
