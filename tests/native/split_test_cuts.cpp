// Cuts that are moved while a model is loaded: what is computed then is what a model loaded with that cut computes.

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type f16  = static_cast<ggml_type>(1);
constexpr ggml_type q4_0 = static_cast<ggml_type>(2);
constexpr ggml_type q4_k = static_cast<ggml_type>(12);

constexpr int n_cuts = 3;

// Where CC of each weight of a block may end.
using Cuts = std::vector<std::vector<int64_t>>;

int64_t granule_of(const Block & block, const Weight & weight) {
    int64_t granule = granularity(weight.type, weight.axis);
    for (const Weight & other : block.weights) {
        granule = block.together ? std::lcm(granule, granularity(other.type, other.axis)) : granule;
    }
    return granule;
}

// At the middle of what is not GG, at its beginning and at its end.
Cuts cuts_of(const Block & block, bool with_gg) {
    Cuts cuts;
    for (const Weight & weight : block.weights) {
        const int64_t granule = granule_of(block, weight);
        const int64_t steps   = (weight.extent() - 1) / granule;
        const int64_t last    = with_gg ? steps * granule : weight.extent();
        cuts.push_back({(steps + 1) / 2 * granule, granule, last});
    }
    return cuts;
}

// The block cut at the first of these; kept: the others are kept beside it.
std::string text_of(const Block & block, const Cuts & cuts, size_t first, bool with_gg, const std::string & layout,
                    bool kept) {
    std::string        text;
    std::istringstream lines(plan_text({&block}, Cut::half, async_device::device_name, layout));
    for (std::string line; std::getline(lines, line);) {
        text += line.rfind("tensor ", 0) == 0 ? "" : line + "\n";
    }
    for (size_t i = 0; i < block.weights.size(); i++) {
        const Weight & weight = block.weights[i];
        const char *   axis   = weight.axis == OALLAMA_ROWS ? "rows" : weight.axis == OALLAMA_COLS ? "cols" : "halves";
        const int64_t  end    = with_gg ? *std::max_element(cuts[i].begin(), cuts[i].end()) : weight.extent();
        const int64_t  cc     = cuts[i][first];
        text += "tensor " + weight.name + " " + type_name(weight.type) + " " + std::to_string(weight.k) + "x" +
                std::to_string(weight.n) + "x" + std::to_string(weight.e) + " " + axis + " " + std::to_string(cc) +
                " " + std::to_string(end - cc) + " " + std::to_string(weight.extent() - end) + " " + layout;
        const std::set<int64_t> others(cuts[i].begin(), cuts[i].end()); // of a small weight some are the same
        for (const int64_t other : others) {
            text += !kept || other == cc ? "" : " cc=" + std::to_string(other);
        }
        text += resident ? " resident\n" : "\n";
    }
    return text;
}

void move(oallama_plan * plan, const Block & block, const Cuts & cuts, size_t to) {
    for (size_t i = 0; i < block.weights.size(); i++) {
        check_ok(oallama_plan_move_cut(plan, block.weights[i].name.c_str(), cuts[i][to]), "a cut is moved");
    }
}

Outputs loaded_with(const Block & block, const Data & data, const std::string & text, int64_t n_tokens) {
    const PlanPtr plan = new_plan(text);
    if (plan == nullptr) {
        return {};
    }
    const Model model(block, data, plan.get());
    Session     session;
    return session.compute(model, n_tokens);
}

void check_moved(const Block & block, bool with_gg, const std::string & layout) {
    const Data    data = make_data(block);
    const Cuts    cuts = cuts_of(block, with_gg);
    const PlanPtr plan = new_plan(text_of(block, cuts, 0, with_gg, layout, true));
    if (plan == nullptr) {
        return;
    }
    const Model model(block, data, plan.get());
    Session     session;
    for (const int64_t n_tokens : {int64_t{1}, int64_t{5}}) {
        for (const size_t to : {size_t{0}, size_t{1}, size_t{2}, size_t{1}, size_t{0}}) {
            const std::string what     = block.name + ", " + layout + (with_gg ? ", GG" : "") + ", cut " +
                                         std::to_string(to) + ", " + std::to_string(n_tokens) + " tokens";
            const std::string text     = text_of(block, cuts, to, with_gg, layout, false);
            const Outputs     expected = loaded_with(block, data, text, n_tokens);
            move(plan.get(), block, cuts, to);
            check(same_bytes(expected, session.compute(model, n_tokens)), what + ": moved is as loaded");
            // llama.cpp may compute a graph again that it prepared for another cut
            SessionOptions again;
            again.reuse   = true;
            again.between = [&] { move(plan.get(), block, cuts, to); };
            Session reuses(again);
            move(plan.get(), block, cuts, (to + 1) % n_cuts);
            check(same_bytes(expected, reuses.compute(model, n_tokens)), what + ": moved between two runs of a graph");
        }
    }
}

oallama_slice slice_of(const oallama_plan * plan) {
    oallama_slice slice = {};
    check_ok(oallama_plan_slice(plan, 0, &slice), "a slice is told");
    return slice;
}

// A graph that llama.cpp prepared while the device computed nothing of it: memory of what is sent now may be another's
// before a slow device has read it.
void check_reused_graph() {
    async_device::Options slow;
    slow.max_delay_us      = 2000;
    slow.refuse_pinned     = true;
    const Block   block    = ffn_block(q4_0, q4_0);
    const Data    data     = make_data(block);
    const Cuts    cuts     = cuts_of(block, false);
    const Outputs expected = loaded_with(block, data, text_of(block, cuts, 1, false, "CPU", false), 7);
    const PlanPtr plan     = new_plan(text_of(block, cuts, 1, false, "CPU", true));
    if (plan == nullptr) {
        return;
    }
    async_device::set_options(slow);
    {
        const Model    model(block, data, plan.get());
        SessionOptions again;
        again.reuse   = true;
        again.between = [&] { move(plan.get(), block, cuts, 1); };
        Session session(again);
        for (int i = 0; i < 20; i++) {
            move(plan.get(), block, cuts, 2);
            check(same_bytes(expected, session.compute(model, 7)), "what is sent is what it was when it was sent");
        }
    }
    async_device::set_options({});
}

// A graph that could not be prepared for want of memory, and is computed when there is some: what is sent is not kept.
void check_graph_that_was_not_prepared() {
    if (resident) {
        return; // a device without memory is more than ggml's own allocator takes
    }
    async_device::Options slow;
    slow.max_delay_us           = 2000;
    slow.refuse_pinned          = true;
    const Block           block = ffn_block(q4_0, q4_0);
    const Data            data  = make_data(block);
    const std::string     text  = text_of(block, cuts_of(block, false), 1, false, "CPU", false);
    const Outputs         right = loaded_with(block, data, text, 64);
    async_device::Options full  = slow;
    const PlanPtr         plan  = new_plan(text);
    if (plan == nullptr) {
        return;
    }
    async_device::set_options(slow);
    {
        const Model model(block, data, plan.get());
        for (int i = 0; i < 10; i++) {
            SessionOptions again;
            again.reuse   = true;
            again.between = [&] { async_device::set_options(slow); };
            Session session(again);
            session.compute(model, 1);
            full.capacity_bytes = static_cast<size_t>(async_device::counters().device_bytes);
            async_device::set_options(full);
            check(same_bytes(right, session.compute(model, 64)), "what is sent is what it was, though not prepared");
        }
    }
    async_device::set_options({});
}

// A device with less room than planned: GG shrinks, and every cut with it.
void check_shrunk() {
    const Block   block = ffn_block(q4_0, q4_0);
    const Data    data  = make_data(block);
    const Cuts    cuts  = cuts_of(block, true);
    const PlanPtr plan  = new_plan(text_of(block, cuts, 1, true, "CPU", true));
    if (plan == nullptr) {
        return;
    }
    async_device::Options small;
    small.max_alloc_bytes = 1024;
    async_device::set_options(small);
    {
        const Model model(block, data, plan.get());
        check_ok(oallama_plan_move_cut(plan.get(), block.weights[0].name.c_str(), slice_of(plan.get()).cuts[0]),
                 "weights are placed");
        async_device::set_options({});
        const oallama_slice slice = slice_of(plan.get());
        check(slice.gg == 0 && slice.n_cuts == n_cuts, "GG is gone, the cuts are not");
        const Outputs expected = loaded_with(block, data, text_of(block, cuts, 1, false, "CPU", false), 5);
        Session       session;
        for (size_t to = 0; to < static_cast<size_t>(slice.n_cuts); to++) {
            for (const Weight & weight : block.weights) {
                check_ok(oallama_plan_move_cut(plan.get(), weight.name.c_str(), slice.cuts[to]), "a cut is moved");
            }
            const double error = nmse(expected, session.compute(model, 5));
            check(error <= summation_bound, "a cut that shrank: NMSE " + text(error));
        }
    }
    async_device::set_options({});
}

// What cuts cost in memory: rows of one matrix are held once as CC and once as CG.
void check_bytes() {
    const Block   block = lone_block(f16);
    const Data    data  = make_data(block);
    const Cuts    cuts  = cuts_of(block, true);
    const PlanPtr plan  = new_plan(text_of(block, cuts, 0, true, "CPU", true));
    if (plan == nullptr) {
        return;
    }
    const Weight & weight = block.weights[0];
    const auto     row    = static_cast<int64_t>(ggml_row_size(weight.type, weight.k));
    const int64_t  range  = cuts[0][2] - cuts[0][1]; // rows between the first and the last cut
    check(slice_of(plan.get()).n_cuts == n_cuts && slice_of(plan.get()).twice_bytes == 0, "cuts are told as planned");
    const Model model(block, data, plan.get());
    for (const size_t to : {size_t{0}, size_t{1}, size_t{2}}) {
        move(plan.get(), block, cuts, to);
        const oallama_slice slice = slice_of(plan.get());
        check(slice.cc == cuts[0][to] && slice.cc + slice.cg + slice.gg == weight.extent(), "the slice is as moved");
        check(slice.host_bytes == row * (cuts[0][2] + range), "what lies between the cuts is held twice");
        check(slice.twice_bytes == row * range, "and told");
        check(slice.n_cuts == n_cuts && slice.cuts[0] == cuts[0][0] && slice.cuts[2] == cuts[0][2], "cuts are told");
    }
    {
        const Model second(block, data, plan.get());
    }
    check(slice_of(plan.get()).loaded == 1, "of two models of a plan one is left");
    move(plan.get(), block, cuts, 1);
    check(slice_of(plan.get()).twice_bytes == row * range, "and what it holds twice is told");
}

void check_refused() {
    const Block   block = lone_block(q4_0);
    const Data    data  = make_data(block);
    const Cuts    cuts  = cuts_of(block, true);
    const PlanPtr plan  = new_plan(text_of(block, cuts, 0, true, "CPU", false));
    if (plan == nullptr) {
        return;
    }
    const char * name = block.weights[0].name.c_str();
    check(oallama_plan_move_cut(plan.get(), name, cuts[0][0]) == OALLAMA_INVALID, "nothing is loaded");
    const Model model(block, data, plan.get());
    check_ok(oallama_plan_move_cut(plan.get(), name, cuts[0][0]), "a cut may be moved to where it is");
    check(oallama_plan_move_cut(plan.get(), name, cuts[0][1]) == OALLAMA_UNSUPPORTED, "a cut that was not kept");
    check(std::string(oallama_last_error()).find("not kept") != std::string::npos, "is said not to be kept");
    check(oallama_plan_move_cut(plan.get(), "other", cuts[0][0]) == OALLAMA_INVALID, "no such tensor");
    check(oallama_plan_move_cut(plan.get(), nullptr, 0) == OALLAMA_INVALID, "no name");
    check(oallama_plan_move_cut(nullptr, name, 0) == OALLAMA_INVALID, "no plan");

    const std::string line   = text_of(block, cuts, 0, true, "CPU", false);
    const std::string start  = line.substr(0, line.size() - 1);
    const std::string first  = std::to_string(cuts[0][0]);
    const std::string extent = std::to_string(block.weights[0].extent());
    for (const std::string & wrong : {first, std::string("33"), extent, std::string("x"), std::string(),
                                      std::string("32 cc=32"), std::string("0 cc=32 cc=64 cc=128 cc=160")}) {
        oallama_plan * made = nullptr;
        check(oallama_plan_new((start + " cc=" + wrong + "\n").c_str(), &made) == OALLAMA_INVALID,
              "refused: cc=" + wrong);
        oallama_plan_free(made);
    }
}

// How long each block took, by its cut.
void check_times() {
    const Block   block = ffn_block(q4_0, q4_0);
    const Data    data  = make_data(block);
    const Cuts    cuts  = cuts_of(block, true);
    const PlanPtr plan  = new_plan(text_of(block, cuts, 0, true, "CPU", true));
    if (plan == nullptr) {
        return;
    }
    const Model                      model(block, data, plan.get());
    Session                          session;
    std::vector<oallama_block_times> times(8);
    int64_t                          n = 0;
    for (const size_t to : {size_t{0}, size_t{0}, size_t{1}}) {
        move(plan.get(), block, cuts, to);
        session.compute(model, to == 0 ? 8 : 5);
    }
    check_ok(oallama_plan_take_times(plan.get(), times.data(), 1, &n), "times are taken");
    check(n == 1, "no more of them than there is room for");
    check_ok(oallama_plan_take_times(plan.get(), times.data() + 1, 7, &n), "times are taken");
    check(n == 1, "and the others later");
    int64_t n_runs = 0;
    for (size_t i = 0; i < 2; i++) {
        const oallama_block_times & time = times[i];
        const size_t                cut  = time.cc == cuts[0][0] ? 0 : 1;
        check(time.cc == cuts[0][cut] && time.cc + time.cg + time.gg == block.weights[0].extent(), "of a cut");
        check(time.batch == 8 && time.n_runs == (cut == 0 ? 2 : 1), "runs");
        check(time.n_tokens == (cut == 0 ? 8 : 5) * time.n_runs, "tokens");
        check(time.host_s > 0 && time.launch_s > 0 && time.wait_s > 0 && time.join_s > 0, "seconds");
        n_runs += time.n_runs;
    }
    check(n_runs == 3, "each run is noted once");
    check_ok(oallama_plan_take_times(plan.get(), times.data(), 8, &n), "times are taken");
    check(n == 0, "once");
    check_ok(oallama_reset_stats(), "statistics are reset");
    session.compute(model, 0);
    check_ok(oallama_plan_take_times(plan.get(), times.data(), 8, &n), "times are taken");
    check(session.status() == GGML_STATUS_SUCCESS && n == 0 && stats().n_phases == 0 && stats().bytes_streamed == 0,
          "a batch of no tokens takes no time and streams nothing");
    check(oallama_plan_take_times(plan.get(), nullptr, 8, &n) == OALLAMA_INVALID, "no room for the times");
}

} // namespace

void test_cuts() {
    const FfnOptions fused = {Ffn::silu, Gate::fused};
    for (const Block & block : {ffn_block(q4_0, q4_0), ffn_block(q4_k, q4_0), ffn_block(q4_0, q4_0, fused),
                                moe_block(q4_0, q4_0), lone_block(f16), qkv_block(q4_0)}) {
        for (ggml_backend_buffer_type_t buft : host_layouts()) {
            check_moved(block, true, ggml_backend_buft_name(buft));
        }
        check_moved(block, false, "CPU");
    }
    done("moved cuts");
    check_reused_graph();
    check_graph_that_was_not_prepared();
    check_shrunk();
    done("cuts of reused graphs, and where GG shrank");
    check_bytes();
    done("bytes of cuts");
    check_refused();
    done("refused cuts");
    const Late kept = std::exchange(late, Late::none); // with an n_g the host may have nothing to do
    check_times();
    late = kept;
    done("times of blocks");
    check_nothing_held("after cuts");
}

} // namespace split_test
