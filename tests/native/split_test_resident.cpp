// Blocks whose neighbours are on the device: what crosses, and that nothing else does.

#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

// x goes to the host, the host's part of the result comes back: two crossings, and the scheduler makes none.
void check_crossings(const Block & block, int64_t n_inputs, Cut cut, int64_t n_tokens) {
    const std::string what = block.name + ", " + cut_name(cut) + ", " + std::to_string(n_tokens) + " tokens";
    const Data        data = make_data(block);
    const PlanPtr     plan = plan_of(block, cut);
    const Model       model(block, data, plan.get());
    const Model       whole(block, data, host_layouts().front());
    Session           cpu({/*split=*/false, /*gpu=*/false});
    Session           session;
    const Outputs     expected = cpu.compute(whole, n_tokens);
    session.compute(model, n_tokens);
    const async_device::Counters before = async_device::counters();
    check_ok(oallama_reset_stats(), "statistics are reset");
    const double                 error = nmse(expected, session.compute(model, n_tokens));
    const async_device::Counters after = async_device::counters();
    check(error <= summation_bound, what + ": NMSE " + text(error));

    const int64_t results   = static_cast<int64_t>(expected.size());
    const bool    both      = cut != Cut::all;
    const int64_t copies_in = after.n_copies_in - before.n_copies_in;
    const int64_t fetched   = after.n_copies_out - before.n_copies_out;
    const int64_t blocking  = after.n_blocking - before.n_blocking;
    check(fetched == (both ? n_inputs : 0), what + ": " + std::to_string(fetched) + " copies to the host");
    check(copies_in == (both ? results : 0), what + ": " + std::to_string(copies_in) + " copies to the device");
    check(blocking == 1 + results, what + ": " + std::to_string(blocking) +
                                       " copies that the caller waits for; the model's input and the results are " +
                                       std::to_string(1 + results));
    check(after.n_idle_waits == before.n_idle_waits, what + ": the device computes while its input is fetched");
    check(stats().n_built == 0, what + ": built once");
    check(stats().bytes_out == (both ? n_tokens * block.n_embd * int64_t{sizeof(float)} : 0) || n_inputs > 1,
          what + ": " + std::to_string(stats().bytes_out) + " bytes are fetched");
}

// ggml's registry has no lock: what it lists stays as it is while plans come and go. Who lists devices meanwhile sees
// one of ours that computes nothing.
void check_registry() {
    const Block        block    = ffn_block(q4_0, q4_0);
    const size_t       n_before = ggml_backend_dev_count();
    ggml_backend_dev_t ours     = ggml_backend_dev_by_name("OALLAMA_Resident");
    const auto         computes = [&] { return ggml_backend_dev_buffer_type(ours) != ggml_backend_cpu_buffer_type(); };
    check(ours != nullptr && !computes(), "without a plan the device for blocks that live on another computes nothing");
    Session                    early; // knows no device's memory
    ggml_backend_buffer_type_t known = nullptr;
    {
        const PlanPtr plan = plan_of(block, Cut::half);
        check(ggml_backend_dev_count() == n_before && computes(), "a plan registers no device, but uses one");
        known = ggml_backend_dev_buffer_type(ours);
        const Model model(block, make_data(block), plan.get());
        check(early.compute(model, 1).empty() && early.status() == GGML_STATUS_FAILED &&
                  std::string(oallama_last_error()).find("made before the plan") != std::string::npos,
              std::string("a context that is older than the plan is refused: ") + oallama_last_error());
        check(!Session().compute(model, 1).empty(), "a new one is not");
        const PlanPtr second = plan_of(block, Cut::one);
        check(second != nullptr && computes(), "so does a second plan for the same device");
    }
    check(ggml_backend_dev_count() == n_before && !computes(), "and none is removed with them");
    check(ours->iface.supports_buft(ours, known), "a scheduler that asked before may still be made");
    done("the registry while plans come and go");
}

} // namespace

void test_resident() {
    const Setting lives(resident, true);
    const Setting streams(streamed, Streamed::none);
    const Setting tokens(late, false);
    for (const Cut cut : {Cut::half, Cut::one, Cut::all}) {
        for (const int64_t n_tokens : {1, 7}) {
            check_crossings(ffn_block(q4_0, q4_0), 1, cut, n_tokens);
            check_crossings(ffn_block(GGML_TYPE_F32, GGML_TYPE_F32, {Ffn::gelu, Gate::none}), 1, cut, n_tokens);
        }
    }
    done("crossings of blocks that live on the device");
    check_registry();
}

} // namespace split_test
