// Hot experts: whole on the device, the others on the host, for every routing of tokens to them.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>

#include "experts.h"
#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);
constexpr ggml_type q4_k = static_cast<ggml_type>(12);
constexpr ggml_type q6_k = static_cast<ggml_type>(14);

constexpr double layout_headroom = 4.0; // some rows are of one kernel, some of another

using Experts = std::vector<int32_t>;

bool is_routed(const Weight & weight) {
    return weight.name.find("_exps") != std::string::npos;
}

std::string list_of(const Experts & experts) {
    std::string text;
    for (const int32_t expert : experts) {
        text += (text.empty() ? "" : ",") + std::to_string(expert);
    }
    return text;
}

// Every weight on the host; of experts, those that are hot on the device too.
std::string hot_plan(const Block & block, const Experts & hot, const std::string & device, const std::string & layout,
                     int64_t sum_bytes) {
    std::string text = "oallama-plan 1\nmodel test\ndevice " + device + "\nsum " + std::to_string(sum_bytes) + "\n";
    for (const Weight & weight : block.weights) {
        const char * axis  = weight.axis == OALLAMA_ROWS ? "rows" : weight.axis == OALLAMA_COLS ? "cols" : "halves";
        const bool   holds = layout_holds(find_layout(layout), weight);
        text += "tensor " + weight.name + " " + type_name(weight.type) + " " + std::to_string(weight.k) + "x" +
                std::to_string(weight.n) + "x" + std::to_string(weight.e) + " " + axis + " " +
                std::to_string(weight.extent()) + " 0 0 " + (holds ? layout : "CPU") +
                (is_routed(weight) && !hot.empty() ? " hot=" + list_of(hot) : "") +
                (resident && device == async_device::device_name ? " resident\n" : "\n");
    }
    return text;
}

int64_t hot_bytes(const Block & block, const Experts & hot) {
    int64_t bytes = 0;
    for (const Weight & weight : block.weights) {
        if (is_routed(weight)) {
            bytes += static_cast<int64_t>(ggml_row_size(weight.type, weight.k)) * weight.n *
                     static_cast<int64_t>(hot.size());
        }
    }
    return bytes;
}

int64_t device_bytes(const oallama_plan * plan) {
    int64_t n     = 0;
    int64_t bytes = 0;
    check_ok(oallama_plan_count(plan, &n), "the plan has slices");
    for (int64_t i = 0; i < n; i++) {
        oallama_slice slice = {};
        check_ok(oallama_plan_slice(plan, i, &slice), "a slice");
        bytes += slice.device_bytes;
    }
    return bytes;
}

// Against the CPU alone, with experts' results added up on the device and where they come together.
void check_hot(const Block & block, const Data & data, const std::vector<Experts> & sets,
               const std::vector<int64_t> & tokens, const std::string & what) {
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        if (!layout_holds(buft, block.weights.front())) {
            continue;
        }
        const std::string layout = ggml_backend_buft_name(buft);
        const Model       plain(block, data, host_layouts().front());
        const Model       repacked(block, data, buft);
        Session           cpu({/*split=*/false, /*gpu=*/false});
        for (const Experts & hot : sets) {
            for (const char * device : {async_device::device_name, "CPU"}) {
                for (const int64_t sum_bytes : {int64_t{0}, int64_t{1} << 40}) {
                    const PlanPtr plan = new_plan(hot_plan(block, hot, device, layout, sum_bytes));
                    if (plan == nullptr) {
                        continue;
                    }
                    const Model model(block, data, plan.get());
                    check(device_bytes(plan.get()) == hot_bytes(block, hot) &&
                              memory().device_weights >= hot_bytes(block, hot),
                          what + ": the device holds the hot experts' bytes");
                    Session session;
                    for (const int64_t n_tokens : tokens) {
                        for (const uint64_t seed : {1, 2}) {
                            const Outputs expected = cpu.compute(plain, n_tokens, seed);
                            const double  error    = nmse(expected, session.compute(model, n_tokens, seed));
                            const double  bound =
                                summation_bound +
                                layout_headroom * nmse(expected, cpu.compute(repacked, n_tokens, seed));
                            check(error <= bound, what + ", " + layout + " and " + device + ", hot " + list_of(hot) +
                                                      ", sums from " + std::to_string(sum_bytes) + ", " +
                                                      std::to_string(n_tokens) + " tokens: NMSE " + text(error) +
                                                      " exceeds " + text(bound));
                        }
                    }
                }
            }
        }
    }
    done(what);
}

const std::vector<Experts> some_of_four = {{0}, {3}, {1, 2}, {0, 1, 3}, {0, 1, 2, 3}};

void check_shapes() {
    struct Named {
        const char * name;
        MoeOptions   options;
    };
    const Named shapes[] = {
        {"SwiGLU", {Ffn::silu, Gate::par}},
        {"fused SwiGLU", {Ffn::silu, Gate::fused}},
        {"ungated squared ReLU", {Ffn::relu_sqr, Gate::none}},
        {"OAI SwiGLU with biases", {Ffn::swiglu_oai, Gate::par, /*bias=*/true}},
        {"fused SwiGLU with biases", {Ffn::silu, Gate::fused, true}},
        {"SwiGLU weighted before", {Ffn::silu, Gate::par, false, /*before=*/true}},
        {"SwiGLU of one expert", {Ffn::silu, Gate::par, false, false, 1}},
        {"SwiGLU of three experts", {Ffn::silu, Gate::par, false, false, 3}},
        {"SwiGLU of all experts", {Ffn::silu, Gate::par, false, false, 4}},
        {"clamped SwiGLU, by MUL", {Ffn::swiglu_limited, Gate::par}},
    };
    for (const Named & shape : shapes) {
        const Block block = moe_block(q4_0, q4_0, shape.options);
        check_hot(block, make_data(block), some_of_four, {1, 2, 7}, std::string("hot experts, ") + shape.name);
    }
    for (const auto & [up, down] :
         {std::pair{GGML_TYPE_F32, GGML_TYPE_F32}, std::pair{GGML_TYPE_F16, GGML_TYPE_F16}, std::pair{q4_k, q6_k}}) {
        const Block block = moe_block(up, down);
        check_hot(block, make_data(block), {{1, 2}}, {1, 33}, "hot experts, " + block.name);
    }
}

// All tokens go to the experts that a tie gives them to: all are hits, or all are misses, or one expert takes all.
void check_one_way() {
    for (const int n_used : {1, 2}) {
        MoeOptions options;
        options.n_used    = n_used;
        const Block block = moe_block(q4_0, q4_0, options);
        Data        data  = make_data(block);
        std::fill(data["gate_inp"].begin(), data["gate_inp"].end(), uint8_t{0});
        check_hot(block, data, {{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {0, 2}}, {1, 7},
                  "tied experts, " + std::to_string(n_used) + " used");
    }
}

void check_many() {
    for (const int n_expert : {128, 512}) {
        MoeOptions options;
        options.n_used   = 8;
        options.n_expert = n_expert;
        Experts hot(static_cast<size_t>(n_expert) / 4);
        for (size_t i = 0; i < hot.size(); i++) {
            hot[i] = static_cast<int32_t>(4 * i + i % 4);
        }
        Block     block = moe_block(q4_0, q4_0, options);
        const int less  = 32; // rows are what takes time
        for (Weight & weight : block.weights) {
            (weight.axis == OALLAMA_COLS ? weight.k : weight.n) = less;
        }
        check_hot(block, make_data(block), {hot, {5}, {1, 2, 100}}, {1, 64}, std::to_string(n_expert) + " experts");
    }
}

// A shared expert beside those that are routed to, after them in one phase: it computes where nothing is a miss too.
void check_shared_expert() {
    Block      block  = moe_block(q4_0, q4_0);
    const auto routed = block.build;
    const auto k      = block.n_embd;
    const auto n_ff   = block.weights.front().n;
    block.weights.push_back({"ffn_up_shexp", q4_0, k, n_ff, 1, OALLAMA_ROWS});
    block.weights.push_back({"ffn_down_shexp", q4_0, n_ff, k, 1, OALLAMA_COLS});
    block.build = [routed](Graph & g) {
        routed(g);
        ggml_tensor * moe = g.outputs.back();
        ggml_tensor * act = ggml_silu(g.ctx, g.mul_mat("ffn_up_shexp", ggml_rms_norm(g.ctx, g.x, 1e-5F)));
        g.output(ggml_add(g.ctx, g.mul_mat("ffn_down_shexp", act), moe));
    };
    check_hot(block, make_data(block), some_of_four, {1, 7}, "a shared expert");
}

// One sub-graph and one phase, and of one token as many rows come back as may be hits.
void check_phases() {
    for (const bool bias : {false, true}) {
        for (const int n_hot : {1, 3}) {
            const Block   block = moe_block(q4_0, q4_0, {Ffn::silu, Gate::par, bias});
            const Data    data  = make_data(block);
            const Experts hot   = n_hot == 1 ? Experts{2} : Experts{0, 2, 3};
            const PlanPtr plan  = new_plan(hot_plan(block, hot, async_device::device_name, "CPU", 1 << 20));
            if (plan == nullptr) {
                continue;
            }
            const Model         model(block, data, plan.get());
            const oallama_stats now = stats_of_second(model, 1);
            check(now.n_graphs == 1 && now.n_phases == 1 && now.n_built == 0,
                  std::string("experts, some of them hot, are one phase") + (bias ? ", with biases" : ""));
            if (resident) {
                continue; // other bytes cross
            }
            const int64_t n_ff   = block.weights.front().n;
            const int64_t biases = bias ? n_hot * (2 * n_ff + block.n_embd) * 4 : 0;
            check(now.bytes_out == std::min(n_hot, 2) * block.n_embd * 4, "rows that come back");
            check(now.bytes_in == block.n_embd * 4 + std::min(n_hot, 2) * 4 + biases,
                  "an input, slots and biases are sent");
        }
    }
    done("phases of hot experts");
}

// A token of several uses a slot once: kernels for batches on CUDA sort rows by expert, and take each once for a token.
void check_routing() {
    const std::vector<int32_t> slot_of = {-1, 0, -1, 1, 2, -1};
    std::vector<int32_t>       ids;
    for (int32_t token = 0; token < 50; token++) {
        for (int32_t rank = 0; rank < 4; rank++) {
            ids.push_back((token + rank * (1 + token % 5 % 2 * 4)) % 6);
        }
    }
    oallama::Routing routing;
    oallama::route(ids, 4, slot_of, 3, routing);
    check(routing.n_device == 3 && routing.slots.size() == 3 * 50, "3 of 4 may be hits");
    for (size_t i = 0; i < routing.slots.size(); i += 3) {
        const std::set<int32_t> slots(routing.slots.begin() + static_cast<std::ptrdiff_t>(i),
                                      routing.slots.begin() + static_cast<std::ptrdiff_t>(i) + 3);
        check(slots == std::set<int32_t>{0, 1, 2}, "a token of several uses a slot once");
    }
    done("routing");
}

// Weights come whole, in odd pieces and in any order, as loaders bring them.
void check_loading() {
    const Block block = moe_block(q4_0, q4_0);
    const Data  data  = make_data(block);
    const Model whole(block, data, host_layouts().front());
    for (const Pieces pieces : {Pieces::whole, Pieces::odd, Pieces::shuffled}) {
        for (const char * layout : {"CPU", ggml_backend_buft_name(host_layouts().back())}) {
            const PlanPtr plan = new_plan(hot_plan(block, {0, 2}, async_device::device_name, layout, int64_t{1} << 40));
            if (plan == nullptr) {
                continue;
            }
            const Model  model(block, data, plan.get(), pieces);
            Session      cpu({/*split=*/false, /*gpu=*/false});
            Session      session;
            const double error = nmse(cpu.compute(whole, 7), session.compute(model, 7));
            check(error <= 1e-4, std::string("hot experts in pieces, ") + layout + ": NMSE " + text(error));
        }
    }
    done("loading hot experts");
}

// A prepared sub-graph is as small for many tokens as for some: a context keeps those of many batches.
void check_program_bytes() {
    const Block   block = moe_block(q4_0, q4_0);
    const Data    data  = make_data(block);
    const PlanPtr plan  = new_plan(hot_plan(block, {0, 2}, async_device::device_name, "CPU", 0));
    if (plan == nullptr) {
        return;
    }
    const Model model(block, data, plan.get());
    Session     session;
    session.compute(model, 512);
    const int64_t large = memory().program_bytes;
    session.compute(model, 7);
    const int64_t small = memory().program_bytes - large;
    check(large > 0 && large <= small + small / 8,
          "prepared for 512 tokens: " + std::to_string(large) + " bytes, for 7: " + std::to_string(small));
    check_ok(oallama_reset_stats(), "statistics are reset");
    session.compute(model, 512);
    check(stats().n_built == 0, "and nothing is prepared twice");
    done("bytes of programs");
}

// The plan's file for uses of experts.
constexpr const char * uses_path = "uses-of-a-test.txt";

PlanPtr plan_that_counts(const Block & block) {
    PlanPtr plan = new_plan(hot_plan(block, {0, 2}, async_device::device_name, "CPU", 0));
    void *  buft = nullptr;
    if (plan == nullptr || oallama_plan_buft(plan.get(), &buft) != OALLAMA_OK) {
        return nullptr;
    }
    static_cast<oallama::LoadedPlan *>(static_cast<ggml_backend_buffer_type_t>(buft)->context)->keep_uses(uses_path);
    return plan;
}

// Uses of experts are counted, hits and misses alike, batches of one token apart, and kept when the model is freed.
void check_uses() {
    MoeOptions options;
    options.n_used    = 2;
    const Block block = moe_block(q4_0, q4_0, options);
    Data        data  = make_data(block);
    std::fill(data["gate_inp"].begin(), data["gate_inp"].end(), uint8_t{0}); // all tokens use the same two experts
    const PlanPtr plan = plan_that_counts(block);
    if (plan == nullptr) {
        return;
    }
    std::remove(uses_path);
    {
        const Model model(block, data, plan.get());
        Session     session;
        for (const int64_t n_tokens : {1, 1, 7}) {
            session.compute(model, n_tokens);
        }
    }
    std::set<std::string> counted; // tensor and kind of batches
    std::ifstream         file(uses_path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string        tensor;
        std::string        batches;
        int64_t            n_tokens = 0;
        words >> tensor >> batches >> n_tokens;
        const std::vector<int64_t> uses{std::istream_iterator<int64_t>(words), {}};
        counted.insert(tensor + " " + batches);
        check(n_tokens == (batches == "single" ? 2 : 7), line + ": tokens");
        check(uses.size() == 4 && std::count(uses.begin(), uses.end(), n_tokens) == 2 &&
                  std::count(uses.begin(), uses.end(), 0) == 2,
              line + ": two experts each, always the same");
    }
    check(counted.size() == 2 * block.weights.size(), "every weight's uses are kept, of both kinds of batches");
    std::remove(uses_path);
    done("uses of experts");
}

// Uses that cannot be kept when a model is freed cost nothing else.
void check_uses_that_are_lost() {
    const Block   block = moe_block(q4_0, q4_0);
    const Data    data  = make_data(block);
    const PlanPtr plan  = plan_that_counts(block);
    if (plan == nullptr) {
        return;
    }
    auto model = std::make_unique<Model>(block, data, plan.get());
    {
        Session session;
        session.compute(*model, 1);
    }
    out_of_memory = true;
    model.reset();
    out_of_memory = false;
    check_nothing_held("after a model whose uses were lost");
    std::remove(uses_path);
    done("uses that are lost");
}

void check_refused() {
    const std::string begin = "oallama-plan 1\ndevice CPU\ntensor a_exps Q4_0 64x64x4 rows ";
    const char * ends[] = {"64 0 0 CPU hot=",        "64 0 0 CPU hot=4",  "64 0 0 CPU hot=1,1",  "64 0 0 CPU hot=2,1",
                           "64 0 0 CPU hot=1 hot=2", "32 0 32 CPU hot=1", "64 0 0 CPU hot=1,,2", "0 64 0 - hot=1"};
    for (const char * end : ends) {
        oallama_plan * plan = nullptr;
        check(oallama_plan_new((begin + end).c_str(), &plan) == OALLAMA_INVALID, std::string("is refused: ") + end);
        oallama_plan_free(plan);
    }
    oallama_plan * plan = nullptr;
    check(oallama_plan_new("oallama-plan 1\ndevice CPU\ntensor a_exps Q4_0 64x64x65537 rows 64 0 0 CPU hot=1", &plan) ==
              OALLAMA_INVALID,
          "so many experts are refused");
    check(oallama_plan_new("oallama-plan 1\ntensor a_exps Q4_0 64x64x4 rows 64 0 0 CPU hot=1", &plan) ==
              OALLAMA_INVALID,
          "hot experts need a device");
    oallama_plan_free(plan);
    done("plans of hot experts that are refused");
}

} // namespace

void test_hot() {
    check_routing();
    check_refused();
    check_phases();
    check_loading();
    check_shapes();
    check_one_way();
    check_many();
    check_shared_expert();
    check_program_bytes();
    check_uses();
    check_uses_that_are_lost();
}

} // namespace split_test
