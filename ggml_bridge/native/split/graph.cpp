#include "graph.h"

#include <algorithm>

namespace oallama {

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

const SliceSpec * planned(const ggml_tensor * weight) {
    return plan_of(weight) == nullptr ? nullptr : plan_of(weight)->spec().find(weight->name);
}

bool are_many(const ggml_tensor * experts, const ggml_tensor * weight) {
    const int64_t saved = experts->ne[0] * (experts->ne[1] - 1) * experts->ne[2] * static_cast<int64_t>(sizeof(float));
    return saved > 0 && saved >= plan_of(weight)->spec().sum_bytes;
}

bool is_on_host(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src == nullptr ? tensor->buffer : tensor->view_src->buffer;
    return buffer != nullptr && (is_split_buft(buffer->buft) || ggml_backend_buffer_is_host(buffer));
}

bool is_empty(const ggml_tensor * tensor) {
    return std::find(std::begin(tensor->ne), std::end(tensor->ne), 0) != std::end(tensor->ne);
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

namespace {

// Element-wise operations that keep a cut along ne[0].
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
    return view->op == GGML_OP_VIEW && view->ne[0] * 2 == whole->ne[0] &&
           std::equal(view->ne + 1, view->ne + GGML_MAX_DIMS, whole->ne + 1) &&
           std::equal(view->nb, view->nb + GGML_MAX_DIMS, whole->nb) &&
           (view->view_offs == whole->view_offs ||
            view->view_offs == whole->view_offs + static_cast<size_t>(view->ne[0]) * whole->nb[0]);
}

// The results of one rank of all tokens' experts, [n, n_tokens], as llama.cpp views them to add them up.
bool is_rank_view(const ggml_tensor * view, const ggml_tensor * experts) {
    return view->op == GGML_OP_VIEW && view->src[0] == experts && experts->view_src == nullptr && experts->ne[3] == 1 &&
           view->ne[0] == experts->ne[0] && view->ne[1] == experts->ne[2] && view->ne[2] == 1 && view->ne[3] == 1 &&
           view->nb[0] == experts->nb[0] && view->nb[1] == experts->nb[2] && view->view_offs % experts->nb[1] == 0;
}

// The experts' results, if this addition is a step of their sum over ranks, ((0 + 1) + 2) and so on; else NULL.
const ggml_tensor * summed_by(const ggml_tensor * op) {
    if (op->op != GGML_OP_ADD || op->src[1]->op != GGML_OP_VIEW) {
        return nullptr;
    }
    const ggml_tensor * experts = op->src[1]->src[0];
    size_t              at      = op->src[1]->view_offs;
    for (bool more = true; more; at -= experts->nb[1]) {
        more                     = op->op == GGML_OP_ADD;
        const ggml_tensor * view = more ? op->src[1] : op;
        if (!is_rank_view(view, experts) || view->view_offs != at || more != (at > 0)) {
            return nullptr;
        }
        op = op->src[0];
    }
    return experts;
}

// Whether this adds biases of experts, in host memory, to the results of a mul-mat by experts some of which are hot.
bool is_bias_of_hot(const ggml_tensor * op) {
    if (op->op != GGML_OP_ADD_ID || op->src[0]->op != GGML_OP_MUL_MAT_ID || op->src[0]->src[2] != op->src[2]) {
        return false;
    }
    const ggml_tensor * bias  = op->src[1];
    const SliceSpec *   slice = planned(op->src[0]->src[0]);
    return slice != nullptr && !slice->hot.empty() && bias->type == GGML_TYPE_F32 && bias->op == GGML_OP_NONE &&
           ggml_is_contiguous(bias) && bias->ne[0] == op->ne[0] && bias->ne[1] == slice->e && is_on_host(bias);
}

// The state of an operation's result: that of its first source if the operation keeps it, else mirrored. of: the state
// of a source, by its number; reads: whether source 1 is mirrored when the operation is computed.
template <typename Of, typename Reads> State kept(const ggml_tensor * op, const Of & of, const Reads & reads) {
    const bool elementwise = op->op == GGML_OP_GLU || is_unary(op->op) || is_binary(op->op);
    if (!elementwise && op->op != GGML_OP_VIEW && op->op != GGML_OP_ADD_ID) {
        return State::mirrored;
    }
    const State first = of(0);
    bool        keeps = false;
    if (first == State::partial) {
        keeps = is_rank_view(op, op->src[0]) || (is_weighting(op) && reads()) ||
                (op->op == GGML_OP_ADD && of(1) == State::partial);
    } else if (first == State::axis_0 || first == State::routed) {
        keeps = elementwise ? op->src[1] == nullptr || of(1) == first ||
                                  (is_binary(op->op) && is_parameter(op->src[1], op->ne[0]) && reads())
                            : is_half_view(op, op->src[0]) || is_bias_of_hot(op);
    }
    return keeps ? first : State::mirrored;
}

//
// claims
//

constexpr int max_depth = 8; // operations between a mul-mat and the last one that keeps its cut

// Whether this is a mul-mat by a weight that a plan names, in this memory.
bool is_planned_in(const ggml_tensor * mul_mat, ggml_backend_dev_t memory) {
    const SliceSpec * slice = planned(mul_mat->src[0]);
    return slice != nullptr && plan_of(mul_mat->src[0])->memory_of(*slice) == memory;
}

// axis_0 for a result of a mul-mat by a planned weight cut by rows, followed by operations that keep the cut, in this
// memory; the same for rows of hot experts. Else mirrored.
State planned_state(const ggml_tensor * tensor, ggml_backend_dev_t memory, int depth = 0) {
    if (depth > max_depth) {
        return State::mirrored;
    }
    if (is_mul_mat(tensor->op)) {
        const bool cut = is_planned_in(tensor, memory) && planned(tensor->src[0])->axis != Axis::cols;
        return cut ? State::axis_0 : State::mirrored;
    }
    const auto of        = [&](int s) { return planned_state(tensor->src[s], memory, depth + 1); };
    const auto is_weight = [&] {
        const ggml_tensor * other = tensor->src[1];
        return other->op == GGML_OP_NONE && other->buffer != nullptr &&
               ggml_backend_buffer_get_usage(other->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    };
    return kept(tensor, of, is_weight);
}

// Whether this is the weighting of experts' results, or a step of their sum, and they are large enough to be added up
// before they are copied back: that costs kernels on the device, and the routing weights are sent there.
bool adds_experts(const ggml_tensor * op, ggml_backend_dev_t memory) {
    const ggml_tensor * experts = is_weighting(op) ? op : summed_by(op);
    if (experts == nullptr) {
        return false;
    }
    const bool          weighted = is_weighting(experts);
    const ggml_tensor * down     = weighted ? experts->src[0] : experts;
    down                         = is_bias_of_hot(down) ? down->src[0] : down;
    if (down->op != GGML_OP_MUL_MAT_ID || !is_planned_in(down, memory)) {
        return false;
    }
    const SliceSpec & slice = *planned(down->src[0]);
    return slice.hot.empty() ? slice.axis == Axis::cols && are_many(down, down->src[0])
                             : weighted && down->ne[1] > 1; // where they come together, which costs the device nothing
}

} // namespace

bool claims(const ggml_tensor * op, ggml_backend_dev_t memory) {
    if (is_view(op->op)) {
        return true;
    }
    if (is_mul_mat(op->op)) {
        const ggml_tensor * x     = op->src[1];
        const SliceSpec *   slice = planned(op->src[0]);
        return plan_of(op->src[0]) != nullptr && (slice == nullptr ? memory == nullptr : is_planned_in(op, memory)) &&
               (x->type == GGML_TYPE_F32 || x->type == GGML_TYPE_F16);
    }
    if (is_bias_of_hot(op)) {
        return is_planned_in(op->src[0], memory);
    }
    return planned_state(op, memory) == State::axis_0 || adds_experts(op, memory);
}

//
// sub-graphs
//

int find_node(const ggml_cgraph * graph, const ggml_tensor * tensor, int before) {
    for (int i = before - 1; i >= 0; i--) {
        if (graph->nodes[i] == tensor) {
            return i;
        }
    }
    return -1;
}

namespace {

// Number of reads of a node in llama.cpp's whole graph; INT32_MAX: not known.
int32_t n_uses(const ggml_cgraph * graph, const ggml_tensor * node) {
    const ggml_hash_set & set = graph->visited_hash_set;
    if (set.size == 0) {
        return INT32_MAX;
    }
    const size_t first = (reinterpret_cast<uintptr_t>(node) >> 4U) % set.size;
    for (size_t slot = first, tried = 0; tried < set.size; slot = (slot + 1) % set.size, tried++) {
        if ((set.used[slot / 32] >> (slot % 32) & 1U) == 0) {
            break;
        }
        if (set.keys[slot] == node) {
            return graph->use_counts[slot];
        }
    }
    return INT32_MAX;
}

// Whether llama.cpp reads node i after this sub-graph, so that it must be mirrored.
bool read_outside(const ggml_cgraph * graph, int i) {
    const ggml_tensor * node = graph->nodes[i];
    if ((node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || i == graph->n_nodes - 1) {
        return true;
    }
    int32_t uses = n_uses(graph, node);
    for (int j = i + 1; j < graph->n_nodes && uses > 0; j++) {
        uses -=
            static_cast<int32_t>(std::count(std::begin(graph->nodes[j]->src), std::end(graph->nodes[j]->src), node));
    }
    return uses > 0;
}

bool reads(const ggml_tensor * reader, const ggml_tensor * node) {
    return std::find(std::begin(reader->src), std::end(reader->src), node) != std::end(reader->src);
}

// Whether exactly one node of this sub-graph, and none outside, reads this node.
bool is_read_once(const ggml_cgraph * graph, int i) {
    const auto n_readers = std::count_if(graph->nodes + i + 1, graph->nodes + graph->n_nodes,
                                         [&](const ggml_tensor * node) { return reads(node, graph->nodes[i]); });
    return n_readers == 1 && !read_outside(graph, i);
}

} // namespace

int find_sum(const ggml_cgraph * graph, int weighting) {
    const ggml_tensor * experts = graph->nodes[weighting];
    const int64_t       n_steps = 2 * experts->ne[1]; // the weighting, a view of each rank, and one addition less
    const int64_t       last    = weighting + n_steps - 1;
    if (experts->ne[1] < 2 || last >= graph->n_nodes) {
        return -1;
    }
    const ggml_tensor * sum = graph->nodes[last];
    if (summed_by(sum) != experts ||
        sum->src[1]->view_offs != static_cast<size_t>(experts->ne[1] - 1) * experts->nb[1]) {
        return -1;
    }
    for (int64_t i = weighting; i < last; i++) {
        const ggml_tensor * step    = graph->nodes[i];
        const bool          is_step = step == experts || is_rank_view(step, experts) || summed_by(step) == experts;
        if (!is_step || read_outside(graph, static_cast<int>(i)) ||
            std::any_of(graph->nodes + last + 1, graph->nodes + graph->n_nodes,
                        [&](const ggml_tensor * node) { return reads(node, step); })) {
            return -1;
        }
    }
    return static_cast<int>(last);
}

namespace {

//
// values
//

class Finder {
  public:
    Finder(const ggml_cgraph * graph, bool fuse) : graph_(graph), fuse_(fuse) {
        found_.nodes.resize(static_cast<size_t>(graph->n_nodes));
    }

    Values find() {
        for (int i = 0; i < graph_->n_nodes; i++) {
            Value & v = value(i);
            v.wanted  = v.wanted || read_outside(graph_, i);
            v.segment = segment_; // segments never go back, so that memory that ggml reuses is free by then
            classify(i, v);
        }
        // a view is mirrored only if what it is a view of is
        for (int i = graph_->n_nodes - 1; i >= 0; i--) {
            if (is_view(graph_->nodes[i]->op) && value(i).state != State::mirrored && value(i).wanted) {
                value(inside(i, 0)).wanted = true;
            }
        }
        return std::move(found_);
    }

  private:
    Value & value(int node) { return found_.nodes[static_cast<size_t>(node)]; }

    const Value & value(int node) const { return found_.nodes[static_cast<size_t>(node)]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const {
        const ggml_tensor * tensor = graph_->nodes[node]->src[src];
        return tensor == nullptr ? -1 : find_node(graph_, tensor, node);
    }

    // The state of source s as the node may take it: only in the same segment, since its end may move it apart.
    State state_of(int i, int s, const Value & v) const {
        const int from = inside(i, s);
        return from >= 0 && value(from).segment == v.segment ? value(from).state : State::mirrored;
    }

    // Whether source 1 is mirrored, on both sides, in the node's segment.
    bool is_sent(int i, const Value & v) const {
        const int from = inside(i, 1);
        return from < 0 || (value(from).state == State::mirrored && value(from).sent_ready <= v.segment);
    }

    void classify(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        const int           from = inside(i, 0);
        if (is_view(node->op)) { // a view never begins a segment
            if (from >= 0 && v.state != State::term) {
                v.segment          = value(from).segment;
                v.host_ready       = value(from).host_ready;
                v.sent_ready       = value(from).sent_ready;
                const bool keeps   = keeps_state(i, v);
                value(from).wanted = value(from).wanted || (!keeps && value(from).state != State::mirrored);
            }
            return;
        }
        if (v.state == State::term || v.state == State::sum) { // found with the weighting
            v.segment = value(v.weighting).segment;
        } else if (is_mul_mat(node->op) && weight_of(node->src[0]) != nullptr) {
            classify_mul_mat(i, v);
        } else if (!keeps_state(i, v) && !is_summed(i, v)) {
            for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
                want_mirrored(i, s, v, false);
            }
        }
        v.host_ready = v.state == State::mirrored ? v.segment : v.segment + 1;
        v.sent_ready = v.segment + 1;
        segment_     = v.segment;
    }

    // Whether the node's value has the state of its first source, with the same cut or routing.
    bool keeps_state(int i, Value & v) {
        const ggml_tensor * node  = graph_->nodes[i];
        const auto          of    = [&](int s) { return state_of(i, s, v); };
        const State         state = fuse_ ? kept(node, of, [&] { return is_sent(i, v); }) : State::mirrored;
        if (state == State::mirrored) {
            return false;
        }
        const Value & a = value(inside(i, 0));
        const Value * b = of(1) == state ? &value(inside(i, 1)) : nullptr;
        if (!fits(i, state, a, b)) {
            return false;
        }
        state == State::routed ? take_routing(v, a) : take_cut(v, a);
        v.state     = state;
        v.token_dim = state == State::partial && is_view(node->op) ? 1 : a.token_dim;
        return true;
    }

    // Whether an operation keeps the state of its first source a, with the same cut or routing. b: source 1, if it has
    // the same state; NULL: a bias, a scale, routing weights, or no source 1.
    bool fits(int i, State state, const Value & a, const Value * b) const {
        const ggml_tensor * node   = graph_->nodes[i];
        const ggml_tensor * x      = node->src[0];
        const bool          equal  = b == nullptr || std::equal(std::begin(x->ne), std::end(x->ne), node->src[1]->ne);
        const bool          halves = state == State::axis_0 && 2 * a.extent == x->ne[0]; // of a fused gate_up
        switch (state) {
            case State::axis_0:
                return b != nullptr              ? b->cut_like(a) && x->ne[0] == node->src[1]->ne[0]
                       : node->src[1] != nullptr ? !halves
                                                 : halves || is_unary(node->op);
            case State::routed:
                return equal && (b == nullptr || routed_alike(a.routed_by, b->routed_by)) &&
                       (node->op != GGML_OP_ADD_ID || inside(i, 1) < 0);
            default:
                return b != nullptr ? equal && b->cut_like(a) && b->token_dim == a.token_dim
                                    : is_view(node->op) || a.token_dim == 2;
        }
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
            want_mirrored(i, 2, v, sent);
        }
        v.cc     = slice.cc;
        v.cg     = slice.cg;
        v.extent = slice.extent();
        if (slice.axis != Axis::cols) {
            want_mirrored(i, 1, v, sent);
            v.state = State::axis_0;
            return;
        }
        v.state = State::partial;
        if (state_of(i, 1, v) == State::axis_0 && value(inside(i, 1)).cut_like(v)) {
            v.x_is_cut = true;
            return;
        }
        want_mirrored(i, 1, v, sent);
    }

    void classify_hot(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        if (node->op != GGML_OP_MUL_MAT_ID) {
            throw Error(OALLAMA_UNSUPPORTED, weight_of(node->src[0])->slice().name + " has hot experts but no routing");
        }
        set_device(node->src[0], true);
        want_mirrored(i, 2, v, true);
        v.state     = State::routed;
        v.routed_by = i;
        if (fuse_ && state_of(i, 1, v) == State::routed && routed_alike(value(inside(i, 1)).routed_by, i)) {
            take_routing(v, value(inside(i, 1)));
            return;
        }
        want_mirrored(i, 1, v, true);
    }

    // Routing weights times routed rows, if only their sum over all ranks is read.
    bool is_summed(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        if (!fuse_ || !is_weighting(node) || node->type != GGML_TYPE_F32 || state_of(i, 0, v) != State::routed) {
            return false;
        }
        const int     rows = inside(i, 0);
        const ggml_op op   = graph_->nodes[rows]->op;
        const int     last = find_sum(graph_, i);
        if (value(rows).wanted || (op != GGML_OP_MUL_MAT_ID && op != GGML_OP_ADD_ID) || last < 0 ||
            !is_read_once(graph_, rows) || !is_sent(i, v)) {
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

    // A value routed as another one.
    static void take_routing(Value & v, const Value & source) {
        v.state     = State::routed;
        v.routed_by = source.routed_by;
        v.token_dim = source.token_dim;
        v.n_tokens  = source.n_tokens;
    }

    // Whether two mul-mats have the same hot experts in the same slots, and the same ids.
    bool routed_alike(int a, int b) const {
        const ggml_tensor * left  = graph_->nodes[a];
        const ggml_tensor * right = graph_->nodes[b];
        return left->src[2] == right->src[2] &&
               weight_of(left->src[0])->slice().hot == weight_of(right->src[0])->slice().hot;
    }

    // A value cut as another one.
    static void take_cut(Value & v, const Value & source) {
        v.state     = State::axis_0;
        v.cc        = source.cc;
        v.cg        = source.cg;
        v.extent    = source.extent;
        v.token_dim = source.token_dim;
        v.n_tokens  = source.n_tokens;
        v.n_g       = source.n_g;
    }

    // n_g of a mul-mat: by the plan's table, if CC can be sent to the device, and ne[] has a dimension of tokens.
    static void assign_tokens(const ggml_tensor * node, Value & v) {
        const bool routed = node->op == GGML_OP_MUL_MAT_ID;
        v.token_dim       = routed ? 2 : 1;
        v.n_tokens        = node->ne[v.token_dim];
        const bool tokens = node->ne[3] == 1 && (routed || node->ne[2] == 1);
        if (tokens && weight_of(node->src[0])->slice().takes_n_g && weight_of(node->src[0])->has_prime()) {
            v.n_g = n_g_at(device_spec_of(node->src[0]).tokens, v.n_tokens);
        }
    }

    // Notes that source s of node i is read mirrored: on the host, or also on the device, to which it is sent when a
    // segment begins.
    void want_mirrored(int i, int s, Value & v, bool sent) {
        const int from = inside(i, s);
        if (from < 0) {
            return;
        }
        Value & source = value(from);
        source.wanted  = source.wanted || source.state != State::mirrored;
        v.segment      = std::max(v.segment, sent ? source.sent_ready : source.host_ready);
    }

    void set_device(const ggml_tensor * weight, bool sent) {
        if (!sent) {
            return;
        }
        ggml_backend_dev_t device = device_of(weight);
        if (found_.device != nullptr && found_.device != device) {
            throw Error(OALLAMA_UNSUPPORTED, "one sub-graph has weights on two devices");
        }
        found_.device = device;
    }

    const ggml_cgraph * graph_;
    bool                fuse_;
    Values              found_;
    int                 segment_ = 0; // of the node at hand
};

} // namespace

Values find_values(const ggml_cgraph * graph, bool fuse) {
    return Finder(graph, fuse).find();
}

const ggml_tensor * first_streamed(const ggml_cgraph * graph) {
    const auto *       end   = graph->nodes + graph->n_nodes;
    const auto * const found = std::find_if(graph->nodes, graph->nodes + graph->n_nodes, [](const ggml_tensor * node) {
        const SplitWeight * weight = weight_of(node->src[0]);
        return weight != nullptr &&
               (weight->part(side_stream).count > 0 || (weight->slice().takes_n_g && weight->has_prime()));
    });
    return found == end ? nullptr : (*found)->src[0];
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

} // namespace oallama
