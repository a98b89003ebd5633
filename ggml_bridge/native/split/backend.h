// The backend interface: how ggml sees what runs a context's graphs.

#pragma once

#include "split_backend.h"

namespace oallama {

// split: NULL: of a device that computes nothing. memory: the device's that results are in; NULL: the host's.
ggml_backend_t new_backend(ggml_backend_dev_t device, std::shared_ptr<SplitBackend> split, ggml_backend_dev_t memory);

// ggml's functions for backends that its interface has no place for; NULL: another name.
void * backend_proc_address(const char * name);

} // namespace oallama
