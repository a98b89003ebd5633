// The mul-mat by the output weight, for some of its tokens at a time.
//
// llama.cpp reserves memory as if the logits of a whole micro-batch were wanted, of which one token's mostly are. With
// a vocabulary of 128k they take half a megabyte a token, and more of a small device than all other activations
// together.

#pragma once

#include <algorithm>

#include "split_graph.h"

namespace oallama {

constexpr int64_t logits_at_once = 64; // tokens; oallama/cost/blocks.py counts on it

// Whether a sub-graph is nothing but that mul-mat, in the host's memory, of more tokens. memory: as of `claims`.
bool is_of_many_logits(const ggml_cgraph * graph, ggml_backend_dev_t memory);

// The same for count of its tokens, from first on.
class SomeLogits {
  public:
    SomeLogits(const ggml_cgraph * whole, int64_t first, int64_t count);

    SomeLogits(const SomeLogits &)             = delete;
    SomeLogits & operator=(const SomeLogits &) = delete;

    ggml_cgraph * graph() { return &graph_; }

  private:
    ggml_tensor   logits_;
    ggml_tensor   x_;
    ggml_tensor * node_ = &logits_;
    ggml_cgraph   graph_;
};

// Calls with the graph of each logits_at_once tokens in turn, and of what is left, until one gives something else than
// success.
template <typename F> ggml_status for_some_logits(const ggml_cgraph * whole, const F & compute) {
    const int64_t n_tokens = whole->nodes[0]->ne[1];
    ggml_status   status   = GGML_STATUS_SUCCESS;
    for (int64_t first = 0; first < n_tokens && status == GGML_STATUS_SUCCESS; first += logits_at_once) {
        SomeLogits some(whole, first, std::min(logits_at_once, n_tokens - first));
        status = compute(some.graph());
    }
    return status;
}

} // namespace oallama
