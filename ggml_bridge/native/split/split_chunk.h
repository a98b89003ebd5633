// A mul-mat of which some tokens are computed at a time: a chunk of them.
//
// llama.cpp reserves memory as if the logits of a whole micro-batch were wanted, of which one token's mostly are. With
// a vocabulary of 128k they take half a megabyte a token, and more of a small device than all other activations
// together. So plans give the output weight chunks.

#pragma once

#include <algorithm>

#include "split_graph.h"

namespace oallama {

// Tokens of a chunk, where a sub-graph is nothing but one such mul-mat and has more of them; 0: it is computed whole.
int64_t chunk_of(const ggml_cgraph * graph);

// The same sub-graph for count of its tokens, from first on.
class Chunk {
  public:
    Chunk(const ggml_cgraph * whole, int64_t first, int64_t count);

    Chunk(const Chunk &)             = delete;
    Chunk & operator=(const Chunk &) = delete;

    ggml_cgraph * graph() { return &graph_; }

  private:
    ggml_tensor   result_;
    ggml_tensor   x_;
    ggml_tensor * node_ = &result_;
    ggml_cgraph   graph_;
};

// Calls with the graph of each chunk in turn, and of what is left, until one gives something else than success.
template <typename F> ggml_status for_chunks(const ggml_cgraph * whole, int64_t n_tokens, const F & compute) {
    const int64_t all    = whole->nodes[0]->ne[1];
    ggml_status   status = GGML_STATUS_SUCCESS;
    for (int64_t first = 0; first < all && status == GGML_STATUS_SUCCESS; first += n_tokens) {
        Chunk chunk(whole, first, std::min(n_tokens, all - first));
        status = compute(chunk.graph());
    }
    return status;
}

} // namespace oallama
