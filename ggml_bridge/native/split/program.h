// Programs: a sub-graph of llama.cpp's graph, prepared for two processors.
//
// Work is done in phases. A phase sends the mirrored values that its device side needs, starts the device, computes the
// host side meanwhile, and joins what the next phase or llama.cpp needs whole. A feed-forward block is one phase.
// Only addresses change from call to call; all else is prepared once for a shape and reused.
//
// Ownership. Tensor headers and both graphs are the program's (`ctx`). Tensors of ours on the host have the memory
// of llama.cpp's (`bindings`), or the Host's (`staged`); those on the device have the memory of weights, of the ring
// (`streamed`), of llama.cpp's tensors there (`bindings`), or the allocator's, which all programs of a context share.
// Uploads and downloads pass the Host's memory too (`staging`).
//
// Shapes, of a node [n, ne1, ne2, ne3] on a side: axis_0 [elements of the side, tokens of the side, ...], partial
// [n, tokens of the side, ...], all contiguous; routed rows [n, n_device, n_tokens] on the device. The host's routed
// rows are those of a batch without hits, [n, 1, n_used * n_tokens], and before each run they shrink to the misses, [n,
// 1, n_misses]. Where the device's are packed too (experts.h) they are [n, 1, n_most], and shrink to those of a launch.

#pragma once

#include "graph.h"
#include "stream.h"
#include "times.h"

namespace oallama {

struct Scratch; // host.h

// A tensor of llama.cpp's sub-graph: a node, or the source of one.
struct Origin {
    int node = 0;
    int src  = -1; // -1: the node itself

    const ggml_tensor * of(const ggml_cgraph * graph) const {
        return src < 0 ? graph->nodes[node] : graph->nodes[node]->src[src];
    }
};

// A mirrored value on the host: llama.cpp's own tensor, or, where that is in device memory, what the host has of it.
struct Source {
    Origin              origin;
    const ggml_tensor * copy = nullptr;

    const ggml_tensor * of(const ggml_cgraph * graph) const { return copy == nullptr ? origin.of(graph) : copy; }
};

// A tensor of ours for one of llama.cpp's.
struct Binding {
    ggml_tensor * tensor;
    Origin        origin;
};

// A tensor of llama.cpp's in device memory. When a phase begins, its first `bytes` are copied to the host, which reads
// no more.
struct Input {
    ggml_tensor * tensor;
    Origin        origin;
    size_t        bytes;
};

// A host tensor that the host makes for itself, in host memory that all programs share.
struct Staged {
    ggml_tensor * tensor;
    size_t        at; // bytes into that memory
};

// A host result that is sent to the device when a phase ends.
struct Lift {
    ggml_tensor * from;
    ggml_tensor * to;
};

// The host's part of a sum over a token's experts, which the device adds to its own part.
struct HostSum {
    const ggml_tensor * rows; // the host's, packed
    const ggml_tensor * to;
    int                 routed; // which of the phase's routings
};

// Biases of the experts that are in slots, [n, n_slots], which stay on the device from one token to the next.
struct SlotBiases {
    const ggml_tensor *          biases; // of all experts, llama.cpp's
    std::shared_ptr<ExpertTable> table;
    BufferPtr                    buffer;
    std::vector<int32_t>         experts; // whose bias each slot has; -1: nobody's
};

// An input that is sent to the device when a phase begins.
struct Upload {
    enum class What {
        value,   // elements [begin, begin + count) of each row, the first of which is first_row
        ids,     // of a routing: slots that the device computes with, and routing weights of its rows,
        tokens,  // of packed rows, whose they are,
        ranks,   // their numbers,
        experts, // and their experts,
        rows,    // rows of a value that has one for each rank,
        biases,  // and the biases of the experts that are in slots, of which those are sent that are not there
    };

    What          what;
    ggml_tensor * tensor;  // on the device
    size_t        staging; // bytes into the host's memory, where it is packed first
    Source        source;
    int64_t       begin;
    int64_t       count;
    int64_t       first_row;
    bool          packed; // contiguous and whole rows: may be sent from where it is
    int           routed; // which of the phase's routings
    SlotBiases *  there;  // what a program's biases have for memory

    const ggml_tensor * biases; // of all experts, llama.cpp's
};

// A result to fetch, and how it becomes part of the original tensor.
struct Download {
    enum class Join {
        scatter, // elements [begin, begin + count) of each row or half
        add,     // partial sums
        rows,    // rows of routed values
        sum,     // rows of routed values, weighted and added up
    };

    ggml_tensor * tensor; // on the device
    int           node;
    Join          join;
    int64_t       begin; // elements
    int64_t       count;
    int64_t       extent;      // 2 * extent == ne[0] of the node: halves
    int64_t       first_row;   // of the node, where the device tensor's first one belongs
    int64_t       n_rows;      // of the device tensor, from its first
    int64_t       spread;      // elements on the host that lie packed and must be moved apart first; 0: none
    int64_t       spread_rows; // of the node, from its first
    bool          direct;      // can be fetched to where it belongs
    size_t        staging;     // bytes into the host's memory
    int           routed;      // which of the phase's routings says what belongs where; of rows and sum
    ggml_tensor * host_rows;   // of a sum
    ggml_tensor * to;          // on the host, what is lifted to the node's device memory; NULL: the node itself
    bool          summed;      // on the device, already
    bool          packed;      // rows, fetched launch by launch; of a sum, behind the host's
};

// A host tensor with something for each miss, along dimension dim.
struct Sized {
    ggml_tensor * tensor;
    int           dim;
};

// A launch's view of numbers that are sent for all launches at once. dim: along which the view's numbers lie.
struct Placed {
    ggml_tensor * tensor;
    int           dim;
    ggml_tensor * whole;
};

// Rows of a mirrored input for the misses.
struct GatheredRows {
    const ggml_tensor * x;
    ggml_tensor *       index;
    ggml_tensor *       rows;
    bool                by_rank; // x has a row for each rank, not one for each token
};

constexpr int64_t number_alignment = 64; // of where numbers lie: kernels cannot read from just anywhere

// Mul-mats by the same ids and the same hot experts, whose rows are divided between the sides.
struct Routed {
    std::vector<const SplitWeight *> weights;
    Source                           ids;
    Source                           weighting; // the routing weights, where weighted
    bool                             weighted   = false;
    int64_t                          n_used     = 0;
    int64_t                          n_rows     = 0; // of the batch: n_used * n_tokens
    int64_t                          n_device   = 0; // for each token
    int64_t                          weights_at = 0; // numbers before the weights that are sent with ids; 0: none are
    ggml_tensor *                    host_ids   = nullptr;
    ggml_tensor *                    device_ids = nullptr;
    std::vector<Sized>               sized;
    std::vector<GatheredRows>        gathered;

    // where the device's rows are packed (experts.h)
    int64_t                    n_most = 0; // rows of a launch at most; 0: they are not
    std::vector<Sized>         packed;     // what has a row for each
    std::vector<Placed>        placed;     // what has a number for each
    std::vector<ggml_tensor *> nodes;      // results, until the phase is complete
    int                        device_begin = 0;
    int                        device_end   = 0;

    // Numbers that all launches have together at most: of hits three launches, of fetched experts one each, and one
    // more where one is full.
    int64_t n_numbers() const { return n_rows + number_alignment * (weights.front()->slice().e + 3 + n_rows / n_most); }
};

// The ids that choose among a weight's experts, whose uses are counted.
struct Counted {
    ExpertUses * uses;
    Source       ids;
};

// A part of a weight, CG or CG', on the device, in whatever slot it is copied to.
struct Streamed {
    StreamedPart  part;
    ggml_tensor * tensor;
};

struct Phase {
    std::vector<Input>    inputs;
    std::vector<Upload>   uploads;
    std::vector<Download> downloads;
    std::vector<HostSum>  sums;
    std::vector<Lift>     lifts; // only where llama.cpp's tensors are in device memory, as inputs
    std::vector<Streamed> streamed;
    std::vector<Routed>   routings;
    std::vector<Counted>  counted;
    StreamBlock *         block = nullptr; // of the streamed weights; NULL: none
    Source                ids;             // which experts are used, where routed
    bool                  routed = false;  // only the experts that are used are streamed
    int64_t               n_used = 0;      // of each token, where routed
    CopyPacing            pacing;
    double                row_s    = 0.0; // seconds of a routed row on the host, of late; 0: not known
    double                device_s = 0.0; // of its routed rows on the device, once it has what it reads
    int64_t               n_sums   = 0;   // that the host has sent up, for a device that adds them to its own
    std::vector<double>   both_s;         // until both sides were done with a token, by rows of the host; 0: not known
    int device_begin   = 0; // nodes of the device graph: GG up to stream_begin, then CG, CG' and their sums
    int launches_begin = 0; // of these, of packed rows, one routing after the other
    int stream_begin   = 0;
    int lift_begin     = 0; // nodes that make results whole in device memory, up to device_end
    int device_end     = 0;
    int host_begin     = 0; // nodes of the host graph
    int host_end       = 0;
};

struct Program {
    Program() { counters().n_programs++; }

    Program(const Program &)             = delete;
    Program & operator=(const Program &) = delete;

    ~Program() { counters().n_programs--; }

    ContextPtr                 ctx;
    int64_t                    n_tokens     = 0;       // of the first mul-mat
    BlockTime *                times        = nullptr; // of this block, cut and class of batch sizes
    ggml_cgraph *              device_graph = nullptr;
    ggml_cgraph *              host_graph   = nullptr;
    ggml_backend_dev_t         device       = nullptr; // NULL: nothing runs there
    bool                       resident     = false;   // llama.cpp's tensors are in its memory
    bool                       prepared     = false;   // llama.cpp keeps what the device reads until the last node
    StreamSpec                 stream;                 // how CG is copied
    ExchangeMode               exchange = ExchangeMode::off;
    std::vector<Binding>       bindings; // get the addresses of llama.cpp's before each run
    std::vector<Staged>        staged;
    std::vector<ggml_tensor *> views; // of bound and staged tensors; their addresses follow, in this order
    std::vector<Phase>         phases;
    size_t                     host_bytes = 0;       // of what is staged, packed for the device, and comes back
    const Scratch *            scratch    = nullptr; // that the Host has for these
};

// Prepares a sub-graph; device memory is not allocated yet. memory: the device's that llama.cpp's tensors are in; NULL:
// the host's. Throws OALLAMA_UNSUPPORTED, OALLAMA_NO_MEMORY.
std::unique_ptr<Program> build_program(const ggml_cgraph * graph, ggml_backend_dev_t memory);

// Ranks of a token's experts that may be hits. One slot may be empty while an expert is on its way there.
inline int64_t n_device_ranks(int64_t n_used, const SplitWeight & weight) {
    return std::min(n_used, weight.n_slots() - (weight.table()->is_movable() ? 1 : 0));
}

} // namespace oallama
