// Traces: what is seen of a phase, in which order, and that nothing is left behind.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

std::vector<oallama_span> stop_trace() {
    int64_t n = 0;
    check_ok(oallama_trace_stop(&n), "a trace ends");
    std::vector<oallama_span> spans(static_cast<size_t>(n) + 1);
    check_ok(oallama_trace_read(spans.data(), n), "a trace is read");
    spans.pop_back();
    return spans;
}

// The spans of one phase by step; a step that is there twice fails.
std::map<int32_t, oallama_span> phase_of(const std::vector<oallama_span> & spans, int64_t phase) {
    std::map<int32_t, oallama_span> found;
    for (const oallama_span & span : spans) {
        if (span.phase == phase && span.step != OALLAMA_COPY) {
            check(found.emplace(span.step, span).second, "a phase has a step once");
        }
    }
    return found;
}

void check_order(const std::map<int32_t, oallama_span> & steps, const std::vector<int32_t> & order) {
    double last = 0.0;
    for (const int32_t step : order) {
        const auto found = steps.find(step);
        check(found != steps.end(), "step " + std::to_string(step) + " is seen");
        if (found != steps.end()) {
            check(found->second.begin_s >= last && found->second.end_s >= found->second.begin_s,
                  "step " + std::to_string(step) + " comes after the one before it");
            last = found->second.end_s;
        }
    }
}

void check_phases(oallama_trace_of of) {
    const Streamed kept = streamed;
    streamed            = Streamed::half;
    const Block   block = ffn_block(q4_0, q4_0);
    const PlanPtr plan  = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    streamed            = kept;
    if (plan == nullptr) {
        return;
    }
    const Model model(block, make_data(block), plan.get());
    Session     session;

    async_device::Options slow;
    slow.set_ns_per_byte = 20.0;
    async_device::set_options(slow);
    check_ok(oallama_trace_start(1000, of), "a trace starts");
    session.compute(model, 7);
    session.compute(model, 7, 2);
    const std::vector<oallama_span> spans = stop_trace();
    session.compute(model, 7, 3);
    async_device::set_options({});

    std::set<int64_t> phases;
    int64_t           copied = 0;
    for (const oallama_span & span : spans) {
        phases.insert(span.phase);
        check(std::string(span.name).rfind("ffn_", 0) == 0 && span.n_tokens == 7, "a span names its weight and tokens");
        copied += span.step == OALLAMA_COPY ? span.bytes : 0;
    }
    check(phases == std::set<int64_t>({0, 1}), "two phases are seen, not what came before and after");
    check(copied > 0, "copies are seen");
    check(std::is_sorted(spans.begin(), spans.end(),
                         [](const oallama_span & a, const oallama_span & b) { return a.end_s < b.end_s; }),
          "spans come as they ended");
    for (const int64_t phase : phases) {
        const auto steps = phase_of(spans, phase);
        check_order(steps, {OALLAMA_LAUNCH, OALLAMA_HOST, OALLAMA_WAIT, OALLAMA_JOIN});
        check_order(steps, {OALLAMA_SEND, OALLAMA_RESIDENT, OALLAMA_STALL, OALLAMA_STREAMED, OALLAMA_FETCH});
    }
    done("phases in a trace");
}

void check_limits() {
    const Block   block = ffn_block(q4_0, q4_0);
    const PlanPtr plan  = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return;
    }
    const Model model(block, make_data(block), plan.get());
    Session     session;
    check(oallama_trace_start(0, OALLAMA_TRACE_EVENTS) == OALLAMA_INVALID, "a trace of nothing is refused");
    check_ok(oallama_trace_start(3, OALLAMA_TRACE_EVENTS), "a short trace starts");
    session.compute(model, 7);
    check(stop_trace().size() == 3, "a full trace takes no more");
    check(stop_trace().empty(), "a trace that was read is over");

    async_device::Options without;
    without.refuse_events = true;
    async_device::set_options(without);
    check_ok(oallama_trace_start(100, OALLAMA_TRACE_EVENTS), "a trace starts");
    Session other;
    other.compute(model, 7);
    const std::vector<oallama_span> spans = stop_trace();
    check(!spans.empty() && std::all_of(spans.begin(), spans.end(),
                                        [](const oallama_span & span) {
                                            return span.step <= OALLAMA_JOIN || span.step == OALLAMA_AHEAD;
                                        }),
          "of a device without events the caller's steps are seen");
    async_device::set_options({});
    check_ok(oallama_trace_start(100, OALLAMA_TRACE_CALLER), "a trace starts");
    other.compute(model, 7);
    const std::vector<oallama_span> own = stop_trace();
    check(!own.empty() && std::all_of(own.begin(), own.end(),
                                      [](const oallama_span & span) {
                                          return span.step <= OALLAMA_JOIN || span.step == OALLAMA_AHEAD;
                                      }),
          "of the caller alone no device's steps are seen");
    done("short traces, and devices without events");
}

// Two threads start and stop traces while a third computes: each trace ends, whoever ends it.
void check_threads() {
    const Block   block = ffn_block(q4_0, q4_0);
    const PlanPtr plan  = new_plan(plan_text({&block}, Cut::half, async_device::device_name, "CPU"));
    if (plan == nullptr) {
        return;
    }
    const Model           model(block, make_data(block), plan.get());
    async_device::Options slow;
    slow.max_delay_us = 200;
    async_device::set_options(slow);
    std::atomic<bool>        ends{false};
    std::thread              computes([&] {
        Session session;
        while (!ends) {
            check(!session.compute(model, 3).empty(), "computes while it is traced");
        }
    });
    std::vector<std::thread> tracers;
    for (int i = 0; i < 2; i++) {
        tracers.emplace_back([] {
            for (int round = 0; round < 30; round++) {
                check_ok(oallama_trace_start(1000, OALLAMA_TRACE_EVENTS), "a trace starts");
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                stop_trace();
            }
        });
    }
    for (std::thread & tracer : tracers) {
        tracer.join();
    }
    ends = true;
    computes.join();
    async_device::set_options({});
    done("traces of several threads");
}

} // namespace

void test_trace() {
    const Late kept = std::exchange(late, Late::none); // with an n_g the host may have nothing to do
    check_phases(OALLAMA_TRACE_EVENTS);
    check_phases(OALLAMA_TRACE_READ_BACK);
    check_limits();
    check_threads();
    late = kept;
}

} // namespace split_test
