// A graph as it was when it was launched: a device reads it at once, and its owner may change it after the call.

#pragma once

#include <functional>
#include <unordered_map>

#include "../split/error.h"

namespace emulated {

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
