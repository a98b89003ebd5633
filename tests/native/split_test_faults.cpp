// Devices that are too small, cannot do something, or are lost.

#include <algorithm>
#include <cstring>
#include <utility>

#include "split_test.h"
#include "support.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

struct Placed {
    int64_t     gg           = 0;
    int64_t     device_bytes = 0;
    bool        usable       = false;
    std::string problems;
};

Placed placed(const oallama_plan * plan) {
    Placed  all;
    int64_t n_slices = 0;
    check_ok(oallama_plan_count(plan, &n_slices), "slices are counted");
    for (int64_t i = 0; i < n_slices; i++) {
        oallama_slice slice = {};
        check_ok(oallama_plan_slice(plan, i, &slice), "a slice is told");
        all.gg += slice.gg;
        all.device_bytes += slice.device_bytes;
    }
    all.problems = problems(plan, &all.usable);
    return all;
}

struct Subject {
    Block   block;
    Data    data;
    Outputs expected; // 5 tokens
};

Subject subject(const Block & block) {
    const Data data = make_data(block);
    return {block, data, on_cpu(block, data, 5)};
}

void check_small_device(const Subject & own, Cut cut) {
    const PlanPtr whole_plan = plan_of(own.block, cut);
    const int64_t gg_planned = placed(whole_plan.get()).gg;
    int64_t       wanted     = 0;
    {
        const Model model(own.block, own.data, whole_plan.get());
        wanted = placed(whole_plan.get()).device_bytes;
    }
    for (int64_t percent : {0, 1, 10, 50, 90, 99}) {
        async_device::Options options;
        options.max_alloc_bytes = static_cast<size_t>(wanted * percent / 100);
        async_device::set_options(options);
        const PlanPtr     plan = plan_of(own.block, cut);
        const Model       model(own.block, own.data, plan.get());
        const Placed      now  = placed(plan.get());
        const std::string what = own.block.name + ", " + cut_name(cut) + ", room for " + std::to_string(percent) + " %";
        check(model.loaded() && now.usable, what + ": the model is loaded");
        check((now.gg < gg_planned || wanted == 0) && now.device_bytes <= wanted * percent / 100,
              what + ": GG shrinks to what fits");
        check(percent < 90 || now.gg > 0 || own.block.weights.size() == 1 || wanted == 0,
              what + ": GG is as large as can be");
        check((!now.problems.empty() || wanted == 0) && now.problems.find('\n') == std::string::npos,
              what + ": one sentence is told");
        async_device::set_options({}); // activations have room
        Session      session;
        const double error = nmse(own.expected, session.compute(model, 5));
        check(error <= summation_bound, what + ": NMSE " + text(error));
    }
}

void check_refused_type(const Subject & own) {
    async_device::Options options;
    options.refused_type = q4_0;
    async_device::set_options(options);
    const PlanPtr plan = plan_of(own.block, Cut::half);
    const Model   model(own.block, own.data, plan.get());
    const Placed  now = placed(plan.get());
    check(now.gg == 0 && now.usable && !now.problems.empty(), "a type the device does not know stays on the host");
    Session session;
    check(same_bytes(own.expected, session.compute(model, 5)), "and is computed there");
    async_device::set_options({});
}

void check_lost_device(const Subject & own) {
    const PlanPtr plan = plan_of(own.block, Cut::half);
    const Model   model(own.block, own.data, plan.get());
    {
        Session       session;
        const int64_t n_before = async_device::counters().n_graphs;
        check(nmse(own.expected, session.compute(model, 5)) <= summation_bound, "the device is there");
        const int64_t n_graphs = async_device::counters().n_graphs - n_before; // CG and GG may be graphs of their own
        for (int64_t n_more = 0; n_more < n_graphs; n_more++) {                // lost at each of them
            async_device::Options options;
            options.graphs_until_lost = n_graphs + n_more;
            async_device::set_options(options);
            session.compute(model, 5);
            check(session.status() == GGML_STATUS_SUCCESS, "the device is still there");
            for (int i = 0; i < 3; i++) {
                check(session.compute(model, 5).empty() && session.status() == GGML_STATUS_FAILED,
                      "computing on a lost device fails with a status");
            }
        }
    }
    {
        const Setting tokens(late, false);    // with an n_g it would need the device
        const Setting lives(resident, false); // as would what is around it
        const PlanPtr on_host = plan_of(own.block, Cut::none);
        const Model   other(own.block, own.data, on_host.get());
        Session       session;
        check(same_bytes(own.expected, session.compute(other, 5)), "the next context can run on the CPU");
    }
    async_device::set_options({});
    Session session;
    check(nmse(own.expected, session.compute(model, 5)) <= summation_bound, "a device that is back computes again");
}

// A user's Ctrl-C, in the midst of a block: what the device has begun is waited for, and the next graph is right.
void check_aborted(const Subject & own) {
    const PlanPtr  plan = plan_of(own.block, Cut::half);
    const Model    model(own.block, own.data, plan.get());
    const LonePass pass(model, 5);
    bool           aborts = false;
    pass.on_host_node([](void * data) { return *static_cast<bool *>(data); }, &aborts);
    for (const bool now : {false, true, true, false}) {
        aborts                   = now;
        const ggml_status status = pass.compute();
        check(status == (now ? GGML_STATUS_ABORTED : GGML_STATUS_SUCCESS), own.block.name + ": a graph is aborted");
        check(now || nmse(own.expected, pass.outputs()) <= summation_bound,
              own.block.name + ": right before and after");
    }
}

// Weights fit, what is computed with does not.
void check_no_room_to_compute(const Subject & own) {
    const PlanPtr         plan = plan_of(own.block, Cut::half);
    const Model           model(own.block, own.data, plan.get());
    async_device::Options options;
    options.capacity_bytes = static_cast<size_t>(async_device::counters().device_bytes);
    async_device::set_options(options);
    if (resident) { // ggml's own allocator, which needs room there too, is of no use once it was refused
        check(Session().compute(model, 5).empty(), "no room for activations fails");
        async_device::set_options({});
        check(nmse(own.expected, Session().compute(model, 5)) <= summation_bound,
              "the next context computes when there is room again");
        return;
    }
    Session session;
    for (int i = 0; i < 2; i++) {
        check(session.compute(model, 5).empty() && session.status() == GGML_STATUS_ALLOC_FAILED,
              "no room for activations fails with a status");
    }
    async_device::set_options({});
    check(nmse(own.expected, session.compute(model, 5)) <= summation_bound,
          "the same context computes when there is room again");
    options.capacity_bytes = static_cast<size_t>(async_device::counters().device_bytes);
    async_device::set_options(options);
    check(session.compute(model, 600).empty() && session.status() == GGML_STATUS_ALLOC_FAILED,
          "no room for a larger batch fails with a status");
    const double error = nmse(own.expected, session.compute(model, 5));
    check(error <= summation_bound || session.status() == GGML_STATUS_ALLOC_FAILED,
          "and the small one is right or fails: NMSE " + text(error));
    async_device::set_options({});
    check(nmse(own.expected, session.compute(model, 5)) <= summation_bound, "and both work when there is room again");
}

// A batch whose CC is streamed as well (CG') needs a larger ring than a token, and the device has no room for it.
void check_ring_that_cannot_grow(const Subject & own) {
    const Setting streams(streamed, Streamed::half);
    const Setting tokens(late, true);
    const Block   other      = lone_block(q4_0); // smaller, so that its slots are too
    const Data    other_data = make_data(other);
    const PlanPtr plan       = plan_of(own.block, Cut::half);
    const PlanPtr other_plan = plan_of(other, Cut::half);
    const Model   model(own.block, own.data, plan.get());
    const Model   small(other, other_data, other_plan.get());
    const Model   whole(own.block, own.data, host_layouts().front());
    const Model   small_whole(other, other_data, host_layouts().front());
    Session       cpu({/*split=*/false, /*gpu=*/false});
    const Outputs expected       = cpu.compute(whole, 1);
    const Outputs many_expected  = cpu.compute(whole, 600);
    const Outputs small_expected = cpu.compute(small_whole, 1);
    const auto    computes       = [](Session & session, const Model & subject, int64_t n_tokens, const Outputs & right,
                                      const std::string & when) {
        const double error = nmse(right, session.compute(subject, n_tokens));
        check(error <= summation_bound,
              subject.block().name + ", " + std::to_string(n_tokens) + " tokens " + when + ": NMSE " + text(error));
    };
    {
        Session session;
        for (int round = 0; round < 2; round++) { // the ring learns that each follows the other
            computes(session, small, 1, small_expected, "before the ring is to grow");
            computes(session, model, 1, expected, "before the ring is to grow");
        }
        const int64_t         held = memory().device_compute;
        async_device::Options options;
        options.capacity_bytes = static_cast<size_t>(async_device::counters().device_bytes);
        async_device::set_options(options);
        for (int i = 0; i < 2; i++) {
            check(session.compute(model, 600).empty() && session.status() == GGML_STATUS_ALLOC_FAILED,
                  own.block.name + ": no room for a larger ring fails with a status");
            check(memory().device_compute <= held, own.block.name + ": a ring that is gone is not counted");
            computes(session, small, 1, small_expected, "after a failed growth");
            computes(session, model, 1, expected, "after a failed growth");
            computes(session, small, 1, small_expected, "after a failed growth");
        }
        async_device::set_options({});
        computes(session, model, 600, many_expected, "when there is room again");
        computes(session, model, 1, expected, "when there is room again");
        computes(session, small, 1, small_expected, "when there is room again");
    }
    check(memory().device_compute == 0, own.block.name + ": no ring is held after its context");
}

// A slot that held NaN gets weights whose rows the device reads beyond: all of one, and one expert out of four.
void check_stale_slots() {
    const Setting streams(streamed, Streamed::all);
    const Setting slots(n_slots, 1);
    const Block   nan  = lone_block(GGML_TYPE_F32);
    Data          data = make_data(nan);
    std::fill(data.begin()->second.begin(), data.begin()->second.end(), uint8_t{0xFF});
    const PlanPtr nan_plan = plan_of(nan, Cut::all);
    const Model   nothing(nan, data, nan_plan.get());
    for (const Block & block : {lone_block(q4_0), ffn_block(q4_0, q4_0),
                                moe_block(q4_0, q4_0, {Ffn::silu, Gate::par, false, false, /*n_used=*/1})}) {
        const Subject own  = subject(block);
        const PlanPtr plan = plan_of(own.block, Cut::all);
        const Model   model(own.block, own.data, plan.get());
        const Model   whole(own.block, own.data, host_layouts().front());
        Session       cpu({/*split=*/false, /*gpu=*/false});
        Session       session;
        for (uint64_t seed = 1; seed <= 4; seed++) {
            session.compute(nothing, 1);
            const double error = nmse(cpu.compute(whole, 1, seed), session.compute(model, 1, seed));
            check(error <= summation_bound, block.name + " in a slot that held NaN: NMSE " + text(error));
        }
    }
}

// Experts that are not there, as a corrupt router would choose them: nothing is copied anywhere.
void check_wrong_experts() {
    const Setting streams(streamed, Streamed::all);
    Block         block;
    block.name    = "experts by number";
    block.n_embd  = 64;
    block.weights = {{"ffn_up_exps", GGML_TYPE_F32, 64, 96, 4, OALLAMA_ROWS}};
    block.extras  = {{"numbers", {2}}};
    block.build   = [](Graph & g) {
        ggml_tensor * ids = ggml_cast(g.ctx, ggml_reshape_2d(g.ctx, g["numbers"], 2, 1), GGML_TYPE_I32);
        ggml_tensor * cur = ggml_reshape_3d(g.ctx, ggml_rms_norm(g.ctx, g.x, 1e-5F), 64, 1, 1);
        g.output(ggml_scale(g.ctx, ggml_mul_mat_id(g.ctx, g["ffn_up_exps"], cur, ids), 0.5F));
    };
    Data          data = make_data(block);
    const PlanPtr plan = plan_of(block, Cut::all);
    const auto    set  = [&](float first, float second) {
        const float numbers[] = {first, second};
        data["numbers"].resize(sizeof numbers);
        std::memcpy(data["numbers"].data(), numbers, sizeof numbers);
    };
    Session session;
    for (const std::pair<float, float> & numbers :
         std::vector<std::pair<float, float>>{{4, 0}, {0, -1}, {1e9F, 2}, {-2e9F, 1}}) {
        set(numbers.first, numbers.second);
        const Model model(block, data, plan.get());
        check(session.compute(model, 1).empty() && session.status() == GGML_STATUS_FAILED,
              "an expert that is not there fails with a status");
    }
    set(3, 1);
    const Model model(block, data, plan.get());
    const Model whole(block, data, host_layouts().front());
    Session     cpu({/*split=*/false, /*gpu=*/false});
    check(nmse(cpu.compute(whole, 1), session.compute(model, 1)) <= summation_bound,
          "and the context computes with those that are");
}

void check_layouts() {
    const Subject own          = subject(ffn_block(GGML_TYPE_F32, GGML_TYPE_F32));
    std::string   text_of_plan = plan_text({&own.block}, Cut::half, async_device::device_name, "CPU");
    for (size_t at = text_of_plan.find(" CPU"); at != std::string::npos; at = text_of_plan.find(" CPU")) {
        text_of_plan.replace(at, 4, " NO_SUCH_LAYOUT");
    }
    const PlanPtr plan = new_plan(text_of_plan);
    const Model   model(own.block, own.data, plan.get());
    check(placed(plan.get()).problems.find("NO_SUCH_LAYOUT") != std::string::npos, "an unknown layout is told");
    Session session;
    check(nmse(own.expected, session.compute(model, 5)) <= summation_bound, "and plain memory used");
}

} // namespace

void test_faults() {
    const Subject dense   = subject(ffn_block(q4_0, q4_0));
    const Subject experts = subject(moe_block(GGML_TYPE_F16, GGML_TYPE_F16));
    const Subject fused   = subject(ffn_block(GGML_TYPE_F32, GGML_TYPE_F32, {Ffn::silu, Gate::fused}));
    const Subject lone    = subject(lone_block(q4_0));
    for (const Subject * own : {&dense, &experts, &fused, &lone}) {
        for (Cut cut : {Cut::half, Cut::all}) {
            check_small_device(*own, cut);
        }
        check_aborted(*own);
        check_no_room_to_compute(*own);
        if (!resident) { // see check_no_room_to_compute
            check_ring_that_cannot_grow(*own);
        }
        check_lost_device(*own);
    }
    done("devices that are too small or lost");
    check_stale_slots();
    check_wrong_experts();
    done("slots and experts");
    check_refused_type(dense);
    check_layouts();
    done("types and layouts that are not there");
}

} // namespace split_test
