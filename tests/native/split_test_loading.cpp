// How weights get in, what is held where, and what is prepared for a shape.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);
constexpr ggml_type q4_k = static_cast<ggml_type>(12);

Outputs expected_of(const Block & block, const Data & data, int64_t n_tokens, uint64_t seed = 1) {
    const Model whole(block, data, host_layouts().front());
    Session     cpu({/*split=*/false, /*gpu=*/false});
    return cpu.compute(whole, n_tokens, seed);
}

void check_granularity() {
    int64_t step = 0;
    for (int32_t number = 0; number < GGML_TYPE_COUNT; number++) {
        const auto    type  = static_cast<ggml_type>(number);
        const int64_t block = ggml_blck_size(type);
        if (block == 0 || ggml_type_size(type) == 0) {
            check(oallama_granularity(number, OALLAMA_ROWS, &step) == OALLAMA_INVALID, "a removed type is refused");
            continue;
        }
        check(granularity(type, OALLAMA_ROWS) == 32 && granularity(type, OALLAMA_HALVES) == 32,
              type_name(type) + ": rows are cut in groups of 32");
        const int64_t cols = granularity(type, OALLAMA_COLS);
        check(cols == std::lcm<int64_t>(block, 32) && ggml_row_size(type, cols) * static_cast<size_t>(block) ==
                                                          ggml_type_size(type) * static_cast<size_t>(cols),
              type_name(type) + ": a row is cut at whole blocks, in groups of 32");
    }
    for (int32_t number : {-1, static_cast<int32_t>(GGML_TYPE_COUNT), 1 << 20}) {
        check(oallama_granularity(number, OALLAMA_ROWS, &step) == OALLAMA_INVALID, "a number of no type is refused");
    }
    check(oallama_granularity(0, 3, &step) == OALLAMA_INVALID && oallama_granularity(0, -1, &step) == OALLAMA_INVALID,
          "a number of no axis is refused");
    check(oallama_granularity(0, OALLAMA_ROWS, nullptr) == OALLAMA_INVALID, "no room for the result is refused");
    done("granularity");
}

// The bytes of every weight come back from where their parts are, in whole and in odd pieces.
void check_read_back(const Model & model, const Data & data, const std::string & what) {
    for (const Weight & weight : model.block().weights) {
        const ggml_tensor *          tensor = model.tensors().at(weight.name);
        const std::vector<uint8_t> & bytes  = data.at(weight.name);
        std::vector<uint8_t>         back(bytes.size());
        ggml_backend_tensor_get(tensor, back.data(), 0, back.size());
        check(back == bytes, what + ": " + weight.name + " is read back");
        std::fill(back.begin(), back.end(), uint8_t{0});
        for (size_t at = 0; at < back.size(); at += 1231) {
            ggml_backend_tensor_get(tensor, back.data() + at, at, std::min<size_t>(1231, back.size() - at));
        }
        check(back == bytes, what + ": " + weight.name + " is read back in pieces");
    }
}

void check_pieces() {
    const FfnOptions fused = {Ffn::silu, Gate::fused};
    for (const Block & block : {ffn_block(GGML_TYPE_F32, GGML_TYPE_F32), ffn_block(q4_0, q4_0), ffn_block(q4_k, q4_k),
                                ffn_block(q4_0, q4_0, fused), moe_block(q4_0, q4_0), moe_block(q4_k, q4_k)}) {
        const Data    data     = make_data(block);
        const Outputs expected = expected_of(block, data, 3);
        for (ggml_backend_buffer_type_t buft : host_layouts()) {
            const std::string layout = ggml_backend_buft_name(buft);
            const bool        plain  = ggml_backend_buft_is_host(buft);
            for (Cut cut : all_cuts) {
                const PlanPtr plan = new_plan(plan_text({&block}, cut, async_device::device_name, layout));
                if (plan == nullptr) {
                    continue;
                }
                Outputs first;
                for (Pieces pieces : {Pieces::whole, Pieces::odd, Pieces::shuffled}) {
                    const std::string what = block.name + ", " + layout + ", " + cut_name(cut) + ", pieces " +
                                             std::to_string(static_cast<int>(pieces));
                    const Model       model(block, data, plan.get(), pieces);
                    Session           session;
                    const Outputs     result = session.compute(model, 3);
                    if (first.empty()) {
                        first = result;
                    }
                    check(same_bytes(first, result), what + ": pieces make a difference");
                    check(nmse(expected, result) <= (plain ? summation_bound : 1e-3),
                          what + ": NMSE " + text(nmse(expected, result)));
                    if (plain) {
                        check_read_back(model, data, what);
                    }
                }
            }
        }
    }
    done("pieces");
}

// What the plan says of its slices, before, while and after a model holds them.
void check_slices() {
    const Block   block = ffn_block(q4_0, q4_0);
    const Data    data  = make_data(block);
    const PlanPtr plan  = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return;
    }
    int64_t n_slices = 0;
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
            check(slice.cc == slice.cc_planned && slice.gg == slice.gg_planned &&
                      slice.cc + slice.cg + slice.gg == weight.extent() && slice.cc > 0 && slice.cg + slice.gg > 0,
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
    }
    check_state(false);
    oallama_slice slice = {};
    check(oallama_plan_slice(plan.get(), n_slices, &slice) == OALLAMA_INVALID &&
              oallama_plan_slice(plan.get(), -1, &slice) == OALLAMA_INVALID,
          "a slice that is not there is refused");
    done("slices");
}

std::string problems(const oallama_plan * plan, bool * usable) {
    char    lines[4096] = "";
    int32_t flag        = 0;
    check_ok(oallama_plan_problems(plan, &flag, lines, sizeof lines), "problems are told");
    *usable = flag != 0;
    return lines;
}

void check_other_tensors() {
    // a plan that names only some of what is loaded with it
    const Block   block    = ffn_block(q4_0, q4_0, {Ffn::silu, Gate::par, /*bias=*/true});
    const Data    data     = make_data(block);
    const Outputs expected = expected_of(block, data, 3);
    for (size_t named = 0; named < block.weights.size(); named++) {
        Block part         = block;
        part.weights       = {block.weights[named]};
        const PlanPtr plan = new_plan(plan_text({&part}, Cut::half, async_device::device_name, "CPU"));
        if (plan == nullptr) {
            continue;
        }
        const Model  model(block, data, plan.get());
        Session      session;
        const double error = nmse(expected, session.compute(model, 3));
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
        const PlanPtr plan = new_plan(plan_text({&other}, Cut::half, async_device::device_name, "CPU"));
        if (plan == nullptr) {
            continue;
        }
        const Model       model(block, data, plan.get());
        bool              usable = true;
        const std::string what   = problems(plan.get(), &usable);
        check(!model.loaded() && !usable && !what.empty() && what.find('\n') == std::string::npos,
              "a plan for another model fails the load with one sentence: " + what);
    }
    // the plan goes first
    PlanPtr     plan = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    const Model model(block, data, plan.get());
    plan.reset();
    Session session;
    check(nmse(expected, session.compute(model, 3)) <= summation_bound, "a model outlives its plan");
    done("other tensors");
}

} // namespace

void test_loading() {
    check_granularity();
    check_pieces();
    check_slices();
    check_other_tensors();
}

void test_programs() {
    const Block                block = ffn_block(q4_0, q4_0);
    const Data                 data  = make_data(block);
    std::map<int64_t, Outputs> expected;
    for (int64_t n_tokens : {1, 512, 7}) {
        expected[n_tokens] = expected_of(block, data, n_tokens);
    }
    for (const char * device : {async_device::device_name, "CPU"}) {
        const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, device, "CPU"));
        if (plan == nullptr) {
            continue;
        }
        const Model model(block, data, plan.get());
        Session     session;
        const auto  round = [&] {
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
        // more shapes than are kept
        for (int64_t n_tokens = 1; n_tokens <= 1100; n_tokens += 1) {
            session.compute(model, n_tokens % 2 == 0 ? n_tokens : 1100 - n_tokens);
        }
        check(memory().n_programs <= 1100, "programs are dropped");
        round();
    }
    done("programs");
}

} // namespace split_test
