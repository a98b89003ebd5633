// The Build: state shared by the builders while build_program makes a program.
//
// build_program (program.cpp) gives each node of a sub-graph to the builder of its state (build_cut.h, build_routed.h),
// segment by segment. All builders add tensors to one Build: the program, the present segment, and each value's tensor
// on each side.

#pragma once

#include <map>

#include "program.h"

namespace oallama {

constexpr std::array<Side, n_sides> all_sides    = {side_host, side_stream, side_device, side_prime};
constexpr std::array<Side, 3>       device_sides = {side_stream, side_device, side_prime};

// Marks a tensor that is sent to the device before a graph, so that its memory is not reused until the graph ends:
// ggml's allocator frees a leaf after its last reader, but CUDA's fused kernels may read it later.
void keep_sent(ggml_tensor * tensor);

struct Build {
    // A value's tensor on each side; NULL: the side has no part of it.
    using Sides = std::array<ggml_tensor *, n_sides>;

    Build(const ggml_cgraph * sub_graph, const Values & found, Program & made)
        : graph(sub_graph), values(found), program(made), sides_(found.nodes.size()) {}

    const ggml_cgraph * graph;
    const Values &      values;
    Program &           program;
    Segment             segment; // the present one

    // Nodes of the device's graph in the present segment: results of GG, CG and CG', and their sums.
    std::array<std::vector<ggml_tensor *>, n_sides> device_nodes;
    std::vector<ggml_tensor *>                      join_nodes; // what makes results whole in device memory

    // The ids that choose which experts of the streamed weights are copied (NULL: all), and the number of experts of
    // each weight.
    const ggml_tensor * chosen_by = nullptr;
    int64_t             n_expert  = 0;

    ggml_context * ctx() { return program.ctx.get(); }

    const Value & value(int node) const { return values.nodes[static_cast<size_t>(node)]; }

    Sides &       sides(int node) { return sides_[static_cast<size_t>(node)]; }
    ggml_tensor * side_of(int node, Side side) { return sides(node)[side]; }

    // Whether a tensor of llama.cpp's is in device memory.
    bool on_device(const ggml_tensor * tensor) const { return program.resident && !is_on_host(tensor); }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const;

    Origin origin_of(int node, int src) const;

    // Source s of node i, as the host reads it before a segment is launched.
    Source source_of(int i, int s);

    // Source s of node i: elements [begin, begin + count) of each row of some tokens; count < 0: all.
    ggml_tensor * mirrored_on(Side side, int i, int s, Tokens tokens, int64_t begin = 0, int64_t count = -1);

    // tokens: of which it is read.
    ggml_tensor * mirrored_on_host(int i, int s, Tokens tokens = {});

    // A mirrored value on the device; sent when the segment begins, unless it is there already.
    ggml_tensor * mirrored_on_device(int i, int s, Tokens tokens, int64_t begin, int64_t count);

    // A tensor of llama.cpp's in the device's graph. It has an address (set again before each run), so that the
    // allocator leaves it alone.
    ggml_tensor * whole_on_device(const ggml_tensor * tensor, Origin origin);

    ggml_tensor * view_on_device(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb,
                                 size_t at);

    // Whether an offset into device memory is aligned for kernels, as e.g. Vulkan's mul-mats need.
    bool is_aligned(size_t at) const;

    ggml_tensor * copy_header(const ggml_tensor * node, const int64_t * ne);

    // Gives it the memory of a tensor of llama.cpp's. strides: whose it takes; NULL: contiguous.
    void bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * strides);

    ggml_tensor * stage(ggml_tensor * tensor);

    // Reserves the Host's memory for an upload or a download; returns its offset.
    size_t take_staging(const ggml_tensor * tensor);

    // Keeps a view: host views get their addresses from their sources, device views from the allocator.
    ggml_tensor * keep_view(ggml_tensor * view, Side side);

    // Elements [begin, begin + n) of each row of some tokens.
    ggml_tensor * view(ggml_tensor * whole, int64_t begin, int64_t n, Tokens tokens, Side side);

  private:
    // A tensor of the same type, shape and strides.
    ggml_tensor * like(const ggml_tensor * tensor);

    // A mirrored value that is in device memory: downloaded when the segment begins, or a view of what the host
    // computes.
    ggml_tensor * input(const ggml_tensor * src, Origin origin, Tokens tokens);

    // Elements [begin, begin + count) of each row of some tokens of a tensor of llama.cpp's, as kernels can read them:
    // where they lie, or what makes them contiguous.
    ggml_tensor * part_on_device(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count,
                                 Tokens tokens);

    std::vector<Sides>                           sides_;
    std::map<const ggml_tensor *, ggml_tensor *> inputs_; // what the host has of llama.cpp's tensors on the device
};

} // namespace oallama
