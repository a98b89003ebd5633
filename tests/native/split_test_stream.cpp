// Streamed weights: in pieces, ahead of their block's turn, and never more of them than the link has time for.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "split_test.h"
#include "stream.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

// All that is not CC is streamed, through one slot, while this lives.
class AllStreamed {
  public:
    AllStreamed() : streamed_(streamed), n_slots_(n_slots) {
        streamed = Streamed::all;
        n_slots  = 1;
    }
    AllStreamed(const AllStreamed &)             = delete;
    AllStreamed & operator=(const AllStreamed &) = delete;
    ~AllStreamed() {
        streamed = streamed_;
        n_slots  = n_slots_;
    }

  private:
    Streamed streamed_;
    int      n_slots_;
};

// Two blocks that take turns: an FFN and a lone mul-mat, half of each streamed, or all.
class TwoBlocks {
  public:
    explicit TwoBlocks(const std::string & lines, Cut cut = Cut::half) {
        const AllStreamed all;
        const std::string text = plan_text({&ffn_, &lone_}, cut, async_device::device_name, "CPU");
        const size_t      at   = text.find("tensor ");
        plan_                  = new_plan(text.substr(0, at) + lines + text.substr(at));
        if (plan_ != nullptr) {
            first_  = std::make_unique<Model>(ffn_, make_data(ffn_), plan_.get());
            second_ = std::make_unique<Model>(lone_, make_data(lone_), plan_.get());
        }
        session_ = std::make_unique<Session>(); // as a llama_context is made, of a model
    }

    bool ready() const { return plan_ != nullptr && first_->loaded() && second_->loaded(); }

    // What is copied while a block is computed: of the FFN, of the other.
    std::pair<int64_t, int64_t> copied() {
        const int64_t ffn = bytes_while(*first_);
        return {ffn, bytes_while(*second_)};
    }

    Outputs of_ffn() { return session_->compute(*first_, 3); }

  private:
    int64_t bytes_while(const Model & model) {
        check_ok(oallama_reset_stats(), "statistics are reset");
        check(!session_->compute(model, 3).empty(), "a block is computed");
        return stats().bytes_streamed;
    }

    Block                    ffn_  = ffn_block(q4_0, q4_0);
    Block                    lone_ = lone_block(q4_0);
    PlanPtr                  plan_;
    std::unique_ptr<Model>   first_;
    std::unique_ptr<Model>   second_;
    std::unique_ptr<Session> session_;
};

// What is copied once the order is known, and how long everything takes; tried again while it is not what was expected,
// as a busy machine keeps no time.
std::pair<int64_t, int64_t> copied_in_time(const std::string & lines, std::pair<int64_t, int64_t> expected = {},
                                           Cut cut = Cut::half) {
    TwoBlocks blocks(lines, cut);
    if (!blocks.ready()) {
        return {};
    }
    for (int i = 0; i < 3; i++) {
        blocks.copied();
    }
    std::pair<int64_t, int64_t> found = blocks.copied();
    for (int i = 0; i < 50 && expected.first > 0 && found != expected; i++) {
        found = blocks.copied();
    }
    return found;
}

// With one slot the copy of a block can only begin when the one before has ended: then what is copied during a call is
// the other block's, unless the link is too slow for anything to be asked for ahead.
void check_ahead() {
    const auto own    = copied_in_time("prefetch layer\n");
    const auto others = copied_in_time("prefetch ahead\n");
    check(own.first > own.second && own.second > 0, "more is streamed of the FFN");
    check(others.first == own.second && others.second == own.first, "the next block is copied ahead");

    const auto fast = copied_in_time("piece 4096\nlink 1000000000000000\n", others);
    check(fast == others, "a fast link is asked for all of it");
    const auto slow = copied_in_time("piece 4096\nlink 1\n");
    check(slow == own, "a link that would keep an activation waiting is asked for nothing");
    done("copies ahead");
}

// Blocks that live on the device and are streamed whole neither send nor receive anything, and are copied ahead too.
void check_ahead_of_whole() {
    const bool kept  = resident;
    resident         = true;
    const auto own   = copied_in_time("prefetch layer\n", {}, Cut::all);
    const auto ahead = copied_in_time("piece 4096\nlink 1000000000000000\n", {own.second, own.first}, Cut::all);
    check(ahead.first == own.second && ahead.second == own.first, "the next block is copied ahead");
    resident = kept;
    done("copies ahead of blocks that send nothing");
}

// When the next small copy is due is what passed the last time between the same two.
void check_turns() {
    using namespace oallama;
    Pace  first, second;
    Turns turns;
    check(turns.due() == Time::min(), "before the first small copy the next one is due at any moment");
    turns.made(&first.sent);
    check(turns.due() == Time::max(), "nothing is known of what comes after it");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    turns.made(&second.lifted);
    check(turns.due() == Time::max() && turns.is_last(second.lifted), "nor of what comes after the second");
    const Time begun = Clock::now();
    turns.made(&first.sent);
    check(turns.due() >= begun + std::chrono::milliseconds(2), "it is due when as much time has passed again");
    turns.made(nullptr);
    check(turns.due() == Time::min(), "a copy that is about to be made may come at any moment");
    turns.made(&second.lifted);
    turns.forget();
    check(turns.due() == Time::min(), "what is forgotten says nothing");
    done("turns");
}

// An interval that lasted for these times, one after another: how long the next one is taken to be.
double learned(const std::vector<double> & seconds) {
    using namespace oallama;
    const Time begun;
    Interval   interval;
    for (const double one : seconds) {
        interval.begin(begun);
        interval.end(begun + to_duration(one));
    }
    interval.begin(begun);
    return std::chrono::duration<double>(interval.due() - begun).count();
}

void check_interval() {
    const auto near = [](double found, double expected) { return std::abs(found - expected) < 1e-6; };
    check(near(learned({0.008, 0.0}), 0.006), "one short time does not undo a long one");
    check(near(learned({0.01, 0.01, 0.02}), 0.0125), "the last time weighs a quarter");
    check(near(learned({0.01, 60.0}), 0.01), "a pause of a minute changes nothing");
    check(near(learned({0.01, 60.0, 0.01, 60.0, 0.01}), 0.01), "nor does the next pause");
    check(near(learned({0.01, 0.05, 0.05}), 0.02), "what takes long twice in a row takes long now");
    done("intervals");
}

// Small copies get through between two pieces.
void check_pieces() {
    constexpr int64_t piece       = 4096;
    const auto        n_copies_of = [](const std::string & lines, int64_t * bytes) {
        TwoBlocks blocks("prefetch layer\n" + lines);
        if (!blocks.ready()) {
            return int64_t{0};
        }
        const async_device::Counters before = async_device::counters();
        *bytes                              = blocks.copied().first;
        return async_device::counters().n_copies_in - before.n_copies_in;
    };
    int64_t       bytes = 0;
    const int64_t whole = n_copies_of("", &bytes);
    const int64_t parts = n_copies_of("piece " + std::to_string(piece) + "\n", &bytes);
    check(parts >= whole + bytes / piece / 2, "weights are asked for in pieces");
    TwoBlocks at_once("prefetch layer\n"), in_pieces("prefetch layer\npiece 4096\n");
    check(at_once.ready() && in_pieces.ready() && same_bytes(at_once.of_ffn(), in_pieces.of_ffn()), "and come whole");
    done("pieces");
}

struct Loaded {
    std::unique_ptr<Model> model;
    Outputs                expected; // the unsplit CPU's
};

// Loads each block by the plan.
std::vector<Loaded> load(const std::vector<Block> & blocks, oallama_plan * plan, int64_t n_tokens) {
    std::vector<Loaded> loaded;
    Session             cpu({/*split=*/false, /*gpu=*/false});
    for (const Block & block : blocks) {
        const Data data = make_data(block);
        loaded.push_back({std::make_unique<Model>(block, data, plan),
                          cpu.compute(Model(block, data, host_layouts().front()), n_tokens)});
        check(loaded.back().model->loaded(), block.name + " is loaded");
    }
    return loaded;
}

// Blocks that take turns in a ring of so many bytes (0: not said): what is copied while each is computed, once the
// order is known, and what the device then holds. As copied_in_time, tried again until it is as foreseen. Results must
// be the CPU's.
struct Turn {
    std::vector<int64_t> copied;
    int64_t              device_bytes = 0;
};

Turn turns_in(int64_t bytes, const std::string & mode, const std::vector<int64_t> & foreseen = {}) {
    constexpr int64_t        n_tokens = 30; // for which all experts are used
    const std::vector<Block> blocks   = {ffn_block(q4_0, q4_0), lone_block(q4_0), moe_block(q4_0, q4_0)};
    const std::string        whole =
        plan_text({&blocks[0], &blocks[1], &blocks[2]}, Cut::half, async_device::device_name, "CPU");
    const size_t      at    = whole.find("tensor ");
    const std::string lines = "prefetch " + mode + "\n" + (bytes > 0 ? "ring " + std::to_string(bytes) + "\n" : "");
    const PlanPtr     plan  = new_plan(whole.substr(0, at) + lines + whole.substr(at));
    Turn              turn;
    if (plan == nullptr) {
        return turn;
    }
    const std::vector<Loaded> loaded = load(blocks, plan.get(), n_tokens);
    Session                   session;
    for (int i = 0; i < 5 || (i < 50 && !foreseen.empty() && turn.copied != foreseen); i++) {
        turn.copied.clear();
        for (size_t block = 0; block < blocks.size(); block++) {
            check_ok(oallama_reset_stats(), "statistics are reset");
            const double error = nmse(loaded[block].expected, session.compute(*loaded[block].model, n_tokens));
            check(error <= summation_bound, blocks[block].name + " in a ring: NMSE " + text(error));
            turn.copied.push_back(stats().bytes_streamed);
        }
    }
    turn.device_bytes = memory().device_compute;
    return turn;
}

// Two slots lie at the two ends of a ring, which is as long as the two blocks that it must hold at once.
void check_two_ends() {
    const AllStreamed    all;
    const int64_t        padding = 6 * 512; // of six weights
    const Turn           own     = turns_in(0, "layer");
    std::vector<int64_t> size    = own.copied;
    check(size.size() == 3 && *std::min_element(size.begin(), size.end()) > padding, "three blocks are streamed");
    if (size.size() != 3) {
        return;
    }
    n_slots                             = 2;
    const std::vector<int64_t> foreseen = {size[2], size[0], size[1]}; // when a block ends, that after the next
    const Turn                 equal    = turns_in(0, "ahead", foreseen);
    check(equal.copied == foreseen, "two slots that hold any block let copies run ahead");
    const int64_t pair   = std::max({size[0] + size[1], size[1] + size[2], size[2] + size[0]});
    const Turn    uneven = turns_in(pair + padding, "ahead", foreseen);
    check(uneven.copied == foreseen, "so do slots that hold what they need");
    const int64_t largest = *std::max_element(size.begin(), size.end());
    check(equal.device_bytes - uneven.device_bytes >= 2 * largest - pair - padding, "they take less of the device");
    check(turns_in(largest, "layer").copied == size, "a ring for one block holds one block");
    check(turns_in(1, "layer").device_bytes == own.device_bytes, "and no ring is smaller");
    done("two ends of a ring");
}

// A token uses three of four experts, so two or three of them lie side by side.
void check_side_by_side() {
    const AllStreamed all;
    const Block       block  = moe_block(GGML_TYPE_F32, GGML_TYPE_F32, {Ffn::silu, Gate::par, false, false, 3, 4});
    const auto        copies = [&block](Streamed how) {
        streamed           = how;
        const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
        const Model   model(block, make_data(block), plan.get());
        Session       session;
        const int64_t before = async_device::counters().n_copies_in;
        check(!session.compute(model, 1).empty(), "a token is computed");
        return async_device::counters().n_copies_in - before;
    };
    const int64_t of_weights = copies(Streamed::all) - copies(Streamed::none);
    check(of_weights >= 3 && of_weights <= 6, "experts that lie side by side come in one copy, of each of three "
                                              "weights one or two: " +
                                                  std::to_string(of_weights));
    done("experts side by side");
}

// A lone mul-mat by a weight of this name.
Block named_block(const std::string & name) {
    Block block = lone_block(q4_0);
    block.name += " by " + name;
    block.weights.front().name = name;
    block.build                = [name](Graph & g) { g.output(g.mul_mat(name.c_str(), g.x)); };
    return block;
}

// Blocks that take turns in two slots: no device graph's tensors move, so that CUDA can capture it, and all weights are
// copied ahead, for an odd number of blocks too.
void check_addresses(size_t n_blocks) {
    const AllStreamed all;
    n_slots                = 2;
    const std::string what = std::to_string(n_blocks) + " blocks: ";

    std::vector<Block>         blocks;
    std::vector<const Block *> each;
    blocks.reserve(n_blocks);
    for (size_t i = 0; i < n_blocks; i++) {
        blocks.push_back(named_block("w" + std::to_string(i)));
        each.push_back(&blocks.back());
    }
    const PlanPtr plan = new_plan(plan_text(each, Cut::half, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return;
    }
    const std::vector<Loaded> loaded = load(blocks, plan.get(), 3);
    Session                   session;
    int64_t                   n_built = 0;
    for (int token = 0; token < 6; token++) {
        check_ok(oallama_reset_stats(), "statistics are reset");
        const int64_t n_moved = async_device::counters().n_moved;
        for (size_t i = 0; i < n_blocks; i++) {
            check(nmse(loaded[i].expected, session.compute(*loaded[i].model, 3)) <= summation_bound,
                  what + "a block is right");
        }
        n_built += stats().n_built;
        check(async_device::counters().n_moved == n_moved, what + "no graph moves in token " + std::to_string(token));
        check(token < 2 || stats().n_built == 0, what + "no program is built after the second token");
    }
    check(n_built <= static_cast<int64_t>(n_blocks * (n_blocks % 2 == 0 ? 1 : 2)),
          what + std::to_string(n_built) + " programs are built");
}

void check_addresses() {
    for (const size_t n_blocks : {2, 3, 4, 5}) {
        check_addresses(n_blocks);
    }
    done("addresses of streamed weights");
}

} // namespace

void test_stream() {
    if (late || streamed != Streamed::none) {
        return; // plans of its own
    }
    check_turns();
    check_interval();
    check_ahead();
    check_ahead_of_whole();
    check_pieces();
    check_side_by_side();
    check_addresses();
    check_two_ends();
}

} // namespace split_test
