// A graph as it was when it was launched: a device reads it at once, and its owner may change it after the call.

#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>

#include "../split/util.h"

namespace emulated {

// Graphs that ggml-cuda would have captured on one stream, known by their first node: those that were launched twice
// with every node and source in the same place and of the same shape. The second launch captures; later ones are of
// what was captured, until something lies elsewhere.
class Captures {
  public:
    // Whether this launch is of what was captured.
    bool launch(const ggml_cgraph * graph);

  private:
    struct Known {
        uint64_t places = 0; // of the last launch
        int      n_same = 0; // launches in a row
    };

    std::unordered_map<const ggml_tensor *, Known> known_;
};

class Launch {
  public:
    // memory_of: where the host finds a tensor's bytes.
    Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of);

    ggml_status run(ggml_backend_t cpu);

  private:
    ggml_tensor * copy(const ggml_tensor * original, void * memory);

    oallama::ContextPtr                                    ctx_;
    ggml_cgraph *                                          graph_ = nullptr;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
};

} // namespace emulated
