// Where there is no libFuzzer: a fuzz target with its flags -runs, -seed, -max_total_time and -artifact_prefix, or with
// files to try. It does not see which code an input reaches: every input is a sound one, changed.

#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "fuzz.h"

namespace {

std::string running; // the input, and where it is kept should it end the process
std::string keep_as;

void keep(int /*signal*/) {
    std::ofstream(keep_as, std::ios::binary).write(running.data(), static_cast<std::streamsize>(running.size()));
    std::cerr << "kept: " << keep_as << std::endl;
}

void run(const std::string & input) {
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(input.data()), input.size());
}

} // namespace

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

int main(int argc, char ** argv) {
    uint64_t    seed = 1, runs = 0, n_files = 0;
    int64_t     seconds = 0;
    std::string prefix  = "./";
    for (int i = 1; i < argc; i++) {
        const std::string text  = argv[i];
        const auto        value = [&](const char * flag) {
            const size_t length = std::strlen(flag);
            return text.compare(0, length, flag) == 0 ? text.c_str() + length : nullptr;
        };
        if (const char * given = value("-runs=")) {
            runs = std::stoull(given);
        } else if (const char * given_seed = value("-seed=")) {
            seed = std::stoull(given_seed);
        } else if (const char * given_time = value("-max_total_time=")) {
            seconds = std::stoll(given_time);
        } else if (const char * given_prefix = value("-artifact_prefix=")) {
            prefix = given_prefix;
        } else {
            std::ifstream file(text, std::ios::binary);
            if (!file) {
                std::cerr << "cannot read " << text << std::endl;
                return 2;
            }
            run(std::string(std::istreambuf_iterator<char>(file), {}));
            n_files++;
        }
    }
    if (n_files > 0) {
        std::cout << n_files << " inputs" << std::endl;
        return 0;
    }
    if (__sanitizer_set_death_callback != nullptr) {
        __sanitizer_set_death_callback([] { keep(0); });
    }
    std::signal(SIGABRT, keep);
    const auto begin   = std::chrono::steady_clock::now();
    const auto elapsed = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    uint64_t done = 0;
    for (; (runs == 0 || done < runs) && (seconds == 0 || elapsed() < static_cast<double>(seconds)); done++) {
        const uint64_t own = seed * 0x9E3779B97F4A7C15U + done;
        running            = fuzz::mutated(fuzz::seeds()[own % fuzz::seeds().size()], own);
        keep_as            = prefix + "crash-" + std::to_string(seed) + "-" + std::to_string(done);
        run(running);
    }
    std::cout << "Done " << done << " runs in " << elapsed() << " second(s)" << std::endl;
    return 0;
}
