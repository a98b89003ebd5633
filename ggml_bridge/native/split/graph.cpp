#include "graph.h"

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

//
// values
//

namespace {

class Finder {
  public:
    Finder(const ggml_cgraph * graph, bool fuse) : graph_(graph), fuse_(fuse) {
        found_.nodes.resize(static_cast<size_t>(graph->n_nodes));
        no_gaps_.resize(static_cast<size_t>(graph->n_nodes));
    }

    Values find() {
        for (int i = 0; i < graph_->n_nodes; i++) {
            Value & v = value(i);
            v.wanted  = v.wanted || read_outside(graph_, i);
            v.phase   = phase_; // never an earlier one, so that memory ggml reuses is free by then
            classify(i, v);
        }
        // a view is in full only if what it is a view of is
        for (int i = graph_->n_nodes - 1; i >= 0; i--) {
            if (is_view(graph_->nodes[i]->op) && value(i).state != State::full && value(i).wanted) {
                value(inside(i, 0)).wanted = true;
            }
        }
        lay_out();
        return std::move(found_);
    }

  private:
    // Shards that lie alike are packed unless one of them is wanted, and even then where a kernel takes no gaps.
    void lay_out() {
        std::vector<bool> wanted(found_.nodes.size());
        for (const Value & v : found_.nodes) {
            if (v.state == State::shard && v.wanted) {
                wanted[static_cast<size_t>(v.group)] = true;
            }
        }
        for (Value & v : found_.nodes) {
            if (v.state == State::shard) {
                v.packed = !wanted[static_cast<size_t>(v.group)] || no_gaps_[static_cast<size_t>(v.group)];
            }
        }
    }

    // One group out of two.
    void lie_alike(int a, int b) {
        const int keep = std::min(a, b);
        const int drop = std::max(a, b);
        for (Value & v : found_.nodes) {
            v.group = v.group == drop ? keep : v.group;
        }
        no_gaps_[static_cast<size_t>(keep)] =
            no_gaps_[static_cast<size_t>(keep)] || no_gaps_[static_cast<size_t>(drop)];
    }

    Value & value(int node) { return found_.nodes[static_cast<size_t>(node)]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const { return find_node(graph_, graph_->nodes[node]->src[src], node); }

    void classify(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        if (v.state == State::term || v.state == State::sum) { // found with the weighting
            v.phase = value(v.weighting).phase;
        } else if (is_view(node->op)) {
            classify_view(i, v);
        } else if (is_mul_mat(node->op) && weight_of(node->src[0]) != nullptr) {
            classify_mul_mat(i, v);
        } else if (!keeps_cut(i, v) && !keeps_partial(i, v) && !keeps_routed(i, v) && !is_summed(i, v)) {
            for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
                want_full(i, s, v, false);
            }
        }
        if (!is_view(node->op)) {
            v.host_ready = v.state == State::full ? v.phase : v.phase + 1;
            v.sent_ready = v.phase + 1;
            phase_       = v.phase;
        }
    }

    // A half of a shard is a shard, and one rank of partial experts' results is partial; any other view is of a full
    // value, and computes nothing, so that it never begins a phase.
    void classify_view(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        const int           from = node->src[0] == nullptr ? -1 : inside(i, 0);
        if (from < 0) {
            return;
        }
        Value & source = value(from);
        v.host_ready   = source.host_ready;
        v.sent_ready   = source.sent_ready;
        if (source.state == State::shard && 2 * source.extent == node->src[0]->ne[0] &&
            is_half_view(node, node->src[0])) {
            take_cut(v, source);
            v.phase = source.phase;
            return;
        }
        if (fuse_ && source.state == State::routed && is_half_view(node, node->src[0])) {
            take_routing(v, source);
            v.phase = source.phase;
            return;
        }
        if (fuse_ && source.state == State::partial && is_rank_view(node, node->src[0])) {
            take_partial(v, source);
            v.token_dim = 1;
            v.phase     = source.phase;
            return;
        }
        source.wanted = source.wanted || source.state != State::full;
    }

    void classify_mul_mat(int i, Value & v) {
        const ggml_tensor * node  = graph_->nodes[i];
        const SliceSpec &   slice = weight_of(node->src[0])->slice();
        assign_tokens(node, v);
        if (!slice.hot.empty()) {
            classify_hot(i, v);
            return;
        }
        const bool sent = slice.gg > 0 || slice.cg > 0 || v.n_g > 0;
        set_device(node->src[0], sent);
        if (node->op == GGML_OP_MUL_MAT_ID) {
            want_full(i, 2, v, sent);
        }
        v.cc     = slice.cc;
        v.cg     = slice.cg;
        v.extent = slice.extent();
        if (slice.axis != Axis::cols) {
            want_full(i, 1, v, sent);
            v.state = State::shard;
            v.group = i;
            // AMX kernels write rows without gaps; two halves of a row have one between them anyway
            no_gaps_[static_cast<size_t>(i)] = slice.layout == "AMX" || slice.axis == Axis::halves;
            return;
        }
        v.state     = State::partial;
        const int x = inside(i, 1);
        if (x >= 0 && can_take_cut(value(x), v) && value(x).cut_like(v)) {
            v.sharded_x = true;
            // kernels of repacked layouts read rows without gaps (ggml quantises four of them at a time)
            const auto group = static_cast<size_t>(value(x).group);
            no_gaps_[group]  = no_gaps_[group] || slice.layout != plain_layout;
            return;
        }
        want_full(i, 1, v, sent);
    }

    void classify_hot(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        if (node->op != GGML_OP_MUL_MAT_ID) {
            throw Error(OALLAMA_UNSUPPORTED, weight_of(node->src[0])->slice().name + " has hot experts but no routing");
        }
        set_device(node->src[0], true);
        want_full(i, 2, v, true);
        v.state     = State::routed;
        v.routed_by = i;
        const int x = inside(i, 1);
        if (fuse_ && x >= 0 && can_take_routing(value(x), v) && routed_alike(value(x).routed_by, i)) {
            take_routing(v, value(x));
            return;
        }
        want_full(i, 1, v, true);
    }

    // Rows that lie as another value's do.
    static void take_routing(Value & v, const Value & source) {
        v.state     = State::routed;
        v.routed_by = source.routed_by;
        v.token_dim = source.token_dim;
        v.n_tokens  = source.n_tokens;
    }

    static bool can_take_routing(const Value & source, const Value & v) {
        return source.state == State::routed && source.phase == v.phase;
    }

    // Whether two mul-mats have the same hot experts in the same slots, and the same ids.
    bool routed_alike(int a, int b) const {
        const ggml_tensor * left  = graph_->nodes[a];
        const ggml_tensor * right = graph_->nodes[b];
        return left->src[2] == right->src[2] &&
               weight_of(left->src[0])->slice().hot == weight_of(right->src[0])->slice().hot;
    }

    // Row by row: every operand is routed alike, or is a bias or a scale, of all experts or of each.
    bool keeps_routed(int i, Value & v) {
        const ggml_tensor * node   = graph_->nodes[i];
        const bool          biases = is_bias_of_hot(node);
        if (!fuse_ || (node->op != GGML_OP_GLU && !is_unary(node->op) && !is_binary(node->op) && !biases)) {
            return false;
        }
        const int first = inside(i, 0);
        if (first < 0 || !can_take_routing(value(first), v)) {
            return false;
        }
        if (biases && inside(i, 1) >= 0) {
            return false;
        }
        if (biases) {
            take_routing(v, value(first));
            return true;
        }
        if (node->src[1] != nullptr) {
            const int second = inside(i, 1);
            if (second >= 0 && value(second).state == State::routed) {
                if (!can_take_routing(value(second), v) ||
                    !routed_alike(value(first).routed_by, value(second).routed_by) ||
                    !std::equal(std::begin(node->src[0]->ne), std::end(node->src[0]->ne), node->src[1]->ne)) {
                    return false;
                }
            } else if (!is_binary(node->op) || !is_parameter(node->src[1], node->ne[0]) ||
                       (second >= 0 && value(second).sent_ready > v.phase)) {
                return false;
            }
        }
        take_routing(v, value(first));
        return true;
    }

    // Routing weights times routed rows of which nothing but the sum over all ranks is read.
    bool is_summed(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        const int           rows = node->src[0] == nullptr ? -1 : inside(i, 0);
        if (!fuse_ || !is_weighting(node) || node->type != GGML_TYPE_F32 || rows < 0 ||
            !can_take_routing(value(rows), v) || value(rows).wanted ||
            (graph_->nodes[rows]->op != GGML_OP_MUL_MAT_ID && graph_->nodes[rows]->op != GGML_OP_ADD_ID)) {
            return false;
        }
        const int weights = inside(i, 1);
        const int last    = find_sum(graph_, i);
        if (last < 0 || !is_read_once(graph_, rows) || (weights >= 0 && value(weights).sent_ready > v.phase)) {
            return false;
        }
        for (int j = i; j <= last; j++) {
            take_routing(value(j), value(rows));
            value(j).state     = j == last ? State::sum : State::term;
            value(j).weighting = i;
        }
        value(last).wanted    = true;
        value(rows).is_summed = true;
        return true;
    }

    // A shard that is cut as another is, and lies as it does.
    static void take_cut(Value & v, const Value & source) {
        v.state     = State::shard;
        v.cc        = source.cc;
        v.cg        = source.cg;
        v.extent    = source.extent;
        v.token_dim = source.token_dim;
        v.n_tokens  = source.n_tokens;
        v.n_g       = source.n_g;
        v.group     = source.group;
    }

    // A partial value of which each side has as much as of another.
    static void take_partial(Value & v, const Value & source) {
        take_cut(v, source);
        v.state = State::partial;
    }

    // n_g of a mul-mat: by the plan's table where the device can be sent CC, and ne[] has a dimension of tokens.
    static void assign_tokens(const ggml_tensor * node, Value & v) {
        const bool routed = node->op == GGML_OP_MUL_MAT_ID;
        v.token_dim       = routed ? 2 : 1;
        v.n_tokens        = node->ne[v.token_dim];
        const bool tokens = node->ne[3] == 1 && (routed || node->ne[2] == 1);
        if (tokens && weight_of(node->src[0])->has_prime()) {
            v.n_g = n_g_at(plan_of(node->src[0])->spec().tokens, v.n_tokens);
        }
    }

    // Whether a value may read this one as a shard: only in the same phase, since its end may move it apart.
    static bool can_take_cut(const Value & source, const Value & v) {
        return source.state == State::shard && source.phase == v.phase;
    }

    // Element-wise operations of which every operand is cut alike, or is a bias or a scale.
    bool keeps_cut(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        if (!fuse_ || (node->op != GGML_OP_GLU && !is_unary(node->op) && !is_binary(node->op))) {
            return false;
        }
        const int first = inside(i, 0);
        if (first < 0 || !can_take_cut(value(first), v)) {
            return false;
        }
        const Value a      = value(first);
        const bool  halves = 2 * a.extent == node->src[0]->ne[0];
        if (node->op == GGML_OP_GLU && node->src[1] == nullptr && !halves) {
            return false; // both operands in one value that was cut as if it were one
        }
        if (node->src[1] != nullptr) {
            const int second = inside(i, 1);
            if (second >= 0 && value(second).state == State::shard) {
                if (!can_take_cut(value(second), v) || !value(second).cut_like(a) ||
                    node->src[1]->ne[0] != node->src[0]->ne[0]) {
                    return false;
                }
                lie_alike(a.group, value(second).group);
            } else if (!is_binary(node->op) || halves || !is_parameter(node->src[1], node->ne[0]) ||
                       (second >= 0 && value(second).sent_ready > v.phase)) {
                return false;
            }
        }
        take_cut(v, value(first));
        return true;
    }

    // Experts' partial results times the routing weights, or two of them added.
    bool keeps_partial(int i, Value & v) {
        const ggml_tensor * node  = graph_->nodes[i];
        const int           first = node->src[0] == nullptr ? -1 : inside(i, 0);
        if (!fuse_ || first < 0 || value(first).state != State::partial || value(first).phase != v.phase) {
            return false;
        }
        const Value & a      = value(first);
        const int     second = node->src[1] == nullptr ? -1 : inside(i, 1);
        if (is_weighting(node)) {
            if (a.token_dim != 2 || (second >= 0 && value(second).sent_ready > v.phase)) {
                return false;
            }
        } else if (node->op != GGML_OP_ADD || second < 0 || value(second).state != State::partial ||
                   value(second).phase != v.phase || !value(second).cut_like(a) ||
                   value(second).token_dim != a.token_dim ||
                   !std::equal(std::begin(node->ne), std::end(node->ne), node->src[1]->ne)) {
            return false;
        }
        take_partial(v, a);
        return true;
    }

    // Source s of node i is read in full: on the host, or on the device too, which gets it when a phase begins.
    void want_full(int i, int s, Value & v, bool sent) {
        const int from = inside(i, s);
        if (from < 0) {
            return;
        }
        Value & source = value(from);
        source.wanted  = source.wanted || source.state != State::full;
        v.phase        = std::max(v.phase, sent ? source.sent_ready : source.host_ready);
    }

    void set_device(const ggml_tensor * weight, bool sent) {
        if (!sent) {
            return;
        }
        ggml_backend_dev_t device = plan_of(weight)->device();
        if (found_.device != nullptr && found_.device != device) {
            throw Error(OALLAMA_UNSUPPORTED, "one sub-graph has weights on two devices");
        }
        found_.device = device;
    }

    const ggml_cgraph * graph_;
    bool                fuse_;
    Values              found_;
    std::vector<bool>   no_gaps_;   // by group: some kernel takes rows without gaps only
    int                 phase_ = 0; // of the node at hand
};

} // namespace

Values find_values(const ggml_cgraph * graph, bool fuse) {
    return Finder(graph, fuse).find();
}

} // namespace oallama
