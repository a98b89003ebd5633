// How the two sides' bytes come together in llama.cpp's tensors, and apart.

#pragma once

#include "split_program.h"

namespace oallama {

// Where a full value's bytes are on the host.
const char * host_data(const ggml_tensor * tensor);

// Elements [begin, begin + count) of each row, one row after the other.
void gather(const ggml_tensor * src, int64_t begin, int64_t count, char * out);

// Makes a node whole: from has what the device computed, the node's memory what the host did.
void join(const Download & download, const ggml_tensor * node, const char * from);

} // namespace oallama
