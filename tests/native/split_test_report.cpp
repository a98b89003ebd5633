// The report: written while blocks run, when something is freed, and on request.

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include "report.h"
#include "split_test.h"
#include "times.h"

namespace split_test {

namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path & path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Waits for a report that has this in it; returns it.
std::string wait_for(const fs::path & path, const std::string & wanted) {
    std::string found;
    for (int i = 0; i < 600; i++) {
        found = text_of(path);
        if (found.find(wanted) != std::string::npos) {
            return found;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    check(false, "a report has " + wanted + ": " + found);
    return found;
}

void ask(const fs::path & path, const std::string & text) {
    const int pipe = open((path.string() + ".ask").c_str(), O_WRONLY | O_NONBLOCK);
    check(pipe >= 0 && write(pipe, text.data(), text.size()) == static_cast<ssize_t>(text.size()), "it can be asked");
    close(pipe);
}

std::string number_in(const std::string & report, const std::string & key) {
    std::smatch found;
    return std::regex_search(report, found, std::regex("\"" + key + "\": ([0-9.e+-]+)")) ? found[1].str() : "";
}

} // namespace

void test_report() {
    std::string folder = (fs::temp_directory_path() / "oallama-report-XXXXXX").string();
    check(mkdtemp(folder.data()) != nullptr, "a folder is made");
    const fs::path path   = fs::path(folder) / ("report-" + std::to_string(getpid()) + ".json");
    const fs::path victim = fs::path(folder) / "victim";
    std::ofstream(victim) << "private";
    fs::create_symlink(victim, path.string() + ".next");

    const Block   block  = moe_block(q4_0, q4_0);
    const PlanPtr plan   = new_plan(plan_text({&block}, Cut::half, "count 1\n"));
    auto &        loaded = *static_cast<oallama::LoadedPlan *>(buft_of(plan.get())->context);
    oallama::keep_report((fs::path(folder) / "report-%p.json").string(), loaded.shared_from_this(), nullptr);

    ask(path, "7\n");
    const std::string nothing = wait_for(path, "\"request\": 7");
    check(nothing.find("\"oallama_report\": 1, ") == 1 && nothing.find("\"slices\": []") != std::string::npos &&
              nothing.find("\"emulated\": null") != std::string::npos,
          "nothing is loaded yet: " + nothing);
    check(text_of(victim) == "private", "a link that somebody left is not followed");
    check(fs::status(path).permissions() == (fs::perms::owner_read | fs::perms::owner_write), "it is the user's alone");
    {
        const Model model(block, plan.get());
        Session     session;
        loaded.times().of("a\n\"name\"\\", 8).add(8, {1, 2, 3, 4}); // a model's names may be anything
        session.compute(model, 3);
        const std::string running = wait_for(path, "\"n_tokens\": 3"); // a second later
        check(running.find("\"name\": \"a\\u000a\\\"name\\\"\\\\\"") != std::string::npos,
              "names are escaped: " + running);
        check(number_in(running, "device_weights") == std::to_string(memory().device_weights), "bytes held");
        check(running.find("\"batches\": \"several\", \"n_tokens\": 3, \"uses\": [") != std::string::npos, "uses");
        session.compute(model, 1);
        ask(path, "8\n9\n");
        wait_for(path, "\"request\": 9");
        ask(path, "no number\n\n");
        session.compute(model, 1);
    }
    const std::string last = text_of(path); // written before it was freed
    check(number_in(last, "n_graphs") == std::to_string(stats().n_graphs), "the last runs are told: " + last);
    check(number_in(last, "device_weights") != "0" && number_in(last, "batch") != "", "what was held, and blocks");
    check(fs::remove_all(folder) > 0, "the folder is removed");
    oallama::write_report(/*always=*/true); // nobody waits for what cannot be written
}

} // namespace split_test
