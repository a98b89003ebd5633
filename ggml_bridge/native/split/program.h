// Programs: a sub-graph of llama.cpp's graph, prepared for the CPU and a device.
//
// A program runs in segments. A segment sends the mirrored values that its device side needs, starts the device,
// computes the host side meanwhile, and joins the values that the next segment or llama.cpp needs whole. A feed-forward
// block is one segment. From call to call only addresses change; everything else is prepared once per shape and reused.
//
// Ownership. The program owns tensor headers and both graphs (`ctx`). Its host tensors use the memory of llama.cpp's
// tensors (`bindings`) or of the Host (`staged`). Its device tensors use the memory of weights, of the ring
// (`streamed`), of llama.cpp's tensors on the device (`bindings`), or of the DeviceSide's allocator, which all programs
// on the device share. Uploads and downloads also pass through the Host's memory (`staging`).
//
// Shapes, of a node [n, ne1, ne2, ne3] on a side: axis_0 [elements of the side, tokens of the side, ...], partial
// [n, tokens of the side, ...], all contiguous; routed rows [n, n_device, n_tokens] on the device. The host's routed
// rows are those of a batch without hits, [n, 1, n_used * n_tokens], and before each run they shrink to the misses, [n,
// 1, n_misses]. Where the device's are packed too (experts.h) they are [n, 1, n_most], and shrink to those of a launch.

#pragma once

#include <algorithm>

#include "graph.h"
#include "row_times.h"
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

// A mirrored value on the host: llama.cpp's tensor, or, if that is in device memory, the host's copy of it.
struct Source {
    Origin              origin;
    const ggml_tensor * copy = nullptr;

    const ggml_tensor * of(const ggml_cgraph * graph) const { return copy == nullptr ? origin.of(graph) : copy; }
};

// A tensor of the program that has the memory of one of llama.cpp's.
struct Binding {
    ggml_tensor * tensor;
    Origin        origin;
};

// A tensor of llama.cpp's in device memory, whose first `bytes` are copied to the host when a segment begins.
struct Input {
    ggml_tensor * tensor;
    Origin        origin;
    size_t        bytes;
};

// A host tensor in the Host's memory, which all programs share.
struct Staged {
    ggml_tensor * tensor;
    size_t        at; // bytes into that memory
};

// A host result that is sent to the device when a segment ends.
struct HostResult {
    ggml_tensor * from;
    ggml_tensor * to;
};

// The host's part of a sum over a token's experts, which the device adds to its own part.
struct HostSum {
    const ggml_tensor * rows; // the host's, packed
    const ggml_tensor * to;
    int                 routed; // which of the segment's routings
};

// Biases of the experts that are in slots, [n, n_slots], which stay on the device from one token to the next.
struct SlotBiases {
    const ggml_tensor *          biases; // of all experts, llama.cpp's
    std::shared_ptr<ExpertTable> table;
    BufferPtr                    buffer;
    std::vector<int32_t>         experts; // the expert whose bias each slot has; -1: none
};

// An input that is sent to the device when a segment begins.
struct Upload {
    enum class What {
        value,   // elements [begin, begin + count) of each row, the first of which is first_row
        ids,     // of a routing: slots that the device computes with, and routing weights of its rows,
        tokens,  // of packed rows, whose they are,
        ranks,   // their numbers,
        experts, // and their experts,
        rows,    // rows of a value that has one for each rank,
        biases,  // and the biases of the experts in slots, of which only those new to the device are sent
    };

    What          what;
    ggml_tensor * tensor;  // on the device
    size_t        staging; // bytes into the host's memory, where it is packed first
    Source        source;
    int64_t       begin;
    int64_t       count;
    int64_t       first_row;
    bool          packed; // contiguous and whole rows: may be sent from where it is
    int           routed; // which of the segment's routings
    SlotBiases *  slots;  // of biases: their memory on the device

    const ggml_tensor * biases; // of all experts, llama.cpp's
};

// A result to download, and how it becomes part of the original tensor.
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
    int64_t       spread;      // elements of a row that are packed on the host and are moved to their places first
    int64_t       spread_rows; // of the node, from its first
    bool          direct;      // can be downloaded directly to its place in the node
    size_t        staging;     // bytes into the host's memory
    int           routed;      // which of the segment's routings says what belongs where; of rows and sum
    ggml_tensor * host_rows;   // of a sum
    ggml_tensor * to;          // host tensor that is sent to the node's device memory; NULL: the node itself
    bool          summed;      // already added up on the device
    bool          packed;      // rows, downloaded launch by launch; of a sum, after the host's rows
};

// A host tensor with one entry per miss along dimension dim.
struct Sized {
    ggml_tensor * tensor;
    int           dim;
};

// A launch's view of numbers that are sent for all launches at once. dim: the dimension of the view's numbers.
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

constexpr int64_t number_alignment = 64; // of the views of numbers, as kernels need aligned addresses

// Mul-mats by the same ids and the same hot experts, whose rows are divided between the sides.
struct Routed {
    std::vector<const SplitWeight *> weights;
    Source                           ids;
    Source                           weighting; // the routing weights, where weighted
    bool                             weighted   = false;
    int64_t                          n_used     = 0;
    int64_t                          n_rows     = 0; // of the batch: n_used * n_tokens
    int64_t                          n_device   = 0; // for each token
    int64_t                          weights_at = 0; // offset of the routing weights that are sent with ids; 0: none
    ggml_tensor *                    host_ids   = nullptr;
    ggml_tensor *                    device_ids = nullptr;
    std::vector<Sized>               sized;
    std::vector<GatheredRows>        gathered;

    // where the device's rows are packed (experts.h)
    int64_t                    n_most = 0; // most rows of a launch; 0: rows are not packed
    std::vector<Sized>         packed;     // tensors with one row per packed row
    std::vector<Placed>        placed;     // views with one number per packed row
    std::vector<ggml_tensor *> nodes;      // results, until the segment is complete
    int                        device_begin = 0;
    int                        device_end   = 0;

    bool packs() const { return n_most > 0; }

    // Numbers that all launches have together at most: of hits three launches, of fetched experts one each, and one
    // more where one is full.
    int64_t n_numbers() const { return n_rows + number_alignment * (weights.front()->slice().e + 3 + n_rows / n_most); }
};

// The ids that choose among a weight's experts, whose uses are counted.
struct Counted {
    ExpertUses * uses;
    Source       ids;
};

// A part of a weight, CG or CG', on the device, in the slot that it is copied to.
struct Streamed {
    StreamedPart  part;
    ggml_tensor * tensor;
};

struct Segment {
    std::vector<Input>      inputs;
    std::vector<Upload>     uploads;
    std::vector<Download>   downloads;
    std::vector<HostSum>    sums;
    std::vector<HostResult> host_results; // only where llama.cpp's tensors are in device memory, as inputs
    std::vector<Streamed>   streamed;
    std::vector<Routed>     routings;
    std::vector<Counted>    counted;
    StreamBlock *           block = nullptr; // of the streamed weights; NULL: none
    Source                  ids;             // which experts are used, where routed
    bool                    routed = false;  // only the experts that are used are streamed
    int64_t                 n_used = 0;      // of each token, where routed
    CopyPacing              pacing;
    RowTimes                row_times;
    int64_t                 n_sums = 0; // number of sums that the host has sent for the device to add
    int device_begin               = 0; // nodes of the device graph: GG up to stream_begin, then CG, CG' and their sums
    int launches_begin             = 0; // of these, of packed rows, one routing after the other
    int stream_begin               = 0;
    int join_begin                 = 0; // nodes that make results whole in device memory, up to device_end
    int device_end                 = 0;
    int host_begin                 = 0; // nodes of the host graph
    int host_end                   = 0;

    // Whether the device's rows of any routing are packed.
    bool packs() const {
        return std::any_of(routings.begin(), routings.end(), [](const Routed & one) { return one.packs(); });
    }
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
    ggml_backend_dev_t         device       = nullptr; // NULL: the host computes everything
    bool                       resident     = false;   // llama.cpp's tensors are in the device's memory
    bool                       prepared     = false;   // llama.cpp keeps inputs allocated until the last node
    StreamSpec                 stream;                 // how CG is copied
    ExchangeMode               exchange = ExchangeMode::off;
    std::vector<Binding>       bindings; // get the addresses of llama.cpp's before each run
    std::vector<Staged>        staged;
    std::vector<ggml_tensor *> views; // of bound and staged tensors; their addresses follow, in this order
    std::vector<Segment>       segments;
    size_t                     host_bytes = 0;       // of the Host's memory: staged tensors, uploads and downloads
    const Scratch *            scratch    = nullptr; // the Host's memory for these
};

// Prepares a sub-graph; device memory is not allocated yet. memory: the device's that llama.cpp's tensors are in; NULL:
// the host's. Throws OALLAMA_UNSUPPORTED, OALLAMA_NO_MEMORY.
std::unique_ptr<Program> build_program(const ggml_cgraph * graph, ggml_backend_dev_t memory);

// Most experts of a token that may be hits. One slot may be empty while an expert is copied to it.
inline int64_t n_device_ranks(int64_t n_used, const SplitWeight & weight) {
    return std::min(n_used, weight.n_slots() - (weight.table()->is_movable() ? 1 : 0));
}

} // namespace oallama
