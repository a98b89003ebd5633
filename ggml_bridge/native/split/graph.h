// Sub-graphs: what ggml's scheduler gives the back end, which operations it takes, and in which state each value is.
//
// States are named as ggml-backend-meta names those of its tensors. A value is
//
//     mirrored  whole: on the host, and on the device once it is sent there
//     axis_0    cut along ne[0]: the first CC elements of each row are on the host, the others on the device. Result of
//               a mul-mat by a weight cut by rows (gate, up); element-wise operations keep it (GLU)
//     partial   a full-size addend on each side. Result of a mul-mat by a weight cut along K with an axis_0 input
//               (down); linear operations keep it: experts' results times the routing weights, and their sum
//     routed    rows of tokens' experts, [n, n_used, n_tokens], each on the side that computes its expert. Result of a
//               mul-mat by a weight with hot experts; row-wise operations keep it (gate, up, GLU, down)
//     term      routing weights times routed rows, one rank of them, or a part of their sum: not computed by itself
//     sum       the sum of all terms: both sides' rows are weighted and added up when the segment ends
//
// `kept` (graph.cpp) is the only place that says which operation keeps which state. It is used twice: by `claims`, when
// ggml asks operation by operation before there is a graph, with the plan's cuts; and by find_values, for each node of
// a sub-graph, with the cuts as loaded.
//
// The device computes all elements of the last n_g tokens of an axis_0 or partial value; those that the host computes
// of the other tokens are CG' there.
//
// The host side of an axis_0 value is packed at the front of the memory that llama.cpp gave the original. If the whole
// value is wanted, its rows move to their places when the segment ends.
//
// These functions keep no state; sub-graphs and their tensors are llama.cpp's.

#pragma once

#include <array>
#include <vector>

#include "weights.h"

namespace oallama {

//
// operations
//

// Whether the split back end computes this operation in this device's memory, or, NULL, in the host's (supports_op of
// ggml's device interface).
bool claims(const ggml_tensor * op, ggml_backend_dev_t memory);

bool is_view(ggml_op op); // no computation
bool is_mul_mat(ggml_op op);

// The slice that a weight's plan names; NULL: the weight has no plan, or is not in it.
const SliceSpec * planned(const ggml_tensor * weight);

// Whether the plan wants experts' results, [n, n_used, n_tokens], added up on the device: if that saves copying back
// as many bytes as the plan's `sum`.
bool are_many(const ggml_tensor * experts, const ggml_tensor * weight);

// Whether this multiplies results of the experts that each token uses, [n, n_used, n_tokens], by the routing weights,
// [1, n_used, n_tokens].
bool is_weighting(const ggml_tensor * op);

// Whether a tensor lies in host memory. What llama.cpp has not allocated yet does not.
bool is_on_host(const ggml_tensor * tensor);

bool is_empty(const ggml_tensor * tensor); // has no elements

//
// values
//

enum class State { mirrored, axis_0, partial, routed, term, sum };

struct Value {
    State   state      = State::mirrored;
    int     segment    = 0;     // in which it is computed; a view: in which its source is
    int     host_ready = 0;     // first segment in which the host can read it mirrored
    int     sent_ready = 0;     // first segment that can send it whole to the device
    bool    wanted     = false; // mirrored, by llama.cpp or by an operation here
    bool    x_is_cut   = false; // a mul-mat along K whose input is cut alike along ne[0]
    int64_t cc         = 0;     // elements on the host
    int64_t cg         = 0;     // elements behind them that the device computes from streamed weights
    int64_t extent     = 0;     // elements that are cut together: ne[0], or half of it
    int     token_dim  = 1;     // which of ne[] counts tokens
    int64_t n_tokens   = 0;
    int64_t n_g        = 0;     // tokens at the end of which the device computes CC too (CG')
    int     routed_by  = -1;    // the first mul-mat of a routed value, whose ids say which rows are where
    int     weighting  = -1;    // of a sum: the node that multiplies by the routing weights
    bool    is_summed  = false; // a routed value that nothing but a sum reads

    bool cut_like(const Value & other) const {
        const bool same_tokens = n_g == other.n_g && (n_g == 0 || n_tokens == other.n_tokens);
        return cc == other.cc && cg == other.cg && extent == other.extent && same_tokens;
    }
};

struct Values {
    std::vector<Value> nodes;            // one for each node of the sub-graph
    ggml_backend_dev_t device = nullptr; // NULL: all of it is computed on the host
};

// fuse: element-wise operations keep a cut; else each mul-mat is joined by itself. Throws OALLAMA_UNSUPPORTED.
Values find_values(const ggml_cgraph * graph, bool fuse);

// Some tokens of a tensor: [first, first + count) along dimension dim; count < 0: all.
struct Tokens {
    int     dim   = 1;
    int64_t first = 0;
    int64_t count = -1;

    int64_t count_of(const ggml_tensor * tensor) const { return count < 0 ? tensor->ne[dim] : count; }

    std::array<int64_t, GGML_MAX_DIMS> shape(const ggml_tensor * tensor, int64_t n) const {
        std::array<int64_t, GGML_MAX_DIMS> ne = {n, tensor->ne[1], tensor->ne[2], tensor->ne[3]};
        ne[static_cast<size_t>(dim)]          = count_of(tensor);
        return ne;
    }

    // Rows of the tensor's memory before them.
    int64_t first_row(const ggml_tensor * tensor) const { return first * (dim == 2 ? tensor->ne[1] : 1); }

    Tokens along(int other) const { return {other, first, count}; }
};

// Elements of a value on one side: [begin, begin + count).
inline int64_t begin_of(const Value & v, Side side) {
    return side == side_stream ? v.cc : side == side_device ? v.cc + v.cg : 0;
}

inline int64_t count_of(const Value & v, Side side) {
    return side == side_stream ? v.cg : side == side_device ? v.extent - v.cc - v.cg : v.cc;
}

// Tokens of a value on one side: CC and CG' share them, CG and GG have all.
inline Tokens tokens_of(const Value & v, Side side) {
    const int64_t on_host = v.n_tokens - v.n_g;
    if (v.n_g > 0 && side == side_host) {
        return {v.token_dim, 0, on_host};
    }
    return side == side_prime ? Tokens{v.token_dim, on_host, v.n_g} : Tokens{v.token_dim};
}

// Whether there is anything of a value on one side.
inline bool has(const Value & v, Side side) {
    const bool tokens = side == side_host ? v.n_g == 0 || v.n_g < v.n_tokens : side != side_prime || v.n_g > 0;
    return tokens && count_of(v, side) > 0;
}

//
// sub-graphs
//

// The last node before `before` that is this tensor; -1: none, it comes from outside.
int find_node(const ggml_cgraph * graph, const ggml_tensor * tensor, int before);

// The node that ends the sum over ranks of a weighting's result, if no other node reads that result; else -1. All nodes
// between are steps of the sum.
int find_sum(const ggml_cgraph * graph, int weighting);

// The first of its weights that are streamed, at least in batches of some sizes; NULL: there is none.
const ggml_tensor * first_streamed(const ggml_cgraph * graph);

// Whether its nodes are views or have no elements: so is all of a block behind the attention of a micro-batch of which
// no token is an output.
bool computes_nothing(const ggml_cgraph & graph);

// Nodes [begin, end) as a graph.
ggml_cgraph graph_range(ggml_cgraph * graph, int begin, int end);

// Key of equal sub-graphs: shapes, operations, how values depend on each other, which weights,
// and which of the tensors from outside are the same one.
using Signature = std::vector<uint64_t>;

// memory: whose; NULL: the host's. In a device's, which of the tensors from outside are on the host all the same is
// part of it.
void make_signature(const ggml_cgraph * graph, ggml_backend_dev_t memory, Signature & signature);

} // namespace oallama
