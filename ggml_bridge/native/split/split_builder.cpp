#include "split_builder.h"

#include <algorithm>
#include <cstring>

namespace oallama {

ProgramBuilder::ProgramBuilder(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory, Room room,
                               Program & program)
    : graph_(graph), values_(values), sides_(values.nodes.size()), program_(program), resident_(graph, program),
      routed_(graph, program) {
    program.device       = memory == nullptr ? values.device : memory;
    program.resident     = memory != nullptr;
    program.ctx          = new_context(room.n_tensors, 2, room.n_nodes);
    program.device_graph = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(room.n_nodes), false);
    program.host_graph   = ggml_new_graph_custom(program.ctx.get(), static_cast<size_t>(room.n_nodes), false);
}

void ProgramBuilder::build() {
    for (int i = 0; i < graph_->n_nodes; i++) {
        emit(i);
    }
    close_phase();
}

//
// nodes
//

void ProgramBuilder::emit(int i) {
    const ggml_tensor * node = graph_->nodes[i];
    const Value &       v    = value(i);
    if (v.state == State::term || is_empty(node)) { // what reads an empty one is empty too
        return;
    }
    if (is_view(node->op)) {
        if (v.state == State::routed) {
            emit_half_of_rows(i);
        } else if (v.state != State::full) {
            for (const Side side : all_sides) {
                ggml_tensor * whole = side_of(inside(i, 0), side);
                sides(i)[side] = v.state == State::partial ? rank(whole, node, side == side_host)
                                                           : half(whole, node, count_of(v, side), side == side_host);
            }
        }
        return; // any other's memory is its source's, and llama.cpp has set its address
    }
    if (v.phase > phase_) {
        close_phase();
        phase_ = v.phase;
    }
    switch (v.state) {
        case State::full: emit_full(i); break;
        case State::routed: emit_rows(i); break;
        case State::sum: emit_sum(i); break;
        default: emit_sides(i);
    }
}

// A node of which each side computes its part.
void ProgramBuilder::emit_sides(int i) {
    const ggml_tensor * node = graph_->nodes[i];
    const Value &       v    = value(i);
    if (has(v, side_host)) {
        ggml_tensor * out   = compute(i, side_host);
        sides(i)[side_host] = program_.resident ? stage(out) : bind(out, {i, -1}, v.packed ? nullptr : node);
        ggml_build_forward_expand(program_.host_graph, side_of(i, side_host));
    }
    for (const Side side : {side_stream, side_device, side_prime}) {
        if (has(v, side)) {
            sides(i)[side] = compute(i, side);
            (side == side_device ? on_device_ : on_stream_).push_back(side_of(i, side));
        }
    }
    if (v.wanted) {
        join(i);
    }
}

// A node that only the host computes, from full values.
void ProgramBuilder::emit_full(int i) {
    const ggml_tensor * node = graph_->nodes[i];
    ggml_tensor *       out  = copy_header(node, node->ne);
    for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
        out->src[s] = full_on_host(i, s);
    }
    if (program_.resident) {
        sides(i)[side_host] = stage(out);
        resident_.put_whole(i, out);
    } else {
        sides(i)[side_host] = bind(out, {i, -1}, node);
    }
    ggml_build_forward_expand(program_.host_graph, out);
}

ggml_tensor * ProgramBuilder::compute(int i, Side side) {
    return is_mul_mat(graph_->nodes[i]->op)   ? mul_mat(i, side)
           : value(i).state == State::partial ? of_partial(i, side)
                                              : elementwise(i, side);
}

// Experts' partial results times the routing weights, or two of them added.
ggml_tensor * ProgramBuilder::of_partial(int i, Side side) {
    const ggml_tensor * node    = graph_->nodes[i];
    const Tokens        tokens  = tokens_of(value(i), side);
    const int           second  = inside(i, 1);
    const bool          partial = second >= 0 && value(second).state == State::partial;
    ggml_tensor *       out     = copy_header(node, tokens.shape(node, node->ne[0]).data());
    out->src[0]                 = side_of(inside(i, 0), side);
    out->src[1]                 = partial ? side_of(second, side) : full_on(side, i, 1, tokens);
    return out;
}

ggml_tensor * ProgramBuilder::mul_mat(int i, Side side) {
    const ggml_tensor * node   = graph_->nodes[i];
    const SplitWeight & weight = *weight_of(node->src[0]);
    const Tokens        tokens = tokens_of(value(i), side);
    if (program_.n_tokens == 0) {
        program_.n_tokens = value(i).n_tokens;
        program_.times    = &plan_of(node->src[0])->times()->of(weight.slice(), program_.n_tokens);
    }
    const bool    streamed = side == side_stream || side == side_prime;
    ggml_tensor * w        = streamed ? slot_of(i, weight, side) : weight.part(side).tensor;
    ggml_tensor * x        = nullptr;
    if (weight.slice().axis != Axis::cols) {
        x = full_on(side, i, 1, tokens);
    } else if (value(i).sharded_x) {
        x = side_of(inside(i, 1), side);
    } else {
        const Part & part = weight.part(side);
        x                 = side == side_host ? columns_of_input(i, part, weight.slice().layout, tokens)
                                              : full_on_device(i, 1, part.begin, part.count, tokens);
    }
    const int64_t n = weight.slice().axis == Axis::cols ? node->ne[0] : w->ne[1];
    if (side == side_host) {
        x = for_kernel_of(weight.slice(), x);
    }
    ggml_tensor * out = copy_header(node, tokens.shape(node, n).data());
    out->src[0]       = w;
    out->src[1]       = x;
    if (node->op == GGML_OP_MUL_MAT_ID) {
        out->src[2] = full_on(side, i, 2, tokens.along(1));
    }
    return out;
}

ggml_tensor * ProgramBuilder::elementwise(int i, Side side) {
    const ggml_tensor * node  = graph_->nodes[i];
    const Value &       v     = value(i);
    const int64_t       n     = count_of(v, side);
    const int64_t       begin = begin_of(v, side);
    const bool          both  = 2 * v.extent == node->ne[0];
    ggml_tensor *       out   = copy_header(node, tokens_of(v, side).shape(node, both ? 2 * n : n).data());
    for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
        const int from = inside(i, s);
        if (from >= 0 && value(from).state == State::shard) {
            out->src[s] = side_of(from, side);
        } else if (node->src[s]->ne[0] == 1) {
            out->src[s] = full_on(side, i, s, {});
        } else {
            out->src[s] =
                side == side_host ? view(full_on_host(i, s), begin, n, {}, true) : full_on_device(i, s, begin, n, {});
        }
    }
    return out;
}

// A weight's CG or CG' in a slot of the ring, which its data pointer is set to when its turn has come.
ggml_tensor * ProgramBuilder::slot_of(int i, const SplitWeight & weight, Side side) {
    count_use(i, weight.slice().e);
    const StreamedPart part = {&weight, side};
    for (const Streamed & streamed : streamed_) {
        if (streamed.part == part) {
            return streamed.tensor;
        }
    }
    const std::array<int64_t, 3> ne  = weight.shape(side);
    ggml_tensor *                out = ne[2] > 1 ? ggml_new_tensor_3d(ctx(), weight.slice().type, ne[0], ne[1], ne[2])
                                                 : ggml_new_tensor_2d(ctx(), weight.slice().type, ne[0], ne[1]);
    streamed_.push_back({part, out});
    const ggml_tensor * node = graph_->nodes[i];
    const PlanSpec &    plan = plan_of(node->src[0])->spec();
    program_.stream          = plan.stream;
    return out;
}

// Whether only the experts that are used need to be copied: where there are more of them than uses, and all that
// the phase streams is chosen from by the same ids.
void ProgramBuilder::count_use(int i, int64_t n_expert) {
    const ggml_tensor * node = graph_->nodes[i];
    const ggml_tensor * ids  = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
    if (ids != nullptr && ids->ne[0] * ids->ne[1] >= n_expert) {
        ids = nullptr;
    }
    if (streamed_.empty()) {
        const int from = ids == nullptr ? -1 : inside(i, 2);
        chosen_by_     = ids;
        n_expert_      = n_expert;
        ids_           = from >= 0 ? Origin{from, -1} : Origin{i, 2};
        host_ids_      = ids != nullptr && program_.resident ? full_on_host(i, 2) : nullptr;
    } else if (ids != chosen_by_ || n_expert != n_expert_) {
        chosen_by_ = nullptr;
    }
}

void ProgramBuilder::close_phase() {
    Phase phase;
    phase.device_begin = program_.phases.empty() ? 0 : program_.phases.back().device_end;
    phase.host_begin   = program_.phases.empty() ? 0 : program_.phases.back().host_end;
    for (ggml_tensor * node : on_device_) {
        ggml_build_forward_expand(program_.device_graph, node);
    }
    phase.stream_begin = ggml_graph_n_nodes(program_.device_graph);
    for (ggml_tensor * node : on_stream_) {
        ggml_build_forward_expand(program_.device_graph, node);
    }
    phase.lift_begin = ggml_graph_n_nodes(program_.device_graph);
    for (ggml_tensor * node : resident_.take_nodes()) {
        ggml_build_forward_expand(program_.device_graph, node);
    }
    phase.device_end = ggml_graph_n_nodes(program_.device_graph);
    phase.host_end   = ggml_graph_n_nodes(program_.host_graph);
    phase.inputs     = std::move(inputs_);
    phase.lifts      = resident_.take_lifts();
    phase.uploads    = std::move(uploads_);
    phase.downloads  = std::move(downloads_);
    if (phase.host_end > phase.host_begin) { // what the host still computes may lie where a result belongs
        for (Download & download : phase.downloads) {
            download.direct = false;
        }
    }
    phase.streamed = std::move(streamed_);
    phase.routings = routed_.take();
    phase.routed   = chosen_by_ != nullptr;
    phase.ids      = ids_;
    phase.host_ids = host_ids_;
    inputs_        = {};
    uploads_       = {};
    downloads_     = {};
    streamed_      = {};
    on_device_     = {};
    on_stream_     = {};
    chosen_by_     = nullptr;
    if (phase.device_end > phase.device_begin || phase.host_end > phase.host_begin) {
        program_.phases.push_back(std::move(phase));
    }
}

//
// tensors
//

ggml_tensor * ProgramBuilder::copy_header(const ggml_tensor * node, const int64_t * ne) {
    ggml_tensor * out = ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, ne);
    out->op           = node->op;
    std::memcpy(out->op_params, node->op_params, sizeof out->op_params);
    return out;
}

// Gives it the memory of a tensor of llama.cpp's. like: whose strides it takes; NULL: contiguous.
ggml_tensor * ProgramBuilder::bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * like) {
    if (like != nullptr) {
        std::copy(std::begin(like->nb), std::end(like->nb), std::begin(tensor->nb));
    }
    program_.bindings.push_back({tensor, origin});
    return tensor;
}

ggml_tensor * ProgramBuilder::stage(ggml_tensor * tensor) {
    program_.host_staged.push_back({tensor, program_.host_bytes});
    program_.host_bytes += padded_bytes(tensor);
    return tensor;
}

// A half of a fused gate_up's shard; NULL where that side has nothing of it.
ggml_tensor * ProgramBuilder::half(ggml_tensor * whole, const ggml_tensor * node, int64_t n, bool on_host) {
    if (whole == nullptr) {
        return nullptr;
    }
    const bool second = node->view_offs != node->src[0]->view_offs;
    return view(whole, second ? n : 0, n, {}, on_host);
}

// One rank of experts' results, of the tokens of a side; NULL where that side has nothing of them.
ggml_tensor * ProgramBuilder::rank(ggml_tensor * experts, const ggml_tensor * node, bool on_host) {
    if (experts == nullptr) {
        return nullptr;
    }
    const size_t  at  = node->view_offs / node->src[0]->nb[1] * experts->nb[1];
    ggml_tensor * out = ggml_view_2d(ctx(), experts, experts->ne[0], experts->ne[2], experts->nb[2], at);
    if (on_host) {
        program_.host_views.push_back(out);
    }
    return out;
}

// Elements [begin, begin + n) of each row of some tokens.
ggml_tensor * ProgramBuilder::view(ggml_tensor * full, int64_t begin, int64_t n, Tokens tokens, bool on_host) {
    if (n == full->ne[0] && tokens.count_of(full) == full->ne[tokens.dim]) {
        return full;
    }
    const auto   ne = tokens.shape(full, n);
    const size_t at =
        static_cast<size_t>(begin) * full->nb[0] + static_cast<size_t>(tokens.first) * full->nb[tokens.dim];
    ggml_tensor * out =
        ggml_view_4d(ctx(), full, ne[0], ne[1], ne[2], ne[3], full->nb[1], full->nb[2], full->nb[3], at);
    if (on_host) {
        program_.host_views.push_back(out);
    }
    return out;
}

} // namespace oallama
