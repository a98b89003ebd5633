#include "split_program.h"

#include <algorithm>

#include "split_builder.h"

namespace oallama {

namespace {

// At most: each node, its weight and each of its sources on every side, and a slice of it.
Room most_of(const ggml_cgraph * graph) {
    const int64_t n_tensors = graph->n_nodes * int64_t{n_sides * (3 + GGML_MAX_SRC)} + 8;
    return {n_tensors, n_tensors};
}

// What it took of that.
Room taken_by(const Program & program) {
    Room                 room = {0, 1};
    const ggml_context * ctx  = program.ctx.get();
    for (ggml_tensor * one = ggml_get_first_tensor(ctx); one != nullptr; one = ggml_get_next_tensor(ctx, one)) {
        room.n_tensors++;
    }
    for (const ggml_cgraph * graph : {program.host_graph, program.device_graph}) {
        room.n_nodes = std::max<int64_t>(room.n_nodes, std::max(graph->n_nodes, graph->n_leafs));
    }
    return room;
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

std::unique_ptr<Program> new_program(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory,
                                     Room room) {
    auto program = std::make_unique<Program>();
    ProgramBuilder(graph, values, memory, room, *program).build();
    return program;
}

template <typename T> size_t bytes_of(const std::vector<T> & items) {
    return items.capacity() * sizeof(T);
}

size_t bytes_of(const Phase & phase) {
    size_t bytes = bytes_of(phase.inputs) + bytes_of(phase.lifts) + bytes_of(phase.uploads) +
                   bytes_of(phase.downloads) + bytes_of(phase.streamed) + bytes_of(phase.routings);
    for (const Routed & routed : phase.routings) {
        bytes += bytes_of(routed.weights) + bytes_of(routed.sized) + bytes_of(routed.gathered) + bytes_of(routed.sent);
    }
    return bytes;
}

size_t bytes_of(const Program & program) {
    size_t bytes = sizeof program + ggml_get_mem_size(program.ctx.get()) + bytes_of(program.signature) +
                   bytes_of(program.bindings) + bytes_of(program.device_bindings) + bytes_of(program.device_views) +
                   bytes_of(program.host_views) + bytes_of(program.host_staged) + bytes_of(program.phases);
    for (const Phase & phase : program.phases) {
        bytes += bytes_of(phase);
    }
    return bytes;
}

} // namespace

std::unique_ptr<Program> build_program(const ggml_cgraph * graph, ggml_backend_dev_t memory,
                                       const Signature & signature) {
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            if (plan_of(src) != nullptr && !ensure_placed(src)) {
                throw Error(OALLAMA_NO_MEMORY, std::string("the weights of this model were not loaded: ") + src->name);
            }
        }
    }
    for (const bool fuse : {true, false}) {
        const Values        values  = find_values(graph, fuse);
        auto                program = new_program(graph, values, memory, most_of(graph));
        const ggml_tensor * refused = refused_by_device(*program);
        if (refused == nullptr) {
            program            = new_program(graph, values, memory, taken_by(*program)); // many are kept: no larger
            program->signature = signature;
            program->bytes     = bytes_of(*program);
            return program;
        }
        if (!fuse) {
            throw Error(OALLAMA_UNSUPPORTED, std::string(ggml_backend_dev_name(program->device)) + " cannot compute " +
                                                 ggml_op_name(refused->op) + " of this shape");
        }
    }
    return nullptr; // not reached
}

} // namespace oallama
