// How the two sides' bytes come together in llama.cpp's tensors, and apart.

#pragma once

#include "host.h"

namespace oallama {

// Where a full value's bytes are on the host.
const char * host_data(const ggml_tensor * tensor);

// Rows of a tensor, over all its dimensions: [first, first + count).
struct Rows {
    int64_t first;
    int64_t count;
};

int64_t n_rows(const ggml_tensor * tensor);

// Elements [begin, begin + count) of each of the rows, one row after the other.
void gather(const ggml_tensor * src, int64_t begin, int64_t count, Rows rows, char * out);

// Where in a node's memory the first byte of a download belongs, if it can be fetched to there; and how many it is.
char * place_of(const Download & download, const ggml_tensor * node);
size_t download_bytes(const Download & download);

// Makes a node whole: from has what the device computed, the node's memory what the host did.
void join(Host & host, const Download & download, const ggml_tensor * node, const char * from);

} // namespace oallama
