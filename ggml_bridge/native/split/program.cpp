#include "program.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace oallama {

namespace {

class Resident {
  public:
    Resident(const ggml_cgraph * graph, Program & program) : graph_(graph), program_(program) {}

    // Elements [begin, begin + count) of each row of some tokens of a tensor of llama.cpp's, as kernels can read them:
    // where they lie, or what makes them contiguous.
    ggml_tensor * part(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count, Tokens tokens);

    // A node becomes the sum of what the host has of these tokens, which is sent to its memory, and of the device's.
    // Either may be NULL.
    void add(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens);

    // Elements of each row (or of each half of one) of some tokens of a node become these of a side.
    void put(int node, const Value & v, Side side, ggml_tensor * from);

    // A node becomes what the host has computed of it.
    void put_whole(int node, ggml_tensor * host);

    // What is sent when the phase at hand ends, and the device's nodes behind that, which write llama.cpp's memory. Not
    // before: a result may lie where the phase still reads.
    std::vector<Lift>          take_lifts() { return std::exchange(lifts_, {}); }
    std::vector<ggml_tensor *> take_nodes() { return std::exchange(nodes_, {}); }

  private:
    struct Known {
        const ggml_tensor * tensor;
        int64_t             begin;
        int64_t             count;
        Tokens              tokens;
        ggml_tensor *       part;
    };

    ggml_context * ctx() const;
    ggml_tensor *  whole(const ggml_tensor * tensor, Origin origin);
    ggml_tensor *  result(int node);
    ggml_tensor *  view(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb, size_t at);
    ggml_tensor *  rows(int node, Tokens tokens);
    void           write(ggml_tensor * node);

    const ggml_cgraph *        graph_;
    Program &                  program_;
    std::vector<Known>         known_;
    std::vector<Lift>          lifts_;
    std::vector<ggml_tensor *> nodes_;
};

// Builds them, for the phase at hand.
class RoutedBuilder {
  public:
    RoutedBuilder(const ggml_cgraph * graph, Program & program) : graph_(graph), program_(program) {}

    // The routing that a mul-mat of the graph is done by. ids: where they come from.
    Routed & routing_of(int mul_mat, Origin ids);

    // Which of the phase's routings it is.
    int number_of(const Routed & routed) const { return static_cast<int>(&routed - routed_.data()); }

    // Rows of a full input for the misses. x: on the host, [k, 1 or n_used, n_tokens].
    ggml_tensor * host_input(Routed & routed, ggml_tensor * x);

    // Rows of a full input that has one for each rank, for the device, which gets them when the phase begins. host: the
    // input there, where llama.cpp's is in device memory.
    ggml_tensor * device_input(Routed & routed, const ggml_tensor * x, Origin origin, ggml_tensor * host);

    // A bias for each of the hot experts, sent when the phase begins. biases: [n, n_expert].
    ggml_tensor * device_biases(Routed & routed, const ggml_tensor * biases, Origin origin);

    // A tensor of one row of n for each miss.
    ggml_tensor * host_rows(Routed & routed, ggml_tensor * rows);

    // Memory for such a tensor that stays until the phase ends.
    ggml_tensor * keep(Routed & routed, ggml_tensor * rows);

    // Memory for a whole node that such rows, which lie at its beginning, are part of.
    ggml_tensor * whole(const ggml_tensor * node, ggml_tensor * rows);

    // Rows of the device times their routing weights, added up for each token.
    ggml_tensor * device_sum(Routed & routed, ggml_tensor * rows);

    std::vector<Routed> take() { return std::exchange(routed_, {}); }

  private:
    ggml_context * ctx() const { return program_.ctx.get(); }

    ggml_tensor * stage(ggml_tensor * tensor);
    ggml_tensor * send(Routed & routed, SentRows::What what, ggml_tensor * tensor, Origin origin = {},
                       ggml_tensor * host = nullptr);

    const ggml_cgraph * graph_;
    Program &           program_;
    std::vector<Routed> routed_;
};

constexpr std::array<Side, n_sides> all_sides = {side_host, side_stream, side_device, side_prime};

// What a program's context has room for.
struct Room {
    int64_t n_tensors;
    int64_t n_nodes; // of each graph, and as many leaves
};

class ProgramBuilder {
  public:
    // memory: the device's that llama.cpp's tensors are in; NULL: the host's.
    ProgramBuilder(const ggml_cgraph * graph, const Values & values, ggml_backend_dev_t memory, Room room,
                   Program & program);

    void build();

  private:
    // Where a value's sides are while the program is built; NULL: nothing of it there.
    using Sides = std::array<ggml_tensor *, n_sides>;

    ggml_context * ctx() { return program_.ctx.get(); }

    const Value & value(int node) const { return values_.nodes[static_cast<size_t>(node)]; }

    Sides & sides(int node) { return sides_[static_cast<size_t>(node)]; }

    ggml_tensor * side_of(int node, Side side) { return sides(node)[side]; }

    // The node that src is the result of; -1: a tensor from outside.
    int inside(int node, int src) const { return find_node(graph_, graph_->nodes[node]->src[src], node); }

    // Whether a tensor of llama.cpp's is in device memory.
    bool on_device(const ggml_tensor * tensor) const { return program_.resident && !is_on_host(tensor); }

    // nodes
    void          emit(int i);
    void          emit_full(int i);
    void          emit_sides(int i);
    void          close_phase();
    ggml_tensor * compute(int i, Side side);
    ggml_tensor * of_partial(int i, Side side);
    ggml_tensor * mul_mat(int i, Side side);
    ggml_tensor * elementwise(int i, Side side);
    ggml_tensor * slot_of(int i, const SplitWeight & weight, Side side);
    void          count_use(int i, int64_t n_expert);

    // rows of tokens' experts (split_rows.cpp)
    void     emit_rows(int i);
    void     emit_half_of_rows(int i);
    void     emit_sum(int i);
    Routed & routing_of(int mul_mat);
    void     set_routed_sources(int i, Side side, ggml_tensor * out);
    void     fetch_rows(int i, Download::Join how, ggml_tensor * there, const Routed & routed, ggml_tensor * whole);

    // tensors
    ggml_tensor * copy_header(const ggml_tensor * node, const int64_t * ne);
    ggml_tensor * bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * like);
    ggml_tensor * stage(ggml_tensor * tensor);
    ggml_tensor * view(ggml_tensor * full, int64_t begin, int64_t n, Tokens tokens, bool on_host);
    ggml_tensor * half(ggml_tensor * whole, const ggml_tensor * node, int64_t n, bool on_host);
    ggml_tensor * rank(ggml_tensor * experts, const ggml_tensor * node, bool on_host);

    // full values on a side (split_inputs.cpp)
    ggml_tensor * full_on(Side side, int i, int s, Tokens tokens);
    ggml_tensor * full_on_host(int i, int s);
    ggml_tensor * full_on_device(int i, int s, int64_t begin, int64_t count, Tokens tokens);
    ggml_tensor * input(const ggml_tensor * src, Origin origin);
    ggml_tensor * for_kernel_of(const SliceSpec & slice, ggml_tensor * x);
    ggml_tensor * columns_of_input(int i, const Part & part, const std::string & layout, Tokens tokens);
    bool          is_aligned(const ggml_tensor * tensor, Tokens tokens) const;

    // results (split_outputs.cpp)
    void          join(int i);
    void          join_partial(int i, const Value & v);
    void          lift(int i, const Value & v);
    ggml_tensor * add(ggml_tensor * a, ggml_tensor * b);
    void          fetch(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count, Tokens tokens);
    size_t        take_staging(const ggml_tensor * tensor);

    static size_t padded_bytes(const ggml_tensor * tensor) { return (ggml_nbytes(tensor) + 63) / 64 * 64; }

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

// Rows [., ne[1], ne[2]] of a tensor as one list of rows.
bool is_list_of_rows(const ggml_tensor * x) {
    return x->nb[0] == ggml_type_size(x->type) &&
           (x->ne[1] == 1 || x->nb[2] == static_cast<size_t>(x->ne[1]) * x->nb[1]);
}

} // namespace

//
// blocks that live on the device
//

ggml_context * Resident::ctx() const {
    return program_.ctx.get();
}

// A tensor of llama.cpp's as the device's graph sees it. Not the allocator's: it has an address, if not yet the right
// one.
ggml_tensor * Resident::whole(const ggml_tensor * tensor, Origin origin) {
    for (const DeviceBinding & bound : program_.device_bindings) {
        if (bound.like == tensor) {
            return bound.tensor;
        }
    }
    ggml_tensor * out = ggml_new_tensor(ctx(), tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(std::begin(tensor->nb), std::end(tensor->nb), std::begin(out->nb));
    out->data = reinterpret_cast<void *>(uintptr_t{1});
    program_.device_bindings.push_back({out, origin, tensor});
    return out;
}

ggml_tensor * Resident::result(int node) {
    return whole(graph_->nodes[node], {node, -1});
}

ggml_tensor * Resident::view(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb,
                             size_t at) {
    ggml_tensor * out = ggml_view_4d(ctx(), of, ne[0], ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], at);
    program_.device_views.push_back(out);
    return out;
}

ggml_tensor * Resident::part(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count, Tokens tokens) {
    for (const Known & known : known_) {
        if (known.tensor == tensor && known.begin == begin && known.count == count && known.tokens.dim == tokens.dim &&
            known.tokens.first == tokens.first && known.tokens.count == tokens.count) {
            return known.part;
        }
    }
    ggml_tensor * out     = whole(tensor, origin);
    const auto    ne      = tokens.shape(tensor, count);
    bool          aligned = true;
    if (!std::equal(ne.begin(), ne.end(), tensor->ne)) {
        const size_t at =
            static_cast<size_t>(begin) * tensor->nb[0] + static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
        out     = view(out, ne, tensor->nb, at);
        aligned = at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(program_.device)) == 0;
    }
    if (!aligned || !ggml_is_contiguous(out)) {
        out = ggml_cont(ctx(), out);
    }
    known_.push_back({tensor, begin, count, tokens, out});
    return out;
}

ggml_tensor * Resident::rows(int node, Tokens tokens) {
    ggml_tensor * out = result(node);
    return tokens.count < 0 ? out
                            : view(out, tokens.shape(out, out->ne[0]), out->nb,
                                   static_cast<size_t>(tokens.first) * out->nb[tokens.dim]);
}

// A node that writes memory of llama.cpp's, so a view of it.
void Resident::write(ggml_tensor * node) {
    program_.device_views.push_back(node);
    nodes_.push_back(node);
}

void Resident::add(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens) {
    ggml_tensor * to = rows(node, tokens);
    if (host != nullptr) {
        lifts_.push_back({host, to});
    }
    if (device != nullptr) {
        write(host == nullptr ? ggml_cpy(ctx(), device, to) : ggml_add_inplace(ctx(), to, device));
    }
}

void Resident::put(int node, const Value & v, Side side, ggml_tensor * from) {
    ggml_tensor * out     = result(node);
    const Tokens  tokens  = tokens_of(v, side);
    const auto    ne      = tokens.shape(out, 1);
    const int64_t n_runs  = out->ne[0] / v.extent; // of each row
    const int64_t n       = ne[1] * ne[2] * ne[3] * n_runs;
    const int64_t count   = count_of(v, side);
    const size_t  run     = static_cast<size_t>(v.extent) * out->nb[0];
    const size_t  nb[]    = {out->nb[0], run, run * static_cast<size_t>(n), run * static_cast<size_t>(n)};
    const auto    skipped = static_cast<size_t>(first_row_of(out, tokens) * n_runs);
    ggml_tensor * to = view(out, {count, n, 1, 1}, nb, skipped * run + static_cast<size_t>(begin_of(v, side)) * nb[0]);
    if (side != side_host) {
        write(ggml_cpy(ctx(), ggml_reshape_2d(ctx(), from, count, n), to));
    } else if (count == v.extent || n == 1) {
        lifts_.push_back({from, to});
    } else {
        ggml_tensor * sent = ggml_new_tensor_2d(ctx(), out->type, count, n);
        keep_sent(sent);
        lifts_.push_back({from, sent});
        write(ggml_cpy(ctx(), sent, to));
    }
}

void Resident::put_whole(int node, ggml_tensor * host) {
    lifts_.push_back({host, result(node)});
}

//
// routed values
//

ggml_tensor * RoutedBuilder::stage(ggml_tensor * tensor) {
    program_.host_staged.push_back({tensor, program_.host_bytes});
    program_.host_bytes += (ggml_nbytes(tensor) + 63) / 64 * 64;
    return tensor;
}

ggml_tensor * RoutedBuilder::send(Routed & routed, SentRows::What what, ggml_tensor * tensor, Origin origin,
                                  ggml_tensor * host) {
    keep_sent(tensor);
    routed.sent.push_back({what, tensor, origin, host, program_.staging_bytes});
    program_.staging_bytes += (ggml_nbytes(tensor) + 63) / 64 * 64;
    return tensor;
}

Routed & RoutedBuilder::routing_of(int mul_mat, Origin ids) {
    const ggml_tensor * chosen = graph_->nodes[mul_mat]->src[2];
    const SplitWeight * weight = weight_of(graph_->nodes[mul_mat]->src[0]);
    for (Routed & routed : routed_) {
        if (routed.ids.of(graph_) == chosen && routed.weights.front()->slice().hot == weight->slice().hot) {
            if (std::find(routed.weights.begin(), routed.weights.end(), weight) == routed.weights.end()) {
                routed.weights.push_back(weight);
            }
            return routed;
        }
    }
    Routed routed;
    routed.weights  = {weight};
    routed.ids      = ids;
    routed.n_used   = chosen->ne[0];
    routed.n_rows   = chosen->ne[0] * chosen->ne[1];
    routed.n_device = n_device_ranks(chosen->ne[0], weight->n_slots());
    routed_.push_back(std::move(routed));
    Routed & made = routed_.back();
    made.host_ids = stage(ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, 1, made.n_rows));
    made.device_ids =
        send(made, SentRows::What::ids, ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, made.n_device, chosen->ne[1]));
    made.sized.push_back({made.host_ids, 1});
    return made;
}

ggml_tensor * RoutedBuilder::host_input(Routed & routed, ggml_tensor * x) {
    for (const GatheredRows & known : routed.gathered) {
        if (known.x == x && !known.reused) {
            return known.rows;
        }
    }
    ggml_tensor * whole = is_list_of_rows(x) ? x : stage(ggml_cont(ctx(), x));
    ggml_tensor * list = ggml_view_2d(ctx(), whole, x->ne[0], x->ne[1] * x->ne[2], whole->nb[x->ne[1] == 1 ? 2 : 1], 0);
    program_.host_views.push_back(list);
    ggml_tensor * index = stage(ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, routed.n_rows, 1));
    ggml_tensor * rows  = stage(ggml_get_rows(ctx(), list, index));
    rows->ne[2]         = rows->ne[1];
    rows->ne[1]         = 1;
    rows->nb[2]         = rows->nb[1];
    routed.sized.push_back({index, 0});
    routed.sized.push_back({rows, 2});
    routed.gathered.push_back({x, index, rows, program_.host_staged.back().at, x->ne[1] > 1});
    return rows;
}

ggml_tensor * RoutedBuilder::device_input(Routed & routed, const ggml_tensor * x, Origin origin, ggml_tensor * host) {
    return send(routed, SentRows::What::rows, ggml_new_tensor_3d(ctx(), x->type, x->ne[0], routed.n_device, x->ne[2]),
                origin, host);
}

ggml_tensor * RoutedBuilder::device_biases(Routed & routed, const ggml_tensor * biases, Origin origin) {
    return send(routed, SentRows::What::biases,
                ggml_new_tensor_2d(ctx(), GGML_TYPE_F32, biases->ne[0], routed.weights.front()->n_slots()), origin);
}

ggml_tensor * RoutedBuilder::host_rows(Routed & routed, ggml_tensor * rows) {
    routed.sized.push_back({rows, 2});
    return rows;
}

ggml_tensor * RoutedBuilder::whole(const ggml_tensor * node, ggml_tensor * rows) {
    ggml_tensor * out = stage(ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, node->ne));
    if (rows != nullptr) {
        program_.host_staged.push_back({rows, program_.host_staged.back().at});
    }
    return out;
}

// Where an input's rows were, if they are as large: what they were for has been computed by then.
ggml_tensor * RoutedBuilder::keep(Routed & routed, ggml_tensor * rows) {
    for (GatheredRows & used : routed.gathered) {
        if (ggml_nbytes(used.rows) == ggml_nbytes(rows) && !used.reused && used.rows != rows->src[1]) {
            used.reused = true;
            program_.host_staged.push_back({rows, used.at});
            return rows;
        }
    }
    return stage(rows);
}

ggml_tensor * RoutedBuilder::device_sum(Routed & routed, ggml_tensor * rows) {
    ggml_tensor * weights =
        send(routed, SentRows::What::weights, ggml_new_tensor_3d(ctx(), GGML_TYPE_F32, 1, rows->ne[1], rows->ne[2]));
    ggml_tensor * terms = ggml_mul(ctx(), rows, weights);
    ggml_tensor * sum   = nullptr;
    for (int64_t rank = 0; rank < rows->ne[1]; rank++) {
        ggml_tensor * term = ggml_view_2d(ctx(), terms, terms->ne[0], terms->ne[2], terms->nb[2],
                                          static_cast<size_t>(rank) * terms->nb[1]);
        sum                = sum == nullptr ? term : ggml_add(ctx(), sum, term);
    }
    return sum;
}

//
// all of a program
//

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

//
// full values on either side: bound to llama.cpp's memory, sent when the phase begins, or fetched
//

// Source s of node i, whole rows of some tokens.
ggml_tensor * ProgramBuilder::full_on(Side side, int i, int s, Tokens tokens) {
    const int64_t n = graph_->nodes[i]->src[s]->ne[0];
    return side == side_host ? view(full_on_host(i, s), 0, n, tokens, true) : full_on_device(i, s, 0, n, tokens);
}

ggml_tensor * ProgramBuilder::full_on_host(int i, int s) {
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
ggml_tensor * ProgramBuilder::input(const ggml_tensor * src, Origin origin) {
    const int root = src->view_src == nullptr ? -1 : find_node(graph_, src->view_src, graph_->n_nodes);
    if (root >= 0 && value(root).state == State::full && side_of(root, side_host) != nullptr) {
        program_.host_views.push_back(ggml_view_4d(ctx(), side_of(root, side_host), src->ne[0], src->ne[1], src->ne[2],
                                                   src->ne[3], src->nb[1], src->nb[2], src->nb[3], src->view_offs));
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
ggml_tensor * ProgramBuilder::full_on_device(int i, int s, int64_t begin, int64_t count, Tokens tokens) {
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
    keep_sent(upload.tensor);
    uploads_.push_back(upload);
    return upload.tensor;
}

// Whether kernels can read the device's tensor from these tokens on: to some, such as Vulkan's mul-mats, memory may
// not be given from just anywhere. A few experts' numbers are soon misaligned.
bool ProgramBuilder::is_aligned(const ggml_tensor * tensor, Tokens tokens) const {
    const size_t at = static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
    return at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(values_.device)) == 0;
}

// What the host's kernel takes: those of repacked layouts F32 only, the others that or the weight's own type.
ggml_tensor * ProgramBuilder::for_kernel_of(const SliceSpec & slice, ggml_tensor * x) {
    if (x->type == GGML_TYPE_F32 || (slice.layout == plain_layout && x->type == slice.type)) {
        return x;
    }
    return stage(ggml_cast(ctx(), x, GGML_TYPE_F32));
}

// The host's columns of a full input; for kernels of repacked layouts without gaps between rows.
ggml_tensor * ProgramBuilder::columns_of_input(int i, const Part & part, const std::string & layout, Tokens tokens) {
    ggml_tensor * columns = view(full_on_host(i, 1), part.begin, part.count, tokens, true);
    if (layout == plain_layout || ggml_is_contiguous(columns)) {
        return columns;
    }
    return stage(ggml_cont(ctx(), columns));
}

//
// rows of tokens' experts of which some are hot: the misses on the host, what may be hits on the device
//

void ProgramBuilder::emit_rows(int i) {
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

void ProgramBuilder::set_routed_sources(int i, Side side, ggml_tensor * out) {
    const ggml_tensor * node   = graph_->nodes[i];
    const SplitWeight & weight = *weight_of(node->src[0]);
    Routed &            routed = routing_of(i);
    const int           from   = inside(i, 1);
    if (program_.n_tokens == 0) {
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

Routed & ProgramBuilder::routing_of(int mul_mat) {
    const int from   = inside(mul_mat, 2);
    Routed &  routed = routed_.routing_of(mul_mat, from >= 0 ? Origin{from, -1} : Origin{mul_mat, 2});
    if (routed.host_chosen == nullptr && on_device(graph_->nodes[mul_mat]->src[2])) {
        routed.host_chosen = full_on_host(mul_mat, 2);
    }
    return routed;
}

void ProgramBuilder::emit_half_of_rows(int i) {
    const ggml_tensor * node   = graph_->nodes[i];
    const int           from   = inside(i, 0);
    const bool          second = node->view_offs != node->src[0]->view_offs;
    for (const Side side : {side_host, side_device}) {
        sides(i)[side] = view(side_of(from, side), second ? node->ne[0] : 0, node->ne[0], {}, side == side_host);
    }
    routed_.host_rows(routing_of(value(i).routed_by), side_of(i, side_host));
}

// Weighted and added up where they come together; on the device, where many rows need not come back then.
void ProgramBuilder::emit_sum(int i) {
    const Value & v       = value(i);
    const int     rows    = inside(v.weighting, 0);
    const int     weights = inside(v.weighting, 1);
    Routed &      routed  = routing_of(value(rows).routed_by);
    routed.weighted       = true;
    routed.weighting      = weights >= 0 ? Origin{weights, -1} : Origin{v.weighting, 1};
    ggml_tensor * there   = side_of(rows, side_device);
    const bool    summed  = are_many(there, graph_->nodes[value(rows).routed_by]->src[0]);
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
void ProgramBuilder::fetch_rows(int i, Download::Join how, ggml_tensor * there, const Routed & routed,
                                ggml_tensor * whole) {
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

//
// results become whole when a phase ends: fetched and joined on the host, or lifted to the device's memory
//

// How node i becomes whole in its original memory when its phase ends.
void ProgramBuilder::join(int i) {
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
void ProgramBuilder::join_partial(int i, const Value & v) {
    const bool     on_host = has(v, side_host);
    ggml_tensor *  sum     = add(side_of(i, side_device), side_of(i, side_stream));
    ggml_tensor *  prime   = side_of(i, side_prime);
    const Tokens   last    = tokens_of(v, side_prime);
    Download::Join how     = on_host ? Download::Join::add : Download::Join::copy;
    if (prime == nullptr || on_host) {
        fetch(i, sum, how, 0, v.extent, tokens_of(v, prime == nullptr ? side_device : side_host));
    }
    if (prime != nullptr) {
        fetch(i, add(prime, sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], last, false)), Download::Join::copy, 0,
              v.extent, last);
    }
}

// The same in device memory.
void ProgramBuilder::lift(int i, const Value & v) {
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
    const auto of = [&](Tokens tokens) { return sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], tokens, false); };
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
ggml_tensor * ProgramBuilder::add(ggml_tensor * a, ggml_tensor * b) {
    if (a == nullptr || b == nullptr) {
        return a == nullptr ? b : a;
    }
    on_stream_.push_back(ggml_add(ctx(), a, b));
    return on_stream_.back();
}

void ProgramBuilder::fetch(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count,
                           Tokens tokens) {
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

size_t ProgramBuilder::take_staging(const ggml_tensor * tensor) {
    const size_t at = program_.staging_bytes;
    program_.staging_bytes += padded_bytes(tensor);
    return at;
}

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
