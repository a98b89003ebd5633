// Devices that are too small, cannot do something, or are lost; routers and layouts that are wrong.

#include <algorithm>
#include <array>
#include <cstring>

#include "split_test.h"

namespace split_test {

namespace {

void set_capacity_to_what_is_held(DeviceOptions & device) {
    device.capacity_bytes = static_cast<size_t>(async_device::counters().device_bytes);
    device.set();
}

void check_small_device(const Block & block, Cut cut) {
    const PlanPtr whole_plan = plan_of(block, cut);
    const int64_t gg_planned = told(whole_plan.get()).gg;
    int64_t       wanted     = 0;
    {
        const Model model(block, whole_plan.get());
        wanted = told(whole_plan.get()).device_bytes;
    }
    for (const int64_t percent : {0, 1, 10, 50, 90, 99}) {
        DeviceOptions device;
        device.max_alloc_bytes = static_cast<size_t>(wanted * percent / 100);
        device.set();
        const PlanPtr     plan = plan_of(block, cut);
        const Model       model(block, plan.get());
        const Told        now  = told(plan.get());
        const std::string what = block.name + ", " + cut_name(cut) + ", room for " + std::to_string(percent) + " %";
        check(model.loaded() && now.usable, what + ": the model is loaded");
        check((now.gg < gg_planned || wanted == 0) && now.device_bytes <= wanted * percent / 100,
              what + ": GG shrinks to what fits");
        check(percent < 90 || now.gg > 0 || block.weights.size() == 1 || wanted == 0, what + ": GG is large");
        check((!now.problems.empty() || wanted == 0) && now.problems.find('\n') == std::string::npos,
              what + ": one sentence is told");
        async_device::set_options({}); // activations have room
        Session session;
        check_right(session, model, 5, what);
    }
}

void check_refused_type(const Block & block) {
    DeviceOptions device;
    device.refused_type = q4_0;
    device.set();
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    const Told    now = told(plan.get());
    check(now.gg == 0 && now.usable && !now.problems.empty(), "a type the device does not know stays on the host");
    Session session;
    check_right(session, model, 5, "and is computed there");
}

// The input of down is to be read in F32, for which the device has no kernel: all of down is computed on the host. A
// plan that does not tell this cannot be computed.
void check_refused_input() {
    MoeOptions options;
    options.f32 = true;
    Block block = moe_block(q4_0, q4_0, options);
    {
        const PlanPtr plan = plan_of(block, Cut::half);
        const Model   model(block, plan.get());
        const Told    now = told(plan.get());
        check(now.gg > 0 && now.usable && now.problems.find("ffn_down_exps") != std::string::npos,
              "a mul-mat the device does not have stays on the host: " + now.problems);
        Session session;
        check_right(session, model, 1, "with down on the host");
        check_right(session, model, 5, "with down on the host");
    }
    block.weights.back().input_f32 = false;
    const PlanPtr plan             = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    Session       session;
    check(told(plan.get()).problems.empty() && session.fails(GGML_STATUS_FAILED, model, 1),
          "the device refuses what the plan did not tell");
}

void check_lost_device(const Block & block) {
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    DeviceOptions device;
    {
        Session       session;
        const int64_t n_before = async_device::counters().n_graphs;
        check_right(session, model, 5, "while the device is there");
        const int64_t n_graphs = async_device::counters().n_graphs - n_before; // CG and GG may be graphs of their own
        for (int64_t n_more = 0; n_more < n_graphs; n_more++) {                // lost at each of them
            device.graphs_until_lost = n_graphs + n_more;
            device.set();
            check(!session.compute(model, 5).empty(), "the device is still there");
            for (int i = 0; i < 3; i++) {
                check(session.fails(GGML_STATUS_FAILED, model, 5), "computing on a lost device fails with a status");
            }
        }
    }
    {
        const Setting tokens(late, false);    // with an n_g it would need the device
        const Setting lives(resident, false); // as would what is around it
        const PlanPtr on_host = plan_of(block, Cut::none);
        const Model   other(block, on_host.get());
        Session       session;
        check_right(session, other, 5, "on the CPU, in the next context");
    }
    async_device::set_options({});
    Session session;
    check_right(session, model, 5, "on a device that is back");
}

// A user's Ctrl-C, in the midst of a block: what the device has begun is waited for, and the next graph is right.
void check_aborted(const Block & block) {
    const PlanPtr  plan = plan_of(block, Cut::half);
    const Model    model(block, plan.get());
    const LonePass pass(model, 5);
    for (const bool aborts : {false, true, true, false}) {
        const ggml_status status = pass.compute([&] { return aborts; });
        check(status == (aborts ? GGML_STATUS_ABORTED : GGML_STATUS_SUCCESS), block.name + ": a graph is aborted");
        check(aborts || nmse(on_cpu(model, 5), pass.outputs()) <= summation_bound,
              block.name + ": right before and after");
    }
}

// Weights fit, what is computed with does not.
void check_no_room_to_compute(const Block & block) {
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    DeviceOptions device;
    set_capacity_to_what_is_held(device);
    if (resident) { // ggml's own allocator, which needs room there too, is of no use once it was refused
        check(Session().compute(model, 5).empty(), "no room for activations fails");
        async_device::set_options({});
        Session next;
        check_right(next, model, 5, "in the next context, when there is room again");
        return;
    }
    Session session;
    for (int i = 0; i < 2; i++) {
        check(session.fails(GGML_STATUS_ALLOC_FAILED, model, 5), "no room for activations fails with a status");
    }
    async_device::set_options({});
    check_right(session, model, 5, "in the same context, when there is room again");
    set_capacity_to_what_is_held(device);
    check(session.fails(GGML_STATUS_ALLOC_FAILED, model, 600), "no room for a larger batch fails with a status");
    check(is_right(session, model, 5) || session.status() == GGML_STATUS_ALLOC_FAILED,
          "and the small one is right or fails");
    async_device::set_options({});
    check_right(session, model, 5, "after a larger batch failed");
}

// A batch whose CC is streamed as well (CG') needs a larger ring than a token, and the device has no room for it.
void check_ring_that_cannot_grow(const Block & block) {
    const Setting streams(streamed, Streamed::half);
    const Setting tokens(late, true);
    const Block   other      = lone_block(q4_0); // smaller, so that its slots are too
    const PlanPtr plan       = plan_of(block, Cut::half);
    const PlanPtr other_plan = plan_of(other, Cut::half);
    const Model   model(block, plan.get());
    const Model   small(other, other_plan.get());
    {
        Session    session;
        const auto both_are_right = [&](const std::string & when) {
            check_right(session, small, 1, when);
            check_right(session, model, 1, when);
        };
        both_are_right("before the ring is to grow"); // it learns that each follows the other
        both_are_right("before the ring is to grow");
        const int64_t held = memory().device_compute;
        DeviceOptions device;
        set_capacity_to_what_is_held(device);
        for (int i = 0; i < 2; i++) {
            check(session.fails(GGML_STATUS_ALLOC_FAILED, model, 600),
                  block.name + ": no room for a larger ring fails with a status");
            check(memory().device_compute <= held, block.name + ": a ring that is gone is not counted");
            both_are_right("after a failed growth");
        }
        async_device::set_options({});
        check_right(session, model, 600, "when there is room again");
        both_are_right("when there is room again");
    }
    check(memory().device_compute == 0, block.name + ": no ring is held after its context");
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
        const PlanPtr plan = plan_of(block, Cut::all);
        const Model   model(block, plan.get());
        Session       session;
        for (uint64_t seed = 1; seed <= 4; seed++) {
            session.compute(nothing, 1);
            check_right(session, model, 1, "in a slot that held NaN", seed);
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
        ggml_tensor * cur = ggml_reshape_3d(g.ctx, g.norm(), 64, 1, 1);
        g.output(ggml_scale(g.ctx, ggml_mul_mat_id(g.ctx, g["ffn_up_exps"], cur, ids), 0.5F));
    };
    const PlanPtr plan = plan_of(block, Cut::all);
    Session       session;
    for (const std::array<float, 2> & numbers :
         {std::array{4.0F, 0.0F}, {0.0F, -1.0F}, {1e9F, 2.0F}, {-2e9F, 1.0F}, {3.0F, 1.0F}}) {
        Data data = make_data(block);
        std::memcpy(data["numbers"].data(), numbers.data(), sizeof numbers);
        const Model model(block, data, plan.get());
        if (numbers[0] == 3.0F) {
            check_right(session, model, 1, "of experts that are there");
        } else {
            check(session.fails(GGML_STATUS_FAILED, model, 1), "an expert that is not there fails with a status");
        }
    }
}

void check_layouts(const Block & block) {
    std::string text = plan_text({&block}, Cut::half);
    for (size_t at = text.find(" CPU"); at != std::string::npos; at = text.find(" CPU")) {
        text.replace(at, 4, " NO_SUCH_LAYOUT");
    }
    const PlanPtr plan = new_plan(text);
    const Model   model(block, plan.get());
    check(told(plan.get()).problems.find("NO_SUCH_LAYOUT") != std::string::npos, "an unknown layout is told");
    Session session;
    check_right(session, model, 5, "in plain memory instead");
}

} // namespace

void test_faults() {
    for (const Block & block : {ffn_block(q4_0, q4_0), moe_block(GGML_TYPE_F16, GGML_TYPE_F16),
                                ffn_block(GGML_TYPE_F32, GGML_TYPE_F32, {Ffn::silu, Gate::fused}), lone_block(q4_0)}) {
        check_small_device(block, Cut::half);
        check_small_device(block, Cut::all);
        check_aborted(block);
        check_no_room_to_compute(block);
        if (!resident) { // see check_no_room_to_compute
            check_ring_that_cannot_grow(block);
        }
        check_lost_device(block);
    }
    check_stale_slots();
    check_wrong_experts();
    check_refused_type(ffn_block(q4_0, q4_0));
    check_refused_input();
    check_layouts(ffn_block(GGML_TYPE_F32, GGML_TYPE_F32));
}

} // namespace split_test
