// First pass over a sub-graph: in which state every value is, and in which phase it is computed.
//
// As in tensor parallelism (Megatron-LM), a value is
//
//     full     whole, in host memory
//     shard    cut along ne[0]: the first CC elements of each row on the host, the others on the device. A mul-mat by a
//              weight cut by rows makes one; element-wise operations keep it (gate, up, GLU)
//     partial  whole on both sides, to be added: a mul-mat by a weight cut along K makes one out of a shard (down), and
//              what is linear keeps it: experts' results times the routing weights, and their sum
//     routed   rows of tokens' experts, [n, n_used, n_tokens], each on the side that computes its expert: a mul-mat by
//              a weight with hot experts makes one, and what works row by row keeps it (gate, up, GLU, down)
//     term     routing weights times routed rows, one rank of them, or a part of their sum: nothing is computed
//     sum      of all terms: both sides' rows are weighted and added up when the phase ends
//
// Of a shard's or partial's last n_g tokens the host computes nothing: the device has all of it, in CG' what the host
// has of the others.
//
// The host side of a shard lies in the memory that llama.cpp gave the original: packed at its front, or, where the
// whole is wanted, at its final places if every kernel that touches it takes rows with gaps. ggml lets element-wise
// operations write over their input, so shards that such operations connect lie alike.

#pragma once

#include "split_graph.h"

namespace oallama {

enum class State { full, shard, partial, routed, term, sum };

struct Value {
    State   state      = State::full;
    int     phase      = 0;     // in which it is computed; a view: in which its shard is
    int     host_ready = 0;     // first phase that can read it in full on the host
    int     sent_ready = 0;     // first phase that can send it in full to the device
    bool    wanted     = false; // in full, by llama.cpp or by an operation here
    bool    packed     = false; // a shard whose rows on the host follow one another without gaps
    int     group      = -1;    // shards that lie alike: the first of them
    bool    sharded_x  = false; // a mul-mat along K whose input is a shard with the same cut
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

} // namespace oallama
