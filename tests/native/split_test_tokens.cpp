// n_g: of a batch, the device computes all that CC is for, for the last n_g tokens (CG').

#include "plan.h"
#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

const std::string table = "tokens 8 0\ntokens 16 8\ntokens 32 32\n";

std::string with_lines(const Block & block, Cut cut, const std::string & lines, const std::string & layout) {
    const std::string text = plan_text({&block}, cut, async_device::device_name, layout);
    const size_t      at   = text.find("tensor ");
    return text.substr(0, at) + lines + text.substr(at);
}

// What one batch moves when nothing was there before.
oallama_stats moved(const Model & model, int64_t n_tokens) {
    Session session;
    check_ok(oallama_reset_stats(), "statistics are reset");
    check(!session.compute(model, n_tokens).empty(), std::to_string(n_tokens) + " tokens are computed");
    return stats();
}

int64_t bytes_of(const Block & block) {
    int64_t bytes = 0;
    for (const Weight & weight : block.weights) {
        bytes += static_cast<int64_t>(ggml_row_size(weight.type, weight.k)) * weight.n * weight.e;
    }
    return bytes;
}

// By the table; between two entries a half is rounded up, and then the host's tokens to whole groups, as the planner
// does (tests/unit/test_cuts.py).
void check_table() {
    using oallama::TokenSplit;
    struct Expected {
        int64_t n_tokens;
        int64_t n_g;
    };
    const auto check_all = [](const std::vector<TokenSplit> & tokens, const std::vector<Expected> & all) {
        for (const Expected & one : all) {
            check(oallama::n_g_at(tokens, one.n_tokens) == one.n_g,
                  "n_g of " + std::to_string(one.n_tokens) + " tokens is " + std::to_string(one.n_g));
        }
    };
    check_all({{8, 0}, {16, 8}, {32, 32}},
              {{1, 0}, {7, 0}, {8, 0}, {9, 1}, {12, 4}, {16, 8}, {24, 20}, {32, 32}, {33, 33}, {64, 64}});
    check_all({{16, 3}, {48, 20}, {50, 15}}, {{16, 3}, {17, 1}, {19, 3}, {32, 12}, {49, 17}});
    done("n_g by the table");
}

// All of the weights are CC, so that the device gets the activations of n_g tokens, CC once, and nothing else.
void check_bytes() {
    const Block         block = ffn_block(q4_0, q4_0);
    const PlanPtr       plan  = new_plan(with_lines(block, Cut::none, "prefetch layer\n" + table, "CPU"));
    const Model         model(block, make_data(block), plan.get());
    const oallama_stats now   = moved(model, 12);
    const int64_t       bytes = 4 * block.n_embd * static_cast<int64_t>(sizeof(float));
    check(now.bytes_in == bytes && now.bytes_out == bytes && now.bytes_streamed == bytes_of(block),
          "of 12 tokens the device gets 4");
    done("bytes of n_g");
}

// A layout that the device cannot read has no n_g unless CC is kept a second time.
void check_twice() {
    const Block block = ffn_block(q4_0, q4_0);
    const Data  data  = make_data(block);
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        const std::string layout = ggml_backend_buft_name(buft);
        if (!layout_holds(buft, block.weights.front())) {
            continue;
        }
        const bool    plain = layout == "CPU";
        const PlanPtr once  = new_plan(with_lines(block, Cut::none, table, layout));
        const PlanPtr twice = new_plan(with_lines(block, Cut::none, table + "twice 1\n", layout));
        {
            const Model model(block, data, once.get());
            check((moved(model, 32).bytes_in > 0) == plain, layout + " kept once has an n_g if it is plain");
            check(memory().host_weights < 3 * bytes_of(block) / 2, layout + " is kept once");
        }
        const Model model(block, data, twice.get());
        check(moved(model, 32).bytes_in > 0, layout + " kept twice has an n_g");
        check((memory().host_weights >= 2 * bytes_of(block)) == !plain, layout + " is kept twice unless it is plain");
    }
    done("CC kept twice");
}

} // namespace

void test_tokens() {
    if (late || streamed != Streamed::none) {
        return; // plans of its own
    }
    check_table();
    check_bytes();
    check_twice();
}

} // namespace split_test
