// Hot experts: whole on the device, the others on the host. That results are right is the random cuts' to test.

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
        text += tensor_line(weight, weight.extent(), 0, layout) +
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

// One sub-graph and one phase, and of one token as many rows come back as may be hits.
void check_phases() {
    for (const bool bias : {false, true}) {
        for (const int n_hot : {1, 3}) {
            const Block   block = moe_block(q4_0, q4_0, {Ffn::silu, Gate::par, bias});
            const Data    data  = make_data(block);
            const Experts hot   = n_hot == 1 ? Experts{2} : Experts{0, 2, 3};
            const PlanPtr plan  = new_plan(hot_plan(block, hot, async_device::device_name, "CPU", 1 << 20));
            const Model   model(block, data, plan.get());
            check(device_bytes(plan.get()) == hot_bytes(block, hot) && memory().device_weights >= hot_bytes(block, hot),
                  "the device holds the hot experts' bytes");
            const oallama_stats now = stats_of_known(model, 1);
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
    oallama::RoutedBatch       batch;
    for (int32_t token = 0; token < 50; token++) {
        for (int32_t rank = 0; rank < 4; rank++) {
            batch.chosen.push_back((token + rank * (1 + token % 5 % 2 * 4)) % 6);
        }
    }
    oallama::route(batch, 4, slot_of, 3);
    check(batch.n_device == 3 && batch.slots.size() == 3 * 50, "3 of 4 may be hits");
    for (size_t i = 0; i < batch.slots.size(); i += 3) {
        const std::set<int32_t> slots(batch.slots.begin() + static_cast<std::ptrdiff_t>(i),
                                      batch.slots.begin() + static_cast<std::ptrdiff_t>(i) + 3);
        check(slots == std::set<int32_t>{0, 1, 2}, "a token of several uses a slot once");
    }
    done("routing");
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
    auto          model = std::make_unique<Model>(block, data, plan.get());
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

} // namespace

void test_hot() {
    check_routing();
    check_phases();
    check_uses();
    check_uses_that_are_lost();
}

} // namespace split_test
