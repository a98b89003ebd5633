// Times of blocks.

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "split_test.h"
#include "times.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

// How long each block took, by classes of batch sizes.
void check_times() {
    const Setting                    tokens(late, false); // with an n_g the host may have nothing to do
    const Block                      block = ffn_block(q4_0, q4_0);
    const Data                       data  = make_data(block);
    const PlanPtr                    plan  = plan_of(block, Cut::half);
    const Model                      model(block, data, plan.get());
    Session                          session;
    std::vector<oallama_block_times> times(8);
    int64_t                          n = 0;
    for (const int64_t n_tokens : {8, 5, 9}) {
        session.compute(model, n_tokens);
    }
    check_ok(oallama_plan_take_times(plan.get(), times.data(), 1, &n), "times are taken");
    check(n == 1, "no more of them than there is room for");
    check_ok(oallama_plan_take_times(plan.get(), times.data() + 1, 7, &n), "times are taken");
    check(n == 1, "and the others later");
    for (size_t i = 0; i < 2; i++) {
        const oallama_block_times & time   = times[i];
        const bool                  larger = time.batch == 16;
        check(time.batch == (larger ? 16 : 8), "the class is a power of two");
        check(time.n_runs == (larger ? 1 : 2) && time.n_tokens == (larger ? 9 : 13), "each run is noted once");
        check(time.host_s > 0 && time.launch_s > 0 && time.wait_s > 0 && time.join_s > 0, "seconds");
    }
    check_ok(oallama_plan_take_times(plan.get(), times.data(), 8, &n), "times are taken");
    check(n == 0, "once");
    check_ok(oallama_reset_stats(), "statistics are reset");
    session.compute(model, 0);
    check_ok(oallama_plan_take_times(plan.get(), times.data(), 8, &n), "times are taken");
    check(session.status() == GGML_STATUS_SUCCESS && n == 0 && stats().n_phases == 0 && stats().bytes_streamed == 0,
          "a batch of no tokens takes no time and streams nothing");
    check(oallama_plan_take_times(plan.get(), nullptr, 8, &n) == OALLAMA_INVALID, "no room for the times");
}

std::string text_of_file(const std::string & path) {
    const std::ifstream file(path);
    std::ostringstream  text;
    text << file.rdbuf();
    return text.str();
}

// The file that is replaced while blocks run, as long as it can be written.
void check_times_file() {
    std::string folder = (std::filesystem::temp_directory_path() / "oallama-times-XXXXXX").string();
    check(mkdtemp(folder.data()) != nullptr, "a folder is made");
    const std::string path  = folder + "/times";
    const auto        times = std::make_shared<oallama::BlockTimes>();
    const auto add    = [&](int64_t n_tokens) { times->of("a block", n_tokens).add(n_tokens, {100, 200, 300, 400}); };
    const auto become = [&](const std::string & text) {
        for (int i = 0; i < 600 && text_of_file(path) != text; i++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        check(text_of_file(path) == text, "the file tells: " + text);
    };
    add(3);
    write_times(times, path);
    become("4 1 3 100 200 300 400 a block\n");
    add(4);
    add(1);
    become("1 1 1 100 200 300 400 a block\n4 2 7 200 400 600 800 a block\n");
    check(std::filesystem::remove_all(folder) > 0, "the folder is removed");
    add(1); // nobody waits for what cannot be written
}

} // namespace

void test_times() {
    check_times();
    done("times of blocks");
    check_times_file();
    done("a file of times");
    check_nothing_held("after times");
}

} // namespace split_test
