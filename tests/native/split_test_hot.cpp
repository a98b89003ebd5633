// Hot experts: whole on the device, the others on the host. That results are right is the random cuts' to test.

#include <algorithm>
#include <set>

#include "experts.h"
#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type slow_type = GGML_TYPE_IQ2_S;

// Every weight on the host; of experts, those that are hot on the device too.
std::string hot_text(const Block & block, const std::string & hot, const std::string & lines = "",
                     const std::string & layout = "CPU") {
    std::string text = "oallama-plan 1\nmodel test\ndevice TEST0\nsum 1048576\n" + lines;
    for (const Weight & weight : block.weights) {
        text += tensor_line(weight, weight.extent(), 0, layout) + " hot=" + hot + (resident ? " resident\n" : "\n");
    }
    return text;
}

// One sub-graph and one segment, and of one token as many rows come back as may be hits.
void check_phases(bool bias, const std::string & hot, int64_t n_hot) {
    const Block   block = moe_block(q4_0, q4_0, {Ffn::silu, Gate::par, bias});
    const PlanPtr plan  = new_plan(hot_text(block, hot));
    const Model   model(block, plan.get());
    int64_t       bytes = 0;
    for (const Weight & weight : block.weights) {
        bytes += weight.bytes() / weight.e * n_hot;
    }
    check(told(plan.get()).device_bytes == bytes && memory().device_weights >= bytes,
          "the device holds the hot experts' bytes");
    const oallama_stats now = stats_of_known(model, 1);
    check(now.n_graphs == 1 && now.n_segments == 1 && now.n_built == 0,
          std::string("experts, some of them hot, are one segment") + (bias ? ", with biases" : ""));
    const int64_t n_rows = std::min<int64_t>(n_hot, 2);
    if (resident) { // the device adds the host's sum to its own
        check(now.bytes_out == block.n_embd * 4 + 2 * 4 + 2 * 4, "an input, experts and routing weights are fetched");
        check(now.bytes_in == block.n_embd * 4 + (oallama::number_alignment + n_rows) * 4,
              "slots, routing weights behind them and one row of the host's are sent");
        return;
    }
    check(now.bytes_out == n_rows * block.n_embd * 4, "rows that come back");
    check(now.bytes_in == block.n_embd * 4 + n_rows * 4, "an input and slots are sent: biases are there since before");
}

// The device has no mul-mat by down's experts whose input is read in F32: down has no hot ones.
void check_refused_input() {
    MoeOptions options;
    options.f32         = true;
    const Block   block = moe_block(q4_0, q4_0, options);
    const PlanPtr plan  = new_plan(hot_text(block, "0,2"));
    const Model   model(block, plan.get());
    Session       session;
    check(told(plan.get()).problems.find("ffn_down_exps") != std::string::npos, "that down has no hot experts is told");
    check_right(session, model, 1, "without hot experts of down");
    check_right(session, model, 5, "without hot experts of down");
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
    batch.n_used = 4;
    oallama::route(batch, 3, slot_of, 3, /*once=*/false, 3);
    check(batch.n_device == 3 && batch.slots.size() == 3 * 50, "3 of 4 may be hits");
    for (auto slot = batch.slots.begin(); slot != batch.slots.end(); slot += 3) {
        check(std::set<int32_t>(slot, slot + 3) == std::set<int32_t>{0, 1, 2}, "a token of several uses a slot once");
    }
    batch.chosen = {0, 3, 2, 5};
    oallama::route(batch, 3, slot_of, 3, /*once=*/false, 3);
    check(batch.slots == std::vector<int32_t>{1, 1, 1}, "one token computes with the slot of a hit");
    oallama::route(batch, 3, slot_of, 3, /*once=*/true, 3);
    check(batch.slots == std::vector<int32_t>{1, 0, 2}, "of weights in float with each slot once");
    check(batch.device_rows == std::vector<int32_t>{1, -1, -1}, "which gives no row");
    batch.chosen = {1, 3, 4, 0};
    oallama::route(batch, 3, slot_of, 3, /*once=*/false, 2);
    check(batch.slots == std::vector<int32_t>{0, 1, 0} && batch.device_rows == std::vector<int32_t>{0, 1, -1},
          "the device computes as many hits as it is given");
    check(batch.host_ids == std::vector<int32_t>{4, 0} && batch.host_rows == std::vector<int32_t>{2, 3},
          "the host the others, and misses");
}

// Packed rows, and slots that serve several experts: every row is on one side, and is computed with its own expert,
// which is copied once what its slot served before has been computed.
void check_packed_routing() {
    bridge::Random random(3);
    for (int round = 0; round < 300; round++) {
        const auto           n_expert = static_cast<int32_t>(2 + random.below(9));
        const auto           n_slots  = static_cast<int32_t>(1 + random.below(n_expert - 1));
        std::vector<int32_t> slots;
        for (int32_t slot = 0; slot < n_slots; slot++) {
            slots.push_back(slot);
        }
        oallama::ExpertTable table(slots, n_expert, {nullptr});
        oallama::RoutedBatch batch;
        batch.n_used           = 1 + random.below(n_expert);
        const int64_t n_tokens = 2 + random.below(30);
        for (int64_t token = 0; token < n_tokens; token++) {
            const auto first = static_cast<int32_t>(random.below(n_expert));
            for (int32_t rank = 0; rank < static_cast<int32_t>(batch.n_used); rank++) {
                batch.chosen.push_back((first + rank) % n_expert);
            }
        }
        table.count(batch.chosen, batch.n_used);
        std::vector<int32_t> missed = table.missed();
        missed.resize(static_cast<size_t>(random.below(static_cast<int64_t>(missed.size()) + 1)));
        const std::vector<int32_t>                    before = table.slot_of();
        const std::vector<oallama::ExpertTable::Move> moves  = table.take(missed, random.below(3) > 0);
        const int64_t                                 n_most = 1 + random.below(40);
        std::vector<int32_t>                          holds  = slots;
        std::vector<size_t>                           used_by(static_cast<size_t>(n_slots)); // launches so far
        oallama::route_packed(batch, n_most, before, moves);
        std::multiset<int32_t> rows(batch.host_rows.begin(), batch.host_rows.end());
        rows.insert(batch.device_rows.begin(), batch.device_rows.end());
        bool right =
            rows.size() == batch.chosen.size() && std::set<int32_t>(rows.begin(), rows.end()).size() == rows.size();
        size_t  n_copied = 0;
        size_t  n        = 0;
        int64_t end      = 0;
        int64_t free     = 0;
        for (const oallama::RoutedLaunch & launch : batch.launches) {
            right = right && launch.begin == end && launch.end > end && launch.end - end <= n_most &&
                    launch.at >= free && launch.at % oallama::number_alignment == 0 && launch.after <= n;
            for (size_t i = 0; i < launch.n_copies; i++) {
                const oallama::ExpertTable::Move & move = moves[n_copied++];
                right = right && launch.after >= used_by[static_cast<size_t>(move.slot)];
                holds[static_cast<size_t>(move.slot)] = move.expert;
            }
            n++;
            for (int64_t i = launch.begin; i < launch.end; i++) {
                const auto slot = static_cast<size_t>(batch.slots[static_cast<size_t>(i)]);
                right = right &&
                        holds[slot] == batch.chosen[static_cast<size_t>(batch.device_rows[static_cast<size_t>(i)])];
                used_by[slot] = n;
            }
            end  = launch.end;
            free = launch.at + launch.end - launch.begin;
        }
        right = right && n_copied == moves.size() && end == static_cast<int64_t>(batch.device_rows.size());
        check(right, "packed rows, drawn " + std::to_string(round));
        check(table.expert_in() == holds, "the table says what slots hold in the end, drawn " + std::to_string(round));
    }
}

// Several tokens use more experts than there are slots: slots serve one after the other.
void check_turns() {
    for (const bool bias : {false, true}) {
        MoeOptions options;
        options.n_expert    = 12;
        options.n_used      = 4;
        options.bias        = bias;
        const Block   block = moe_block(slow_type, slow_type, options);
        const PlanPtr plan  = new_plan(hot_text(block, "0,1,5", "exchange idle\nlink 1000000000000000\n"));
        const Model   model(block, plan.get());
        Session       session;
        int64_t       most = 0; // of a batch; how many it is depends on what the host takes
        reset_stats();
        for (uint64_t seed = 1; seed <= 20 || (most <= 3 && seed < 2000); seed++) {
            const int64_t before = stats().n_fetched;
            check_right(session, model, seed % 4 == 0 ? 1 : 40, "experts in turns", seed);
            most = std::max(most, stats().n_fetched - before);
        }
        check(most > 3, "a batch has more fetched than there are slots, " + std::to_string(most));
    }
}

// Uses of experts are counted, hits and misses alike, batches of one token apart, also where none is hot, and are still
// known when the model is freed.
void check_uses() {
    const Block block = moe_block(q4_0, q4_0);
    Data        data  = make_data(block);
    std::fill(data["gate_inp"].begin(), data["gate_inp"].end(), uint8_t{0}); // all tokens use the same two experts
    for (const std::string & text :
         {hot_text(block, "0,2"), plan_text({&block}, Cut::half), plan_text({&block}, Cut::none)}) {
        for (const bool counts : {true, false}) {
            const PlanPtr plan = new_plan(text + (counts ? "count 1\n" : "count 0\n"));
            {
                const Model model(block, data, plan.get());
                Session     session;
                for (const int64_t n_tokens : {1, 1, 7}) {
                    session.compute(model, n_tokens);
                }
            }
            const auto uses = static_cast<oallama::LoadedPlan *>(buft_of(plan.get())->context)->uses();
            check(uses.size() == (counts ? block.weights.size() : 0),
                  "every weight's uses are counted where that is asked");
            for (const auto & [name, totals] : uses) {
                for (const oallama::ExpertUses::Batches & batches : totals) {
                    const int64_t                n = &batches == totals.data() ? 2 : 7;
                    const std::multiset<int64_t> of_expert(batches.of_expert.begin(), batches.of_expert.end());
                    check(batches.n_tokens == n, name + ": tokens");
                    check(of_expert == std::multiset<int64_t>{0, 0, n, n},
                          name + ": two experts each, always the same");
                    const int64_t known = n == 7 ? 7 : 1; // the first token finds nothing that was used before
                    check(batches.of_rank == std::vector<int64_t>{known, known, 0, 0},
                          name + ": which are those that were used most of late");
                }
            }
        }
    }
}

//
// experts that are exchanged
//

constexpr const char * eager = "exchange eager\nlink 1000000000\npiece 4096\n";

// Results are the CPU's in every state of the table: while an expert is on its way, and when it is there.
void check_exchange(const Block & block, const std::string & lines, const std::string & layout, bool moves,
                    const std::string & when) {
    const PlanPtr plan = new_plan(hot_text(block, "0,1,2", lines, layout));
    const Model   model(block, plan.get());
    Session       session;
    reset_stats();
    for (uint64_t seed = 1; seed <= 40; seed++) {
        check_right(session, model, seed % 5 == 0 ? 3 : 1, when + ", batch " + std::to_string(seed), seed);
    }
    const oallama_stats done = stats();
    check((done.n_exchanged > 4) == moves, when + ": experts are exchanged, " + std::to_string(done.n_exchanged));
    check(done.n_uses == 2 * (32 + 3 * 8) && done.n_hits <= done.n_uses, when + ": all uses are counted");
    check((done.bytes_exchanged > 0) == moves, when + ": which takes bytes");
    int64_t bytes = 0;
    for (const Weight & weight : block.weights) {
        bytes += weight.bytes() / weight.e * 3;
    }
    check(told(plan.get()).device_bytes == bytes, when + ": the device holds as many bytes as before");
}

void check_exchanges() {
    const auto moe = [](ggml_type type, MoeOptions options = {}) {
        options.n_expert = 8;
        return moe_block(type, type, options);
    };
    const bool pinned = true;
    for (const ggml_type type : {q4_0, GGML_TYPE_F16, GGML_TYPE_F32}) {
        check_exchange(moe(type), eager, "CPU", pinned, std::string("exchange, ") + ggml_type_name(type));
    }
    MoeOptions biased;
    biased.bias = true;
    check_exchange(moe(q4_0, biased), eager, "CPU", true, "exchange with biases");
    MoeOptions fused;
    fused.gate = Gate::fused;
    check_exchange(moe(q4_0, fused), eager, "CPU", true, "exchange of a fused gate and up");
    check_exchange(moe(q4_0), "exchange off\nlink 1000000000\n", "CPU", false, "no exchange");
    for (const ggml_backend_buffer_type_t layout : host_layouts()) {
        const std::string name  = ggml_backend_buft_name(layout);
        const bool        plain = name == "CPU" || !layout_holds(layout, moe(q4_0).weights.front());
        check_exchange(moe(q4_0), eager, name, plain, "exchange in the layout " + name);
        check_exchange(moe(q4_0), std::string(eager) + "twice 1\n", name, true, "exchange of copies beside " + name);
    }
    DeviceOptions options;
    options.refuse_events = true;
    options.set();
    check_exchange(moe(q4_0), eager, "CPU", true, "exchange without events");
    options.refuse_events = false;
    options.max_delay_us  = 200;
    options.set();
    check_exchange(moe(q4_0), eager, "CPU", true, "exchange on a slow device");
    options.max_delay_us    = 0;
    options.pinned_capacity = 0;
    options.set();
    check_exchange(moe(q4_0), eager, "CPU", false, "no exchange out of memory that is not pinned");
}

// Where the link is fast beside the host, missed experts are fetched for the token that needs them, sooner or later;
// else none. The host has six times as many rows as the device, of a type that is slow to multiply by.
void check_fetches() {
    MoeOptions options;
    options.n_expert  = 8;
    options.n_used    = 6;
    const Block block = moe_block(slow_type, slow_type, options);
    for (const bool fast : {true, false}) {
        const std::string link = fast ? "1000000000000000" : "1000";
        const PlanPtr     plan = new_plan(hot_text(block, "0,1", "exchange idle\nlink " + link + "\n"));
        const Model       model(block, plan.get());
        Session           session;
        reset_stats();
        for (uint64_t seed = 1; seed <= 30 || (fast && stats().n_fetched == 0 && seed < 5000); seed++) {
            check_right(session, model, 1 + static_cast<int64_t>(seed % 2), "tokens whose experts are fetched", seed);
        }
        const oallama_stats done = stats();
        check((done.n_fetched > 0) == fast, "experts are fetched over a fast link, " + std::to_string(done.n_fetched));
        check(done.n_hits + done.n_fetched <= done.n_uses, "a fetched one is no hit");
        check(fast || done.bytes_exchanged == 0, "a link that has no time copies nothing");
    }
}

// A second context that computes with the same experts ends their exchange: it may read any slot at any time.
void check_two_contexts() {
    MoeOptions options;
    options.n_expert    = 8;
    const Block   block = moe_block(q4_0, q4_0, options);
    const PlanPtr plan  = new_plan(hot_text(block, "0,1,2", eager));
    const Model   model(block, plan.get());
    {
        Session first;
        Session second;
        for (uint64_t seed = 1; seed <= 20; seed++) {
            check_right(first, model, 1, "one context", seed);
        }
        check_right(second, model, 1, "a second context", 1);
        reset_stats();
        for (uint64_t seed = 1; seed <= 20; seed++) {
            check_right(first, model, 1, "the first of two contexts", seed);
            check_right(second, model, 1, "the second of two contexts", seed + 5);
        }
        check(stats().n_exchanged == 0, "two contexts exchange nothing");
    }
    Session after;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        check_right(after, model, 1, "a context behind two others", seed);
    }
}

// The rule, replayed by itself: with each token counts decay, and one missed expert takes the place of the least used
// one where it is used more. Routing has a hot set that changes.
void check_rule() {
    constexpr int32_t    n_expert = 16;
    constexpr int32_t    n_used   = 2;
    std::vector<int32_t> slots    = {0, 1, 2, 3};
    std::vector<double>  uses(n_expert);
    int64_t              n_hits = 0;
    int64_t              n_same = 0;
    // as a table that may move has weights, and reads nothing of them
    oallama::ExpertTable table(slots, n_expert, {nullptr});
    bridge::Random       random(5);
    for (int32_t token = 0; token < 400; token++) {
        const auto    first  = static_cast<int32_t>((token / 100 * 4 + random.below(4)) % n_expert);
        const auto    second = static_cast<int32_t>((first + 1 + random.below(n_expert - 1)) % n_expert);
        const int32_t ids[]  = {first, second};
        int32_t       missed = -1;
        for (double & one : uses) {
            one *= 0.98;
        }
        const std::vector<int32_t> slot_of = table.slot_of();
        for (const int32_t id : ids) {
            uses[static_cast<size_t>(id)] += 1.0;
        }
        for (const int32_t id : ids) {
            const bool hit = std::find(slots.begin(), slots.end(), id) != slots.end();
            n_hits += hit ? 1 : 0;
            n_same += hit == (slot_of[static_cast<size_t>(id)] >= 0) ? 1 : 0;
            missed =
                !hit && (missed < 0 || uses[static_cast<size_t>(id)] > uses[static_cast<size_t>(missed)]) ? id : missed;
        }
        const auto least = std::min_element(slots.begin(), slots.end(), [&](int32_t a, int32_t b) {
            return uses[static_cast<size_t>(a)] < uses[static_cast<size_t>(b)];
        });
        if (missed >= 0 && uses[static_cast<size_t>(missed)] > uses[static_cast<size_t>(*least)]) {
            *least = missed;
        }
        table.count({first, second}, n_used);
        if (const oallama::ExpertTable::Move move = table.next(); move.expert >= 0) {
            table.put(move);
        }
    }
    check(n_same >= n_used * 400 * 99 / 100, "the table is the rule's, but for ties: " + std::to_string(n_same));
    check(n_hits > n_used * 400 / 3, "and follows the routing");
}

} // namespace

void test_hot() {
    check_routing();
    for (const bool bias : {false, true}) {
        check_phases(bias, "2", 1);
        check_phases(bias, "0,2,3", 3);
    }
    check_refused_input();
    check_rule();
    check_exchanges();
    check_fetches();
    check_packed_routing();
    check_turns();
    check_two_contexts();
    check_uses();
}

} // namespace split_test
