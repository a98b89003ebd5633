// A graph that TEST0 was given, as it was at that moment.

#pragma once

#include <functional>
#include <memory>
#include <unordered_map>

#include "split/ggml_backend_abi.h"

namespace async_device {

class Launch {
  public:
    // memory_of: where the host finds a tensor's bytes, or death where the device may not use it.
    Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of);

    void run(ggml_backend_t cpu);

  private:
    struct FreeContext {
        void operator()(ggml_context * ctx) const noexcept { ggml_free(ctx); }
    };

    ggml_tensor * copy(const ggml_tensor * original, void * memory);

    std::unique_ptr<ggml_context, FreeContext>             ctx_;
    ggml_cgraph *                                          graph_ = nullptr;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
};

} // namespace async_device
