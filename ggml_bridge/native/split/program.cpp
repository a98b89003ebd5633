#include "program.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace oallama {

namespace {

constexpr std::array<Side, n_sides> all_sides    = {side_host, side_stream, side_device, side_prime};
constexpr std::array<Side, 3>       device_sides = {side_stream, side_device, side_prime};

// Rows of a launch that need no second one. Of more tokens a launch has half of the rows that may be hits: with their
// inputs, which are gathered, they take no more memory than all of them without.
constexpr int64_t least_packed = 64;

// Room of a program's context.
struct Room {
    int64_t n_tensors;
    int64_t n_nodes; // of each graph, and as many leaves
};

size_t padded_bytes(const ggml_tensor * tensor) {
    return (ggml_nbytes(tensor) + 63) / 64 * 64;
}

// Marks a tensor that the device is sent before it computes a graph. Its memory stays its own until the graph ends:
// ggml's allocator frees a leaf behind its last reader, and CUDA's fused kernels read one for longer than that.
void keep_sent(ggml_tensor * tensor) {
    ggml_set_input(tensor);
    ggml_set_output(tensor);
}

// Builds a program node by node, phase by phase, by the states that find_values found.
class Builder {
  public:
    // memory: the device's that llama.cpp's tensors are in; NULL: the host's.
    Builder(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory, Room room, Program & program)
        : graph_(graph), values_(values), sides_(values.nodes.size()), program_(program) {
        program.device       = memory == nullptr ? values.device : memory;
        program.resident     = memory != nullptr;
        program.ctx          = new_context(room.n_tensors, 2, room.n_nodes);
        program.device_graph = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(room.n_nodes), false);
        program.host_graph   = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(room.n_nodes), false);
    }

    void build() {
        for (int i = 0; i < graph_->n_nodes; i++) {
            emit(i);
        }
        close_phase();
    }

  private:
    // A value's tensor on each side while the program is built; NULL: nothing of it there.
    using Sides = std::array<ggml_tensor *, n_sides>;

    ggml_context * ctx() { return program_.ctx.get(); }

    const Value & value(int node) const { return values_.nodes[static_cast<size_t>(node)]; }

    Sides & sides(int node) { return sides_[static_cast<size_t>(node)]; }

    ggml_tensor * side_of(int node, Side side) { return sides(node)[side]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const {
        const ggml_tensor * tensor = graph_->nodes[node]->src[src];
        return tensor == nullptr ? -1 : find_node(graph_, tensor, node);
    }

    Origin origin_of(int node, int src) const {
        const int from = inside(node, src);
        return from >= 0 ? Origin{from, -1} : Origin{node, src};
    }

    // Whether a tensor of llama.cpp's is in device memory.
    bool on_device(const ggml_tensor * tensor) const { return program_.resident && !is_on_host(tensor); }

    // Source s of node i, as the host reads it before a phase is launched.
    Source source_of(int i, int s) {
        return {origin_of(i, s), on_device(graph_->nodes[i]->src[s]) ? mirrored_on_host(i, s) : nullptr};
    }

    //
    // nodes
    //

    void emit(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        const Value &       v    = value(i);
        if (v.state == State::term || is_empty(node)) { // what reads an empty one is empty too
            return;
        }
        if (is_view(node->op)) { // of a mirrored value: its memory is its source's, and llama.cpp has set its address
            if (v.state != State::mirrored) {
                emit_view(i);
            }
            return;
        }
        if (v.phase > n_phase_) {
            close_phase();
            n_phase_ = v.phase;
        }
        if (node->op == GGML_OP_MUL_MAT_ID) {
            count_experts(i);
        }
        switch (v.state) {
            case State::mirrored: emit_on_host(i); break;
            case State::routed: emit_rows(i); break;
            case State::sum: emit_sum(i); break;
            default: emit_sides(i);
        }
    }

    // Has the uses of a mul-mat's experts counted, where the plan wants that; not of a warm-up, which uses all.
    void count_experts(int i) {
        const ggml_tensor * tensor = graph_->nodes[i]->src[0];
        const SplitWeight * weight = weight_of(tensor);
        ExpertUses *        uses   = weight == nullptr ? nullptr : plan_of(tensor)->uses_of(weight->slice());
        if (uses != nullptr && graph_->nodes[i]->src[2]->ne[0] < tensor->ne[2]) {
            phase_.counted.push_back({uses, source_of(i, 2)});
        }
    }

    // A half of a fused gate_up's elements or rows, or one rank of experts' partial results.
    void emit_view(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        const Value &       v    = value(i);
        for (const Side side : all_sides) {
            ggml_tensor * whole = side_of(inside(i, 0), side);
            if (whole == nullptr) {
                continue;
            }
            if (v.state == State::partial) {
                const size_t at = node->view_offs / node->src[0]->nb[1] * whole->nb[1];
                sides(i)[side] =
                    keep_view(ggml_view_2d(ctx(), whole, whole->ne[0], whole->ne[2], whole->nb[2], at), side);
                continue;
            }
            const int64_t n      = v.state == State::routed ? node->ne[0] : count_of(v, side);
            const bool    second = node->view_offs != node->src[0]->view_offs;
            sides(i)[side]       = view(whole, second ? n : 0, n, {}, side);
        }
        if (v.state == State::routed) {
            Routed & routed = routing_of(v.routed_by);
            routed.sized.push_back({side_of(i, side_host), 2});
            if (routed.n_most > 0) {
                routed.packed.push_back({side_of(i, side_device), 2});
            }
        }
    }

    // A node of which each side computes its part.
    void emit_sides(int i) {
        const Value & v = value(i);
        for (const Side side : all_sides) {
            if (has(v, side)) {
                sides(i)[side] = is_mul_mat(graph_->nodes[i]->op) ? mul_mat(i, side) : elementwise(i, side);
            }
        }
        if (ggml_tensor * host = side_of(i, side_host); host != nullptr) {
            if (program_.resident) {
                stage(host);
            } else {
                bind(host, {i, -1}, nullptr);
            }
            ggml_build_forward_expand(program_.host_graph, host);
        }
        for (const Side side : device_sides) {
            if (side_of(i, side) != nullptr) {
                (side == side_device  ? on_device_
                 : side == side_prime ? on_prime_
                                      : on_stream_)
                    .push_back(side_of(i, side));
            }
        }
        if (v.wanted) {
            join(i);
        }
    }

    // A node that only the host computes, from mirrored values.
    void emit_on_host(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        ggml_tensor *       out  = copy_header(node, node->ne);
        for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
            out->src[s] = mirrored_on_host(i, s);
        }
        if (program_.resident) {
            phase_.lifts.push_back({stage(out), whole_on_device(node, {i, -1})});
        } else {
            bind(out, {i, -1}, node);
        }
        sides(i)[side_host] = out;
        ggml_build_forward_expand(program_.host_graph, out);
    }

    ggml_tensor * mul_mat(int i, Side side) {
        const ggml_tensor * node   = graph_->nodes[i];
        const SplitWeight & weight = *weight_of(node->src[0]);
        const SliceSpec &   slice  = weight.slice();
        const Part &        part   = weight.part(side);
        const Tokens        tokens = tokens_of(value(i), side);
        if (program_.n_tokens == 0) {
            program_.n_tokens = value(i).n_tokens;
            program_.times    = &plan_of(node->src[0])->times()->of(slice.name, program_.n_tokens);
        }
        const bool    streamed = side == side_stream || side == side_prime;
        ggml_tensor * w        = streamed ? slot_of(i, weight, side) : part.tensor;
        const int64_t n        = slice.axis == Axis::cols ? node->ne[0] : w->ne[1];
        ggml_tensor * x        = value(i).x_is_cut          ? side_of(inside(i, 1), side)
                                 : slice.axis != Axis::cols ? mirrored_on(side, i, 1, tokens)
                                                            : mirrored_on(side, i, 1, tokens, part.begin, part.count);
        ggml_tensor * out      = copy_header(node, tokens.shape(node, n).data());
        out->src[0]            = w;
        out->src[1]            = side == side_host ? for_kernel_of(slice, x, value(i).x_is_cut) : x;
        if (node->op == GGML_OP_MUL_MAT_ID) {
            out->src[2] = mirrored_on(side, i, 2, tokens.along(1));
        }
        return out;
    }

    // x as the host's kernel takes it. Kernels of repacked layouts take columns without gaps between rows, and F32
    // only; the others take F32 or the weight's own type.
    ggml_tensor * for_kernel_of(const SliceSpec & slice, ggml_tensor * x, bool x_is_cut) {
        const bool plain = slice.layout == plain_layout;
        if (slice.axis == Axis::cols && !x_is_cut && !plain && !ggml_is_contiguous(x)) {
            x = stage(ggml_cont(ctx(), x));
        }
        return x->type == GGML_TYPE_F32 || (plain && x->type == slice.type) ? x
                                                                            : stage(ggml_cast(ctx(), x, GGML_TYPE_F32));
    }

    // An element-wise operation on an axis_0 value, or experts' partial results times the routing weights, or two of
    // them added.
    ggml_tensor * elementwise(int i, Side side) {
        const ggml_tensor * node    = graph_->nodes[i];
        const Value &       v       = value(i);
        const Tokens        tokens  = tokens_of(v, side);
        const bool          partial = v.state == State::partial;
        const int64_t       n       = count_of(v, side);
        const int64_t       all     = partial ? node->ne[0] : 2 * v.extent == node->ne[0] ? 2 * n : n;
        ggml_tensor *       out     = copy_header(node, tokens.shape(node, all).data());
        for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
            const int from = inside(i, s);
            out->src[s]    = from >= 0 && value(from).state == v.state ? side_of(from, side)
                             : partial                                 ? mirrored_on(side, i, s, tokens)
                             : node->src[s]->ne[0] == 1 ? mirrored_on(side, i, s, {})
                                                        : mirrored_on(side, i, s, {}, begin_of(v, side), n);
        }
        return out;
    }

    // A weight's CG or CG' in a slot of the ring, which its data pointer is set to when its turn has come.
    ggml_tensor * slot_of(int i, const SplitWeight & weight, Side side) {
        count_use(i, weight.slice().e);
        const StreamedPart part = {&weight, side};
        for (const Streamed & streamed : phase_.streamed) {
            if (streamed.part == part) {
                return streamed.tensor;
            }
        }
        ggml_tensor * out = weight.new_tensor(ctx(), side);
        phase_.streamed.push_back({part, out});
        program_.stream = plan_of(graph_->nodes[i]->src[0])->spec().stream;
        return out;
    }

    // Whether only the experts that are used are to be copied: where all that the phase streams is chosen from by the
    // same ids, and not all of it, as in llama.cpp's warm-up.
    void count_use(int i, int64_t n_expert) {
        const ggml_tensor * node = graph_->nodes[i];
        const ggml_tensor * ids  = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
        if (phase_.streamed.empty()) {
            chosen_by_ = ids != nullptr && ids->ne[0] < n_expert ? ids : nullptr;
            n_expert_  = n_expert;
            phase_.ids = chosen_by_ == nullptr ? Source{} : source_of(i, 2);
        } else if (ids != chosen_by_ || n_expert != n_expert_) {
            chosen_by_ = nullptr;
        }
    }

    void close_phase() {
        const auto expand = [this](std::vector<ggml_tensor *> & nodes) {
            for (ggml_tensor * node : nodes) {
                ggml_build_forward_expand(program_.device_graph, node);
            }
            nodes.clear();
            return ggml_graph_n_nodes(program_.device_graph);
        };
        phase_.device_begin   = program_.phases.empty() ? 0 : program_.phases.back().device_end;
        phase_.host_begin     = program_.phases.empty() ? 0 : program_.phases.back().host_end;
        phase_.launches_begin = expand(on_device_);
        phase_.stream_begin   = phase_.launches_begin;
        for (Routed & routed : phase_.routings) {
            routed.device_begin = phase_.stream_begin;
            routed.device_end   = expand(routed.nodes);
            phase_.stream_begin = routed.device_end;
        }
        expand(on_stream_); // one behind the other, so that hidden values of both are not there at the same time
        phase_.lift_begin = expand(on_prime_);
        phase_.device_end = expand(on_lift_);
        phase_.host_end   = ggml_graph_n_nodes(program_.host_graph);
        phase_.routed     = chosen_by_ != nullptr;
        phase_.n_used     = phase_.routed ? chosen_by_->ne[0] : 0;
        chosen_by_        = nullptr;
        if (phase_.host_end > phase_.host_begin) { // what the host still computes may lie where a result belongs
            for (Download & download : phase_.downloads) {
                download.direct = false;
            }
        }
        if (phase_.device_end > phase_.device_begin || phase_.host_end > phase_.host_begin) {
            program_.phases.push_back(std::move(phase_));
        }
        phase_ = Phase{};
        packed_.clear();
    }

    //
    // rows of tokens' experts of which some are hot: the misses on the host, what may be hits on the device
    //

    void emit_rows(int i) {
        const ggml_tensor * node   = graph_->nodes[i];
        const Value &       v      = value(i);
        Routed &            routed = routing_of(is_mul_mat(node->op) ? i : v.routed_by);
        const int64_t       host[] = {node->ne[0], 1, routed.n_rows, 1};
        const bool          packed = routed.n_most > 0;
        const int64_t there[] = {node->ne[0], packed ? 1 : routed.n_device, packed ? routed.n_most : node->ne[2], 1};
        for (const Side side : {side_host, side_device}) {
            ggml_tensor * out = copy_header(node, side == side_host ? host : there);
            ggml_tensor * ids = side == side_host ? routed.host_ids : routed.device_ids;
            if (is_mul_mat(node->op)) {
                out->src[0] = weight_of(node->src[0])->part(side).tensor;
                out->src[1] = routed_input(i, side, routed);
                out->src[2] = ids;
            } else if (node->op == GGML_OP_ADD_ID) {
                out->src[0] = side_of(inside(i, 0), side);
                out->src[1] = side == side_host ? mirrored_on_host(i, 1)
                              : packed          ? read_again(mirrored_on_device(i, 1, {}, 0, node->src[1]->ne[0]))
                                                : device_biases(routed, i);
                out->src[2] = side == side_device && packed ? numbers(routed, Upload::What::experts, 1) : ids;
            } else {
                for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
                    const int  from = inside(i, s);
                    const bool rows = from >= 0 && value(from).state == State::routed;
                    out->src[s]     = rows ? side_of(from, side) : mirrored_on(side, i, s, {});
                    if (!rows && side == side_device && packed) {
                        read_again(out->src[s]);
                    }
                }
            }
            sides(i)[side] = out;
        }
        ggml_tensor * rows  = side_of(i, side_host);
        ggml_tensor * whole = nullptr;
        routed.sized.push_back({rows, 2});
        if (v.is_summed) {
            stage(rows);
        } else if (program_.resident) { // the rows lie at the beginning of the whole that they become part of
            whole = stage(ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, node->ne));
            program_.staged.push_back({rows, program_.staged.back().at});
        } else {
            bind(rows, {i, -1}, nullptr);
        }
        ggml_build_forward_expand(program_.host_graph, rows);
        if (packed) {
            routed.packed.push_back({side_of(i, side_device), 2});
        }
        (packed ? routed.nodes : on_device_).push_back(side_of(i, side_device));
        if (v.wanted) {
            fetch_rows(i, Download::Join::rows, side_of(i, side_device), routed, whole);
        }
    }

    // The input of a mul-mat by hot experts on a side.
    ggml_tensor * routed_input(int i, Side side, Routed & routed) {
        const ggml_tensor * x = graph_->nodes[i]->src[1];
        if (program_.n_tokens == 0) {
            program_.n_tokens = value(i).n_tokens;
        }
        if (value(i).routed_by != i) { // a routed value itself
            return side_of(inside(i, 1), side);
        }
        if (side == side_host) {
            return rows_for_misses(routed, mirrored_on_host(i, 1));
        }
        if (routed.n_most > 0) {
            return rows_for_launches(routed, mirrored_on_device(i, 1, {}, 0, x->ne[0]));
        }
        if (x->ne[1] == 1) {
            return mirrored_on_device(i, 1, {}, 0, x->ne[0]);
        }
        return send(Upload::What::rows, ggml_new_tensor_3d(ctx(), x->type, x->ne[0], routed.n_device, x->ne[2]), routed,
                    source_of(i, 1));
    }

    // Rows of a mirrored input for a launch. x: on the device, [k, 1 or n_used, n_tokens].
    ggml_tensor * rows_for_launches(Routed & routed, ggml_tensor * x) {
        ggml_tensor *& known = packed_[{&routed - phase_.routings.data(), x}];
        if (known == nullptr) {
            ggml_tensor * index = numbers(routed, x->ne[1] > 1 ? Upload::What::ranks : Upload::What::tokens, 0);
            ggml_tensor * list  = ggml_reshape_2d(ctx(), read_again(x), x->ne[0], x->ne[1] * x->ne[2]);
            ggml_tensor * rows  = ggml_get_rows(ctx(), list, index);
            if (program_.resident) {
                program_.views.push_back(list); // x may be llama.cpp's
            }
            known = ggml_reshape_3d(ctx(), rows, rows->ne[0], 1, rows->ne[1]);
            routed.packed.push_back({rows, 1});
            routed.packed.push_back({known, 2});
        }
        return known;
    }

    // A tensor that several launches read: its memory stays its own.
    static ggml_tensor * read_again(ggml_tensor * tensor) {
        for (ggml_tensor * one = tensor; one != nullptr; one = one->view_src) {
            ggml_set_output(one);
        }
        return tensor;
    }

    // Numbers of a launch's rows, of which all launches' are sent at once. dim: along which they lie.
    ggml_tensor * numbers(Routed & routed, Upload::What what, int dim) {
        ggml_tensor * whole = nullptr;
        for (const Upload & upload : phase_.uploads) {
            whole = upload.what == what && upload.routed == number_of(routed) ? upload.tensor : whole;
        }
        if (whole == nullptr) {
            whole = send(what, ggml_new_tensor_1d(ctx(), GGML_TYPE_I32, routed.n_numbers()), routed, {});
        }
        ggml_tensor * out = dim == 0 ? ggml_view_1d(ctx(), whole, routed.n_most, 0)
                                     : ggml_view_2d(ctx(), whole, 1, routed.n_most, sizeof(int32_t), 0);
        routed.placed.push_back({out, dim, whole});
        return out;
    }

    // A bias for each slot. biases: [n, n_expert].
    ggml_tensor * device_biases(Routed & routed, int i) {
        const ggml_tensor * biases = graph_->nodes[i]->src[1];
        return send(Upload::What::biases,
                    ggml_new_tensor_2d(ctx(), GGML_TYPE_F32, biases->ne[0], routed.weights.front()->n_slots()), routed,
                    {{i, 1}});
    }

    // The routing that a mul-mat of the graph is done by.
    Routed & routing_of(int mul_mat) {
        const ggml_tensor * chosen = graph_->nodes[mul_mat]->src[2];
        const SplitWeight * weight = weight_of(graph_->nodes[mul_mat]->src[0]);
        for (Routed & routed : phase_.routings) {
            if (routed.ids.origin.of(graph_) == chosen && routed.weights.front()->slice().hot == weight->slice().hot) {
                if (std::find(routed.weights.begin(), routed.weights.end(), weight) == routed.weights.end()) {
                    routed.weights.push_back(weight);
                }
                return routed;
            }
        }
        phase_.routings.emplace_back();
        Routed & made = phase_.routings.back();
        made.weights  = {weight};
        made.ids      = source_of(mul_mat, 2);
        made.n_used   = chosen->ne[0];
        made.n_rows   = chosen->ne[0] * chosen->ne[1];
        made.n_device = n_device_ranks(chosen->ne[0], *weight);
        if (weight->table()->is_movable()) {
            const PlanSpec & plan = plan_of(graph_->nodes[mul_mat]->src[0])->spec();
            program_.stream       = plan.stream;
            program_.exchange     = plan.exchange;
        }
        made.host_ids = stage(ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, 1, made.n_rows));
        if (weight->table()->is_movable() && chosen->ne[1] > 1) {
            made.n_most     = std::min(made.n_rows, std::max(least_packed, (made.n_device * chosen->ne[1] + 1) / 2));
            made.device_ids = numbers(made, Upload::What::ids, 1);
        } else {
            ggml_tensor * ids = ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, made.n_device, chosen->ne[1]);
            made.device_ids   = send(Upload::What::ids, ids, made, {});
        }
        made.sized.push_back({made.host_ids, 1});
        return made;
    }

    // Sends a tensor of a routing to the device when the phase begins.
    ggml_tensor * send(Upload::What what, ggml_tensor * tensor, const Routed & routed, Source source) {
        keep_sent(tensor);
        Upload upload  = {};
        upload.what    = what;
        upload.tensor  = tensor;
        upload.source  = source;
        upload.routed  = number_of(routed);
        upload.staging = take_staging(tensor);
        phase_.uploads.push_back(upload);
        return tensor;
    }

    int number_of(const Routed & routed) const { return static_cast<int>(&routed - phase_.routings.data()); }

    // Rows of a mirrored input for the misses. x: on the host, [k, 1 or n_used, n_tokens].
    ggml_tensor * rows_for_misses(Routed & routed, ggml_tensor * x) {
        for (const GatheredRows & known : routed.gathered) {
            if (known.x == x) {
                return known.rows;
            }
        }
        const bool    is_list = x->nb[0] == ggml_type_size(x->type) &&
                                (x->ne[1] == 1 || x->nb[2] == static_cast<size_t>(x->ne[1]) * x->nb[1]);
        ggml_tensor * whole   = is_list ? x : stage(ggml_cont(ctx(), x));
        ggml_tensor * list    = keep_view(
            ggml_view_2d(ctx(), whole, x->ne[0], x->ne[1] * x->ne[2], whole->nb[x->ne[1] == 1 ? 2 : 1], 0), side_host);
        ggml_tensor * index = stage(ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, routed.n_rows, 1));
        ggml_tensor * rows  = stage(ggml_get_rows(ctx(), list, index));
        rows->ne[2]         = rows->ne[1];
        rows->ne[1]         = 1;
        rows->nb[2]         = rows->nb[1];
        routed.sized.push_back({index, 0});
        routed.sized.push_back({rows, 2});
        routed.gathered.push_back({x, index, rows, x->ne[1] > 1});
        return rows;
    }

    // Weighted and added up where they come together: on the device, where the result is to be there or many rows need
    // not come back then; else on the host.
    void emit_sum(int i) {
        const Value & v      = value(i);
        const int     rows   = inside(v.weighting, 0);
        Routed &      routed = routing_of(value(rows).routed_by);
        routed.weighted      = true;
        routed.weighting     = source_of(v.weighting, 1);
        ggml_tensor * there  = side_of(rows, side_device);
        const bool    packed = routed.n_most > 0;
        const bool    summed =
            !packed && (program_.resident || are_many(there, graph_->nodes[value(rows).routed_by]->src[0]));
        if (summed) {
            there = device_sum(routed, there);
            on_device_.push_back(there);
        }
        const ggml_tensor * node = graph_->nodes[i];
        ggml_tensor *       own =
            program_.resident ? stage(ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, node->ne)) : nullptr;
        if (own != nullptr && summed) {
            phase_.sums.push_back({side_of(rows, side_host), own, number_of(routed)});
            make_sum(i, own, there, {});
            return;
        }
        fetch_rows(i, Download::Join::sum, there, routed, own);
        phase_.downloads.back().host_rows = side_of(rows, side_host);
        phase_.downloads.back().summed    = summed;
    }

    // Rows of the device times their routing weights, added up for each token.
    ggml_tensor * device_sum(Routed & routed, ggml_tensor * rows) {
        ggml_tensor * weights = send(Upload::What::weights,
                                     ggml_new_tensor_3d(ctx(), GGML_TYPE_F32, 1, rows->ne[1], rows->ne[2]), routed, {});
        ggml_tensor * terms   = ggml_mul(ctx(), rows, weights);
        ggml_tensor * sum     = nullptr;
        for (int64_t rank = 0; rank < rows->ne[1]; rank++) {
            ggml_tensor * term = ggml_view_2d(ctx(), terms, terms->ne[0], terms->ne[2], terms->nb[2],
                                              static_cast<size_t>(rank) * terms->nb[1]);
            sum                = sum == nullptr ? term : ggml_add(ctx(), sum, term);
        }
        return sum;
    }

    // whole: where llama.cpp's tensors are in device memory, what the node becomes there.
    void fetch_rows(int i, Download::Join how, ggml_tensor * there, const Routed & routed, ggml_tensor * whole) {
        Download download = {};
        download.tensor   = there;
        download.node     = i;
        download.join     = how;
        download.n_rows   = there->ne[1] * there->ne[2];
        download.packed   = routed.n_most > 0;
        if (download.packed && how == Download::Join::rows) {
            download.staging = program_.host_bytes;
            program_.host_bytes += static_cast<size_t>(routed.n_rows) * there->nb[2];
        } else if (!download.packed) {
            download.staging = take_staging(there);
        }
        download.routed = number_of(routed);
        download.to     = whole;
        if (whole != nullptr) {
            phase_.lifts.push_back({whole, whole_on_device(graph_->nodes[i], {i, -1})});
        }
        ggml_set_output(there);
        phase_.downloads.push_back(download);
    }

    //
    // mirrored values on either side: bound to llama.cpp's memory, sent when the phase begins, or fetched
    //

    // Source s of node i: elements [begin, begin + count) of each row of some tokens; count < 0: all.
    ggml_tensor * mirrored_on(Side side, int i, int s, Tokens tokens, int64_t begin = 0, int64_t count = -1) {
        const int64_t n = count < 0 ? graph_->nodes[i]->src[s]->ne[0] : count;
        return side == side_host ? view(mirrored_on_host(i, s, tokens), begin, n, tokens, side)
                                 : mirrored_on_device(i, s, tokens, begin, n);
    }

    // tokens: of which it is read.
    ggml_tensor * mirrored_on_host(int i, int s, Tokens tokens = {}) {
        const ggml_tensor * src    = graph_->nodes[i]->src[s];
        const SplitWeight * weight = weight_of(src);
        if (weight != nullptr) { // a bias that lies among the cut weights
            return weight->whole_on_host().tensor;
        }
        const int from = inside(i, s);
        if (from >= 0 && value(from).state == State::mirrored && side_of(from, side_host) != nullptr) {
            return side_of(from, side_host);
        }
        if (on_device(src)) {
            return input(src, origin_of(i, s), tokens);
        }
        for (const Binding & bound : program_.bindings) { // gate and up share one
            if (bound.tensor->op == GGML_OP_NONE && bound.origin.of(graph_) == src) {
                return bound.tensor;
            }
        }
        ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
        bind(out, origin_of(i, s), src);
        return out;
    }

    // A mirrored value that is in device memory: fetched when the phase begins, or a view of what the host computes.
    ggml_tensor * input(const ggml_tensor * src, Origin origin, Tokens tokens) {
        const int root = src->view_src == nullptr ? -1 : find_node(graph_, src->view_src, graph_->n_nodes);
        if (root >= 0 && value(root).state == State::mirrored && side_of(root, side_host) != nullptr) {
            return keep_view(ggml_view_4d(ctx(), side_of(root, side_host), src->ne[0], src->ne[1], src->ne[2],
                                          src->ne[3], src->nb[1], src->nb[2], src->nb[3], src->view_offs),
                             side_host);
        }
        ggml_tensor *& known = inputs_[src];
        if (known == nullptr) {
            known = stage(like(src));
            phase_.inputs.push_back({known, origin, 0});
        }
        for (Phase & phase : program_.phases) {
            read(phase.inputs, known, tokens);
        }
        read(phase_.inputs, known, tokens);
        return known;
    }

    // Has these tokens of an input fetched; all where they do not lie one behind another.
    static void read(std::vector<Input> & inputs, const ggml_tensor * tensor, Tokens tokens) {
        size_t bytes = ggml_nbytes(tensor);
        if (tokens.count >= 0 &&
            std::all_of(tensor->ne + tokens.dim + 1, tensor->ne + GGML_MAX_DIMS, [](int64_t n) { return n == 1; })) {
            bytes = std::min(bytes, static_cast<size_t>(tokens.first + tokens.count) * tensor->nb[tokens.dim]);
        }
        for (Input & input : inputs) {
            input.bytes = input.tensor == tensor ? std::max(input.bytes, bytes) : input.bytes;
        }
    }

    // A mirrored value on the device, sent when the phase begins unless it is there.
    ggml_tensor * mirrored_on_device(int i, int s, Tokens tokens, int64_t begin, int64_t count) {
        const ggml_tensor * src = graph_->nodes[i]->src[s];
        if (weight_of(src) != nullptr) {
            weight_of(src)->whole_on_host(); // is sent from there
        }
        if (on_device(src)) {
            return part_on_device(src, origin_of(i, s), begin, count, tokens);
        }
        const auto    ne        = tokens.shape(src, count);
        const int64_t first_row = tokens.first_row(src);
        for (const Upload & upload : phase_.uploads) {
            if (upload.what != Upload::What::value || upload.source.origin.of(graph_) != src || upload.begin != begin ||
                upload.count != count) {
                continue;
            }
            if (upload.first_row == first_row && std::equal(ne.begin(), ne.end(), upload.tensor->ne)) {
                return upload.tensor;
            }
            const bool   all = upload.first_row == 0 && upload.tensor->ne[tokens.dim] == src->ne[tokens.dim];
            const size_t at  = static_cast<size_t>(tokens.first) * upload.tensor->nb[tokens.dim];
            if (all && is_aligned(at)) {
                return view(upload.tensor, 0, count, tokens, side_device);
            }
        }
        Upload upload    = {};
        upload.tensor    = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, ne.data());
        upload.source    = {origin_of(i, s)};
        upload.begin     = begin;
        upload.count     = count;
        upload.first_row = first_row;
        upload.packed    = count == src->ne[0] && ggml_is_contiguous(src);
        upload.staging   = take_staging(upload.tensor);
        keep_sent(upload.tensor);
        phase_.uploads.push_back(upload);
        return upload.tensor;
    }

    // Whether kernels can read a tensor of the device's from here on: to some, such as Vulkan's mul-mats, memory may
    // not be given from just anywhere. A few experts' numbers are soon misaligned.
    bool is_aligned(size_t at) const {
        return at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(program_.device)) == 0;
    }

    //
    // results become whole when a phase ends: fetched and joined on the host, or made whole in the device's memory
    //

    // Joins both sides' parts of a value. The device has all of a partial value's last n_g tokens; the host has a part
    // of the first tokens too, unless there is no CC.
    void join(int i) {
        const Value & v = value(i);
        if (v.state == State::axis_0) {
            for (const Side side : all_sides) {
                if (side_of(i, side) != nullptr && program_.resident) {
                    put(i, v, side);
                } else if (side_of(i, side) != nullptr && side != side_host) {
                    const int64_t count = count_of(v, side);
                    fetch(i, side_of(i, side), Download::Join::scatter, begin_of(v, side), count, tokens_of(v, side));
                }
            }
            return;
        }
        const int64_t n     = graph_->nodes[i]->ne[0];
        ggml_tensor * host  = side_of(i, side_host);
        ggml_tensor * prime = side_of(i, side_prime);
        ggml_tensor * sum   = add(side_of(i, side_device), side_of(i, side_stream), on_stream_);
        const auto    of    = [&](Tokens tokens) {
            return sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], tokens, side_device);
        };
        if (prime == nullptr || host != nullptr) {
            const Tokens tokens = tokens_of(v, prime == nullptr ? side_device : side_host);
            if (program_.resident) {
                make_sum(i, host, of(tokens), tokens);
            } else {
                fetch(i, sum, host != nullptr ? Download::Join::add : Download::Join::scatter, 0, n, tokens);
            }
        }
        if (prime != nullptr) {
            const Tokens  last  = tokens_of(v, side_prime);
            ggml_tensor * whole = add(prime, of(last), on_prime_);
            if (program_.resident) {
                make_sum(i, nullptr, whole, last);
            } else {
                fetch(i, whole, Download::Join::scatter, 0, n, last);
            }
        }
    }

    // On the device; either may be missing.
    ggml_tensor * add(ggml_tensor * a, ggml_tensor * b, std::vector<ggml_tensor *> & nodes) {
        if (a == nullptr || b == nullptr) {
            return a == nullptr ? b : a;
        }
        nodes.push_back(ggml_add(ctx(), a, b));
        return nodes.back();
    }

    void fetch(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count, Tokens tokens) {
        if (tensor == nullptr) {
            return;
        }
        const ggml_tensor * node     = graph_->nodes[i];
        const Value &       v        = value(i);
        const bool          one_row  = node->ne[1] * node->ne[2] * node->ne[3] == 1;
        const bool          moves    = v.state == State::axis_0 && has(v, side_host) && v.cc < v.extent;
        const bool          first    = phase_.downloads.empty() || phase_.downloads.back().node != i;
        const auto          ne       = tokens.shape(node, 1);
        const auto          host_ne  = tokens_of(v, side_host).shape(node, 1);
        Download            download = {};
        download.tensor              = tensor;
        download.node                = i;
        download.join                = how;
        download.begin               = begin;
        download.count               = count;
        download.extent              = v.state == State::axis_0 ? v.extent : node->ne[0];
        download.first_row           = tokens.first_row(node);
        download.n_rows              = ne[1] * ne[2] * ne[3];
        download.spread              = moves && first ? v.cc : 0;
        download.spread_rows         = host_ne[1] * host_ne[2] * host_ne[3];
        download.direct =
            how == Download::Join::scatter && (count == download.extent || (one_row && download.extent == node->ne[0]));
        download.staging = take_staging(tensor);
        ggml_set_output(tensor);
        phase_.downloads.push_back(download);
    }

    //
    // blocks that live on the device: it reads llama.cpp's tensors where they are, and what the host has of a result is
    // sent up when the phase ends. Not before: a result may lie where the phase still reads.
    //

    // A tensor of llama.cpp's as the device's graph sees it. Not the allocator's: it has an address, if not yet the
    // right one.
    ggml_tensor * whole_on_device(const ggml_tensor * tensor, Origin origin) {
        for (const Binding & bound : program_.bindings) {
            if (bound.origin.of(graph_) == tensor) {
                return bound.tensor;
            }
        }
        ggml_tensor * out = like(tensor);
        out->data         = reinterpret_cast<void *>(uintptr_t{1});
        program_.bindings.push_back({out, origin});
        return out;
    }

    ggml_tensor * view_on_device(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb,
                                 size_t at) {
        ggml_tensor * out = ggml_view_4d(ctx(), of, ne[0], ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], at);
        program_.views.push_back(out);
        return out;
    }

    // Elements [begin, begin + count) of each row of some tokens of a tensor of llama.cpp's, as kernels can read them:
    // where they lie, or what makes them contiguous.
    ggml_tensor * part_on_device(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count,
                                 Tokens tokens) {
        ggml_tensor * out     = whole_on_device(tensor, origin);
        const auto    ne      = tokens.shape(tensor, count);
        bool          aligned = true;
        if (!std::equal(ne.begin(), ne.end(), tensor->ne)) {
            const size_t at =
                static_cast<size_t>(begin) * tensor->nb[0] + static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
            out     = view_on_device(out, ne, tensor->nb, at);
            aligned = is_aligned(at);
        }
        if (!aligned || !ggml_is_contiguous(out)) {
            out = ggml_cont(ctx(), out);
        }
        return out;
    }

    // A node that writes memory of llama.cpp's, so a view of it.
    void write(ggml_tensor * node) {
        program_.views.push_back(node);
        on_lift_.push_back(node);
    }

    // A node becomes the sum of what the host has of these tokens, which is sent to its memory, and of the device's.
    // Either may be NULL.
    void make_sum(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens) {
        ggml_tensor * to = whole_on_device(graph_->nodes[node], {node, -1});
        if (tokens.count >= 0) {
            to = view_on_device(to, tokens.shape(to, to->ne[0]), to->nb,
                                static_cast<size_t>(tokens.first) * to->nb[tokens.dim]);
        }
        if (host != nullptr) {
            phase_.lifts.push_back({host, to});
        }
        if (device != nullptr) {
            write(host == nullptr ? ggml_cpy(ctx(), device, to) : ggml_add_inplace(ctx(), to, device));
        }
    }

    // Elements of each row (or of each half of one) of some tokens of a node become those of a side.
    void put(int node, const Value & v, Side side) {
        ggml_tensor * from    = side_of(node, side);
        ggml_tensor * out     = whole_on_device(graph_->nodes[node], {node, -1});
        const Tokens  tokens  = tokens_of(v, side);
        const auto    ne      = tokens.shape(out, 1);
        const int64_t n_runs  = out->ne[0] / v.extent; // of each row
        const int64_t n       = ne[1] * ne[2] * ne[3] * n_runs;
        const int64_t count   = count_of(v, side);
        const size_t  run     = static_cast<size_t>(v.extent) * out->nb[0];
        const size_t  nb[]    = {out->nb[0], run, run * static_cast<size_t>(n), run * static_cast<size_t>(n)};
        const auto    skipped = static_cast<size_t>(tokens.first_row(out) * n_runs);
        ggml_tensor * to =
            view_on_device(out, {count, n, 1, 1}, nb, skipped * run + static_cast<size_t>(begin_of(v, side)) * nb[0]);
        if (side != side_host) {
            write(ggml_cpy(ctx(), ggml_reshape_2d(ctx(), from, count, n), to));
        } else if (count == v.extent || n == 1) {
            phase_.lifts.push_back({from, to});
        } else {
            ggml_tensor * sent = ggml_new_tensor_2d(ctx(), out->type, count, n);
            keep_sent(sent);
            phase_.lifts.push_back({from, sent});
            write(ggml_cpy(ctx(), sent, to));
        }
    }

    //
    // tensors
    //

    ggml_tensor * copy_header(const ggml_tensor * node, const int64_t * ne) {
        ggml_tensor * out = ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, ne);
        out->op           = node->op;
        std::memcpy(out->op_params, node->op_params, sizeof out->op_params);
        return out;
    }

    // A tensor of the same type, shape and strides.
    ggml_tensor * like(const ggml_tensor * tensor) {
        ggml_tensor * out = ggml_new_tensor(ctx(), tensor->type, GGML_MAX_DIMS, tensor->ne);
        std::copy(std::begin(tensor->nb), std::end(tensor->nb), std::begin(out->nb));
        return out;
    }

    // Gives it the memory of a tensor of llama.cpp's. strides: whose it takes; NULL: contiguous.
    void bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * strides) {
        if (strides != nullptr) {
            std::copy(std::begin(strides->nb), std::end(strides->nb), std::begin(tensor->nb));
        }
        program_.bindings.push_back({tensor, origin});
    }

    ggml_tensor * stage(ggml_tensor * tensor) {
        program_.staged.push_back({tensor, take_staging(tensor)});
        return tensor;
    }

    // Bytes into the host's memory, for what is packed or comes back.
    size_t take_staging(const ggml_tensor * tensor) {
        const size_t at = program_.host_bytes;
        program_.host_bytes += padded_bytes(tensor);
        return at;
    }

    // Views on the host follow what they are views of; those on the device are the allocator's.
    ggml_tensor * keep_view(ggml_tensor * view, Side side) {
        if (side == side_host) {
            program_.views.push_back(view);
        }
        return view;
    }

    // Elements [begin, begin + n) of each row of some tokens.
    ggml_tensor * view(ggml_tensor * whole, int64_t begin, int64_t n, Tokens tokens, Side side) {
        if (n == whole->ne[0] && tokens.count_of(whole) == whole->ne[tokens.dim]) {
            return whole;
        }
        const auto   ne = tokens.shape(whole, n);
        const size_t at =
            static_cast<size_t>(begin) * whole->nb[0] + static_cast<size_t>(tokens.first) * whole->nb[tokens.dim];
        return keep_view(
            ggml_view_4d(ctx(), whole, ne[0], ne[1], ne[2], ne[3], whole->nb[1], whole->nb[2], whole->nb[3], at), side);
    }

    const ggml_cgraph * graph_;
    const Values &      values_;
    std::vector<Sides>  sides_;
    Program &           program_;

    std::map<const ggml_tensor *, ggml_tensor *> inputs_; // what the host has of llama.cpp's tensors on the device
    std::map<std::pair<std::ptrdiff_t, const ggml_tensor *>, ggml_tensor *> packed_; // rows of an input, by routing

    Phase                      phase_; // at hand, like all that follow
    int                        n_phase_ = 0;
    std::vector<ggml_tensor *> on_device_;           // results in GG
    std::vector<ggml_tensor *> on_stream_;           // results in CG, and sums with them
    std::vector<ggml_tensor *> on_prime_;            // results in CG', and sums with them
    std::vector<ggml_tensor *> on_lift_;             // what makes results whole in the device's memory
    const ggml_tensor *        chosen_by_ = nullptr; // the ids of the experts that are streamed; NULL: all are
    int64_t                    n_expert_  = 0;       // of each streamed weight, where there are such ids
};

std::unique_ptr<Program> new_program(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory,
                                     Room room) {
    auto program = std::make_unique<Program>();
    Builder(graph, values, memory, room, *program).build();
    return program;
}

// The most room that a sub-graph takes: each node, its weight and each of its sources on every side, and a slice of it.
Room most_of(const ggml_cgraph * graph) {
    const int64_t n_tensors = graph->n_nodes * int64_t{n_sides * (3 + GGML_MAX_SRC)} + 8;
    return {n_tensors, n_tensors};
}

// The room that a program took.
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
        auto                program = new_program(graph, values, memory, most_of(graph));
        const ggml_tensor * refused = refused_by_device(*program);
        if (refused == nullptr) {
            return new_program(graph, values, memory, taken_by(*program)); // many are kept: no larger
        }
        if (!fuse) {
            throw Error(OALLAMA_UNSUPPORTED, std::string(ggml_backend_dev_name(program->device)) + " cannot compute " +
                                                 ggml_op_name(refused->op) + " of this shape");
        }
    }
    return nullptr; // not reached
}

} // namespace oallama
