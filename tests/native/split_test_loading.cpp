// How weights get in, what is held where, and what is prepared for a shape.

#include <algorithm>

#include "split_test.h"

namespace split_test {

namespace {

bool is_one_sentence(const std::string & text) {
    return !text.empty() && text.find('\n') == std::string::npos;
}

// What was loaded cannot compute, and one sentence says why.
void check_unusable(const oallama_plan * plan, const std::string & reason, const std::string & what) {
    const Told now = told(plan);
    check(!now.usable && is_one_sentence(now.problems) && now.problems.find(reason) != std::string::npos,
          what + " is told: " + now.problems);
}

// What the plan says of its slices, before, while and after a model holds them.
void check_slices() {
    const Block   block = ffn_block(q4_0, q4_0);
    const PlanPtr plan  = plan_of(block, Cut::half);
    oallama_slice slice = {};

    const auto check_state = [&](bool loaded) {
        int64_t host_bytes = 0;
        int64_t all_bytes  = 0;
        for (size_t i = 0; i < block.weights.size(); i++) {
            const Weight & weight = block.weights[i];
            check_ok(oallama_plan_slice(plan.get(), static_cast<int64_t>(i), &slice), "a slice is told");
            check(slice.name == weight.name && slice.axis == weight.axis, "slices are in the plan's order");
            check(slice.loaded == (loaded ? 1 : 0), "a slice knows whether it is loaded");
            check(slice.cc + slice.cg + slice.gg == weight.extent() && slice.cc > 0 && slice.cg + slice.gg > 0,
                  "a slice is loaded as planned");
            check(std::string(slice.layout) == "CPU", "a slice has its layout");
            host_bytes += slice.host_bytes;
            all_bytes += weight.bytes();
        }
        const int64_t device_bytes = told(plan.get()).device_bytes;
        check(host_bytes + device_bytes == (loaded ? all_bytes : 0), "every byte of the weights is held once");
        if (loaded) {
            const int64_t slack = 3 * 4096; // alignment, padding of rows
            check(memory().host_weights >= host_bytes && memory().host_weights <= host_bytes + slack &&
                      memory().device_weights >= device_bytes && memory().device_weights <= device_bytes + slack &&
                      memory().n_weights == 3,
                  "the library holds what its slices say");
            check(async_device::counters().device_bytes == memory().device_weights, "the device holds GG only");
        }
    };
    check_state(false);
    {
        const Model model(block, plan.get());
        check_state(true);
        {
            const Model second(block, plan.get());
        }
        check_state(true);
    }
    check_state(false);
    for (const int64_t i : {int64_t{3}, int64_t{-1}}) {
        check(oallama_plan_slice(plan.get(), i, &slice) == OALLAMA_INVALID, "a slice that is not there is refused");
    }
}

void check_plans_for_other_models() {
    const Block block = ffn_block(q4_0, q4_0);
    for (int wrong = 0; wrong < 3; wrong++) {
        Block other = block;
        switch (wrong) {
            case 0: other.weights[0].type = GGML_TYPE_F16; break;
            case 1: other.weights[0].n += 32; break;
            default: other.weights[0].e = 2;
        }
        const PlanPtr plan = plan_of(other, Cut::half);
        const Model   model(block, plan.get());
        check(!model.loaded(), "a plan for another model fails the load");
        check_unusable(plan.get(), "", "a plan for another model");
    }
}

// A bias that the plan puts on the device, beside a gate that is on the host or on the device.
void check_biases_on_the_device() {
    Block             block = ffn_block(q4_0, q4_0, {Ffn::silu, Gate::par, /*bias=*/true});
    const Weight      gate  = block.weights[1];
    const std::string n     = std::to_string(gate.n);
    const auto        moved = [](const Extra & extra) { return extra.name == "gate_b"; };
    block.extras.erase(std::remove_if(block.extras.begin(), block.extras.end(), moved), block.extras.end());
    block.weights.push_back({"gate_b", GGML_TYPE_F32, gate.n, 1, 1, OALLAMA_ROWS});
    for (const auto & [cut, bias_cut] : {std::pair<std::string, std::string>{n + " 0 0 CPU", "0 1 0 -"},
                                         std::pair<std::string, std::string>{"0 0 " + n + " -", "0 0 1 -"}}) {
        const PlanPtr plan =
            new_plan("oallama-plan 1\ndevice TEST0\ntensor ffn_gate Q4_0 " + std::to_string(gate.k) + "x" + n +
                     "x1 rows " + cut + "\ntensor gate_b F32 " + n + "x1x1 rows " + bias_cut + "\n");
        const Model model(block, plan.get());
        Session     session;
        check(model.loaded() && session.fails(GGML_STATUS_FAILED, model, 3), "a bias on the device fails the graph");
        check(std::string(oallama_last_error()).find("gate_b is read by something that is no mul-mat") !=
                  std::string::npos,
              "and it is said why");
    }
}

// A plan is loaded once more after a load that failed, or that had less room.
void check_loading_again() {
    const Block   block = ffn_block(q4_0, q4_0);
    const PlanPtr plan  = plan_of(block, Cut::half);
    const auto    loads = [&](const std::string & when) {
        const Model model(block, plan.get());
        const Told  now = told(plan.get());
        check(now.usable && now.problems.empty(), "a plan that is loaded " + when + " has no problems");
        Session session;
        check_right(session, model, 3, when);
    };
    {
        const Model model(ffn_block(GGML_TYPE_F16, q4_0), plan.get());
        check_unusable(plan.get(), "", "a model of another type");
    }
    check_unusable(plan.get(), "", "what failed, until the next load,");
    loads("after a load that failed");
    DeviceOptions device;
    device.max_alloc_bytes = 0;
    device.set();
    {
        const Model model(block, plan.get());
        async_device::set_options({});
        check(told(plan.get()).usable && is_one_sentence(told(plan.get()).problems), "a device without room is told");
        const Model second(block, plan.get());
        check(told(plan.get()).usable && is_one_sentence(told(plan.get()).problems), "while its model is there");
    }
    check(told(plan.get()).gg == told(plan_of(block, Cut::half).get()).gg, "a model that is gone moves no cuts");
    loads("after one without room");
}

// What the plan says of staging is left free on the device while weights take the rest.
void check_staging() {
    if (late || streamed != Streamed::none) {
        return; // of resident weights
    }
    const Block block = ffn_block(q4_0, q4_0);
    const auto  held  = [&](int64_t staging, int64_t capacity, bool less) {
        const PlanPtr plan   = plan_of(block, Cut::all, "staging " + std::to_string(staging) + "\n");
        const int64_t before = async_device::counters().device_bytes;
        DeviceOptions device;
        device.capacity_bytes = static_cast<size_t>(before + capacity);
        device.set();
        const Model model(block, plan.get());
        check(model.loaded() && told(plan.get()).usable, "a model is loaded beside staging");
        check(told(plan.get()).problems.empty() == !less, "it is told where weights are fewer, and only there");
        return async_device::counters().device_bytes - before;
    };
    const int64_t all     = held(0, int64_t{1} << 29, false);
    const int64_t staging = all / 4;
    check(all > 0 && held(0, all, false) == all, "without staging the weights may take all of the device");
    check(held(staging, all + staging, false) == all, "the room for staging is not taken for good");
    const int64_t fewer = held(staging, all, true);
    check(fewer > 0 && fewer <= all - staging, "weights that leave no room for staging are fewer");
}

// What no memory holds is a problem of the load, not the end of the process.
void check_too_large() {
    const PlanPtr    plan = new_plan("oallama-plan 1\n");
    const ContextPtr ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_tensor *    huge = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, int64_t{1} << 30, int64_t{1} << 30);
    const BufferPtr  buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft_of(plan.get())));
    check(buffer != nullptr, "memory is not taken before there is something to put there");
    float first = 0.0F;
    ggml_backend_tensor_get(huge, &first, 0, sizeof first);
    check_unusable(plan.get(), "no room", "a weight that no memory holds");
}

// A layout that has no bytes to read, when another operation than a mul-mat reads them.
void check_reads() {
    const Block block = lone_block(q4_0);
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        if (ggml_backend_buft_is_host(buft) || !layout_holds(buft, block.weights[0])) {
            continue;
        }
        const std::string    layout = ggml_backend_buft_name(buft);
        const PlanPtr        plan   = plan_of(block, Cut::none, "", "", layout);
        const Model          model(block, plan.get());
        std::vector<uint8_t> back(100);
        Session              session;
        check(!session.compute(model, 3).empty(), layout + ": computed before it is read");
        ggml_backend_tensor_get(model.tensors().at("attn_output"), back.data(), 7, back.size());
        check_unusable(plan.get(), layout, layout + ": that it cannot be read");
        check(session.fails(GGML_STATUS_FAILED, model, 3), layout + ": nothing is computed with zeros instead");
    }
}

// A weight is written whole, as llama.cpp and ggml's repacked layouts do; and no tensor is added to a buffer that has
// bytes of another already.
void check_order_of_loading() {
    const Block   block = lone_block(q4_0);
    const PlanPtr plan  = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    const auto &  bytes = model.data().at("attn_output");
    ggml_backend_tensor_set(model.tensors().at("attn_output"), bytes.data(), 0, bytes.size() / 2);
    check_unusable(plan.get(), "attn_output is written in pieces", "a weight in pieces");

    const PlanPtr      empty = new_plan("oallama-plan 1\n");
    const ContextPtr   ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_tensor *      first  = ggml_set_name(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 32, 32), "first");
    ggml_tensor *      second = ggml_set_name(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 32, 32), "second");
    const BufferPtr    buffer(ggml_backend_buft_alloc_buffer(buft_of(empty.get()), 1 << 16));
    auto *             base = static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
    std::vector<float> values(32 * 32, 1.0F);
    check(ggml_backend_tensor_alloc(buffer.get(), first, base) == GGML_STATUS_SUCCESS, "a tensor is added");
    ggml_backend_tensor_set(first, values.data(), 0, ggml_nbytes(first));
    check(ggml_backend_tensor_alloc(buffer.get(), second, base + (1 << 15)) != GGML_STATUS_SUCCESS,
          "another one, when there are bytes already, is refused");
    check_unusable(empty.get(), "second", "a tensor that comes late");
    ggml_backend_tensor_set(second, values.data(), 0, ggml_nbytes(second));
}

// gate and up of one input, then of two with the same shape: what is prepared for one is not for the other.
void check_same_sources() {
    bool  two   = false;
    Block block = ffn_block(q4_0, q4_0);
    block.build = [&two](Graph & g) {
        ggml_tensor * first  = g.norm();
        ggml_tensor * second = ggml_soft_max(g.ctx, g.x);
        ggml_build_forward_expand(g.gf, first);
        ggml_build_forward_expand(g.gf, second);
        ggml_tensor * gate = g.mul_mat("ffn_gate", first);
        ggml_tensor * up   = g.mul_mat("ffn_up", two ? second : first);
        g.output(ggml_add(g.ctx, g.mul_mat("ffn_down", ggml_swiglu_split(g.ctx, gate, up)), second));
    };
    for (const Cut cut : {Cut::none, Cut::half, Cut::all}) {
        const PlanPtr plan = plan_of(block, cut);
        const Model   model(block, plan.get());
        Session       session;
        for (const bool now : {false, true, false, true}) {
            two = now;
            check_right(session, model, 3, cut_name(cut) + (now ? " of two inputs" : " of one input"));
        }
    }
}

} // namespace

void test_loading() {
    check_order_of_loading();
    check_loading_again();
    check_staging();
    check_too_large();
    check_reads();
    check_slices();
    check_plans_for_other_models();
    check_biases_on_the_device();
}

void test_programs() {
    check_same_sources();
    const Block block = ffn_block(q4_0, q4_0);
    for (const char * device : {async_device::device_name, "CPU"}) {
        const PlanPtr plan = plan_of(block, Cut::half, "", device);
        const Model   model(block, plan.get());
        Session       session;
        const auto    round = [&] {
            for (const int64_t n_tokens : {1, 512, 7, 1, 1, 512, 1}) {
                check_right(session, model, n_tokens, "by the program of their own shape");
            }
        };
        session.compute(model, 512); // as llama.cpp reserves
        round();
        reset_stats();
        const oallama_memory held     = memory();
        const int64_t        n_allocs = async_device::counters().n_allocs;
        round();
        check(stats().n_built == 0 && memory().n_programs == held.n_programs, "known shapes build nothing");
        check(memory().host_compute == held.host_compute && memory().device_compute == held.device_compute &&
                  async_device::counters().n_allocs == n_allocs,
              "the steady state allocates nothing");
        check(stats().n_graphs == 7 && stats().total_s > 0.0 && stats().bytes_in > 0 && stats().bytes_out > 0,
              "statistics are kept");
        for (int64_t n_tokens = 1; n_tokens <= 60; n_tokens++) {
            session.compute(model, n_tokens);
        }
        check(memory().n_programs <= 64, "every shape has one program");
        round();
    }
}

} // namespace split_test
