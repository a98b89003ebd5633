// Sub-graphs in the shape that llama.cpp's build_ffn, build_moe_ffn and its attention give them.

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "plan.h"
#include "split_test.h"
#include "support.h"

namespace split_test {

namespace {

// At least so many elements, in whole granules of a cut along K.
int64_t width(ggml_type type, int64_t least) {
    const int64_t granule = granularity(type, OALLAMA_COLS);
    return (least + granule - 1) / granule * granule;
}

int64_t ff_elements(ggml_type up, ggml_type down) {
    const int64_t granule = std::lcm(granularity(up, OALLAMA_COLS), granularity(down, OALLAMA_COLS));
    return granule >= 256 ? 4 * granule : 9 * granule;
}

// The activation of two branches, or of one where up is NULL.
ggml_tensor * activate(const Graph & g, Ffn op, ggml_tensor * gate, ggml_tensor * up) {
    switch (op) {
        case Ffn::silu: return up == nullptr ? ggml_silu(g.ctx, gate) : ggml_swiglu_split(g.ctx, gate, up);
        case Ffn::gelu: return up == nullptr ? ggml_gelu(g.ctx, gate) : ggml_geglu_split(g.ctx, gate, up);
        case Ffn::relu: return up == nullptr ? ggml_relu(g.ctx, gate) : ggml_reglu_split(g.ctx, gate, up);
        case Ffn::relu_sqr: {
            ggml_tensor * act = ggml_sqr(g.ctx, ggml_relu(g.ctx, gate));
            return up == nullptr ? act : ggml_mul(g.ctx, act, up);
        }
        case Ffn::swiglu_clamped: return ggml_swiglu_clamp(g.ctx, gate, up, 0.5F);
        case Ffn::swiglu_oai: return ggml_swiglu_oai(g.ctx, gate, up, 1.702F, 7.0F);
        case Ffn::swiglu_limited: {
            ggml_tensor * limited = ggml_clamp(g.ctx, up, -0.5F, 0.5F);
            ggml_tensor * act     = ggml_silu(g.ctx, gate);
            return ggml_mul(g.ctx, ggml_clamp(g.ctx, act, -INFINITY, 0.5F), limited);
        }
    }
    return nullptr;
}

ggml_tensor * activate_fused(const Graph & g, Ffn op, ggml_tensor * gate_up) {
    return op == Ffn::silu   ? ggml_swiglu(g.ctx, gate_up)
           : op == Ffn::gelu ? ggml_geglu(g.ctx, gate_up)
                             : ggml_reglu(g.ctx, gate_up);
}

void build_ffn(Graph & g, const FfnOptions & options) {
    const auto branch = [&](const char * weight, ggml_tensor * src1, const char * bias, const char * scale) {
        ggml_tensor * cur = g.mul_mat(weight, src1);
        if (options.bias) {
            cur = ggml_add(g.ctx, cur, g[bias]);
        }
        if (options.scales) {
            cur = ggml_mul(g.ctx, cur, g[scale]);
        }
        return cur;
    };
    ggml_tensor * cur = g.norm();
    if (options.gate == Gate::fused) {
        cur = activate_fused(g, options.op, branch("ffn_up", cur, "up_b", "up_s"));
    } else {
        ggml_tensor * up   = branch("ffn_up", cur, "up_b", "up_s");
        ggml_tensor * gate = options.gate == Gate::par   ? branch("ffn_gate", cur, "gate_b", "gate_s")
                             : options.gate == Gate::seq ? branch("ffn_gate", up, "gate_b", "gate_s")
                                                         : up;
        if (options.watch) {
            g.output(up);
            g.output(gate);
        }
        cur = activate(g, options.op, gate, options.gate == Gate::par ? up : nullptr);
    }
    if (options.watch) {
        g.output(cur);
    }
    g.output(ggml_add(g.ctx, branch("ffn_down", cur, "down_b", "down_s"), g.x));
}

} // namespace

//
// Graph
//

void Graph::output(ggml_tensor * tensor) {
    ggml_set_output(tensor);
    ggml_build_forward_expand(gf, tensor);
    outputs.push_back(tensor);
}

//
// dense
//

Block ffn_block(ggml_type up, ggml_type down, const FfnOptions & options) {
    const int64_t n_embd = width(up, 96);
    const int64_t n_ff   = ff_elements(up, down);

    Block block;
    block.name     = "FFN " + type_name(up) + (up == down ? "" : "/" + type_name(down));
    block.n_embd   = n_embd;
    block.together = options.gate != Gate::seq;
    if (options.gate == Gate::fused) {
        block.weights = {{"ffn_up", up, n_embd, 2 * n_ff, 1, OALLAMA_HALVES}};
    } else {
        block.weights = {{"ffn_up", up, n_embd, n_ff, 1, OALLAMA_ROWS}};
    }
    if (options.gate == Gate::par) {
        block.weights.push_back({"ffn_gate", up, n_embd, n_ff, 1, OALLAMA_ROWS});
    } else if (options.gate == Gate::seq) {
        block.weights.push_back({"ffn_gate", up, n_ff, n_ff, 1, OALLAMA_ROWS});
    }
    block.weights.push_back({"ffn_down", down, n_ff, n_embd, 1, OALLAMA_COLS});
    const int64_t n_up = options.gate == Gate::fused ? 2 * n_ff : n_ff;
    block.extras       = {{"up_b", {n_up}}, {"gate_b", {n_ff}}, {"down_b", {n_embd}},
                          {"up_s", {1}},    {"gate_s", {1}},    {"down_s", {1}}};
    block.build        = [options](Graph & g) { build_ffn(g, options); };
    return block;
}

Block lone_block(ggml_type type, ggml_type src1) {
    Block block;
    block.name    = "mul-mat " + type_name(type) + (src1 == GGML_TYPE_F32 ? "" : " by " + type_name(src1));
    block.n_embd  = width(type, 96);
    block.weights = {{"attn_output", type, block.n_embd, 200, 1, OALLAMA_ROWS}}; // the last granule is not whole
    block.build   = [src1](Graph & g) {
        ggml_tensor * cur = g.norm();
        if (src1 != GGML_TYPE_F32) {
            cur = ggml_cast(g.ctx, cur, src1);
        }
        g.output(ggml_scale(g.ctx, g.mul_mat("attn_output", cur), 0.5F));
    };
    return block;
}

Block qkv_block(ggml_type type, bool in_one) {
    Block block;
    block.name    = "q, k, v " + type_name(type);
    block.n_embd  = width(type, 128);
    block.weights = {{"attn_q", type, block.n_embd, block.n_embd, 1, OALLAMA_ROWS},
                     {"attn_k", type, block.n_embd, 64, 1, OALLAMA_ROWS},
                     {"attn_v", type, block.n_embd, 64, 1, OALLAMA_ROWS}};
    block.extras  = {{"q_b", {block.n_embd}}, {"k_b", {64}}};
    block.build   = [in_one](Graph & g) { // one input for three, two of them with a bias and reshaped into heads
        ggml_tensor * cur = g.norm();
        ggml_tensor * q   = ggml_add(g.ctx, g.mul_mat("attn_q", cur), g["q_b"]);
        ggml_tensor * k   = ggml_add(g.ctx, g.mul_mat("attn_k", cur), g["k_b"]);
        ggml_tensor * v   = g.mul_mat("attn_v", cur);
        if (in_one) {
            for (ggml_tensor * own : {q, k, v}) {
                ggml_build_forward_expand(g.gf, own);
            }
        }
        g.output(ggml_rms_norm(g.ctx, ggml_reshape_3d(g.ctx, q, 32, q->ne[0] / 32, g.n_tokens), 1e-5F));
        g.output(ggml_rms_norm(g.ctx, ggml_reshape_3d(g.ctx, k, 32, 2, g.n_tokens), 1e-5F));
        g.output(v);
    };
    return block;
}

// Mul-mats of views of one input, by any shape that ggml lets them have: of some columns of each token, with gaps
// behind them, of several rows of a token, of heads, of four dimensions, of one token, or of none.
Block views_block(ggml_type type, bridge::Random & random) {
    struct View {
        int64_t                e;    // of the weight
        std::array<int64_t, 3> ne;   // -1: tokens
        std::array<size_t, 3>  step; // in rows of k elements, of which a token has six
    };
    static constexpr View views[] = {
        {1, {-1, 1, 1}, {6, 0, 0}}, // columns
        {1, {2, -1, 1}, {1, 6, 0}}, // rows
        {1, {-1, 3, 1}, {6, 2, 0}}, // heads that share a weight
        {3, {-1, 3, 1}, {6, 1, 0}}, // heads, as MLA has
        {1, {1, 1, 1}, {6, 0, 0}},  // the first token
        {1, {0, 1, 1}, {6, 0, 0}},  // none
        {1, {2, 3, -1}, {1, 2, 6}}, // four dimensions, of which the last ...
        {3, {-1, 3, 2}, {6, 1, 3}}, // ... or the first is of tokens
    };
    constexpr size_t first_of_four = 6; // not in repacked types, whose kernels take no fourth dimension

    Block               block;
    std::vector<size_t> numbers;
    const bool          four = random.below(3) == 0;
    const bool          cols = random.below(2) == 0;
    type                     = !four ? type : cols ? GGML_TYPE_F32 : GGML_TYPE_F16;
    const int64_t k          = width(type, 64);
    for (int64_t i = 1 + random.below(3); i >= 0; i--) {
        const auto number = static_cast<size_t>(random.below(static_cast<int64_t>(four ? 8 : first_of_four)));
        const bool rows   = views[number].e > 1 && !four;
        block.weights.push_back({"w" + std::to_string(numbers.size()), type, k, 96, views[number].e,
                                 cols && !rows ? OALLAMA_COLS : OALLAMA_ROWS});
        numbers.push_back(number);
    }
    block.name   = "views " + type_name(type);
    block.n_embd = 6 * k;
    block.build  = [numbers, k](Graph & g) {
        ggml_tensor * cur = g.norm();
        ggml_tensor * sum = nullptr; // of results that can be added
        const auto    end = [&] {
            ggml_tensor * out = ggml_scale(g.ctx, sum, 2.0F);
            ggml_is_empty(out) ? ggml_build_forward_expand(g.gf, out) : g.output(out);
        };
        for (size_t i = 0; i < numbers.size(); i++) {
            const View &  view = views[numbers[i]];
            const auto    ne   = [&](size_t d) { return view.ne[d] < 0 ? g.n_tokens : view.ne[d]; };
            const auto    nb   = [&](size_t d) { return view.step[d] * static_cast<size_t>(k) * sizeof(float); };
            const size_t  from = numbers[i] == 0 ? i * nb(0) / 6 : 0;
            ggml_tensor * x    = ggml_view_4d(g.ctx, cur, k, ne(0), ne(1), ne(2), nb(0), nb(1), nb(2), from);
            const auto    name = "w" + std::to_string(i);
            ggml_tensor * out  = g.mul_mat(name.c_str(), x);
            if (ggml_is_empty(out)) { // ggml's allocator aborts where all that a back end computes is empty
                g.output(ggml_scale(g.ctx, g.mul_mat(name.c_str(), ggml_view_1d(g.ctx, cur, k, 0)), 0.5F));
            }
            if (sum != nullptr && !ggml_can_repeat(out, sum)) {
                end();
                sum = nullptr;
            }
            sum = sum == nullptr ? out : ggml_add(g.ctx, sum, out);
        }
        end();
        g.output(ggml_scale(g.ctx, g.x, 3.0F)); // where all were of no tokens
    };
    return block;
}

// The intermediate is read again after the block, by an operation of ours and by one that is not; so is the result,
// a sum whose last digits depend on the cut: by a weight of F32, as any other type quantises what it is multiplied by.
Block read_again_block(ggml_type type) {
    Block block = ffn_block(type, type);
    block.name  = "read again, " + block.name;
    block.weights.push_back({"again", GGML_TYPE_F32, block.n_embd, block.weights[0].n, 1, OALLAMA_ROWS});
    block.build = [](Graph & g) {
        ggml_tensor * cur  = g.norm();
        ggml_tensor * up   = g.mul_mat("ffn_up", cur);
        ggml_tensor * gate = g.mul_mat("ffn_gate", cur);
        ggml_tensor * act  = ggml_swiglu_split(g.ctx, gate, up);
        ggml_tensor * down = g.mul_mat("ffn_down", act);
        g.output(ggml_add(g.ctx, down, g.x));
        g.output(ggml_scale(g.ctx, act, 0.5F));
        g.output(ggml_soft_max(g.ctx, up));
        g.output(g.mul_mat("ffn_gate", cur));
        g.output(g.mul_mat("again", down));
    };
    return block;
}

//
// experts
//

namespace {

void build_moe(Graph & g, const MoeOptions & options) {
    const int64_t n_used   = options.n_used;
    const int64_t n_expert = options.n_expert;
    ggml_tensor * cur      = g.norm();
    const int64_t n_embd   = cur->ne[0];
    ggml_tensor * probs    = ggml_soft_max(g.ctx, ggml_mul_mat(g.ctx, g["gate_inp"], cur));
    ggml_tensor * ids      = ggml_argsort_top_k(g.ctx, probs, static_cast<int>(n_used)); // a strided view
    ggml_tensor * weights =
        ggml_get_rows(g.ctx, ggml_reshape_3d(g.ctx, probs, 1, n_expert, g.n_tokens), ids); // [1, n_used, n_tokens]
    ggml_build_forward_expand(g.gf, weights);

    cur = ggml_reshape_3d(g.ctx, cur, n_embd, 1, g.n_tokens);
    if (options.before) {
        cur = ggml_mul(g.ctx, ggml_repeat_4d(g.ctx, cur, n_embd, n_used, g.n_tokens, 1), weights);
    }
    const auto branch = [&](const char * weight, ggml_tensor * src1, const char * bias) {
        ggml_tensor * out = ggml_mul_mat_id(g.ctx, g[weight], src1, ids);
        return options.bias ? ggml_add_id(g.ctx, out, g[bias], ids) : out;
    };
    ggml_tensor * up   = nullptr;
    ggml_tensor * gate = nullptr;
    if (options.gate == Gate::fused) {
        ggml_tensor * both = branch("ffn_gate_up_exps", cur, "up_b");
        const int64_t n_ff = both->ne[0] / 2;
        const auto    half = [&](size_t i) {
            return ggml_view_3d(g.ctx, both, n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2],
                                i * static_cast<size_t>(n_ff) * both->nb[0]);
        };
        gate = half(0);
        up   = half(1);
    } else {
        up   = branch("ffn_up_exps", cur, "up_b");
        gate = options.gate == Gate::par ? branch("ffn_gate_exps", cur, "gate_b") : up;
    }
    cur = activate(g, options.op, gate, options.gate == Gate::none ? nullptr : up);

    ggml_tensor * experts = branch("ffn_down_exps", cur, "down_b"); // [n_embd, n_used, n_tokens]
    if (options.f32) {
        ggml_prec_set_src(options.bias ? experts->src[0] : experts, GGML_PREC_F32, 1);
    }
    if (!options.before) {
        experts = ggml_mul(g.ctx, experts, weights);
    }
    ggml_build_forward_expand(g.gf, experts);
    const auto of_rank = [&](int64_t i) {
        return ggml_view_2d(g.ctx, experts, n_embd, g.n_tokens, experts->nb[2],
                            static_cast<size_t>(i) * experts->nb[1]);
    };
    ggml_tensor * out = of_rank(0);
    for (int64_t i = 1; i < n_used; i++) {
        out = ggml_add(g.ctx, out, of_rank(i));
    }
    g.output(n_used == 1 ? ggml_cont(g.ctx, out) : out);
}

} // namespace

Block moe_block(ggml_type up, ggml_type down, const MoeOptions & options) {
    const int64_t n_embd   = width(up, 96);
    const int64_t n_ff     = ff_elements(up, down);
    const int64_t n_up     = options.gate == Gate::fused ? 2 * n_ff : n_ff;
    const int64_t n_expert = options.n_expert;

    Block block;
    block.name     = "experts " + type_name(up) + (up == down ? "" : "/" + type_name(down));
    block.n_embd   = n_embd;
    block.together = true;
    if (options.gate == Gate::fused) {
        block.weights = {{"ffn_gate_up_exps", up, n_embd, n_up, n_expert, OALLAMA_HALVES}};
    } else {
        block.weights = {{"ffn_up_exps", up, n_embd, n_ff, n_expert, OALLAMA_ROWS}};
    }
    if (options.gate == Gate::par) {
        block.weights.push_back({"ffn_gate_exps", up, n_embd, n_ff, n_expert, OALLAMA_ROWS});
    }
    block.weights.push_back({"ffn_down_exps", down, n_ff, n_embd, n_expert, OALLAMA_COLS, 0, options.f32});
    block.extras = {{"gate_inp", {n_embd, n_expert}},
                    {"up_b", {n_up, n_expert}},
                    {"gate_b", {n_ff, n_expert}},
                    {"down_b", {n_embd, n_expert}}};
    block.build  = [options](Graph & g) { build_moe(g, options); };
    return block;
}

// A shared expert beside those that are routed to, after them in one segment: it computes where nothing is a miss too.
Block shared_expert_block(ggml_type type) {
    Block block       = moe_block(type, type);
    block.name        = "a shared expert, " + block.name;
    const auto routed = block.build;
    const auto k      = block.n_embd;
    const auto n_ff   = block.weights.front().n;
    block.weights.push_back({"ffn_up_shexp", type, k, n_ff, 1, OALLAMA_ROWS});
    block.weights.push_back({"ffn_down_shexp", type, n_ff, k, 1, OALLAMA_COLS});
    block.build = [routed](Graph & g) {
        routed(g);
        ggml_tensor * moe = g.outputs.back();
        ggml_tensor * act = ggml_silu(g.ctx, g.mul_mat("ffn_up_shexp", g.norm()));
        g.output(ggml_add(g.ctx, g.mul_mat("ffn_down_shexp", act), moe));
    };
    return block;
}

// A dense weight and experts in one segment: of the dense one all is needed, whatever experts are chosen.
Block beside_dense_block(ggml_type type, bool dense_first) {
    Block block    = moe_block(type, type);
    block.name     = "a dense weight and " + block.name;
    block.together = false;
    const auto k   = block.n_embd;
    block.weights  = {{"ffn_up_exps", type, k, 96, 4, OALLAMA_ROWS}, {"attn_q", type, k, 96, 1, OALLAMA_ROWS}};
    block.build    = [dense_first, k](Graph & g) {
        ggml_tensor * cur = g.norm();
        ggml_tensor * ids = ggml_argsort_top_k(g.ctx, ggml_mul_mat(g.ctx, g["gate_inp"], cur), 1);
        ggml_build_forward_expand(g.gf, ids);
        ggml_tensor * dense = g.mul_mat("attn_q", cur);
        ggml_tensor * routed =
            ggml_mul_mat_id(g.ctx, g["ffn_up_exps"], ggml_reshape_3d(g.ctx, cur, k, 1, g.n_tokens), ids);
        for (ggml_tensor * own : dense_first ? std::vector{dense, routed} : std::vector{routed, dense}) {
            ggml_build_forward_expand(g.gf, own);
        }
        g.output(ggml_scale(g.ctx, dense, 2.0F));
        g.output(ggml_scale(g.ctx, routed, 2.0F));
    };
    return block;
}

// A block with work of the device's own behind it, which must wait for the block's end.
Block chain_block(const Block & inner) {
    Block block = inner;
    block.name  = "a chain of " + inner.name;
    block.build = [inner](Graph & g) {
        inner.build(g);
        for (ggml_tensor *& out : g.outputs) {
            for (int i = 0; i < 3; i++) {
                out = ggml_rms_norm(g.ctx, out, 1e-5F);
            }
            ggml_set_output(out);
            ggml_build_forward_expand(g.gf, out);
        }
    };
    return block;
}

//
// types
//

std::string type_name(ggml_type type) {
    std::string name = ggml_type_name(type);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
    return name;
}

std::vector<ggml_type> mul_mat_types() {
    std::vector<ggml_type> types;
    for (int32_t number = 0; number < GGML_TYPE_COUNT; number++) {
        const auto type = static_cast<ggml_type>(number);
        if (ggml_type_size(type) > 0 && bridge::has_cpu_kernel(type)) {
            types.push_back(type);
        }
    }
    return types;
}

int64_t granularity(ggml_type type, oallama_axis axis) {
    return oallama::granularity(type, static_cast<oallama::Axis>(axis));
}

int64_t granularity(const Block & block) {
    int64_t shared = 1;
    for (const Weight & weight : block.weights) {
        shared = std::lcm(shared, granularity(weight.type, weight.axis));
    }
    return shared;
}

} // namespace split_test
