// The memory of blocks whose neighbours are on the device.
//
// ggml's scheduler puts what a backend computes into the backend's own buffer type, and hands a node whose inputs the
// device can read to the device itself where both have the same buffer type: the GLU between our mul-mats too. So ours
// is the device's in all but its address. Devices know their buffer types by name and context, and take it for their
// own: nothing is copied between the two, in either direction. What it allocates is the device's.

#pragma once

#include "util.h"

namespace oallama {

// The device's buffer type under another address, the same for every call. NULL where the device computes in host
// memory, or takes no other address for its own.
ggml_backend_buffer_type_t resident_buft(ggml_backend_dev_t device);

// Whether resident_buft returned it, for any device.
bool is_resident_buft(ggml_backend_buffer_type_t buft);

} // namespace oallama
