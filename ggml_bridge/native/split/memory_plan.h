// Memory for the parts of all weights of a model: as much of GG as the device has room for, the rest on the host.

#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "split_weight.h"

namespace oallama {

struct WeightMemory {
    std::vector<ContextPtr> contexts; // of the parts' tensor headers; freed after the buffers
    std::vector<BufferPtr>  buffers;
    int64_t                 host_bytes   = 0; // as allocated
    int64_t                 device_bytes = 0;
};

// Moves cuts where the device cannot compute a weight, has no room, or a layout cannot hold it, and says so. Throws
// OALLAMA_NO_MEMORY when host memory is short.
WeightMemory place_weights(const std::vector<std::unique_ptr<SplitWeight>> & weights, ggml_backend_dev_t device,
                           const PlanSpec & plan, const std::function<void(const std::string &)> & problem);

} // namespace oallama
