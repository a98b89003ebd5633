// Several contexts, models and plans at once, work that threads share, and what is left behind.

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "host.h"
#include "split_test.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);
constexpr ggml_type q4_k = static_cast<ggml_type>(12);

using Expected = std::map<int64_t, Outputs>; // by n_tokens

Expected expected_of(const Block & block, const Data & data) {
    const Model whole(block, data, host_layouts().front());
    Session     cpu({/*split=*/false, /*gpu=*/false});
    Expected    all;
    for (int64_t n_tokens : {1, 2, 7, 33}) {
        all[n_tokens] = cpu.compute(whole, n_tokens);
    }
    return all;
}

// Counted, so that a device that is always wrong gives one line.
int wrong_results(const Model & model, const Expected & expected, int n_rounds) {
    Session session;
    int     n_wrong = 0;
    for (int round = 0; round < n_rounds; round++) {
        for (const auto & [n_tokens, outputs] : expected) {
            n_wrong += nmse(outputs, session.compute(model, n_tokens)) <= summation_bound ? 0 : 1;
        }
    }
    return n_wrong;
}

int in_parallel(const std::vector<std::function<int()>> & works) {
    std::atomic<int>         total{0};
    std::vector<std::thread> threads;
    for (const std::function<int()> & work : works) {
        threads.emplace_back([&] { total += work(); });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    return total;
}

void check_contexts() {
    for (const Block & block : {ffn_block(q4_0, q4_0), moe_block(GGML_TYPE_F16, GGML_TYPE_F16)}) {
        const Data     data     = make_data(block);
        const Expected expected = expected_of(block, data);
        for (const char * device : {async_device::device_name, "CPU"}) {
            const PlanPtr plan = new_plan(plan_text({&block}, Cut::half, device, "CPU"));
            const Model   model(block, data, plan.get());
            const int     n_wrong = in_parallel(
                {[&] { return wrong_results(model, expected, 4); }, [&] { return wrong_results(model, expected, 4); }});
            check(n_wrong == 0, block.name + ": two contexts share a model on " + device + ": " +
                                    std::to_string(n_wrong) + " wrong results");
        }
    }
    done("contexts in two threads");
}

void check_models() {
    const Block    first           = ffn_block(q4_0, q4_0);
    const Block    second          = moe_block(q4_k, q4_k);
    const Data     first_data      = make_data(first);
    const Data     second_data     = make_data(second);
    const Expected first_expected  = expected_of(first, first_data);
    const Expected second_expected = expected_of(second, second_data);

    const auto run = [](const Block & block, const Data & data, const Expected & expected, Cut cut,
                        const char * device) {
        const PlanPtr plan    = new_plan(plan_text({&block}, cut, device, "CPU"));
        int           n_wrong = 0;
        for (int i = 0; i < 3; i++) { // each is loaded and freed while the other computes
            const Model model(block, data, plan.get());
            n_wrong += wrong_results(model, expected, 1);
        }
        return n_wrong;
    };
    const int n_wrong =
        in_parallel({[&] { return run(first, first_data, first_expected, Cut::half, async_device::device_name); },
                     [&] { return run(second, second_data, second_expected, Cut::most, "CPU"); },
                     [&] { return run(first, first_data, first_expected, Cut::one, async_device::device_name); }});
    check(n_wrong == 0, "three plans at once: " + std::to_string(n_wrong) + " wrong results");
    done("models and plans in three threads");
}

// Large work is shared among all threads, small work is not, and each item is worked on once.
void check_shares() {
    oallama::Host host;
    host.set_n_threads(n_threads);
    for (const size_t bytes : {size_t{1} << 10, size_t{4} << 20}) { // only the second is large
        constexpr int64_t         n = 1000;
        std::vector<int>          times(n);
        std::mutex                mutex;
        std::set<std::thread::id> threads;
        host.share(n, bytes, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                times[static_cast<size_t>(i)]++;
            }
            const std::lock_guard<std::mutex> lock(mutex);
            threads.insert(std::this_thread::get_id());
        });
        check(std::all_of(times.begin(), times.end(), [](int n_times) { return n_times == 1; }),
              "each item is worked on once");
        const size_t expected = bytes < (size_t{1} << 20) ? 1 : static_cast<size_t>(n_threads);
        check(threads.size() == expected, std::to_string(bytes) + " bytes: " + std::to_string(threads.size()) +
                                              " threads of " + std::to_string(n_threads));
    }
    // packed rows of 4096 bytes move to larger distances: nearly all places overlap packed rows, half, hardly any
    for (const size_t row : {size_t{4100}, size_t{8192}, size_t{65536}}) {
        constexpr int64_t n     = 300;
        constexpr size_t  bytes = 4096;
        std::vector<char> data(n * row);
        for (size_t i = 0; i < n * bytes; i++) {
            data[i] = static_cast<char>(i * 7 + i / bytes);
        }
        const std::vector<char> packed = data;
        host.spread(data.data(), n, bytes, [row](int64_t i) { return static_cast<size_t>(i) * row; });
        bool same = true;
        for (size_t i = 0; i < n; i++) {
            same = same && std::equal(&packed[i * bytes], &packed[i * bytes] + bytes, &data[i * row]);
        }
        check(same, "packed rows come to lie " + std::to_string(row) + " bytes apart");
    }
    done("work that threads share");
}

} // namespace

void test_threads() {
    check_shares();
    check_contexts();
    check_models();
}

void test_leaks() {
    for (const Block & block : {ffn_block(q4_0, q4_0), moe_block(q4_0, q4_0)}) {
        const Data     data     = make_data(block);
        const Expected expected = expected_of(block, data);
        for (int i = 0; i < 50; i++) {
            const Cut     cut  = all_cuts[static_cast<size_t>(i) % all_cuts.size()];
            const PlanPtr plan = plan_of(block, cut);
            {
                const Model model(block, data, plan.get());
                Session     session;
                check(nmse(expected.at(2), session.compute(model, 2)) <= summation_bound,
                      "computed after loading again");
                check(i % 5 == 0 || async_device::counters().device_bytes > 0, "the device holds something");
            }
            check_nothing_held("after load and free " + std::to_string(i));
        }
    }
    done("loaded and freed 100 times");
}

} // namespace split_test
