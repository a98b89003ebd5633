// Streamed weights: in pieces, ahead of their block's turn, and never more of them than the link has time for.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "split_test.h"
#include "stream.h"

namespace split_test {

namespace {

using Bytes = std::vector<int64_t>; // of each block

// Blocks that take turns in a ring, as those of a model's layers do. All that is not CC is streamed.
class Round {
  public:
    Round(const std::vector<Block> & blocks, const std::string & lines, int slots = 1, Cut cut = Cut::half) {
        const Setting              all(streamed, Streamed::all);
        const Setting              ring(n_slots, slots);
        std::vector<const Block *> each;
        for (const Block & block : blocks) {
            each.push_back(&block);
        }
        plan_ = new_plan(plan_text(each, cut, lines));
        for (const Block & block : blocks) {
            models_.push_back(std::make_unique<Model>(block, plan_.get()));
        }
        session_ = std::make_unique<Session>(); // as a llama_context is made, of a model
    }

    // Computes each block; the bytes that are copied meanwhile.
    Bytes turn() {
        Bytes copied;
        for (const auto & model : models_) {
            reset_stats();
            check_right(*session_, *model, n_tokens, "in a ring", seed);
            copied.push_back(stats().bytes_streamed);
            n_built += stats().n_built;
        }
        return copied;
    }

    // What is copied once the order is known, and how long everything takes; tried again while it is not what was
    // foreseen, as a busy machine keeps no time.
    Bytes copied(const Bytes & foreseen = {}) {
        Bytes found;
        for (int i = 0; i < 5 || (i < 50 && !foreseen.empty() && found != foreseen); i++) {
            found = turn();
        }
        return found;
    }

    int64_t  n_built  = 0;  // programs
    int64_t  n_tokens = 30; // for which all of four experts are used
    uint64_t seed     = 1;  // of the tokens

  private:
    PlanPtr                             plan_;
    std::vector<std::unique_ptr<Model>> models_;
    std::unique_ptr<Session>            session_;
};

// With one slot the copy of a block can only begin when the one before has ended: then what is copied during a call is
// the other block's, unless the link is too slow for anything to be asked for ahead.
void check_ahead() {
    const std::vector<Block> two     = {ffn_block(q4_0, q4_0), lone_block(q4_0)};
    const Bytes              own     = Round(two, "prefetch layer\n").copied();
    const Bytes              swapped = {own[1], own[0]};
    check(own[0] > own[1] && own[1] > 0, "more is streamed of the FFN");
    check(Round(two, "prefetch ahead\n").copied(swapped) == swapped, "the next block is copied ahead");
    const std::string fast = "piece 4096\nlink 1000000000000000\n";
    check(Round(two, fast).copied(swapped) == swapped, "a fast link is asked for all of it");
    check(Round(two, "piece 4096\nlink 1\n").copied() == own,
          "a link that would keep an activation waiting is asked for nothing");

    // blocks that live on the device and are streamed whole neither send nor receive anything, and are copied ahead too
    const Setting lives(resident, true);
    const Bytes   whole         = Round(two, "prefetch layer\n", 1, Cut::all).copied();
    const Bytes   whole_swapped = {whole[1], whole[0]};
    check(Round(two, fast, 1, Cut::all).copied(whole_swapped) == whole_swapped, "the next whole block is copied ahead");
}

// Experts that a batch is likely to use are copied ahead like any weights; once the router has chosen, what is missing
// follows, and nothing that is not needed.
void check_experts_ahead() {
    const Block block = moe_block(q4_0, q4_0, {Ffn::silu, Gate::par, false, false, 2, 16});
    const auto  round = [&](const std::string & lines) {
        Round one({lone_block(q4_0), block}, lines);
        one.n_tokens = 4; // they use eight of sixteen experts at most
        return one;
    };
    Round       layer = round("prefetch layer\n");
    const Bytes own   = layer.copied();
    Round       ahead = round("");
    check(ahead.copied({own[1], own[0]}) == Bytes{own[1], own[0]},
          "the experts that tokens used before are copied ahead, and no others");

    layer.seed        = 2; // other tokens, which use some of the experts that are there
    const Bytes other = layer.turn();
    ahead.seed        = 2;
    const Bytes late  = ahead.turn();
    check(late[0] == own[1] && late[1] > other[0] && late[1] < other[0] + other[1],
          "of other tokens' experts those follow that are missing");

    Round single    = round("");
    single.n_tokens = 1;
    bool none       = true;
    for (int i = 0; i < 8; i++) {
        single.seed = static_cast<uint64_t>(i);
        none        = single.turn()[0] <= own[0] && none;
    }
    check(none, "of a single token's experts none are copied before they are chosen");
}

// Weights of one router, cut apart as gate and down may be: once the router has chosen, what the second one needs is
// copied ahead even for a single token, and nothing else of it.
void check_same_experts() {
    std::vector<Block> two;
    for (const char * name : {"a_exps", "b_exps"}) {
        Block         block = moe_block(q4_0, q4_0, {Ffn::silu, Gate::none, false, false, 2, 16});
        const int64_t k     = block.n_embd;
        block.together      = false;
        block.weights       = {{name, q4_0, k, 96, 16, OALLAMA_ROWS}};
        block.extras        = {{"gate_inp", {k, 16}}};
        block.build         = [name, k](Graph & g) {
            ggml_tensor * cur = g.norm();
            ggml_tensor * ids = ggml_argsort_top_k(g.ctx, ggml_mul_mat(g.ctx, g["gate_inp"], cur), 2);
            ggml_build_forward_expand(g.gf, ids);
            g.output(ggml_mul_mat_id(g.ctx, g[name], ggml_reshape_3d(g.ctx, cur, k, 1, g.n_tokens), ids));
        };
        two.push_back(block);
    }
    Round layer(two, "prefetch layer\n");
    Round ahead(two, "");
    layer.n_tokens = ahead.n_tokens = 1;
    const Bytes own                 = layer.copied();
    check(own[0] == own[1] && own[0] > 0, "both need the same experts");
    Bytes found;
    for (uint64_t seed = 2; seed < 50 && (seed < 6 || found != Bytes{own[0] + own[1], 0}); seed++) {
        ahead.seed = seed; // other experts each time, so the first block's are not known before
        found      = ahead.turn();
    }
    check(found == Bytes{own[0] + own[1], 0}, "what the router chose is copied ahead for the next block");
}

// Which experts a batch is likely to use, by those that batches before it used.
void check_odds() {
    check(!oallama::ExpertOdds(32, 0).likely(512)[0], "nothing is likely before it is known how many a token uses");
    oallama::ExpertOdds odds(32, 2);
    const auto          n_likely = [&](int64_t n_tokens) {
        const std::vector<bool> likely = odds.likely(n_tokens);
        return std::count(likely.begin(), likely.end(), true);
    };
    check(n_likely(512) == 32 && n_likely(1) == 0, "before anything was counted, all are alike");
    std::vector<int32_t> chosen;
    for (int32_t token = 0; token < 128; token++) { // the first eight, and one use of each of the others
        chosen.push_back(token % 8);
        chosen.push_back(token < 24 ? 8 + token : (token + 1) % 8);
    }
    odds.count(chosen, 2);
    check(n_likely(1) == 0, "no expert of a single token is likely");
    check(n_likely(16) == 8 && odds.likely(16)[7] && !odds.likely(16)[8], "a few tokens use those that are used often");
    check(n_likely(512) == 32, "many tokens use them all");
    for (int i = 0; i < 64; i++) {
        odds.count({8, 9}, 2);
    }
    check(odds.likely(16)[8], "what is used now counts");
    for (int i = 0; i < 4096; i++) {
        odds.count({8, 9}, 2);
    }
    check(n_likely(16) == 2, "what was used long ago does not");
}

// When the next small copy is due is what passed the last time between the same two.
void check_small_copies() {
    using namespace oallama;
    CopyPacing  first, second;
    SmallCopies copies;
    check(copies.due() == Time::min(), "before the first small copy the next one is due at any moment");
    copies.copied(&first.sent);
    check(copies.due() == Time::max(), "nothing is known of what comes after it");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    copies.copied(&second.results_sent);
    check(copies.due() == Time::max() && copies.is_last(second.results_sent), "nor of what comes after the second");
    const Time begun = Clock::now();
    copies.copied(&first.sent);
    check(copies.due() >= begun + std::chrono::milliseconds(2), "it is due when as much time has passed again");
    copies.copied(nullptr);
    check(copies.due() == Time::min(), "a copy that is about to be made may come at any moment");
    copies.copied(&second.results_sent);
    copies.forget();
    check(copies.due() == Time::min(), "what is forgotten says nothing");
}

// An interval that lasted for these times, one after another, is taken to last for so long the next time.
void check_interval(const std::vector<double> & seconds, double expected, const char * what) {
    const oallama::Time begun;
    oallama::Interval   interval;
    for (const double one : seconds) {
        interval.begin(begun);
        interval.end(begun + oallama::to_duration(one));
    }
    interval.begin(begun);
    check(std::abs(std::chrono::duration<double>(interval.due() - begun).count() - expected) < 1e-6, what);
}

// Small copies get through between two pieces.
void check_pieces() {
    const auto n_copies_of = [](const std::string & lines, int64_t * bytes) {
        Round         blocks({ffn_block(q4_0, q4_0)}, "prefetch layer\n" + lines);
        const int64_t before = async_device::counters().n_copies_in;
        *bytes               = blocks.turn().front();
        return async_device::counters().n_copies_in - before;
    };
    int64_t       bytes = 0;
    const int64_t whole = n_copies_of("", &bytes);
    const int64_t parts = n_copies_of("piece 4096\n", &bytes);
    check(parts >= whole + bytes / 4096 / 2, "weights are asked for in pieces");
}

// Two slots lie at the two ends of a ring, which is as long as the two blocks that it must hold at once.
void check_two_ends() {
    const std::vector<Block> blocks  = {ffn_block(q4_0, q4_0), lone_block(q4_0), moe_block(q4_0, q4_0)};
    const int64_t            padding = 6 * 512; // of six weights

    const Bytes   size    = Round(blocks, "prefetch layer\n").copied();
    const int64_t largest = *std::max_element(size.begin(), size.end());
    const int64_t pair    = std::max({size[0] + size[1], size[1] + size[2], size[2] + size[0]});
    check(*std::min_element(size.begin(), size.end()) > padding, "three blocks are streamed");

    const Bytes foreseen = {size[2], size[0], size[1]}; // when a block ends, that after the next
    const auto  held_by  = [&](const std::string & lines) {
        Round round(blocks, lines, 2);
        check(round.copied(foreseen) == foreseen, "two slots that hold what they need let copies run ahead");
        return memory().device_compute;
    };
    const int64_t saved = held_by("") - held_by("ring " + std::to_string(pair + padding) + "\n");
    check(saved >= 2 * largest - pair - padding, "slots of two sizes take less of the device");
    for (const int64_t bytes : {largest, int64_t{1}}) {
        const std::string one = "prefetch layer\nring " + std::to_string(bytes) + "\n";
        check(Round(blocks, one, 2).copied() == size, "no ring holds less than one block");
    }
}

// A token uses three of four experts, so two or three of them lie side by side.
void check_side_by_side() {
    const Block block  = moe_block(GGML_TYPE_F32, GGML_TYPE_F32, {Ffn::silu, Gate::par, false, false, 3, 4});
    const auto  copies = [&block](Streamed how) {
        const Setting streams(streamed, how);
        const PlanPtr plan = plan_of(block, Cut::half);
        const Model   model(block, plan.get());
        Session       session;
        const int64_t before = async_device::counters().n_copies_in;
        check(!session.compute(model, 1).empty(), "a token is computed");
        return async_device::counters().n_copies_in - before;
    };
    const int64_t of_weights = copies(Streamed::all) - copies(Streamed::none);
    check(of_weights >= 3 && of_weights <= 6, "experts that lie side by side come in one copy, of each of three "
                                              "weights one or two: " +
                                                  std::to_string(of_weights));
}

// Blocks that take turns in two slots: no device graph's tensors move, so that CUDA can capture it, and all weights are
// copied ahead, for an odd number of blocks too.
void check_addresses(int64_t n_blocks) {
    const std::string  what = std::to_string(n_blocks) + " blocks: ";
    std::vector<Block> blocks;
    for (int64_t i = 0; i < n_blocks; i++) {
        blocks.push_back(lone_block(q4_0));
        const std::string name             = "w" + std::to_string(i);
        blocks.back().weights.front().name = name;
        blocks.back().build                = [name](Graph & g) { g.output(g.mul_mat(name.c_str(), g.x)); };
    }
    Round round(blocks, "", 2);
    for (int token = 0; token < 6; token++) {
        const int64_t n_moved = async_device::counters().n_moved;
        const int64_t n_built = round.n_built;
        round.turn();
        check(async_device::counters().n_moved == n_moved, what + "no graph moves in token " + std::to_string(token));
        check(token < 2 || round.n_built == n_built, what + "no program is built after the second token");
    }
    check(round.n_built <= n_blocks * (n_blocks % 2 == 0 ? 1 : 2),
          what + std::to_string(round.n_built) + " programs are built");
}

} // namespace

void test_stream() {
    if (late || streamed != Streamed::none) {
        return; // plans of its own
    }
    check_small_copies();
    check_interval({0.008, 0.0}, 0.006, "one short time does not undo a long one");
    check_interval({0.01, 0.01, 0.02}, 0.0125, "the last time weighs a quarter");
    check_interval({0.01, 60.0}, 0.01, "a pause of a minute changes nothing");
    check_interval({0.01, 60.0, 0.01, 60.0, 0.01}, 0.01, "nor does the next pause");
    check_interval({0.01, 0.05, 0.05}, 0.02, "what takes long twice in a row takes long now");
    check_ahead();
    check_odds();
    check_experts_ahead();
    check_same_experts();
    check_pieces();
    check_side_by_side();
    for (const int64_t n_blocks : {2, 3, 4, 5}) {
        check_addresses(n_blocks);
    }
    check_two_ends();
}

} // namespace split_test
