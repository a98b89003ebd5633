#include "launch.h"

#include <cstring>

#include "kernels.h"

namespace emulated {

namespace {

// One number for a tensor's place and shape.
uint64_t mixed(uint64_t hash, const ggml_tensor * tensor) {
    const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15U; };
    add(reinterpret_cast<uintptr_t>(tensor->data));
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        add(static_cast<uint64_t>(tensor->ne[d]));
        add(tensor->nb[d]);
    }
    return hash ^ (hash >> 32U);
}

} // namespace

bool Captures::launch(const ggml_cgraph * graph) {
    if (graph->n_nodes == 0) {
        return false;
    }
    uint64_t places = static_cast<uint64_t>(graph->n_nodes);
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        places                   = mixed(places ^ reinterpret_cast<uintptr_t>(node), node);
        for (const ggml_tensor * src : node->src) {
            places = src == nullptr ? places : mixed(places, src);
        }
    }
    Known & known = known_[graph->nodes[0]];
    known.n_same  = known.places == places ? known.n_same + 1 : 1;
    known.places  = places;
    return known.n_same > 2;
}

Launch::Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of)
    : ctx_(oallama::new_context(int64_t{original->n_nodes} * (1 + GGML_MAX_SRC), 1,
                                int64_t{original->n_nodes} * (1 + GGML_MAX_SRC))) {
    const auto n_nodes = static_cast<size_t>(original->n_nodes);
    graph_             = ggml_new_graph_custom(ctx_.get(), n_nodes * (1 + GGML_MAX_SRC), false);
    for (size_t i = 0; i < n_nodes; i++) {
        const ggml_tensor * node = original->nodes[i];
        if (!has_kernel(node)) { // a view: of whatever, maybe of memory that is not the device's
            continue;
        }
        ggml_tensor * own = copy(node, memory_of(node));
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * src = node->src[j];
            if (src == nullptr) {
                continue;
            }
            const auto known = copies_.find(src);
            if (known != copies_.end()) {
                own->src[j] = known->second;
            } else { // a view, or no node of this graph: what computed it did so before
                own->src[j]     = copy(src, memory_of(src));
                own->src[j]->op = GGML_OP_NONE;
            }
        }
        ggml_build_forward_expand(graph_, own);
        own->flags = node->flags; // ggml has set the flag that says whether a node is to be computed
    }
}

ggml_tensor * Launch::copy(const ggml_tensor * original, void * memory) {
    ggml_tensor * own = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, 1);
    *own              = *original;
    own->data         = memory;
    own->buffer       = nullptr;
    own->view_src     = nullptr;
    std::memset(own->src, 0, sizeof own->src);
    copies_[original] = own;
    return own;
}

ggml_status Launch::run(ggml_backend_t cpu) {
    return ggml_backend_graph_compute(cpu, graph_);
}

} // namespace emulated
