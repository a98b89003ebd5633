// A graph on the device that parameters describe: what its kernels take, whether CUDA would have captured it, and
// computing it as it was when it was launched.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <unordered_map>

#include "../split/util.h"
#include "parameters.h"

namespace emulated {

// True for a node that computes something; views do not.
bool has_kernel(const ggml_tensor * node);

// Whether ggml-cuda would compute an operation that the CPU does: not by experts whose input must be read in F32.
bool cuda_supports(const ggml_tensor * op);

// True for a sort: its result says which experts a token is routed to.
bool is_routing(const ggml_tensor * node);

double kernel_seconds(const Parameters & parameters, const ggml_tensor * node);

// n_expert_used > 0: of MUL_MAT_ID, by tokens that are routed to experts drawn alike.
double mul_mat_seconds(const Parameters & parameters, ggml_type type, int64_t k, int64_t n, int64_t e,
                       int64_t n_expert_used, int64_t n_tokens);

// A MUL_MAT_ID: which experts its tokens use is known when the device comes to it.
class RoutedMulMat {
  public:
    // ids: where the host finds those of the node.
    RoutedMulMat(const ggml_tensor * node, const char * ids);

    bool has_ids_of(const RoutedMulMat & other) const { return ids_ == other.ids_; }

    int64_t n_distinct() const; // experts that are used, now

    // A time that was measured is one of experts drawn alike: by others it changes as a roofline does.
    double seconds(const Parameters & parameters, int64_t n_distinct) const;

  private:
    ggml_type             type_;
    int64_t               k_, n_, e_, n_used_, n_tokens_;
    const char *          ids_;
    std::array<size_t, 2> nb_; // of ids
};

// Tokens that an operation works on at once, as ggml-cuda counts them before it takes an operation from the host.
int64_t offload_batch(const ggml_tensor * op);

// Graphs that ggml-cuda would have captured on one stream, known by their first node: those that were launched twice
// with every node and source in the same place and of the same shape. The second launch captures; later ones are of
// what was captured, until something lies elsewhere.
class Captures {
  public:
    // Notes a launch. True where it is of a captured graph.
    bool launch(const ggml_cgraph * graph);

  private:
    struct Known {
        uint64_t places = 0; // of the last launch
        int      n_same = 0; // launches in a row
    };

    std::unordered_map<const ggml_tensor *, Known> known_;
};

// A copy of a graph: a device reads a graph at once when it is launched, and its owner may change it after the call.
class Launch {
  public:
    // memory_of: where the host finds a tensor's bytes.
    Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of);

    const ggml_cgraph * graph() const { return graph_; }

    ggml_status run(ggml_backend_t cpu);

  private:
    ggml_tensor * copy(const ggml_tensor * original, void * memory);

    oallama::ContextPtr                                    ctx_;
    ggml_cgraph *                                          graph_ = nullptr;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
};

} // namespace emulated
