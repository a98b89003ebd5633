#include "split_program.h"

#include <algorithm>
#include <cstring>

#include "split_resident.h"
#include "split_routed.h"

namespace oallama {

namespace {

// Where a value's sides are while the program is built; NULL: nothing of it there.
using Sides = std::array<ggml_tensor *, n_sides>;

constexpr std::array<Side, n_sides> all_sides = {side_host, side_stream, side_device, side_prime};

// What a program's context has room for.
struct Room {
    int64_t n_tensors;
    int64_t n_nodes; // of each graph, and as many leaves
};

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

// Second pass: tensors of both sides.
class Builder {
  public:
    Builder(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory, Room room, Program & program)
        : graph_(graph), values_(values), sides_(values.nodes.size()), program_(program), resident_(graph, program),
          routed_(graph, program) {
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
    ggml_context * ctx() { return program_.ctx.get(); }

    const Value & value(int node) const { return values_.nodes[static_cast<size_t>(node)]; }

    Sides & sides(int node) { return sides_[static_cast<size_t>(node)]; }

    ggml_tensor * side_of(int node, Side side) { return sides(node)[side]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const { return find_node(graph_, graph_->nodes[node]->src[src], node); }

    void emit(int i) {
        const ggml_tensor * node = graph_->nodes[i];
        const Value &       v    = value(i);
        if (v.state == State::term) {
            return;
        }
        if (is_view(node->op)) {
            if (v.state == State::routed) {
                emit_half_of_rows(i);
            } else if (v.state != State::full) {
                for (const Side side : all_sides) {
                    ggml_tensor * whole = side_of(inside(i, 0), side);
                    sides(i)[side]      = v.state == State::partial
                                              ? rank(whole, node, side == side_host)
                                              : half(whole, node, count_of(v, side), side == side_host);
                }
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
        if (v.state == State::routed) {
            emit_rows(i);
            return;
        }
        if (v.state == State::sum) {
            emit_sum(i);
            return;
        }
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
    void emit_full(int i) {
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

    // Rows of tokens' experts: the misses on the host, what may be hits on the device.
    void emit_rows(int i) {
        const ggml_tensor * node    = graph_->nodes[i];
        const Value &       v       = value(i);
        Routed &            routed  = routing_of(v.routed_by);
        const int64_t       host[]  = {node->ne[0], 1, routed.n_rows, 1};
        const int64_t       there[] = {node->ne[0], routed.n_device, node->ne[2], 1};
        for (const Side side : {side_host, side_device}) {
            ggml_tensor * out = copy_header(node, side == side_host ? host : there);
            if (is_mul_mat(node->op)) {
                set_routed_sources(i, side, out);
            } else if (node->op == GGML_OP_ADD_ID) {
                const bool on_host = side == side_host;
                out->src[0]        = side_of(inside(i, 0), side);
                out->src[1]        = on_host ? full_on_host(i, 1) : routed_.device_biases(routed, node->src[1], {i, 1});
                out->src[2]        = on_host ? routed.host_ids : routed.device_ids;
            } else {
                for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
                    const int  from = inside(i, s);
                    const bool rows = from >= 0 && value(from).state == State::routed;
                    out->src[s]     = rows ? side_of(from, side) : full_on(side, i, s, {});
                }
            }
            sides(i)[side] = out;
        }
        ggml_tensor * rows  = routed_.host_rows(routed, side_of(i, side_host));
        ggml_tensor * whole = nullptr;
        if (v.is_summed) {
            routed_.keep(routed, rows);
        } else if (program_.resident) {
            whole = routed_.whole(node, rows);
        } else {
            bind(rows, {i, -1}, nullptr);
        }
        ggml_build_forward_expand(program_.host_graph, rows);
        on_device_.push_back(side_of(i, side_device));
        if (v.wanted) {
            fetch_rows(i, Download::Join::rows, side_of(i, side_device), routed, whole);
        }
    }

    void set_routed_sources(int i, Side side, ggml_tensor * out) {
        const ggml_tensor * node   = graph_->nodes[i];
        const SplitWeight & weight = *weight_of(node->src[0]);
        Routed &            routed = routing_of(i);
        const int           from   = inside(i, 1);
        if (program_.first == nullptr) {
            program_.first    = &weight;
            program_.n_tokens = value(i).n_tokens;
        }
        out->src[0] = weight.part(side).tensor;
        out->src[2] = side == side_host ? routed.host_ids : routed.device_ids;
        if (value(i).routed_by != i) { // a routed value itself
            out->src[1] = side_of(from, side);
        } else if (side == side_host) {
            out->src[1] = routed_.host_input(routed, full_on_host(i, 1));
        } else if (node->src[1]->ne[1] == 1) {
            out->src[1] = full_on_device(i, 1, 0, node->src[1]->ne[0], {});
        } else {
            ggml_tensor * host = on_device(node->src[1]) ? full_on_host(i, 1) : nullptr;
            out->src[1] = routed_.device_input(routed, node->src[1], from >= 0 ? Origin{from, -1} : Origin{i, 1}, host);
        }
    }

    Routed & routing_of(int mul_mat) {
        const int from   = inside(mul_mat, 2);
        Routed &  routed = routed_.routing_of(mul_mat, from >= 0 ? Origin{from, -1} : Origin{mul_mat, 2});
        if (routed.host_chosen == nullptr && on_device(graph_->nodes[mul_mat]->src[2])) {
            routed.host_chosen = full_on_host(mul_mat, 2);
        }
        return routed;
    }

    // Whether a tensor of llama.cpp's is in device memory.
    bool on_device(const ggml_tensor * tensor) const { return program_.resident && !is_on_host(tensor); }

    void emit_half_of_rows(int i) {
        const ggml_tensor * node   = graph_->nodes[i];
        const int           from   = inside(i, 0);
        const bool          second = node->view_offs != node->src[0]->view_offs;
        for (const Side side : {side_host, side_device}) {
            sides(i)[side] = view(side_of(from, side), second ? node->ne[0] : 0, node->ne[0], {}, side == side_host);
        }
        routed_.host_rows(routing_of(value(i).routed_by), side_of(i, side_host));
    }

    // Weighted and added up where they come together; on the device, where many rows need not come back then.
    void emit_sum(int i) {
        const Value & v       = value(i);
        const int     rows    = inside(v.weighting, 0);
        const int     weights = inside(v.weighting, 1);
        Routed &      routed  = routing_of(value(rows).routed_by);
        routed.weighted       = true;
        routed.weighting      = weights >= 0 ? Origin{weights, -1} : Origin{v.weighting, 1};
        ggml_tensor * there   = side_of(rows, side_device);
        const int64_t saved   = there->ne[0] * (there->ne[1] - 1) * there->ne[2] * static_cast<int64_t>(sizeof(float));
        const bool    summed =
            saved > 0 && saved >= plan_of(graph_->nodes[value(rows).routed_by]->src[0])->spec().sum_bytes;
        if (summed) {
            there = routed_.device_sum(routed, there);
            on_device_.push_back(there);
        }
        if (on_device(graph_->nodes[v.weighting]->src[1])) {
            routed.host_weighting = full_on_host(v.weighting, 1);
        }
        fetch_rows(i, Download::Join::sum, there, routed,
                   program_.resident ? routed_.whole(graph_->nodes[i], nullptr) : nullptr);
        downloads_.back().host_rows = side_of(rows, side_host);
        downloads_.back().summed    = summed;
    }

    // whole: where llama.cpp's tensors are in device memory, what the node becomes there.
    void fetch_rows(int i, Download::Join how, ggml_tensor * there, const Routed & routed, ggml_tensor * whole) {
        Download download = {};
        download.tensor   = there;
        download.node     = i;
        download.join     = how;
        download.n_rows   = there->ne[1] * there->ne[2];
        download.staging  = take_staging(there);
        download.routed   = routed_.number_of(routed);
        download.to       = whole;
        if (whole != nullptr) {
            resident_.put_whole(i, whole);
        }
        ggml_set_output(there);
        downloads_.push_back(download);
    }

    ggml_tensor * compute(int i, Side side) {
        return is_mul_mat(graph_->nodes[i]->op)   ? mul_mat(i, side)
               : value(i).state == State::partial ? of_partial(i, side)
                                                  : elementwise(i, side);
    }

    // Experts' partial results times the routing weights, or two of them added.
    ggml_tensor * of_partial(int i, Side side) {
        const ggml_tensor * node    = graph_->nodes[i];
        const Tokens        tokens  = tokens_of(value(i), side);
        const int           second  = inside(i, 1);
        const bool          partial = second >= 0 && value(second).state == State::partial;
        ggml_tensor *       out     = copy_header(node, tokens.shape(node, node->ne[0]).data());
        out->src[0]                 = side_of(inside(i, 0), side);
        out->src[1]                 = partial ? side_of(second, side) : full_on(side, i, 1, tokens);
        return out;
    }

    ggml_tensor * mul_mat(int i, Side side) {
        const ggml_tensor * node   = graph_->nodes[i];
        const SplitWeight & weight = *weight_of(node->src[0]);
        const Tokens        tokens = tokens_of(value(i), side);
        if (program_.first == nullptr) {
            program_.first    = &weight;
            program_.n_tokens = value(i).n_tokens;
            program_.times    = &plan_of(node->src[0])->times().of(weight.slice(), program_.n_tokens);
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

    ggml_tensor * elementwise(int i, Side side) {
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
                out->src[s] = side == side_host ? view(full_on_host(i, s), begin, n, {}, true)
                                                : full_on_device(i, s, begin, n, {});
            }
        }
        return out;
    }

    // A weight's CG or CG' in a slot of the ring, which its data pointer is set to when its turn has come.
    ggml_tensor * slot_of(int i, const SplitWeight & weight, Side side) {
        count_use(i, weight.slice().e);
        const StreamedPart part = {&weight, side};
        for (const Streamed & streamed : streamed_) {
            if (streamed.part == part) {
                return streamed.tensor;
            }
        }
        const std::array<int64_t, 3> ne = weight.shape(side);
        ggml_tensor * out = ne[2] > 1 ? ggml_new_tensor_3d(ctx(), weight.slice().type, ne[0], ne[1], ne[2])
                                      : ggml_new_tensor_2d(ctx(), weight.slice().type, ne[0], ne[1]);
        streamed_.push_back({part, out});
        const ggml_tensor * node = graph_->nodes[i];
        const PlanSpec &    plan = plan_of(node->src[0])->spec();
        program_.stream          = plan.stream;
        return out;
    }

    // Whether only the experts that are used need to be copied: where there are more of them than uses, and all that
    // the phase streams is chosen from by the same ids.
    void count_use(int i, int64_t n_expert) {
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

    // What the host's kernel takes: those of repacked layouts F32 only, the others that or the weight's own type.
    ggml_tensor * for_kernel_of(const SliceSpec & slice, ggml_tensor * x) {
        if (x->type == GGML_TYPE_F32 || (slice.layout == plain_layout && x->type == slice.type)) {
            return x;
        }
        return stage(ggml_cast(ctx(), x, GGML_TYPE_F32));
    }

    ggml_tensor * stage(ggml_tensor * tensor) {
        program_.host_staged.push_back({tensor, program_.host_bytes});
        program_.host_bytes += padded_bytes(tensor);
        return tensor;
    }

    // The host's columns of a full input; for kernels of repacked layouts without gaps between rows.
    ggml_tensor * columns_of_input(int i, const Part & part, const std::string & layout, Tokens tokens) {
        ggml_tensor * columns = view(full_on_host(i, 1), part.begin, part.count, tokens, true);
        if (layout == plain_layout || ggml_is_contiguous(columns)) {
            return columns;
        }
        return stage(ggml_cont(ctx(), columns));
    }

    // A half of a fused gate_up's shard; NULL where that side has nothing of it.
    ggml_tensor * half(ggml_tensor * whole, const ggml_tensor * node, int64_t n, bool on_host) {
        if (whole == nullptr) {
            return nullptr;
        }
        const bool second = node->view_offs != node->src[0]->view_offs;
        return view(whole, second ? n : 0, n, {}, on_host);
    }

    // One rank of experts' results, of the tokens of a side; NULL where that side has nothing of them.
    ggml_tensor * rank(ggml_tensor * experts, const ggml_tensor * node, bool on_host) {
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
    ggml_tensor * view(ggml_tensor * full, int64_t begin, int64_t n, Tokens tokens, bool on_host) {
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

    // Source s of node i, whole rows of some tokens.
    ggml_tensor * full_on(Side side, int i, int s, Tokens tokens) {
        const int64_t n = graph_->nodes[i]->src[s]->ne[0];
        return side == side_host ? view(full_on_host(i, s), 0, n, tokens, true) : full_on_device(i, s, 0, n, tokens);
    }

    ggml_tensor * full_on_host(int i, int s) {
        const ggml_tensor * src    = graph_->nodes[i]->src[s];
        const SplitWeight * weight = weight_of(src);
        if (weight != nullptr) { // a bias that lies among the cut weights
            return weight->whole_on_host().tensor;
        }
        const int from = inside(i, s);
        if (from >= 0 && value(from).state == State::full && side_of(from, side_host) != nullptr) {
            return side_of(from, side_host);
        }
        if (program_.resident && !is_on_host(src)) {
            return input(src, from >= 0 ? Origin{from, -1} : Origin{i, s});
        }
        for (const Binding & bound : program_.bindings) { // gate and up share one
            if (bound.tensor->op == GGML_OP_NONE && bound.origin.of(graph_) == src) {
                return bound.tensor;
            }
        }
        ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
        return bind(out, from >= 0 ? Origin{from, -1} : Origin{i, s}, src);
    }

    // A full value that is in device memory: fetched when the phase begins, or a view of what the host computes.
    ggml_tensor * input(const ggml_tensor * src, Origin origin) {
        const int root = src->view_src == nullptr ? -1 : find_node(graph_, src->view_src, graph_->n_nodes);
        if (root >= 0 && value(root).state == State::full && side_of(root, side_host) != nullptr) {
            program_.host_views.push_back(ggml_view_4d(ctx(), side_of(root, side_host), src->ne[0], src->ne[1],
                                                       src->ne[2], src->ne[3], src->nb[1], src->nb[2], src->nb[3],
                                                       src->view_offs));
            return program_.host_views.back();
        }
        const auto known = [&](const Input & one) { return one.origin.of(graph_) == src; };
        for (const Phase & phase : program_.phases) {
            const auto found = std::find_if(phase.inputs.begin(), phase.inputs.end(), known);
            if (found != phase.inputs.end()) {
                return found->tensor;
            }
        }
        const auto found = std::find_if(inputs_.begin(), inputs_.end(), known);
        if (found != inputs_.end()) {
            return found->tensor;
        }
        ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
        std::copy(std::begin(src->nb), std::end(src->nb), std::begin(out->nb));
        inputs_.push_back({stage(out), origin});
        return out;
    }

    // A full value on the device: elements [begin, begin + count) of each row of some tokens, sent when the phase
    // begins unless it is there.
    ggml_tensor * full_on_device(int i, int s, int64_t begin, int64_t count, Tokens tokens) {
        const ggml_tensor * src  = graph_->nodes[i]->src[s];
        const int           from = inside(i, s);
        if (weight_of(src) != nullptr) {
            weight_of(src)->whole_on_host(); // is sent from there
        }
        if (program_.resident && !is_on_host(src)) {
            return resident_.part(src, from >= 0 ? Origin{from, -1} : Origin{i, s}, begin, count, tokens);
        }
        const auto    ne        = tokens.shape(src, count);
        const int64_t first_row = first_row_of(src, tokens);
        for (const Upload & upload : uploads_) {
            if (upload.origin.of(graph_) != src || upload.begin != begin || upload.count != count) {
                continue;
            }
            if (upload.first_row == first_row && std::equal(ne.begin(), ne.end(), upload.tensor->ne)) {
                return upload.tensor;
            }
            const bool all = upload.first_row == 0 && upload.tensor->ne[tokens.dim] == src->ne[tokens.dim];
            if (all && is_aligned(upload.tensor, tokens)) {
                return view(upload.tensor, 0, count, tokens, false);
            }
        }
        Upload upload    = {};
        upload.tensor    = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, ne.data());
        upload.origin    = from >= 0 ? Origin{from, -1} : Origin{i, s};
        upload.begin     = begin;
        upload.count     = count;
        upload.first_row = first_row;
        upload.packed    = count == src->ne[0] && ggml_is_contiguous(src);
        upload.staging   = take_staging(upload.tensor);
        ggml_set_input(upload.tensor);
        uploads_.push_back(upload);
        return upload.tensor;
    }

    // Whether kernels can read the device's tensor from these tokens on: to some, such as Vulkan's mul-mats, memory may
    // not be given from just anywhere. A few experts' numbers are soon misaligned.
    bool is_aligned(const ggml_tensor * tensor, Tokens tokens) const {
        const size_t at = static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
        return at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(values_.device)) == 0;
    }

    // How node i becomes whole in its original memory when its phase ends.
    void join(int i) {
        const Value & v = value(i);
        if (program_.resident) {
            lift(i, v);
            return;
        }
        if (v.state == State::partial) {
            join_partial(i, v);
            return;
        }
        for (const Side side : {side_stream, side_device, side_prime}) {
            const int64_t count = count_of(v, side);
            fetch(i, side_of(i, side), count == v.extent ? Download::Join::copy : Download::Join::scatter,
                  begin_of(v, side), count, tokens_of(v, side));
        }
    }

    // Of the first tokens the host has a part too, unless there is no CC; of the last n_g the device has all of it.
    void join_partial(int i, const Value & v) {
        const bool     on_host = has(v, side_host);
        ggml_tensor *  sum     = add(side_of(i, side_device), side_of(i, side_stream));
        ggml_tensor *  prime   = side_of(i, side_prime);
        const Tokens   last    = tokens_of(v, side_prime);
        Download::Join how     = on_host ? Download::Join::add : Download::Join::copy;
        if (prime == nullptr || on_host) {
            fetch(i, sum, how, 0, v.extent, tokens_of(v, prime == nullptr ? side_device : side_host));
        }
        if (prime != nullptr) {
            fetch(i, add(prime, sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], last, false)), Download::Join::copy,
                  0, v.extent, last);
        }
    }

    // The same in device memory.
    void lift(int i, const Value & v) {
        if (v.state == State::shard) {
            for (const Side side : all_sides) {
                if (side_of(i, side) != nullptr) {
                    resident_.put(i, v, side, side_of(i, side));
                }
            }
            return;
        }
        ggml_tensor * host  = side_of(i, side_host);
        ggml_tensor * prime = side_of(i, side_prime);
        ggml_tensor * sum   = add(side_of(i, side_device), side_of(i, side_stream));
        const auto    of    = [&](Tokens tokens) {
            return sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], tokens, false);
        };
        if (prime == nullptr || host != nullptr) {
            const Tokens tokens = tokens_of(v, prime == nullptr ? side_device : side_host);
            resident_.add(i, host, of(tokens), tokens);
        }
        if (prime != nullptr) {
            const Tokens last = tokens_of(v, side_prime);
            resident_.add(i, nullptr, add(prime, of(last)), last);
        }
    }

    // On the device; either may be missing.
    ggml_tensor * add(ggml_tensor * a, ggml_tensor * b) {
        if (a == nullptr || b == nullptr) {
            return a == nullptr ? b : a;
        }
        on_stream_.push_back(ggml_add(ctx(), a, b));
        return on_stream_.back();
    }

    void fetch(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count, Tokens tokens) {
        if (tensor == nullptr) {
            return;
        }
        const ggml_tensor * node     = graph_->nodes[i];
        const Value &       v        = value(i);
        const bool          one_row  = node->ne[1] * node->ne[2] * node->ne[3] == 1;
        const bool          moves    = v.state == State::shard && v.packed && has(v, side_host) && v.cc < v.extent;
        const bool          first    = downloads_.empty() || downloads_.back().node != i;
        const auto          ne       = tokens.shape(node, 1);
        const auto          host_ne  = tokens_of(v, side_host).shape(node, 1);
        Download            download = {};
        download.tensor              = tensor;
        download.node                = i;
        download.join                = how;
        download.begin               = begin;
        download.count               = count;
        download.extent              = v.extent;
        download.first_row           = first_row_of(node, tokens);
        download.n_rows              = ne[1] * ne[2] * ne[3];
        download.spread              = moves && first ? v.cc : 0;
        download.spread_rows         = host_ne[1] * host_ne[2] * host_ne[3];
        download.direct =
            how == Download::Join::copy || (how == Download::Join::scatter && one_row && v.extent == node->ne[0]);
        download.staging = take_staging(tensor);
        ggml_set_output(tensor);
        downloads_.push_back(download);
    }

    size_t take_staging(const ggml_tensor * tensor) {
        const size_t at = program_.staging_bytes;
        program_.staging_bytes += padded_bytes(tensor);
        return at;
    }

    static size_t padded_bytes(const ggml_tensor * tensor) { return (ggml_nbytes(tensor) + 63) / 64 * 64; }

    void close_phase() {
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

    const ggml_cgraph *        graph_;
    const Values &             values_;
    std::vector<Sides>         sides_;
    Program &                  program_;
    Resident                   resident_;
    RoutedBuilder              routed_;
    std::vector<Input>         inputs_; // of the phase at hand, like all that follow
    std::vector<Upload>        uploads_;
    std::vector<Download>      downloads_;
    std::vector<Streamed>      streamed_;
    std::vector<ggml_tensor *> on_device_;           // results in GG
    std::vector<ggml_tensor *> on_stream_;           // results in CG and CG', and sums with them
    const ggml_tensor *        chosen_by_ = nullptr; // the ids of the experts that are streamed; NULL: all are
    int64_t                    n_expert_  = 0;       // of each streamed weight, where there are such ids
    Origin                     ids_;
    ggml_tensor *              host_ids_ = nullptr;
    int                        phase_    = 0; // of the node at hand
};

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
    Builder(graph, values, memory, room, *program).build();
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
