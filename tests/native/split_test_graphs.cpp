// Shapes of blocks: one segment each, the bytes that come back, chunks. Their results are `random`'s to test.

#include "split_test.h"

namespace split_test {

namespace {

// One sub-graph, started and joined once, is what a block should be.
void check_phases(const Block & block, const std::string & options) {
    const PlanPtr       plan = plan_of(block, Cut::half);
    const Model         model(block, plan.get());
    const oallama_stats now = stats_of_known(model, 3);
    check(now.n_graphs == 1 && now.n_segments == 1 && now.n_built == 0,
          block.name + options + " runs as one: " + std::to_string(now.n_graphs) + " graphs, " +
              std::to_string(now.n_segments) + " segments, " + std::to_string(now.n_built) + " built");
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
        check_phases(ffn_block(q4_0, q4_0, options), ", " + std::to_string(static_cast<int>(options.op)) + " " +
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
        check_phases(moe_block(q4_0, q4_0, options),
                     ", " + std::to_string(static_cast<int>(options.gate)) + " " + std::to_string(options.n_used));
    }
    check_phases(qkv_block(q4_0), "");
}

int64_t bytes_back(const Block & block, int64_t n_tokens, int64_t enough = 0) {
    const PlanPtr plan = plan_of(block, Cut::half, "sum " + std::to_string(enough) + "\n");
    const Model   model(block, plan.get());
    Session       session;
    reset_stats();
    session.compute(model, n_tokens);
    return stats().bytes_out;
}

// Each side weights and adds up what it has of the experts' results, where that many bytes need not come back.
void check_sums() {
    if (resident) {
        return; // of results that go to the host
    }
    constexpr int64_t n_tokens = 512, enough = 256 << 10;
    MoeOptions        options;
    const int64_t     n_embd = moe_block(q4_0, q4_0).n_embd;
    for (const int n_used : {1, 2, 4}) {
        for (const bool before : {false, true}) {
            options.n_used         = n_used;
            options.before         = before;
            const Block       once = moe_block(q4_0, q4_0, options);
            const std::string what = std::to_string(n_used) + " experts" + (before ? ", weighted before" : "");
            const bool        all  = (n_used - 1) * n_embd * 4 * n_tokens < enough;
            check(bytes_back(once, 7) == 7 * n_embd * 4, what + ": the sums come back");
            check(bytes_back(once, 7, enough) == 7 * n_used * n_embd * 4, what + ": all of a small batch");
            check(bytes_back(once, n_tokens, enough) == n_tokens * (all ? n_used : 1) * n_embd * 4,
                  what + ": the sums of a large batch");
        }
    }
    options.bias = true;
    check(bytes_back(moe_block(q4_0, q4_0, options), 7) > 7 * n_embd * 4, "results with biases are not added up");
}

// The host alone, in every layout, with an input in F16, which repacked kernels do not take.
void check_f16_input() {
    const Block block = lone_block(q4_0, GGML_TYPE_F16);
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        const PlanPtr plan = plan_of(block, Cut::none, "", "", ggml_backend_buft_name(buft));
        const Model   model(block, plan.get());
        const Model   right(lone_block(q4_0), plan.get());
        Session       session;
        for (const int64_t n_tokens : {1, 7}) {
            const double error = nmse(on_cpu(right, n_tokens), session.compute(model, n_tokens));
            check(error <= 1e-3, block.name + " in " + ggml_backend_buft_name(buft) + ": NMSE " + text(error));
        }
    }
}

// Of 64 tokens at a time, and of what is left.
void check_chunks() {
    Block block               = lone_block(q4_0);
    block.name                = "chunks";
    const auto device_compute = [&block](int64_t n_tokens) {
        const PlanPtr plan = plan_of(block, Cut::half);
        const Model   model(block, plan.get());
        Session       session;
        check(!session.compute(model, n_tokens).empty(), std::to_string(n_tokens) + " tokens in chunks");
        return memory().device_compute;
    };
    check(device_compute(200) > device_compute(64), "without chunks more tokens take more memory");
    block.weights[0].chunk = 64;
    check(resident || device_compute(200) == device_compute(64), "200 tokens take no more memory than a chunk of 64");
}

// What the split back end logs of a block's program.
std::string dump_of(const Block & block, const char * level) {
    constexpr const char * variable = "OALLAMA_SPLIT_DEBUG";
    std::string            logged;
    ggml_log_callback      quiet  = nullptr;
    void *                 unused = nullptr;
    ggml_log_get(&quiet, &unused);
    ggml_log_set([](ggml_log_level at, const char * line,
                    void * to) { *static_cast<std::string *>(to) += at == GGML_LOG_LEVEL_DEBUG ? line : ""; },
                 &logged);
    ::setenv(variable, level, /*overwrite=*/1);
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    Session().compute(model, 3);
    ::unsetenv(variable);
    ggml_log_set(quiet, unused);
    return logged;
}

void check_dump() {
    const Block block = ffn_block(q4_0, q4_0);
    const auto  has = [](const std::string & dump, const char * what) { return dump.find(what) != std::string::npos; };
    const auto  segment = dump_of(block, "1");
    const auto  nodes   = dump_of(block, "2");
    check(dump_of(block, "0").empty(), "programs are logged where this is asked for alone");
    check(has(segment, "## PROGRAM") && has(segment, "segment 0: ") && !has(segment, "node #"),
          "a line a segment: " + segment);
    check(has(nodes, "segment 0: ") && has(nodes, "MUL_MAT") && has(nodes, "AXIS_0") && has(nodes, "PARTIAL"),
          "and a line a node: " + nodes);
}

} // namespace

void test_graphs() {
    check_shapes();
    check_f16_input();
    check_sums();
    check_chunks();
    check_dump();
}

} // namespace split_test
