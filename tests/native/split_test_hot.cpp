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

// Every weight on the host; of experts, those that are hot on the device too.
PlanPtr hot_plan(const Block & block, const std::string & hot) {
    std::string text = "oallama-plan 1\nmodel test\ndevice TEST0\nsum 1048576\n";
    for (const Weight & weight : block.weights) {
        text += tensor_line(weight, weight.extent(), 0, "CPU") + " hot=" + hot + (resident ? " resident\n" : "\n");
    }
    return new_plan(text);
}

// One sub-graph and one phase, and of one token as many rows come back as may be hits.
void check_phases(bool bias, const std::string & hot, int64_t n_hot) {
    const Block   block = moe_block(q4_0, q4_0, {Ffn::silu, Gate::par, bias});
    const PlanPtr plan  = hot_plan(block, hot);
    const Model   model(block, plan.get());
    int64_t       bytes = 0;
    for (const Weight & weight : block.weights) {
        bytes += weight.bytes() / weight.e * n_hot;
    }
    check(told(plan.get()).device_bytes == bytes && memory().device_weights >= bytes,
          "the device holds the hot experts' bytes");
    const oallama_stats now = stats_of_known(model, 1);
    check(now.n_graphs == 1 && now.n_phases == 1 && now.n_built == 0,
          std::string("experts, some of them hot, are one phase") + (bias ? ", with biases" : ""));
    if (resident) {
        return; // other bytes cross
    }
    const int64_t n_ff   = block.weights.front().n;
    const int64_t n_rows = std::min<int64_t>(n_hot, 2);
    const int64_t biases = bias ? n_hot * (2 * n_ff + block.n_embd) * 4 : 0;
    check(now.bytes_out == n_rows * block.n_embd * 4, "rows that come back");
    check(now.bytes_in == block.n_embd * 4 + n_rows * 4 + biases, "an input, slots and biases are sent");
}

// A token uses a slot once, where there are several or the weights are in float: CUDA's kernels for those keep one rank
// for each expert and token. One token alone computes what is thrown away with the slot of a hit.
void check_routing() {
    const std::vector<int32_t> slot_of = {-1, 0, -1, 1, 2, -1};
    oallama::RoutedBatch       batch;
    for (int32_t token = 0; token < 50; token++) {
        for (int32_t rank = 0; rank < 4; rank++) {
            batch.chosen.push_back((token + rank * (1 + token % 5 % 2 * 4)) % 6);
        }
    }
    oallama::route(batch, 4, slot_of, 3, /*once=*/false);
    check(batch.n_device == 3 && batch.slots.size() == 3 * 50, "3 of 4 may be hits");
    for (auto slot = batch.slots.begin(); slot != batch.slots.end(); slot += 3) {
        check(std::set<int32_t>(slot, slot + 3) == std::set<int32_t>{0, 1, 2}, "a token of several uses a slot once");
    }
    batch.chosen = {0, 3, 2, 5};
    oallama::route(batch, 4, slot_of, 3, /*once=*/false);
    check(batch.slots == std::vector<int32_t>{1, 1, 1}, "one token computes with the slot of a hit");
    oallama::route(batch, 4, slot_of, 3, /*once=*/true);
    check(batch.slots == std::vector<int32_t>{1, 0, 2}, "of weights in float with each slot once");
    check(batch.device_rows == std::vector<int32_t>{1, -1, -1}, "which gives no row");
}

// The plan's file for uses of experts.
constexpr const char * uses_path = "uses-of-a-test.txt";

PlanPtr plan_that_counts(const Block & block) {
    PlanPtr plan = hot_plan(block, "0,2");
    static_cast<oallama::LoadedPlan *>(buft_of(plan.get())->context)->keep_uses(uses_path);
    return plan;
}

// Uses of experts are counted, hits and misses alike, batches of one token apart, and kept when the model is freed.
void check_uses() {
    const Block block = moe_block(q4_0, q4_0);
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
        const std::multiset<int64_t> uses{std::istream_iterator<int64_t>(words), {}};
        counted.insert(tensor + " " + batches);
        check(n_tokens == (batches == "single" ? 2 : 7), line + ": tokens");
        check(uses == std::multiset<int64_t>{0, 0, n_tokens, n_tokens}, line + ": two experts each, always the same");
    }
    check(counted.size() == 2 * block.weights.size(), "every weight's uses are kept, of both kinds of batches");
    std::remove(uses_path);
}

// Uses that cannot be kept when a model is freed cost nothing else.
void check_uses_that_are_lost() {
    const Block   block = moe_block(q4_0, q4_0);
    const PlanPtr plan  = plan_that_counts(block);
    auto          model = std::make_unique<Model>(block, plan.get());
    Session().compute(*model, 1);
    out_of_memory = true;
    model.reset();
    out_of_memory = false;
    check_nothing_held("after a model whose uses were lost");
    std::remove(uses_path);
}

} // namespace

void test_hot() {
    check_routing();
    for (const bool bias : {false, true}) {
        check_phases(bias, "2", 1);
        check_phases(bias, "0,2,3", 3);
    }
    check_uses();
    check_uses_that_are_lost();
}

} // namespace split_test
