// How weights get in, what is held where, and what is prepared for a shape.

#include <algorithm>
#include <cstring>

#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

// What the plan says of its slices, before, while and after a model holds them.
void check_slices() {
    const Block   block    = ffn_block(q4_0, q4_0);
    const Data    data     = make_data(block);
    const PlanPtr plan     = plan_of(block, Cut::half);
    int64_t       n_slices = 0;
    check_ok(oallama_plan_count(plan.get(), &n_slices), "slices are counted");
    check(n_slices == 3, "a gated FFN has three slices");
    const auto check_state = [&](bool loaded) {
        int64_t device_bytes = 0;
        int64_t host_bytes   = 0;
        for (int64_t i = 0; i < n_slices; i++) {
            oallama_slice slice = {};
            check_ok(oallama_plan_slice(plan.get(), i, &slice), "a slice is told");
            const Weight & weight = block.weights[static_cast<size_t>(i)];
            check(slice.name == weight.name && slice.axis == weight.axis, "slices are in the plan's order");
            check(slice.loaded == (loaded ? 1 : 0), "a slice knows whether it is loaded");
            check(slice.cc + slice.cg + slice.gg == weight.extent() && slice.cc > 0 && slice.cg + slice.gg > 0,
                  "a slice is loaded as planned");
            check(std::string(slice.layout) == "CPU", "a slice has its layout");
            host_bytes += slice.host_bytes;
            device_bytes += slice.device_bytes;
        }
        int64_t total = 0;
        for (const Weight & weight : block.weights) {
            total += static_cast<int64_t>(data.at(weight.name).size());
        }
        check(host_bytes + device_bytes == (loaded ? total : 0), "every byte of the weights is held once");
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
        const Model model(block, data, plan.get());
        check_state(true);
        {
            const Model second(block, data, plan.get());
        }
        check_state(true);
    }
    check_state(false);
    oallama_slice slice = {};
    check(oallama_plan_slice(plan.get(), n_slices, &slice) == OALLAMA_INVALID &&
              oallama_plan_slice(plan.get(), -1, &slice) == OALLAMA_INVALID,
          "a slice that is not there is refused");
    done("slices");
}

void check_other_tensors() {
    // a plan that names only some of what is loaded with it
    const Block   block    = ffn_block(q4_0, q4_0, {Ffn::silu, Gate::par, /*bias=*/true});
    const Data    data     = make_data(block);
    const Outputs expected = on_cpu(block, data, 3);
    for (size_t named = 0; named < block.weights.size(); named++) {
        Block part         = block;
        part.weights       = {block.weights[named]};
        const PlanPtr plan = plan_of(part, Cut::half);
        const Model   model(block, data, plan.get());
        Session       session;
        const double  error = nmse(expected, session.compute(model, 3));
        check(error <= summation_bound, "only " + part.weights[0].name + " is in the plan: NMSE " + text(error));
    }
    // a plan for another model
    for (int wrong = 0; wrong < 3; wrong++) {
        Block other = block;
        if (wrong == 0) {
            other.weights[0].type = GGML_TYPE_F16;
        } else if (wrong == 1) {
            other.weights[0].n += 32;
        } else {
            other.weights[0].e = 2;
        }
        const PlanPtr     plan = plan_of(other, Cut::half);
        const Model       model(block, data, plan.get());
        bool              usable = true;
        const std::string what   = problems(plan.get(), &usable);
        check(!model.loaded() && !usable && !what.empty() && what.find('\n') == std::string::npos,
              "a plan for another model fails the load with one sentence: " + what);
    }
    // the plan goes first
    PlanPtr     plan = plan_of(block, Cut::half);
    const Model model(block, data, plan.get());
    plan.reset();
    Session session;
    check(nmse(expected, session.compute(model, 3)) <= summation_bound, "a model outlives its plan");
    done("other tensors");
}

// A bias that the plan puts on the device, beside a gate that is on the host or on the device.
void check_biases_on_the_device() {
    Block             block = ffn_block(q4_0, q4_0, {Ffn::silu, Gate::par, /*bias=*/true});
    const Weight      gate  = block.weights[1];
    const std::string n     = std::to_string(gate.n);
    const auto        moved = [](const Extra & extra) { return extra.name == "gate_b"; };
    block.extras.erase(std::remove_if(block.extras.begin(), block.extras.end(), moved), block.extras.end());
    block.weights.push_back({"gate_b", GGML_TYPE_F32, gate.n, 1, 1, OALLAMA_ROWS});
    const Data data = make_data(block);
    for (const auto & [cut, bias_cut] : {std::pair<std::string, std::string>{n + " 0 0 CPU", "0 1 0 -"},
                                         std::pair<std::string, std::string>{"0 0 " + n + " -", "0 0 1 -"}}) {
        const PlanPtr plan = new_plan("oallama-plan 1\ndevice " + std::string(async_device::device_name) +
                                      "\ntensor ffn_gate Q4_0 " + std::to_string(gate.k) + "x" + n + "x1 rows " + cut +
                                      "\ntensor gate_b F32 " + n + "x1x1 rows " + bias_cut + "\n");
        const Model   model(block, data, plan.get());
        Session       session;
        check(model.loaded() && session.compute(model, 3).empty() && session.status() == GGML_STATUS_FAILED,
              "a bias on the device fails the graph: " + bias_cut);
        check(std::string(oallama_last_error()).find("gate_b is read by something that is no mul-mat") !=
                  std::string::npos,
              "and it is said why");
    }
    done("biases on the device");
}

// A plan is loaded once more after a load that failed, or that had less room.
void check_loading_again() {
    const Block   block    = ffn_block(q4_0, q4_0);
    const Data    data     = make_data(block);
    const Block   other    = ffn_block(GGML_TYPE_F16, q4_0);
    const PlanPtr plan     = plan_of(block, Cut::half);
    const Outputs expected = on_cpu(block, data, 3);
    bool          usable   = true;
    const auto    loads    = [&](const std::string & when) {
        const Model       model(block, data, plan.get());
        const std::string what = problems(plan.get(), &usable);
        check(usable && what.empty(), "a plan that is loaded " + when + " has no problems: " + what);
        Session session;
        check(nmse(expected, session.compute(model, 3)) <= summation_bound, "and computes");
    };
    {
        const Model model(other, make_data(other), plan.get());
        check(!problems(plan.get(), &usable).empty() && !usable, "a model of another type is refused");
    }
    check(!problems(plan.get(), &usable).empty() && !usable, "which is told until the next load");
    loads("after a load that failed");
    async_device::Options options;
    options.max_alloc_bytes = 0;
    async_device::set_options(options);
    {
        const Model model(block, data, plan.get());
        async_device::set_options({});
        check(!problems(plan.get(), &usable).empty() && usable, "a device without room is told");
        const Model second(block, data, plan.get());
        check(!problems(plan.get(), &usable).empty() && usable, "and still is while its model is there");
    }
    oallama_slice slice = {};
    check_ok(oallama_plan_slice(plan.get(), 0, &slice), "a slice is told");
    check(slice.cc > 0 && slice.cc < block.weights[0].extent(), "a model that is gone moves no cuts");
    loads("after one without room");
    done("loading again");
}

// What the plan says of staging is left free on the device while weights take the rest.
void check_staging() {
    if (late || streamed != Streamed::none) {
        return; // of resident weights
    }
    const Block block = ffn_block(q4_0, q4_0);
    const Data  data  = make_data(block);
    const auto  held  = [&](int64_t staging, int64_t capacity, bool * told) {
        const std::string text = plan_text({&block}, Cut::all, async_device::device_name, "CPU");
        const size_t      at   = text.find("tensor ");
        const PlanPtr     plan =
            new_plan(text.substr(0, at) + "staging " + std::to_string(staging) + "\n" + text.substr(at));
        const int64_t         before = async_device::counters().device_bytes;
        async_device::Options options;
        options.capacity_bytes = static_cast<size_t>(before + capacity);
        async_device::set_options(options);
        const Model   model(block, data, plan.get());
        const int64_t bytes = async_device::counters().device_bytes - before;
        async_device::set_options({});
        bool usable = false;
        *told       = !problems(plan.get(), &usable).empty();
        check(model.loaded() && usable, "a model is loaded beside staging");
        return bytes;
    };
    bool          told    = false;
    const int64_t all     = held(0, int64_t{1} << 29, &told);
    const int64_t staging = all / 4;
    check(all > 0 && !told, "all of the weights are on a device with room");
    check(held(0, all, &told) == all && !told, "without staging they may take all of it");
    check(held(staging, all + staging, &told) == all && !told, "the room for staging is not taken for good");
    const int64_t fewer = held(staging, all, &told);
    check(fewer > 0 && fewer <= all - staging && told, "weights that leave no room for staging are fewer");
    done("staging");
}

// What no memory holds is a problem of the load, not the end of the process.
void check_too_large() {
    const PlanPtr plan = new_plan("oallama-plan 1\n");
    void *        buft = nullptr;
    check_ok(oallama_plan_buft(plan.get(), &buft), "the plan has a buffer type");
    const ContextPtr ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_tensor *    tensor = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, int64_t{1} << 30, int64_t{1} << 30);
    ggml_set_name(tensor, "huge");
    const BufferPtr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), static_cast<ggml_backend_buffer_type_t>(buft)));
    check(buffer != nullptr, "memory is not taken before there is something to put there");
    if (buffer != nullptr) {
        float first = 0.0F;
        ggml_backend_tensor_get(tensor, &first, 0, sizeof first);
        bool              usable = true;
        const std::string what   = problems(plan.get(), &usable);
        check(!usable && what.find("no room") != std::string::npos, "a weight that no memory holds is told: " + what);
    }
    done("too large");
}

// What another operation reads of a weight: a view of it, and a layout that has no bytes to read.
void check_reads() {
    const Block   block  = lone_block(q4_0);
    const Data    data   = make_data(block);
    const auto &  bytes  = data.at("attn_output");
    const size_t  row    = ggml_row_size(q4_0, block.n_embd);
    const Outputs expect = on_cpu(block, data, 3);
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        const std::string layout = ggml_backend_buft_name(buft);
        const bool        plain  = ggml_backend_buft_is_host(buft);
        const PlanPtr     plan   = new_plan(plan_text({&block}, Cut::none, "", layout));
        if (plan == nullptr || (!plain && !layout_holds(buft, block.weights[0]))) {
            continue;
        }
        const Model          model(block, data, plan.get());
        ggml_tensor *        tensor = model.tensors().at("attn_output");
        const ContextPtr     ctx(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
        ggml_tensor *        view = ggml_view_2d(ctx.get(), tensor, block.n_embd, 10, tensor->nb[1], 7 * row);
        std::vector<uint8_t> back(10 * row);
        Session              session;
        check(nmse(expect, session.compute(model, 3)) <= 1e-3, layout + ": computed before it is read");
        ggml_backend_tensor_get(view, back.data(), 0, back.size());
        bool              usable = true;
        const std::string what   = problems(plan.get(), &usable);
        if (plain) {
            check(std::equal(back.begin(), back.end(), bytes.begin() + static_cast<int64_t>(7 * row)) && usable,
                  "a view of a weight is read");
        } else {
            check(!usable && what.find(layout) != std::string::npos && what.find('\n') == std::string::npos,
                  layout + ": that it cannot be read is told: " + what);
            check(session.compute(model, 3).empty() && session.status() == GGML_STATUS_FAILED,
                  layout + ": nothing is computed with zeros instead");
        }
    }
    done("reads");
}

// A weight is written whole, as llama.cpp and ggml's repacked layouts do.
void check_pieces() {
    const Block   block = lone_block(q4_0);
    const Data    data  = make_data(block);
    const auto &  bytes = data.at("attn_output");
    const PlanPtr plan  = plan_of(block, Cut::half);
    const Model   model(block, data, plan.get());
    ggml_backend_tensor_set(model.tensors().at("attn_output"), bytes.data(), 0, bytes.size() / 2);
    bool              usable = true;
    const std::string what   = problems(plan.get(), &usable);
    check(!usable && what.find("attn_output is written in pieces") != std::string::npos, "pieces are refused: " + what);
    done("weights in pieces");
}

// A tensor that is added to a buffer when the first bytes of another are there already.
void check_late_tensor() {
    const PlanPtr plan = new_plan("oallama-plan 1\n");
    void *        buft = nullptr;
    check_ok(oallama_plan_buft(plan.get(), &buft), "the plan has a buffer type");
    const ContextPtr   ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_tensor *      first  = ggml_set_name(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 32, 32), "first");
    ggml_tensor *      second = ggml_set_name(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 32, 32), "second");
    const BufferPtr    buffer(ggml_backend_buft_alloc_buffer(static_cast<ggml_backend_buffer_type_t>(buft), 1 << 16));
    auto *             base = static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
    std::vector<float> values(32 * 32, 1.0F);
    check(ggml_backend_tensor_alloc(buffer.get(), first, base) == GGML_STATUS_SUCCESS, "a tensor is added");
    ggml_backend_tensor_set(first, values.data(), 0, ggml_nbytes(first));
    check(ggml_backend_tensor_alloc(buffer.get(), second, base + (1 << 15)) != GGML_STATUS_SUCCESS,
          "another one, when there are bytes already, is refused");
    bool              usable = true;
    const std::string what   = problems(plan.get(), &usable);
    check(!usable && what.find("second") != std::string::npos, "which is told: " + what);
    ggml_backend_tensor_set(second, values.data(), 0, ggml_nbytes(second));
    done("a tensor that comes late");
}

} // namespace

void test_loading() {
    check_pieces();
    check_late_tensor();
    check_loading_again();
    check_staging();
    check_too_large();
    check_reads();
    check_slices();
    check_other_tensors();
    check_biases_on_the_device();
}

// Weights that are freed and replaced, as LoRA adapters are: others soon lie where they were.
static void check_replaced_weights() {
    const Block block = ffn_block(q4_0, q4_0);
    Data        data  = make_data(block);
    for (const Cut cut : {Cut::none, Cut::half}) {
        const PlanPtr plan = plan_of(block, cut);
        Session       session;
        for (int i = 0; i < 8; i++) {
            for (auto & [name, bytes] : data) {
                if (name.rfind("ffn", 0) == 0) {
                    std::rotate(bytes.begin(), bytes.begin() + 18 * 3, bytes.end()); // three blocks of Q4_0
                }
            }
            const Model  model(block, data, plan.get());
            const double error = nmse(on_cpu(block, data, 3), session.compute(model, 3));
            check(error <= summation_bound, cut_name(cut) + ", weights that replace others: NMSE " + text(error));
        }
    }
    done("replaced weights");
}

// gate and up of one input, then of two with the same shape: what is prepared for one is not for the other.
static void check_same_sources() {
    static bool two = false;

    Block block = ffn_block(q4_0, q4_0);
    block.build = [](Graph & g) {
        ggml_tensor * first  = ggml_rms_norm(g.ctx, g.x, 1e-5F);
        ggml_tensor * second = ggml_soft_max(g.ctx, g.x);
        ggml_build_forward_expand(g.gf, first);
        ggml_build_forward_expand(g.gf, second);
        ggml_tensor * gate = g.mul_mat("ffn_gate", first);
        ggml_tensor * up   = g.mul_mat("ffn_up", two ? second : first);
        g.output(ggml_add(g.ctx, g.mul_mat("ffn_down", ggml_swiglu_split(g.ctx, gate, up)), second));
    };
    const Data data = make_data(block);
    for (const Cut cut : {Cut::none, Cut::half, Cut::all}) {
        const PlanPtr plan = plan_of(block, cut);
        const Model   model(block, data, plan.get());
        Session       session;
        for (const bool now : {false, true, false, true}) {
            two                = now;
            const double error = nmse(on_cpu(block, data, 3), session.compute(model, 3));
            check(error <= summation_bound,
                  cut_name(cut) + ", gate and up of " + (now ? "two inputs" : "one input") + ": NMSE " + text(error));
        }
    }
    done("same sources");
}

void test_programs() {
    check_replaced_weights();
    check_same_sources();
    const Block                block = ffn_block(q4_0, q4_0);
    const Data                 data  = make_data(block);
    std::map<int64_t, Outputs> expected;
    for (int64_t n_tokens : {1, 512, 7}) {
        expected[n_tokens] = on_cpu(block, data, n_tokens);
    }
    for (const char * device : {async_device::device_name, "CPU"}) {
        const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, device, "CPU"));
        const Model   model(block, data, plan.get());
        Session       session;
        const auto    round = [&] {
            for (int64_t n_tokens : {1, 512, 7, 1, 1, 512, 1}) {
                check(nmse(expected[n_tokens], session.compute(model, n_tokens)) <= summation_bound,
                      "programs are used for their own shape");
            }
        };
        session.compute(model, 512); // as llama.cpp reserves
        round();
        check_ok(oallama_reset_stats(), "statistics are reset");
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
    done("programs");
}

} // namespace split_test
