// Second pass over a sub-graph: the tensors of both sides, phase by phase.

#pragma once

#include <array>

#include "split_resident.h"
#include "split_routed.h"

namespace oallama {

constexpr std::array<Side, n_sides> all_sides = {side_host, side_stream, side_device, side_prime};

// What a program's context has room for.
struct Room {
    int64_t n_tensors;
    int64_t n_nodes; // of each graph, and as many leaves
};

class ProgramBuilder {
  public:
    // memory: the device's that llama.cpp's tensors are in; NULL: the host's.
    ProgramBuilder(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory, Room room,
                   Program & program);

    void build();

  private:
    // Where a value's sides are while the program is built; NULL: nothing of it there.
    using Sides = std::array<ggml_tensor *, n_sides>;

    ggml_context * ctx() { return program_.ctx.get(); }

    const Value & value(int node) const { return values_.nodes[static_cast<size_t>(node)]; }

    Sides & sides(int node) { return sides_[static_cast<size_t>(node)]; }

    ggml_tensor * side_of(int node, Side side) { return sides(node)[side]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const { return find_node(graph_, graph_->nodes[node]->src[src], node); }

    // Whether a tensor of llama.cpp's is in device memory.
    bool on_device(const ggml_tensor * tensor) const { return program_.resident && !is_on_host(tensor); }

    // nodes
    void          emit(int i);
    void          emit_full(int i);
    void          emit_sides(int i);
    void          close_phase();
    ggml_tensor * compute(int i, Side side);
    ggml_tensor * of_partial(int i, Side side);
    ggml_tensor * mul_mat(int i, Side side);
    ggml_tensor * elementwise(int i, Side side);
    ggml_tensor * slot_of(int i, const SplitWeight & weight, Side side);
    void          count_use(int i, int64_t n_expert);

    // rows of tokens' experts (split_rows.cpp)
    void     emit_rows(int i);
    void     emit_half_of_rows(int i);
    void     emit_sum(int i);
    Routed & routing_of(int mul_mat);
    void     set_routed_sources(int i, Side side, ggml_tensor * out);
    void     fetch_rows(int i, Download::Join how, ggml_tensor * there, const Routed & routed, ggml_tensor * whole);

    // tensors
    ggml_tensor * copy_header(const ggml_tensor * node, const int64_t * ne);
    ggml_tensor * bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * like);
    ggml_tensor * stage(ggml_tensor * tensor);
    ggml_tensor * view(ggml_tensor * full, int64_t begin, int64_t n, Tokens tokens, bool on_host);
    ggml_tensor * half(ggml_tensor * whole, const ggml_tensor * node, int64_t n, bool on_host);
    ggml_tensor * rank(ggml_tensor * experts, const ggml_tensor * node, bool on_host);

    // full values on a side (split_inputs.cpp)
    ggml_tensor * full_on(Side side, int i, int s, Tokens tokens);
    ggml_tensor * full_on_host(int i, int s);
    ggml_tensor * full_on_device(int i, int s, int64_t begin, int64_t count, Tokens tokens);
    ggml_tensor * input(const ggml_tensor * src, Origin origin);
    ggml_tensor * for_kernel_of(const SliceSpec & slice, ggml_tensor * x);
    ggml_tensor * columns_of_input(int i, const Part & part, const std::string & layout, Tokens tokens);
    bool          is_aligned(const ggml_tensor * tensor, Tokens tokens) const;

    // results (split_outputs.cpp)
    void          join(int i);
    void          join_partial(int i, const Value & v);
    void          lift(int i, const Value & v);
    ggml_tensor * add(ggml_tensor * a, ggml_tensor * b);
    void          fetch(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count, Tokens tokens);
    size_t        take_staging(const ggml_tensor * tensor);

    static size_t padded_bytes(const ggml_tensor * tensor) { return (ggml_nbytes(tensor) + 63) / 64 * 64; }

    const ggml_cgraph *        graph_;
    const Values &             values_;
    std::vector<Sides>         sides_;
    Program &                  program_;
    Resident                   resident_;
    RoutedBuilder              routed_;
    std::vector<Input>         inputs_; // of the phase at hand, like all that follow
    std::vector<Upload>        uploads_;
    std::vector<Download>      downloads_;
    std::vector<Streamed>      streamed_;
    std::vector<ggml_tensor *> on_device_;           // results in GG
    std::vector<ggml_tensor *> on_stream_;           // results in CG and CG', and sums with them
    const ggml_tensor *        chosen_by_ = nullptr; // the ids of the experts that are streamed; NULL: all are
    int64_t                    n_expert_  = 0;       // of each streamed weight, where there are such ids
    Origin                     ids_;
    ggml_tensor *              host_ids_ = nullptr;
    int                        phase_    = 0; // of the node at hand
};

} // namespace oallama
