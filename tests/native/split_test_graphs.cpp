// Shapes of blocks: one phase each, the bytes that come back, chunks. Their results are `random`'s to test.

#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

// One sub-graph, started and joined once, is what a block should be.
void check_phases(const Block & block, const std::string & what) {
    const Data          data = make_data(block);
    const PlanPtr       plan = plan_of(block, Cut::half);
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
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, data, plan.get());
    Session       session;
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

// The host alone, in every layout, with an input in F16, which repacked kernels do not take.
void check_f16_input() {
    const Block block = lone_block(q4_0, GGML_TYPE_F16);
    const Block right = lone_block(q4_0);
    const Data  data  = make_data(block);
    const Model whole(right, data, host_layouts().front());
    Session     cpu({/*split=*/false, /*gpu=*/false});
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        const PlanPtr plan = new_plan(plan_text({&block}, Cut::none, "", ggml_backend_buft_name(buft)));
        const Model   model(block, data, plan.get());
        Session       session;
        for (const int64_t n_tokens : {1, 7}) {
            const double error = nmse(cpu.compute(whole, n_tokens), session.compute(model, n_tokens));
            check(error <= 1e-3, block.name + " in " + ggml_backend_buft_name(buft) + ": NMSE " + text(error));
        }
    }
    done("an input in F16");
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
        const PlanPtr plan = plan_of(block, Cut::half);
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
    check_f16_input();
    check_sums();
    check_chunks();
}

} // namespace split_test
