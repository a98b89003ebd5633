// What the split backend knows of ggml's operations, and of the sub-graphs that ggml's scheduler gives it.

#pragma once

#include "split_buffer.h"

namespace oallama {

// What a weight's plan says of it; NULL: it has none, or is not in it.
const SliceSpec * planned(const ggml_tensor * weight);

bool is_view(ggml_op op); // computes nothing
bool is_mul_mat(ggml_op op);

// Element-wise operations that keep a cut along ne[0].
bool is_unary(ggml_op op);
bool is_binary(ggml_op op);

// One value per column, or one for all: a bias or a scale.
bool is_parameter(const ggml_tensor * tensor, int64_t n);

// A half of a fused gate_up's result, as llama.cpp views it.
bool is_half_view(const ggml_tensor * view, const ggml_tensor * whole);

// Results of the experts that each token uses, [n, n_used, n_tokens], times the routing weights.
bool is_weighting(const ggml_tensor * op);

// Whether this adds the biases of experts, in host memory, to the results of a mul-mat by them of which some are hot.
bool is_bias_of_hot(const ggml_tensor * op);

// Whether so many bytes of experts' results, [n, n_used, n_tokens], need not come back where they are added up before,
// that the weight's plan has it done.
bool are_many(const ggml_tensor * experts, const ggml_tensor * weight);

// The results of every token's expert of one rank, [n, n_tokens], as llama.cpp views them to add them up.
bool is_rank_view(const ggml_tensor * view, const ggml_tensor * experts);

// Whether the split backend computes this operation in this device's memory, or, NULL, in the host's (supports_op of
// ggml's device interface).
bool claims(const ggml_tensor * op, ggml_backend_dev_t memory);

// Whether a tensor lies in host memory. What llama.cpp has not allocated yet does not.
bool is_on_host(const ggml_tensor * tensor);

// The last node before `before` that is this tensor; -1: none, it comes from outside.
int find_node(const ggml_cgraph * graph, const ggml_tensor * tensor, int before);

// llama.cpp reads node i after this sub-graph, so it has to be there in full.
bool read_outside(const ggml_cgraph * graph, int i);

// Whether one node reads this one, and nothing outside.
bool is_read_once(const ggml_cgraph * graph, int i);

// The node that ends the sum of all ranks of what a weighting gives, which nothing else reads; -1: none. All nodes
// between are steps of it.
int find_sum(const ggml_cgraph * graph, int weighting);

bool is_empty(const ggml_tensor * tensor); // has no elements

// Marks a tensor that the device is sent before it computes a graph. Its memory stays its own until the graph ends:
// ggml's allocator frees a leaf behind its last reader, and CUDA's fused kernels read one for longer than that.
void keep_sent(ggml_tensor * tensor);

// A node of a graph that was allocated which is written over a tensor of keep_sent; NULL: none is.
const ggml_tensor * find_overwriting(const ggml_cgraph * graph);

// Whether it has weights that are streamed, at least in batches of some sizes.
bool may_stream(const ggml_cgraph * graph);

// Whether its nodes are views or have no elements: so is all of a block behind the attention of a micro-batch of which
// no token is an output.
bool computes_nothing(const ggml_cgraph & graph);

// Nodes [begin, end) as a graph.
ggml_cgraph graph_range(ggml_cgraph * graph, int begin, int end);

// What distinguishes one sub-graph from another: shapes, operations, how values depend on each other, which weights,
// and which of the tensors from outside are the same one.
using Signature = std::vector<uint64_t>;

// memory: whose; NULL: the host's. In a device's, which of the tensors from outside are on the host all the same is
// part of it.
void     make_signature(const ggml_cgraph * graph, ggml_backend_dev_t memory, Signature & signature);
uint64_t hash_of(const Signature & signature);

} // namespace oallama
