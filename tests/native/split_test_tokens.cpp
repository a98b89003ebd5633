// n_g: of a batch, the device computes all that CC is for, for the last n_g tokens (CG'). And times of blocks.

#include <algorithm>

#include "plan.h"
#include "split_test.h"

namespace split_test {

namespace {

const std::string table = "tokens 8 0\ntokens 16 8\ntokens 32 32\n";

// What one batch moves when nothing was there before.
oallama_stats moved(const Model & model, int64_t n_tokens) {
    Session session;
    reset_stats();
    check(!session.compute(model, n_tokens).empty(), std::to_string(n_tokens) + " tokens are computed");
    return stats();
}

int64_t bytes_of(const Block & block) {
    int64_t bytes = 0;
    for (const Weight & weight : block.weights) {
        bytes += weight.bytes();
    }
    return bytes;
}

// By the table; between two entries a half is rounded up, and then the host's tokens to whole groups, as the planner
// does (tests/unit/test_cuts.py).
void check_table() {
    using Pairs          = std::vector<std::pair<int64_t, int64_t>>; // n_tokens, n_g
    const auto check_all = [](const std::vector<oallama::TokenSplit> & tokens, const Pairs & all) {
        for (const auto & [n_tokens, n_g] : all) {
            check(oallama::n_g_at(tokens, n_tokens) == n_g,
                  "n_g of " + std::to_string(n_tokens) + " tokens is " + std::to_string(n_g));
        }
    };
    check_all({{8, 0}, {16, 8}, {32, 32}},
              {{1, 0}, {7, 0}, {8, 0}, {9, 1}, {12, 4}, {16, 8}, {24, 20}, {32, 32}, {33, 33}, {64, 64}});
    check_all({{16, 3}, {48, 20}, {50, 15}}, {{16, 3}, {17, 1}, {19, 3}, {32, 12}, {49, 17}});
}

// All of the weights are CC, so that the device gets the activations of n_g tokens, CC once, and nothing else.
void check_bytes() {
    const Block         block = ffn_block(q4_0, q4_0);
    const PlanPtr       plan  = plan_of(block, Cut::none, "prefetch layer\n" + table);
    const Model         model(block, plan.get());
    const oallama_stats now   = moved(model, 12);
    const int64_t       bytes = 4 * block.n_embd * static_cast<int64_t>(sizeof(float));
    check(now.bytes_in == bytes && now.bytes_out == bytes && now.bytes_streamed == bytes_of(block),
          "of 12 tokens the device gets 4");
}

// Where blocks live on the device, the host gets the activations of its own tokens, and sends what it made of them.
void check_resident_bytes() {
    const Setting       lives(resident, true);
    const Block         block = ffn_block(q4_0, q4_0);
    const PlanPtr       plan  = plan_of(block, Cut::none, "prefetch layer\n" + table);
    const Model         model(block, plan.get());
    const oallama_stats now   = moved(model, 12);
    const int64_t       bytes = 8 * block.n_embd * static_cast<int64_t>(sizeof(float));
    check(now.bytes_in == bytes && now.bytes_out == bytes, "of 12 tokens the host gets 8");
}

// A layout that the device cannot read has no n_g unless CC is kept a second time.
void check_twice() {
    const Block block = ffn_block(q4_0, q4_0);
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        const std::string layout = ggml_backend_buft_name(buft);
        if (!layout_holds(buft, block.weights.front())) {
            continue;
        }
        const bool plain = layout == "CPU";
        for (const bool twice : {false, true}) {
            const PlanPtr plan =
                plan_of(block, Cut::none, table + (twice ? "twice 1\n" : ""), async_device::device_name, layout);
            const Model model(block, plan.get());
            check((moved(model, 32).bytes_in > 0) == (plain || twice), layout + " has an n_g where it can be read");
            check((memory().host_weights >= 2 * bytes_of(block)) == (twice && !plain), layout + " is kept twice");
            check(memory().host_weights < 3 * bytes_of(block), layout + " is kept no more often");
        }
    }
}

//
// times
//

// How long each block took, by classes of batch sizes.
void check_times() {
    const Setting tokens(late, false); // with an n_g the host may have nothing to do
    const Block   block = ffn_block(q4_0, q4_0);
    const PlanPtr plan  = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    Session       session;
    const auto    times = [&] {
        return static_cast<oallama::LoadedPlan *>(buft_of(plan.get())->context)->times().totals();
    };
    for (const int64_t n_tokens : {8, 5, 9}) {
        session.compute(model, n_tokens);
    }
    const auto found = times();
    check(found.size() == 2, "two classes");
    for (const auto & [key, totals] : found) {
        const bool larger = key.second == 16;
        check(key.second == (larger ? 16 : 8), "the class is a power of two");
        check(totals[0] == (larger ? 1 : 2) && totals[1] == (larger ? 9 : 13), "each run is noted once");
        check(std::all_of(totals.begin(), totals.end(), [](int64_t total) { return total > 0; }), "times of each part");
    }
    reset_stats();
    session.compute(model, 0);
    check(session.status() == GGML_STATUS_SUCCESS && times() == found && stats().n_segments == 0 &&
              stats().bytes_streamed == 0,
          "a batch of no tokens takes no time and streams nothing");
}

} // namespace

void test_tokens() {
    if (late || streamed != Streamed::none) {
        return; // plans of its own
    }
    check_table();
    check_bytes();
    check_resident_bytes();
    check_twice();
}

void test_times() {
    check_times();
}

} // namespace split_test
