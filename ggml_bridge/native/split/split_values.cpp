#include "split_values.h"

#include <algorithm>

namespace oallama {

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
