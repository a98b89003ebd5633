#include "split_program.h"

#include <algorithm>
#include <cstring>

namespace oallama {

namespace {

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

const SliceSpec * planned(const ggml_tensor * weight) {
    LoadedPlan * plan = plan_of(weight);
    if (plan == nullptr) {
        return nullptr;
    }
    const auto found = plan->spec().by_name.find(weight->name);
    return found == plan->spec().by_name.end() ? nullptr : &plan->spec().slices[found->second];
}

constexpr int max_depth = 8; // operations between a mul-mat and the last one that keeps its cut

// A value that a mul-mat of ours, cut by rows, leads to by operations that keep the cut.
bool stays_cut(const ggml_tensor * tensor, int depth = 0) {
    if (tensor == nullptr || depth > max_depth) {
        return false;
    }
    if (is_mul_mat(tensor->op)) {
        const SliceSpec * slice = planned(tensor->src[0]);
        return slice != nullptr && slice->axis != Axis::cols;
    }
    if (tensor->op == GGML_OP_VIEW) {
        return is_half_view(tensor, tensor->view_src) && stays_cut(tensor->view_src, depth + 1);
    }
    if (is_unary(tensor->op)) {
        return stays_cut(tensor->src[0], depth + 1);
    }
    if (tensor->op == GGML_OP_GLU) {
        return stays_cut(tensor->src[0], depth + 1) &&
               (tensor->src[1] == nullptr || stays_cut(tensor->src[1], depth + 1));
    }
    if (is_binary(tensor->op)) {
        const ggml_tensor * other  = tensor->src[1];
        const bool          weight = other->op == GGML_OP_NONE && other->buffer != nullptr &&
                                     ggml_backend_buffer_get_usage(other->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
        return stays_cut(tensor->src[0], depth + 1) &&
               ((weight && is_parameter(other, tensor->ne[0])) || stays_cut(other, depth + 1));
    }
    return false;
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

} // namespace

bool claims(const ggml_tensor * op) {
    if (is_view(op->op)) {
        return true;
    }
    if (is_mul_mat(op->op)) {
        const ggml_tensor * x = op->src[1];
        return plan_of(op->src[0]) != nullptr && (x->type == GGML_TYPE_F32 || x->type == GGML_TYPE_F16);
    }
    return stays_cut(op);
}

void make_signature(const ggml_cgraph * graph, Signature & signature) {
    signature.clear();

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
                add(reinterpret_cast<uintptr_t>(src->extra) | 2U); // a weight, by address
            } else {
                add(3);
                add_tensor(src);
            }
        }
    }
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

//
// building
//

namespace {

enum class State { full, shard, partial };

// What is known of a node's value while the program is built.
struct Value {
    State         state      = State::full;
    int           phase      = 0;       // in which it is computed; a view: in which it stands
    int           host_ready = 0;       // first phase that can read it in full on the host
    int           sent_ready = 0;       // first phase that can send it in full to the device
    bool          wanted     = false;   // in full, by llama.cpp or by an operation here
    bool          sharded_x  = false;   // a mul-mat along K whose input is a shard with the same cut
    int64_t       cc         = 0;       // elements on the host
    int64_t       extent     = 0;       // elements that are cut together: ne[0], or half of it
    bool          packed     = false;   // the host side is contiguous at the start of the original's memory
    bool          moves      = false;   // wanted, the host side is packed and moved apart when its phase ends
    ggml_tensor * host       = nullptr; // NULL: nothing of it there
    ggml_tensor * device     = nullptr;
};

class Builder {
  public:
    // fuse: element-wise operations keep the cut; else each mul-mat is joined by itself.
    Builder(const ggml_cgraph * graph, Program & program, bool fuse) : graph_(graph), program_(program), fuse_(fuse) {
        const auto n = static_cast<size_t>(graph->n_nodes);
        values_.resize(n);
        // at most: each node and each of its sources on both sides, and a slice of it
        const int64_t n_tensors = graph->n_nodes * int64_t{2 * (2 + GGML_MAX_SRC)};
        program.ctx             = new_context(n_tensors + 8, 2, n_tensors + 8);
        program.device_graph    = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(n_tensors + 8), false);
        program.host_graph      = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(n_tensors + 8), false);
    }

    void build() {
        classify();
        for (int i = 0; i < graph_->n_nodes; i++) {
            emit(i);
        }
        close_phase();
    }

  private:
    ggml_context * ctx() { return program_.ctx.get(); }

    Value & value(int node) { return values_[static_cast<size_t>(node)]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const { return find_node(graph_, graph_->nodes[node]->src[src], node); }

    // --- first pass: states and phases

    void classify() {
        for (int i = 0; i < graph_->n_nodes; i++) {
            Value & v = value(i);
            v.wanted  = read_outside(graph_, i);
            v.phase   = phase_; // never an earlier one, so that memory ggml reuses is free by then
            classify(i, v);
        }
        phase_ = 0;
        // a shard's half is in full only if the shard is
        for (int i = graph_->n_nodes - 1; i >= 0; i--) {
            if (graph_->nodes[i]->op == GGML_OP_VIEW && value(i).state == State::shard && value(i).wanted) {
                value(inside(i, 0)).wanted = true;
            }
        }
    }

    void classify(int i, Value & v) {
        const ggml_tensor * node = graph_->nodes[i];
        if (is_view(node->op)) {
            classify_view(i, v);
        } else if (is_mul_mat(node->op) && weight_of(node->src[0]) != nullptr) {
            classify_mul_mat(i, v);
        } else if (!keeps_cut(i, v)) {
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

    // A half of a shard is a shard; any other view is of a full value, and computes nothing, so that it never begins a
    // phase.
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
            v.state  = State::shard;
            v.cc     = source.cc;
            v.extent = source.extent;
            v.phase  = source.phase; // of the values, which later ones must not miss
            v.moves  = source.moves;
            return;
        }
        source.wanted = source.wanted || source.state != State::full;
    }

    void classify_mul_mat(int i, Value & v) {
        const ggml_tensor * node   = graph_->nodes[i];
        const SliceSpec &   slice  = weight_of(node->src[0])->slice();
        const bool          sent   = slice.gg > 0;
        const bool          strict = slice.layout == "AMX"; // its kernels read and write rows without gaps only
        set_device(node->src[0], sent);
        if (node->op == GGML_OP_MUL_MAT_ID) {
            want_full(i, 2, v, sent);
        }
        v.cc     = slice.cc;
        v.extent = slice.extent();
        if (slice.axis != Axis::cols) {
            want_full(i, 1, v, sent);
            v.state = State::shard;
            v.moves = strict || slice.axis == Axis::halves;
            return;
        }
        v.state     = State::partial;
        const int x = inside(i, 1);
        if (x >= 0 && can_take_cut(value(x), v) && value(x).cc == slice.cc && value(x).extent == slice.k) {
            v.sharded_x    = true;
            value(x).moves = value(x).moves || strict;
            return;
        }
        want_full(i, 1, v, sent);
    }

    // Whether a later value may read this one as a shard: one that moves apart is gone when its phase ends.
    static bool can_take_cut(const Value & source, const Value & v) {
        return source.state == State::shard && (source.phase == v.phase || !source.moves);
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
        const Value & a      = value(first);
        const bool    halves = 2 * a.extent == node->src[0]->ne[0];
        if (node->op == GGML_OP_GLU && node->src[1] == nullptr && !halves) {
            return false; // both operands in one value that was cut as if it were one
        }
        if (node->src[1] != nullptr) {
            const int second = inside(i, 1);
            if (second >= 0 && value(second).state == State::shard) {
                if (!can_take_cut(value(second), v) || value(second).cc != a.cc || value(second).extent != a.extent ||
                    node->src[1]->ne[0] != node->src[0]->ne[0]) {
                    return false;
                }
            } else if (!is_binary(node->op) || halves || !is_parameter(node->src[1], node->ne[0]) ||
                       (second >= 0 && value(second).sent_ready > v.phase)) {
                return false;
            }
        }
        v.state  = State::shard;
        v.cc     = a.cc;
        v.extent = a.extent;
        v.moves  = halves && node->op != GGML_OP_GLU;
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
        if (program_.device != nullptr && program_.device != device) {
            throw Error(OALLAMA_UNSUPPORTED, "one sub-graph has weights on two devices");
        }
        program_.device = device;
    }

    // --- second pass: tensors

    void emit(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        Value &             v    = value(i);
        if (is_view(node->op)) {
            if (v.state == State::shard) {
                const Value & whole = value(inside(i, 0));
                v.host              = half(whole.host, node, v.cc, true);
                v.device            = half(whole.device, node, v.extent - v.cc, false);
            }
            return; // any other's memory is its source's, and llama.cpp has set its address
        }
        if (v.phase > phase_) {
            close_phase();
            phase_ = v.phase;
        }
        if (v.state == State::full) {
            emit_full(i);
            return;
        }
        v.packed = v.state == State::partial || !v.wanted || v.moves;
        if (v.cc > 0) {
            v.host = bind(side_of(i, side_host), {i, -1}, v.packed ? nullptr : node);
            ggml_build_forward_expand(program_.host_graph, v.host);
        }
        if (v.cc < v.extent) {
            v.device = side_of(i, side_device);
            ggml_build_forward_expand(program_.device_graph, v.device);
        }
        if (v.wanted) {
            join(i);
        }
    }

    // A node that only the host computes, from full values.
    void emit_full(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        ggml_tensor *       out  = copy_header(node, node->ne);
        for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
            out->src[s] = full_on_host(i, s);
        }
        value(i).host = bind(out, {i, -1}, node);
        ggml_build_forward_expand(program_.host_graph, out);
    }

    ggml_tensor * side_of(int i, Side side) {
        return is_mul_mat(graph_->nodes[i]->op) ? mul_mat(i, side) : elementwise(i, side);
    }

    ggml_tensor * mul_mat(int i, Side side) {
        const ggml_tensor * node   = graph_->nodes[i];
        const SplitWeight & weight = *weight_of(node->src[0]);
        ggml_tensor *       w      = weight.part(side).tensor;
        const int           from   = inside(i, 1);
        ggml_tensor *       x      = nullptr;
        if (weight.slice().axis != Axis::cols) {
            x = side == side_host ? full_on_host(i, 1) : full_on_device(i, 1, 0, node->src[1]->ne[0]);
        } else if (value(i).sharded_x) {
            x = side == side_host ? value(from).host : value(from).device;
        } else {
            const Part & part = weight.part(side);
            x                 = side == side_host ? view(full_on_host(i, 1), part.begin, part.count, true)
                                                  : full_on_device(i, 1, part.begin, part.count);
        }
        std::array<int64_t, GGML_MAX_DIMS> ne  = {weight.slice().axis == Axis::cols ? node->ne[0] : w->ne[1],
                                                  node->ne[1], node->ne[2], node->ne[3]};
        ggml_tensor *                      out = copy_header(node, ne.data());
        out->src[0]                            = w;
        out->src[1]                            = x;
        if (node->op == GGML_OP_MUL_MAT_ID) {
            out->src[2] = side == side_host ? full_on_host(i, 2) : full_on_device(i, 2, 0, node->src[2]->ne[0]);
        }
        return out;
    }

    ggml_tensor * elementwise(int i, Side side) {
        const ggml_tensor *                      node  = graph_->nodes[i];
        const Value &                            v     = value(i);
        const int64_t                            n     = side == side_host ? v.cc : v.extent - v.cc;
        const int64_t                            begin = side == side_host ? 0 : v.cc;
        const bool                               both  = 2 * v.extent == node->ne[0];
        const std::array<int64_t, GGML_MAX_DIMS> ne    = {both ? 2 * n : n, node->ne[1], node->ne[2], node->ne[3]};
        ggml_tensor *                            out   = copy_header(node, ne.data());
        for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
            const int from = inside(i, s);
            if (from >= 0 && value(from).state == State::shard) {
                out->src[s] = side == side_host ? value(from).host : value(from).device;
            } else if (node->src[s]->ne[0] == 1) {
                out->src[s] = side == side_host ? full_on_host(i, s) : full_on_device(i, s, 0, 1);
            } else {
                out->src[s] =
                    side == side_host ? view(full_on_host(i, s), begin, n, true) : full_on_device(i, s, begin, n);
            }
        }
        return out;
    }

    // A half of a fused gate_up's shard; NULL where that side has nothing of it.
    ggml_tensor * half(ggml_tensor * whole, const ggml_tensor * node, int64_t n, bool on_host) {
        if (whole == nullptr) {
            return nullptr;
        }
        const bool second = node->view_offs != node->src[0]->view_offs;
        return view(whole, second ? n : 0, n, on_host);
    }

    // Elements [begin, begin + n) of each row.
    ggml_tensor * view(ggml_tensor * full, int64_t begin, int64_t n, bool on_host) {
        if (n == full->ne[0]) {
            return full;
        }
        ggml_tensor * out = ggml_view_4d(ctx(), full, n, full->ne[1], full->ne[2], full->ne[3], full->nb[1],
                                         full->nb[2], full->nb[3], static_cast<size_t>(begin) * full->nb[0]);
        if (on_host) {
            program_.host_views.push_back(out);
        }
        return out;
    }

    ggml_tensor * full_on_host(int i, int s) {
        const ggml_tensor * src    = graph_->nodes[i]->src[s];
        const SplitWeight * weight = weight_of(src);
        if (weight != nullptr) { // a bias that lies among the cut weights
            const Part & part = weight->part(side_host);
            if (weight->slice().gg > 0 || !part.pieces) {
                throw Error(OALLAMA_UNSUPPORTED, weight->slice().name + " is read by something that is no mul-mat");
            }
            return part.tensor;
        }
        const int from = inside(i, s);
        if (from >= 0 && value(from).host != nullptr && value(from).state == State::full) {
            return value(from).host;
        }
        for (const Binding & bound : program_.bindings) { // gate and up share one
            if (bound.tensor->op == GGML_OP_NONE && bound.origin.of(graph_) == src) {
                return bound.tensor;
            }
        }
        ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
        return bind(out, from >= 0 ? Origin{from, -1} : Origin{i, s}, src);
    }

    // A full value on the device: elements [begin, begin + count) of each row, sent when the phase begins.
    ggml_tensor * full_on_device(int i, int s, int64_t begin, int64_t count) {
        const ggml_tensor * src  = graph_->nodes[i]->src[s];
        const int           from = inside(i, s);
        for (const Upload & upload : uploads_) {
            if (upload.origin.of(graph_) == src && upload.begin == begin && upload.count == count) {
                return upload.tensor;
            }
        }
        const std::array<int64_t, GGML_MAX_DIMS> ne = {count, src->ne[1], src->ne[2], src->ne[3]};

        Upload upload  = {};
        upload.tensor  = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, ne.data());
        upload.origin  = from >= 0 ? Origin{from, -1} : Origin{i, s};
        upload.begin   = begin;
        upload.count   = count;
        upload.packed  = count == src->ne[0] && ggml_is_contiguous(src);
        upload.staging = upload.packed ? 0 : take_staging(upload.tensor);
        ggml_set_input(upload.tensor);
        uploads_.push_back(upload);
        return upload.tensor;
    }

    // How node i becomes whole in its original memory when its phase ends.
    void join(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        const Value &       v    = value(i);
        if (v.device == nullptr) {
            return; // the host has written all of it in place
        }
        const bool one_row  = node->ne[1] * node->ne[2] * node->ne[3] == 1;
        Download   download = {};
        download.tensor     = v.device;
        download.node       = i;
        download.cc         = v.cc;
        download.extent     = v.extent;
        download.spread     = v.state == State::shard && v.packed && v.cc > 0 && v.cc < v.extent;
        download.join       = v.cc == 0                   ? Download::Join::copy
                              : v.state == State::partial ? Download::Join::add
                                                          : Download::Join::scatter;
        ggml_set_output(v.device);
        download.direct  = download.join == Download::Join::copy ||
                           (download.join == Download::Join::scatter && one_row && v.extent == node->ne[0]);
        download.staging = take_staging(v.device);
        downloads_.push_back(download);
    }

    size_t take_staging(const ggml_tensor * tensor) {
        const size_t at = program_.staging_bytes;
        program_.staging_bytes += (ggml_nbytes(tensor) + 63) / 64 * 64;
        return at;
    }

    void close_phase() {
        Phase phase;
        phase.uploads   = std::move(uploads_);
        phase.downloads = std::move(downloads_);
        uploads_.clear();
        downloads_.clear();
        phase.device_begin = program_.phases.empty() ? 0 : program_.phases.back().device_end;
        phase.host_begin   = program_.phases.empty() ? 0 : program_.phases.back().host_end;
        phase.device_end   = ggml_graph_n_nodes(program_.device_graph);
        phase.host_end     = ggml_graph_n_nodes(program_.host_graph);
        if (phase.device_end > phase.device_begin || phase.host_end > phase.host_begin) {
            program_.phases.push_back(std::move(phase));
        }
    }

    // --- tensors

    ggml_tensor * copy_header(const ggml_tensor * node, const int64_t * ne) {
        ggml_tensor * out = ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, ne);
        out->op           = node->op;
        std::memcpy(out->op_params, node->op_params, sizeof out->op_params);
        return out;
    }

    // Gives it the memory of a tensor of llama.cpp's. like: whose strides it takes; NULL: contiguous.
    ggml_tensor * bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * like) {
        if (like != nullptr) {
            std::copy(std::begin(like->nb), std::end(like->nb), std::begin(tensor->nb));
        }
        program_.bindings.push_back({tensor, origin});
        return tensor;
    }

    const ggml_cgraph *   graph_;
    Program &             program_;
    bool                  fuse_;
    std::vector<Value>    values_;
    std::vector<Upload>   uploads_;
    std::vector<Download> downloads_;
    int                   phase_ = 0; // of the node at hand
};

} // namespace

namespace {

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

std::unique_ptr<Program> build_program(const ggml_cgraph * graph, const Signature & signature) {
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            if (plan_of(src) != nullptr && !ensure_placed(src)) {
                throw Error(OALLAMA_NO_MEMORY, std::string("the weights of this model were not loaded: ") + src->name);
            }
        }
    }
    for (const bool fuse : {true, false}) {
        auto program       = std::make_unique<Program>();
        program->signature = signature;
        Builder(graph, *program, fuse).build();
        const ggml_tensor * refused = refused_by_device(*program);
        if (refused == nullptr) {
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
