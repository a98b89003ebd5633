// What a graph's kernels take on the device that parameters describe.

#pragma once

#include "parameters.h"

namespace emulated {

// Whether the node computes anything; views do not.
bool has_kernel(const ggml_tensor * node);

// Whether it sorts: its result says which experts a token is routed to.
bool is_routing(const ggml_tensor * node);

double kernel_seconds(const Parameters & parameters, const ggml_tensor * node);

double mul_mat_seconds(const Parameters & parameters, ggml_type type, int64_t k, int64_t n, int64_t e,
                       int64_t n_expert_used, int64_t n_tokens);

// Tokens that an operation works on at once, as ggml-cuda counts them before it takes an operation from the host.
int64_t offload_batch(const ggml_tensor * op);

} // namespace emulated
