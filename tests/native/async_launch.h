// A graph that TEST0 was given, as it was at that moment.

#pragma once

#include <functional>

#include "emulated/graph.h"

namespace async_device {

class Launch {
  public:
    // memory_of: where the host finds a tensor's bytes, or death where the device may not use it.
    Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of);

    void run(ggml_backend_t cpu);

  private:
    emulated::Launch launch_;
};

} // namespace async_device
