#include "split_graph.h"

#include <algorithm>

namespace oallama {

const SliceSpec * planned(const ggml_tensor * weight) {
    LoadedPlan * plan = plan_of(weight);
    if (plan == nullptr) {
        return nullptr;
    }
    const auto found = plan->spec().by_name.find(weight->name);
    return found == plan->spec().by_name.end() ? nullptr : &plan->spec().slices[found->second];
}

namespace {

constexpr int max_depth = 8; // operations between a mul-mat and the last one that keeps its cut

// Whose memory a mul-mat by this weight works in; NULL: the host's.
ggml_backend_dev_t memory_of(const ggml_tensor * weight) {
    const SliceSpec * slice = planned(weight);
    return slice == nullptr ? nullptr : plan_of(weight)->memory_of(*slice);
}

// A value that a mul-mat of ours, cut by rows, in this memory leads to by operations that keep the cut.
bool stays_cut(const ggml_tensor * tensor, ggml_backend_dev_t memory, int depth = 0) {
    if (tensor == nullptr || depth > max_depth) {
        return false;
    }
    if (is_mul_mat(tensor->op)) {
        const SliceSpec * slice = planned(tensor->src[0]);
        return slice != nullptr && slice->axis != Axis::cols && memory_of(tensor->src[0]) == memory;
    }
    if (tensor->op == GGML_OP_ADD_ID) {
        return is_bias_of_hot(tensor) && stays_cut(tensor->src[0], memory, depth + 1);
    }
    if (tensor->op == GGML_OP_VIEW) {
        return is_half_view(tensor, tensor->view_src) && stays_cut(tensor->view_src, memory, depth + 1);
    }
    if (is_unary(tensor->op)) {
        return stays_cut(tensor->src[0], memory, depth + 1);
    }
    if (tensor->op == GGML_OP_GLU) {
        return stays_cut(tensor->src[0], memory, depth + 1) &&
               (tensor->src[1] == nullptr || stays_cut(tensor->src[1], memory, depth + 1));
    }
    if (is_binary(tensor->op)) {
        const ggml_tensor * other  = tensor->src[1];
        const bool          weight = other->op == GGML_OP_NONE && other->buffer != nullptr &&
                                     ggml_backend_buffer_get_usage(other->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        return stays_cut(tensor->src[0], memory, depth + 1) &&
               ((weight && is_parameter(other, tensor->ne[0])) || stays_cut(other, memory, depth + 1));
    }
    return false;
}

// Experts' results, weighted or not, of which each side has a part, and which are many enough to be added up before
// they come back: that costs the device kernels, and the routing weights are sent to it.
bool is_worth_adding(const ggml_tensor * experts, ggml_backend_dev_t memory) {
    const bool          weighted = is_weighting(experts);
    const ggml_tensor * down     = weighted ? experts->src[0] : experts;
    if (is_bias_of_hot(down)) {
        down = down->src[0];
    }
    if (down->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    const SliceSpec * slice = planned(down->src[0]);
    if (slice != nullptr && !slice->hot.empty()) { // weighted where they come together, which costs the device nothing
        return weighted && down->ne[1] > 1 && memory_of(down->src[0]) == memory;
    }
    return slice != nullptr && slice->axis == Axis::cols && memory_of(down->src[0]) == memory &&
           are_many(down, down->src[0]);
}

// The weighting of such results, or a step of their sum: ((rank 0 + rank 1) + rank 2) and so on.
bool adds_experts(const ggml_tensor * op, ggml_backend_dev_t memory) {
    if (is_weighting(op)) {
        return is_worth_adding(op, memory);
    }
    if (op->op != GGML_OP_ADD || op->src[1]->op != GGML_OP_VIEW) {
        return false;
    }
    const ggml_tensor * experts = op->src[1]->src[0];
    for (; op->op == GGML_OP_ADD; op = op->src[0]) {
        if (!is_rank_view(op->src[1], experts)) {
            return false;
        }
    }
    return is_rank_view(op, experts) && is_worth_adding(experts, memory);
}

size_t hash_slot(const ggml_cgraph * graph, const ggml_tensor * node) {
    const ggml_hash_set & set   = graph->visited_hash_set;
    const size_t          first = (reinterpret_cast<uintptr_t>(node) >> 4U) % set.size;
    for (size_t slot = first, tried = 0; tried < set.size; slot = (slot + 1) % set.size, tried++) {
        if ((set.used[slot / 32] >> (slot % 32) & 1U) == 0) {
            break;
        }
        if (set.keys[slot] == node) {
            return slot;
        }
    }
    return SIZE_MAX;
}

} // namespace

//
// operations
//

bool is_view(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

bool is_mul_mat(ggml_op op) {
    return op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID;
}

// Not SCALE: ggml's CPU kernel takes no rows with gaps between them.
bool is_unary(ggml_op op) {
    return op == GGML_OP_UNARY || op == GGML_OP_SQR || op == GGML_OP_CLAMP;
}

bool is_binary(ggml_op op) {
    return op == GGML_OP_ADD || op == GGML_OP_SUB || op == GGML_OP_MUL || op == GGML_OP_DIV;
}

// One value per column, or one for all: a bias or a scale.
bool is_parameter(const ggml_tensor * tensor, int64_t n) {
    return tensor->type == GGML_TYPE_F32 && tensor->ne[1] == 1 && tensor->ne[2] == 1 && tensor->ne[3] == 1 &&
           (tensor->ne[0] == n || tensor->ne[0] == 1) && tensor->nb[0] == sizeof(float);
}

// A half of a fused gate_up's result, as llama.cpp views it.
bool is_half_view(const ggml_tensor * view, const ggml_tensor * whole) {
    return view->op == GGML_OP_VIEW && view->ne[0] * 2 == whole->ne[0] && view->ne[1] == whole->ne[1] &&
           view->ne[2] == whole->ne[2] && view->ne[3] == whole->ne[3] && view->nb[0] == whole->nb[0] &&
           view->nb[1] == whole->nb[1] && view->nb[2] == whole->nb[2] && view->nb[3] == whole->nb[3] &&
           (view->view_offs == whole->view_offs ||
            view->view_offs == whole->view_offs + static_cast<size_t>(view->ne[0]) * whole->nb[0]);
}

bool is_weighting(const ggml_tensor * op) {
    if (op->op != GGML_OP_MUL) {
        return false;
    }
    const ggml_tensor * experts = op->src[0];
    const ggml_tensor * weights = op->src[1];
    return weights->type == GGML_TYPE_F32 && weights->ne[0] == 1 && weights->ne[1] == experts->ne[1] &&
           weights->ne[2] == experts->ne[2] && weights->ne[3] == 1 && experts->ne[3] == 1;
}

bool is_bias_of_hot(const ggml_tensor * op) {
    if (op->op != GGML_OP_ADD_ID || op->src[0]->op != GGML_OP_MUL_MAT_ID || op->src[0]->src[2] != op->src[2]) {
        return false;
    }
    const ggml_tensor * bias  = op->src[1];
    const SliceSpec *   slice = planned(op->src[0]->src[0]);
    return slice != nullptr && !slice->hot.empty() && bias->type == GGML_TYPE_F32 && bias->op == GGML_OP_NONE &&
           ggml_is_contiguous(bias) && bias->ne[0] == op->ne[0] && bias->ne[1] == slice->e && is_on_host(bias);
}

bool are_many(const ggml_tensor * experts, const ggml_tensor * weight) {
    const int64_t saved = experts->ne[0] * (experts->ne[1] - 1) * experts->ne[2] * static_cast<int64_t>(sizeof(float));
    return saved > 0 && saved >= plan_of(weight)->spec().sum_bytes;
}

bool is_rank_view(const ggml_tensor * view, const ggml_tensor * experts) {
    return view->op == GGML_OP_VIEW && view->src[0] == experts && experts->view_src == nullptr && experts->ne[3] == 1 &&
           view->ne[0] == experts->ne[0] && view->ne[1] == experts->ne[2] && view->ne[2] == 1 && view->ne[3] == 1 &&
           view->nb[0] == experts->nb[0] && view->nb[1] == experts->nb[2] && view->view_offs % experts->nb[1] == 0;
}

bool claims(const ggml_tensor * op, ggml_backend_dev_t memory) {
    if (is_view(op->op)) {
        return true;
    }
    if (is_mul_mat(op->op)) {
        const ggml_tensor * x = op->src[1];
        return plan_of(op->src[0]) != nullptr && memory_of(op->src[0]) == memory &&
               (x->type == GGML_TYPE_F32 || x->type == GGML_TYPE_F16);
    }
    if (is_bias_of_hot(op)) {
        return memory_of(op->src[0]->src[0]) == memory;
    }
    return stays_cut(op, memory) || adds_experts(op, memory);
}

bool is_on_host(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src == nullptr ? tensor->buffer : tensor->view_src->buffer;
    return buffer != nullptr && (is_split_buft(buffer->buft) || ggml_backend_buffer_is_host(buffer));
}

//
// graphs
//

int find_node(const ggml_cgraph * graph, const ggml_tensor * tensor, int before) {
    for (int i = before - 1; i >= 0; i--) {
        if (graph->nodes[i] == tensor) {
            return i;
        }
    }
    return -1;
}

// llama.cpp reads node i after this sub-graph, so it has to be there in full.
bool read_outside(const ggml_cgraph * graph, int i) {
    const ggml_tensor * node = graph->nodes[i];
    if ((node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || i == graph->n_nodes - 1) {
        return true;
    }
    const size_t slot = graph->visited_hash_set.size == 0 ? SIZE_MAX : hash_slot(graph, node);
    int32_t      uses = slot == SIZE_MAX ? INT32_MAX : graph->use_counts[slot];
    for (int j = i + 1; j < graph->n_nodes && uses > 0; j++) {
        for (const ggml_tensor * src : graph->nodes[j]->src) {
            uses -= src == node ? 1 : 0;
        }
    }
    return uses > 0;
}

bool is_read_once(const ggml_cgraph * graph, int i) {
    int n_readers = 0;
    for (int j = i + 1; j < graph->n_nodes; j++) {
        const auto & src = graph->nodes[j]->src;
        n_readers += std::find(std::begin(src), std::end(src), graph->nodes[i]) != std::end(src) ? 1 : 0;
    }
    return n_readers == 1 && !read_outside(graph, i);
}

int find_sum(const ggml_cgraph * graph, int weighting) {
    const ggml_tensor * experts = graph->nodes[weighting];
    const int64_t       n_used  = experts->ne[1];
    const int64_t       last    = weighting + 2 * n_used - 1; // a view of each rank, and one addition less
    if (n_used < 2 || last >= graph->n_nodes) {
        return -1;
    }
    std::vector<const ggml_tensor *> steps = {experts};
    const ggml_tensor *              sum   = graph->nodes[last];
    for (int64_t rank = n_used - 1; rank >= 0; rank--) {
        const ggml_tensor * view = sum;
        if (rank > 0) {
            if (sum->op != GGML_OP_ADD) {
                return -1;
            }
            steps.push_back(sum);
            view = sum->src[1];
            sum  = sum->src[0];
        }
        if (!is_rank_view(view, experts) || view->view_offs != static_cast<size_t>(rank) * experts->nb[1]) {
            return -1;
        }
        steps.push_back(view);
    }
    const auto is_step = [&](const ggml_tensor * node) {
        return std::find(steps.begin(), steps.end(), node) != steps.end();
    };
    for (int j = weighting; j < last; j++) {
        if (!is_step(graph->nodes[j]) || read_outside(graph, j)) {
            return -1;
        }
    }
    for (int j = static_cast<int>(last) + 1; j < graph->n_nodes; j++) {
        for (const ggml_tensor * src : graph->nodes[j]->src) {
            if (src != nullptr && src != graph->nodes[last] && is_step(src)) {
                return -1;
            }
        }
    }
    return static_cast<int>(last);
}

bool is_empty(const ggml_tensor * tensor) {
    return std::find(std::begin(tensor->ne), std::end(tensor->ne), 0) != std::end(tensor->ne);
}

void keep_sent(ggml_tensor * tensor) {
    ggml_set_input(tensor);
    ggml_set_output(tensor);
}

const ggml_tensor * find_overwriting(const ggml_cgraph * graph) {
    const auto begin_of = [](const ggml_tensor * tensor) { return reinterpret_cast<uintptr_t>(tensor->data); };
    for (int i = 0; i < graph->n_leafs; i++) {
        const ggml_tensor * sent  = graph->leafs[i];
        const uintptr_t     begin = begin_of(sent);
        if ((sent->flags & GGML_TENSOR_FLAG_INPUT) == 0) {
            continue; // a weight, or memory of llama.cpp's
        }
        for (int j = 0; j < graph->n_nodes; j++) {
            const ggml_tensor * node = graph->nodes[j];
            if (!is_view(node->op) && begin_of(node) < begin + ggml_nbytes(sent) &&
                begin < begin_of(node) + ggml_nbytes(node)) {
                return node;
            }
        }
    }
    return nullptr;
}

bool may_stream(const ggml_cgraph * graph) {
    return std::any_of(graph->nodes, graph->nodes + graph->n_nodes, [](const ggml_tensor * node) {
        const SplitWeight * weight = weight_of(node->src[0]);
        return weight != nullptr && (weight->part(side_stream).count > 0 || weight->has_prime());
    });
}

bool computes_nothing(const ggml_cgraph & graph) {
    return std::all_of(graph.nodes, graph.nodes + graph.n_nodes,
                       [](const ggml_tensor * node) { return is_view(node->op) || is_empty(node); });
}

ggml_cgraph graph_range(ggml_cgraph * graph, int begin, int end) {
    ggml_cgraph range = *graph;
    range.nodes       = graph->nodes + begin;
    range.n_nodes     = end - begin;
    range.size        = 0;
    range.n_leafs     = 0;
    range.leafs       = nullptr;
    range.uid         = 0;
    return range;
}

void make_signature(const ggml_cgraph * graph, ggml_backend_dev_t memory, Signature & signature) {
    signature.clear();
    signature.push_back(reinterpret_cast<uintptr_t>(memory));
    std::vector<const ggml_tensor *> outside; // by the number that the signature has for them

    const auto add        = [&](uint64_t value) { signature.push_back(value); };
    const auto add_tensor = [&](const ggml_tensor * tensor) {
        add(static_cast<uint64_t>(tensor->type));
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            add(static_cast<uint64_t>(tensor->ne[d]));
            add(tensor->nb[d]);
        }
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        add(static_cast<uint64_t>(node->op) << 8U | (read_outside(graph, i) ? 1U : 0U));
        add_tensor(node);
        add(node->view_offs);
        for (const int32_t param : node->op_params) {
            add(static_cast<uint64_t>(static_cast<uint32_t>(param)));
        }
        for (const ggml_tensor * src : node->src) {
            if (src == nullptr) {
                add(0);
                continue;
            }
            const int inside = find_node(graph, src, i);
            if (inside >= 0) {
                add(static_cast<uint64_t>(inside) << 8U | 1U);
            } else if (plan_of(src) != nullptr) {
                const SplitWeight * weight = weight_of(src);
                add((weight == nullptr ? 0 : weight->id()) << 8U | 2U);
            } else {
                const auto known = std::find(outside.begin(), outside.end(), src);
                add(static_cast<uint64_t>(known - outside.begin()) << 8U | 3U);
                if (known == outside.end()) {
                    outside.push_back(src);
                    add_tensor(src);
                    add(memory != nullptr && is_on_host(src) ? 1U : 0U);
                }
            }
        }
    }
}

uint64_t hash_of(const Signature & signature) {
    uint64_t hash = 0xCBF29CE484222325U;
    for (const uint64_t word : signature) { // FNV-1a, eight bytes at a time, folded so that high bits count
        hash = (hash ^ word) * 0x100000001B3U;
        hash ^= hash >> 29U;
    }
    return hash;
}

} // namespace oallama
