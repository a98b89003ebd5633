// Several contexts, models and plans at once, and work that threads share.

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

// Counted, so that a device that is always wrong gives one line.
int wrong_results(const Model & model, int n_rounds) {
    Session session;
    int     n_wrong = 0;
    for (int round = 0; round < n_rounds; round++) {
        for (const int64_t n_tokens : {1, 2, 7, 33}) {
            n_wrong += is_right(session, model, n_tokens) ? 0 : 1;
        }
    }
    return n_wrong;
}

void check_in_parallel(const std::vector<std::function<int()>> & works, const std::string & what) {
    std::atomic<int>         n_wrong{0};
    std::vector<std::thread> threads;
    for (const std::function<int()> & work : works) {
        threads.emplace_back([&] { n_wrong += work(); });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    check(n_wrong == 0, what + ": " + std::to_string(n_wrong) + " wrong results");
}

void check_contexts(const Block & block) {
    for (const char * device : {async_device::device_name, "CPU"}) {
        const PlanPtr              plan = plan_of(block, Cut::half, "", device);
        const Model                model(block, plan.get());
        const std::function<int()> work = [&] { return wrong_results(model, 4); };
        check_in_parallel({work, work}, block.name + ": two contexts share a model on " + device);
    }
}

void check_models() {
    const auto loads_and_computes = [](const Block & block, Cut cut, const char * device) {
        return [block, cut, device] {
            const PlanPtr plan    = plan_of(block, cut, "", device);
            int           n_wrong = 0;
            for (int i = 0; i < 3; i++) { // each is loaded and freed while the others compute
                n_wrong += wrong_results(Model(block, plan.get()), 1);
            }
            return n_wrong;
        };
    };
    const Block     dense = ffn_block(q4_0, q4_0);
    const ggml_type q4_k  = static_cast<ggml_type>(12);
    check_in_parallel({loads_and_computes(dense, Cut::half, async_device::device_name),
                       loads_and_computes(moe_block(q4_k, q4_k), Cut::most, "CPU"),
                       loads_and_computes(dense, Cut::one, async_device::device_name)},
                      "three plans at once");
}

// Large work is shared among all threads, small work is not, and each item is worked on once.
void check_shares() {
    oallama::Host host;
    host.set_n_threads(n_threads);
    for (const size_t bytes : {size_t{1} << 10, size_t{4} << 20}) { // only the second is large
        std::vector<int>          times(1000);
        std::mutex                mutex;
        std::set<std::thread::id> threads;
        host.share(1000, bytes, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                times[static_cast<size_t>(i)]++;
            }
            const std::lock_guard<std::mutex> lock(mutex);
            threads.insert(std::this_thread::get_id());
        });
        check(std::count(times.begin(), times.end(), 1) == 1000, "each item is worked on once");
        check(threads.size() == (bytes < (size_t{1} << 20) ? 1 : static_cast<size_t>(n_threads)),
              std::to_string(bytes) + " bytes: " + std::to_string(threads.size()) + " threads");
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
}

} // namespace

void test_threads() {
    check_shares();
    check_contexts(ffn_block(q4_0, q4_0));
    check_contexts(moe_block(GGML_TYPE_F16, GGML_TYPE_F16));
    check_models();
}

} // namespace split_test
