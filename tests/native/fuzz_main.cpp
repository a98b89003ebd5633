// Runs a fuzz target where there is no libFuzzer: with its flags -runs, -seed and -artifact_prefix, or over files. It
// does not see which code an input reaches: every input is a sound one, changed.

#include <csignal>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>

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
    std::map<std::string, std::string> flags   = {{"runs", "1000"}, {"seed", "1"}, {"artifact_prefix", "./"}};
    int                                n_files = 0;
    for (int i = 1; i < argc; i++) {
        const std::string text = argv[i];
        if (text[0] == '-') {
            const size_t end                  = text.find('=');
            flags.at(text.substr(1, end - 1)) = text.substr(end + 1);
            continue;
        }
        std::ifstream file(text, std::ios::binary);
        if (!file) {
            std::cerr << "cannot read " << text << std::endl;
            return 2;
        }
        run(std::string(std::istreambuf_iterator<char>(file), {}));
        n_files++;
    }
    if (n_files > 0) {
        return 0;
    }
    if (__sanitizer_set_death_callback != nullptr) {
        __sanitizer_set_death_callback([] { keep(0); });
    }
    std::signal(SIGABRT, keep);
    const uint64_t runs = std::stoull(flags.at("runs")), seed = std::stoull(flags.at("seed"));
    for (uint64_t done = 0; done < runs; done++) {
        const uint64_t own = seed * 0x9E3779B97F4A7C15U + done;
        running            = fuzz::mutated(fuzz::seeds()[own % fuzz::seeds().size()], own);
        keep_as            = flags.at("artifact_prefix") + "crash-" + flags.at("seed") + "-" + std::to_string(done);
        run(running);
    }
    std::cout << "Done " << runs << " runs" << std::endl;
    return 0;
}
