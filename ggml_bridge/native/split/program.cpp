#include "program.h"

#include <algorithm>

#include "build_cut.h"
#include "build_routed.h"
#include "dump.h"

namespace oallama {

namespace {

// Room of a program's context.
struct ContextSize {
    int64_t n_tensors;
    int64_t n_nodes; // of each graph, and as many leaves
};

class Builder {
  public:
    // memory: the device's that llama.cpp's tensors are in; NULL: the host's.
    Builder(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory, ContextSize size,
            Program & program)
        : build_(graph, values, program), resident_(build_), routed_(build_, resident_), cut_(build_, resident_) {
        program.device       = memory == nullptr ? values.device : memory;
        program.resident     = memory != nullptr;
        program.ctx          = new_context(size.n_tensors, 2, size.n_nodes);
        program.device_graph = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(size.n_nodes), false);
        program.host_graph   = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(size.n_nodes), false);
    }

    void build() {
        for (int i = 0; i < build_.graph->n_nodes; i++) {
            emit(i);
        }
        close_segment();
    }

  private:
    void emit(int i) {
        const ggml_tensor * node = build_.graph->nodes[i];
        const Value &       v    = build_.value(i);
        if (v.state == State::term || is_empty(node)) { // what reads an empty one is empty too
            return;
        }
        if (is_view(node->op)) {
            emit_view(i);
            return;
        }
        if (v.segment > n_segment_) {
            close_segment();
            n_segment_ = v.segment;
        }
        GGML_ASSERT(v.segment == n_segment_); // never an earlier one
        if (node->op == GGML_OP_MUL_MAT_ID) {
            count_experts(i);
        }
        switch (v.state) {
            case State::mirrored: emit_on_host(i); break;
            case State::routed: routed_.emit_rows(i); break;
            case State::sum: routed_.emit_sum(i); break;
            default: cut_.emit_sides(i);
        }
    }

    // One of a mirrored value has its source's memory, and llama.cpp has set its address.
    void emit_view(int i) {
        const State state = build_.value(i).state;
        if (state == State::routed) {
            routed_.emit_view(i);
        } else if (state != State::mirrored) {
            cut_.emit_view(i);
        }
    }

    // Has the uses of a mul-mat's experts counted, where the plan wants that; not of a warm-up, which uses all.
    void count_experts(int i) {
        const ggml_tensor * node   = build_.graph->nodes[i];
        const SplitWeight * weight = weight_of(node->src[0]);
        ExpertUses *        uses   = weight == nullptr ? nullptr : plan_of(node->src[0])->uses_of(weight->slice());
        if (uses != nullptr && node->src[2]->ne[0] < node->src[0]->ne[2]) {
            build_.segment.counted.push_back({uses, build_.source_of(i, 2)});
        }
    }

    // A node that only the host computes, from mirrored values.
    void emit_on_host(int i) {
        const ggml_tensor * node = build_.graph->nodes[i];
        ggml_tensor *       out  = build_.copy_header(node, node->ne);
        for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
            out->src[s] = build_.mirrored_on_host(i, s);
        }
        if (build_.program.resident) {
            build_.segment.host_results.push_back({build_.stage(out), build_.whole_on_device(node, {i, -1})});
        } else {
            build_.bind(out, {i, -1}, node);
        }
        build_.sides(i)[side_host] = out;
        ggml_build_forward_expand(build_.program.host_graph, out);
    }

    void close_segment() {
        Program &  program = build_.program;
        Segment &  segment = build_.segment;
        const auto expand  = [&](std::vector<ggml_tensor *> & nodes) {
            for (ggml_tensor * node : nodes) {
                ggml_build_forward_expand(program.device_graph, node);
            }
            nodes.clear();
            return ggml_graph_n_nodes(program.device_graph);
        };
        segment.device_begin   = program.segments.empty() ? 0 : program.segments.back().device_end;
        segment.host_begin     = program.segments.empty() ? 0 : program.segments.back().host_end;
        segment.launches_begin = expand(build_.device_nodes[side_device]);
        segment.stream_begin   = segment.launches_begin;
        for (Routed & routed : segment.routings) {
            routed.device_begin  = segment.stream_begin;
            routed.device_end    = expand(routed.nodes);
            segment.stream_begin = routed.device_end;
        }
        // one behind the other, so that hidden values of both are not there at the same time
        expand(build_.device_nodes[side_stream]);
        segment.join_begin = expand(build_.device_nodes[side_prime]);
        segment.device_end = expand(build_.join_nodes);
        segment.host_end   = ggml_graph_n_nodes(program.host_graph);
        segment.routed     = build_.chosen_by != nullptr;
        segment.n_used     = segment.routed ? build_.chosen_by->ne[0] : 0;
        build_.chosen_by   = nullptr;
        if (segment.host_end > segment.host_begin) { // what the host still computes may lie where a result belongs
            for (Download & download : segment.downloads) {
                download.direct = false;
            }
        }
        if (segment.device_end > segment.device_begin || segment.host_end > segment.host_begin) {
            program.segments.push_back(std::move(segment));
        }
        segment = Segment{};
        routed_.end_segment();
    }

    Build           build_;
    ResidentBuilder resident_;
    RoutedBuilder   routed_;
    CutBuilder      cut_;
    int             n_segment_ = 0;
};

std::unique_ptr<Program> new_program(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory,
                                     ContextSize size) {
    auto program = std::make_unique<Program>();
    Builder(graph, values, memory, size, *program).build();
    return program;
}

// The most room that a sub-graph takes: each node, its weight and each of its sources on every side, and a slice of it.
ContextSize largest_of(const ggml_cgraph * graph) {
    const int64_t n_tensors = graph->n_nodes * int64_t{n_sides * (3 + GGML_MAX_SRC)} + 8;
    return {n_tensors, n_tensors};
}

// The room that a program took.
ContextSize taken_by(const Program & program) {
    ContextSize          size = {0, 1};
    const ggml_context * ctx  = program.ctx.get();
    for (ggml_tensor * tensor = ggml_get_first_tensor(ctx); tensor != nullptr;
         tensor               = ggml_get_next_tensor(ctx, tensor)) {
        size.n_tensors++;
    }
    for (const ggml_cgraph * graph : {program.host_graph, program.device_graph}) {
        size.n_nodes = std::max<int64_t>(size.n_nodes, std::max(graph->n_nodes, graph->n_leafs));
    }
    return size;
}

// The first node of the device side that the device has no kernel for; NULL: it can compute all of them.
const ggml_tensor * refused_by_device(const Program & program) {
    for (int i = 0; i < ggml_graph_n_nodes(program.device_graph); i++) {
        const ggml_tensor * node = ggml_graph_node(program.device_graph, i);
        if (!is_view(node->op) && !ggml_backend_dev_supports_op(program.device, node)) {
            return node;
        }
    }
    return nullptr;
}

} // namespace

std::unique_ptr<Program> build_program(const ggml_cgraph * graph, ggml_backend_dev_t memory) {
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            if (plan_of(src) != nullptr && !ensure_placed(src)) {
                throw Error(OALLAMA_NO_MEMORY, std::string("the weights of this model were not loaded: ") + src->name);
            }
        }
    }
    for (const bool fuse : {true, false}) {
        const Values        values  = find_values(graph, fuse);
        auto                program = new_program(graph, values, memory, largest_of(graph));
        const ggml_tensor * refused = refused_by_device(*program);
        if (refused == nullptr) {
            program = new_program(graph, values, memory, taken_by(*program)); // many are kept: no larger
            dump_program(graph, values, *program);
            return program;
        }
        if (!fuse) {
            throw Error(OALLAMA_UNSUPPORTED, std::string(ggml_backend_dev_name(program->device)) + " cannot compute " +
                                                 ggml_op_name(refused->op) + " of this shape");
        }
    }
    GGML_ABORT("the last try returns or throws");
}

} // namespace oallama
