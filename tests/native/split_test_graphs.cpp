// Every shape of block that llama.cpp builds, and llama.cpp's habits with graphs: reading nodes one by one, outputs in
// the middle, a GPU backend beside ours.

#include <algorithm>
#include <set>

#include "split_test.h"
#include "support.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);
constexpr ggml_type q4_k = static_cast<ggml_type>(12);
constexpr ggml_type q6_k = static_cast<ggml_type>(14);

// One sub-graph, started and joined once, is what a block should be.
void check_phases(const Block & block, const std::string & what) {
    const Data    data = make_data(block);
    const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return;
    }
    const Model         model(block, data, plan.get());
    const oallama_stats now = stats_of_known(model, 3);
    check(now.n_graphs == 1 && now.n_phases == 1, what + " runs as one: " + std::to_string(now.n_graphs) + " graphs, " +
                                                      std::to_string(now.n_phases) + " phases");
    check(now.n_built == 0, what + " is built once");
}

void check_shapes() {
    const FfnOptions ffns[] = {
        {Ffn::silu, Gate::par},
        {Ffn::silu, Gate::par, /*bias=*/true},
        {Ffn::gelu, Gate::par, true, /*scales=*/true},
        {Ffn::relu_sqr, Gate::par},
        {Ffn::swiglu_clamped, Gate::par},
        {Ffn::swiglu_oai, Gate::par},
        {Ffn::swiglu_limited, Gate::par},
        {Ffn::gelu, Gate::none, true},
        {Ffn::silu, Gate::fused},
        {Ffn::silu, Gate::par, false, false, /*watch=*/true},
    };
    for (const FfnOptions & options : ffns) {
        check_phases(ffn_block(q4_0, q4_0, options), "FFN " + std::to_string(static_cast<int>(options.op)) +
                                                         std::to_string(static_cast<int>(options.gate)));
    }
    const MoeOptions experts[] = {
        {Ffn::silu, Gate::par},
        {Ffn::silu, Gate::fused},
        {Ffn::relu_sqr, Gate::none},
        {Ffn::silu, Gate::par, false, /*before=*/true},
        {Ffn::silu, Gate::par, false, false, /*n_used=*/1},
        {Ffn::silu, Gate::par, false, false, 4},
    };
    for (const MoeOptions & options : experts) {
        check_phases(moe_block(q4_0, q4_0, options), "experts " + std::to_string(static_cast<int>(options.gate)) +
                                                         ", " + std::to_string(options.n_used) + " used");
    }
    check_phases(qkv_block(q4_0), "q, k, v");
    done("one phase a block");
}

int64_t bytes_back(const Block & block, int64_t n_tokens) {
    const Data    data = make_data(block);
    const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return -1;
    }
    const Model model(block, data, plan.get());
    Session     session;
    check_ok(oallama_reset_stats(), "statistics are reset");
    session.compute(model, n_tokens);
    return stats().bytes_out;
}

// Each side weights and adds up what it has of the experts' results, where that many bytes need not come back.
void check_sums() {
    if (resident) {
        return; // of results that go to the host
    }
    constexpr int64_t n_tokens = 512, enough = 256 << 10;
    const int64_t     n_embd = moe_block(q4_0, q4_0).n_embd;
    for (const int n_used : {1, 2, 4}) {
        for (const bool before : {false, true}) {
            MoeOptions options;
            options.n_used          = n_used;
            options.before          = before;
            const Block       block = moe_block(q4_0, q4_0, options);
            const std::string what =
                std::to_string(n_used) + " experts" + (before ? ", weighted before" : "") + ": bytes that come back";
            check(bytes_back(block, 7) == 7 * n_embd * 4, what);
            sum_bytes = enough;
            check(bytes_back(block, 7) == 7 * n_used * n_embd * 4, what + " of a small batch");
            const bool large = (n_used - 1) * n_embd * 4 * n_tokens >= enough;
            check(bytes_back(block, n_tokens) == n_tokens * (large ? 1 : n_used) * n_embd * 4,
                  what + " of a large batch");
            sum_bytes = 0;
        }
    }
    MoeOptions biased;
    biased.bias = true;
    check(bytes_back(moe_block(q4_0, q4_0, biased), 7) > 7 * n_embd * 4, "results with biases are not added up");
    done("bytes of experts' results");
}

// Of four dimensions, the last of which is of tokens, and heads that two others share.
void check_four_dimensions(ggml_type type, oallama_axis axis) {
    constexpr int64_t k = 64, row = k * sizeof(float);

    Block block;
    block.name    = "four dimensions " + type_name(type);
    block.n_embd  = 6 * k;
    block.weights = {{"ssm_out", type, k, 96, 1, axis}, {"attn_k_b", type, k, 96, 3, axis}};
    block.build   = [](Graph & g) {
        ggml_tensor * cur  = ggml_rms_norm(g.ctx, g.x, 1e-5F);
        const auto    view = [&](int64_t ne1, int64_t ne2, int64_t ne3, size_t nb1, size_t nb2, size_t nb3) {
            return ggml_view_4d(g.ctx, cur, k, ne1, ne2, ne3, nb1 * row, nb2 * row, nb3 * row, 0);
        };
        g.output(ggml_scale(g.ctx, g.mul_mat("ssm_out", view(2, 3, g.n_tokens, 1, 2, 6)), 2.0F));
        g.output(ggml_scale(g.ctx, g.mul_mat("ssm_out", view(3, 2, g.n_tokens, 2, 1, 6)), 3.0F));
        g.output(ggml_cont(g.ctx, g.mul_mat("attn_k_b", view(g.n_tokens, 3, 2, 6, 1, 3))));
        g.output(ggml_cont(g.ctx, g.mul_mat("attn_k_b", view(g.n_tokens, 6, 1, 6, 1, 6))));
    };
    check_block(block, {1, 3});
}

//
// partial graphs
//

using Nodes = std::map<std::string, std::vector<float>>;

Nodes watch_nodes(Session & session, const Model & model, const std::function<bool(const ggml_tensor *)> & wants) {
    Nodes nodes;
    session.watch(wants, [&](const ggml_tensor * tensor) {
        if (tensor->type == GGML_TYPE_F32 && ggml_is_contiguous(tensor)) {
            std::vector<float> & values = nodes[tensor->name];
            values.resize(static_cast<size_t>(ggml_nelements(tensor)));
            ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
        }
    });
    session.compute(model, 5);
    return nodes;
}

void check_watched(const Block & block, Cut cut) {
    const Data    data = make_data(block);
    const PlanPtr plan = new_plan(plan_text({&block}, cut, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return;
    }
    const Model whole(block, data, host_layouts().front());
    const Model model(block, data, plan.get());
    Session     cpu({/*split=*/false, /*gpu=*/false});
    Session     split;
    const Nodes expected = watch_nodes(cpu, whole, [](const ggml_tensor *) { return true; });

    const auto check_nodes = [&](const Nodes & nodes, const std::string & how) {
        for (const auto & [name, values] : nodes) {
            const double error = nmse({expected.at(name)}, {values});
            check(error <= summation_bound,
                  block.name + ", " + cut_name(cut) + ", " + how + ", node " + name + ": NMSE " + text(error));
        }
    };
    const Nodes all = watch_nodes(split, model, [](const ggml_tensor *) { return true; });
    check(all.size() == expected.size(), block.name + ": every node can be watched");
    check_nodes(all, "every node");
    for (uint64_t seed = 1; seed <= 12; seed++) {
        bridge::Random                         random(seed);
        const std::set<std::string>::size_type limit = expected.size();
        std::set<std::string>                  chosen;
        for (const auto & [name, values] : expected) {
            if (random.below(static_cast<int64_t>(limit)) < 2) {
                chosen.insert(name);
            }
        }
        const Nodes some =
            watch_nodes(split, model, [&](const ggml_tensor * node) { return chosen.count(node->name) > 0; });
        check(some.size() == chosen.size(), block.name + ": chosen nodes are watched");
        check_nodes(some, "seed " + std::to_string(seed));
    }
}

// The host alone, in every layout, with inputs that repacked kernels do not take as they are: columns of a row with
// gaps behind it, and F16.
void check_inputs_of_layouts() {
    Block columns   = batch_block(q4_0);
    columns.name    = "columns with gaps";
    columns.weights = {{"ssm_out", q4_0, 64, 96, 1, OALLAMA_COLS}};
    columns.n_embd  = 128;
    columns.build   = [](Graph & g) {
        ggml_tensor * cur = ggml_rms_norm(g.ctx, g.x, 1e-5F);
        g.output(ggml_scale(
            g.ctx, g.mul_mat("ssm_out", ggml_view_2d(g.ctx, cur, 64, g.n_tokens, cur->nb[1], 64 * cur->nb[0])), 2.0F));
    };
    for (const Block & block : {columns, lone_block(q4_0, GGML_TYPE_F16)}) {
        const Block & right = block.name == columns.name ? columns : lone_block(q4_0);
        const Data    data  = make_data(block);
        const Model   whole(right, data, host_layouts().front());
        Session       cpu({/*split=*/false, /*gpu=*/false});
        for (ggml_backend_buffer_type_t buft : host_layouts()) {
            const PlanPtr plan = new_plan(plan_text({&block}, Cut::none, "", ggml_backend_buft_name(buft)));
            if (plan == nullptr) {
                continue;
            }
            const Model model(block, data, plan.get());
            Session     session;
            for (const int64_t n_tokens : {1, 7}) {
                const double error = nmse(cpu.compute(whole, n_tokens), session.compute(model, n_tokens));
                check(error <= 1e-3, block.name + " in " + ggml_backend_buft_name(buft) + ", " +
                                         std::to_string(n_tokens) + " tokens: NMSE " + text(error));
            }
        }
    }
    done("inputs of layouts");
}

// A dense weight and experts in one phase: of the dense one all is needed, whatever experts are chosen.
void check_mixed_experts() {
    const Streamed kept = streamed;
    streamed            = Streamed::all;
    for (const bool dense_first : {false, true}) {
        Block block   = moe_block(q4_0, q4_0);
        block.name    = "experts and a dense weight";
        const auto k  = block.n_embd;
        block.weights = {{"ffn_up_exps", q4_0, k, 96, 4, OALLAMA_ROWS}, {"attn_q", q4_0, k, 96, 1, OALLAMA_ROWS}};
        block.build   = [dense_first, k](Graph & g) {
            ggml_tensor * cur = ggml_rms_norm(g.ctx, g.x, 1e-5F);
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
        const Data    data = make_data(block);
        const PlanPtr plan = new_plan(plan_text({&block}, Cut::all, async_device::device_name, "CPU"));
        if (plan == nullptr) {
            continue;
        }
        const Model model(block, data, plan.get());
        const Model whole(block, data, host_layouts().front());
        Session     cpu({/*split=*/false, /*gpu=*/false});
        Session     session;
        for (uint64_t seed = 1; seed <= 5; seed++) {
            const double error = nmse(cpu.compute(whole, 1, seed), session.compute(model, 1, seed));
            check(error <= summation_bound,
                  block.name + (dense_first ? ", dense first" : "") + ": NMSE " + text(error));
        }
    }
    streamed = kept;
    done("experts beside a dense weight");
}

// Of 64 tokens at a time, and of what is left.
void check_chunks() {
    Block block      = lone_block(q4_0);
    block.name       = "chunks";
    const auto whole = block.weights[0];
    block.build      = [whole](Graph & g) {
        g.output(ggml_scale(g.ctx, g.mul_mat(whole.name.c_str(), ggml_rms_norm(g.ctx, g.x, 1e-5F)), 0.5F));
    };
    const auto device_compute = [&block](int64_t n_tokens) {
        const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
        const Model   model(block, make_data(block), plan.get());
        Session       session;
        check(!session.compute(model, n_tokens).empty(), std::to_string(n_tokens) + " tokens in chunks");
        return memory().device_compute;
    };
    check(device_compute(200) > device_compute(64), "without chunks more tokens take more memory");
    block.weights[0].chunk = 64;
    check(resident || device_compute(200) == device_compute(64), "200 tokens take no more memory than a chunk of 64");
    done("some tokens at a time");
}

} // namespace

void test_graphs() {
    check_shapes();
    check_four_dimensions(GGML_TYPE_F16, OALLAMA_ROWS); // CPU_REPACK's kernels take no fourth dimension
    check_four_dimensions(GGML_TYPE_F32, OALLAMA_COLS);
    check_inputs_of_layouts();
    check_mixed_experts();
    check_sums();
    check_chunks();
}

void test_partial() {
    for (Cut cut : {Cut::none, Cut::half, Cut::all}) {
        check_watched(ffn_block(q4_0, q4_0), cut);
        check_watched(ffn_block(q4_0, q4_0, {Ffn::gelu, Gate::none, /*bias=*/true}), cut);
        check_watched(ffn_block(q4_0, q4_0, {Ffn::silu, Gate::fused}), cut);
        check_watched(ffn_block(q4_0, q4_0, {Ffn::swiglu_limited, Gate::par}), cut);
        check_watched(moe_block(q4_0, q4_0), cut);
        check_watched(moe_block(q4_0, q4_0, {Ffn::silu, Gate::fused}), cut);
        check_watched(qkv_block(q4_0), cut);
    }
    done("watched nodes");
}

} // namespace split_test
