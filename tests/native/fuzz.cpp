// Runs a fuzz target: with clang under libFuzzer, which sees what code an input reaches; else with the same flags
// (-runs, -seed, -artifact_prefix) or over files, every input being a sound one, changed. Either changes inputs here.

#include "fuzz.h"

#include <algorithm>
#include <csignal>
#include <fstream>
#include <iostream>
#include <map>
#include <random>

namespace fuzz {

namespace {

using Random = std::mt19937_64;

size_t below(Random & random, size_t n) {
    return n == 0 ? 0 : static_cast<size_t>(random() % n);
}

// Begin and end of one of the words of a text, or of its lines; of nothing where it has none.
std::pair<size_t, size_t> one_part(const std::string & text, const char * between, Random & random) {
    std::vector<std::pair<size_t, size_t>> found;
    for (size_t begin = text.find_first_not_of(between); begin != std::string::npos;) {
        const size_t end = std::min(text.find_first_of(between, begin), text.size());
        found.emplace_back(begin, end);
        begin = text.find_first_not_of(between, end);
    }
    return found.empty() ? std::pair<size_t, size_t>() : found[below(random, found.size())];
}

std::string number(Random & random) {
    const int64_t near[] = {0, 1, 31, 32, 64, 128, 256, 4096, 999999999999999999, int64_t{1} << 31, int64_t{1} << 60};
    const int64_t some   = near[below(random, std::size(near))];
    return std::to_string(some + static_cast<int64_t>(below(random, 3)) - 1);
}

void change_word(std::string & text, Random & random) {
    const auto [begin, end] = one_part(text, " \t\r\nx", random);
    const auto [from, to]   = one_part(text, " \t\r\nx", random);
    switch (below(random, 4)) {
        case 0: text.replace(begin, end - begin, number(random)); break;
        case 1: text.replace(begin, end - begin, words()[below(random, words().size())]); break;
        case 2: text.replace(begin, end - begin, text.substr(from, to - from)); break;
        default: text.erase(begin, end - begin); break;
    }
}

void change_line(std::string & text, Random & random) {
    const auto [begin, end] = one_part(text, "\n", random);
    const auto [from, to]   = one_part(text, "\n", random);
    switch (below(random, 3)) {
        case 0: text.insert(begin, text.substr(from, to - from) + "\n"); break;
        case 1: text.erase(begin, end - begin); break;
        default: text.insert(begin, words()[below(random, words().size())] + " " + number(random) + "\n"); break;
    }
}

void change_byte(std::string & text, Random & random) {
    const size_t at   = below(random, text.size() + 1);
    const char   byte = static_cast<char>(below(random, 256));
    switch (below(random, 4)) {
        case 0: text.resize(at); break;
        case 1: text.insert(at, 1 + below(random, 8), byte); break;
        case 2: text.erase(at, 1); break;
        default: text.replace(at, 1, 1, byte); break;
    }
}

// An input with one to four words, lines or bytes changed.
std::string mutated(std::string input, uint64_t seed) {
    Random random(seed);
    for (size_t left = 1 + below(random, 4); left > 0; left--) {
        switch (below(random, 4)) {
            case 0: change_line(input, random); break;
            case 1: change_byte(input, random); break;
            default: change_word(input, random); break;
        }
    }
    return input;
}

} // namespace

} // namespace fuzz

#ifdef OALLAMA_LIBFUZZER

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned int seed) {
    if (seed % 3 == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::string input(reinterpret_cast<const char *>(data), size);
    if (size <= 1) {
        input = fuzz::seeds()[seed % fuzz::seeds().size()];
    }
    input = fuzz::mutated(std::move(input), seed);
    input.resize(std::min(input.size(), max_size));
    std::copy(input.begin(), input.end(), data);
    return input.size();
}

#else

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
    std::map<std::string, std::string> flags = {{"runs", "1000"}, {"seed", "1"}, {"artifact_prefix", "./"}};
    std::vector<std::string>           files;
    for (const std::string & text : std::vector<std::string>(argv + 1, argv + argc)) {
        const size_t end = text.find('=');
        if (text[0] == '-') {
            flags.at(text.substr(1, end - 1)) = text.substr(end + 1);
        } else {
            files.push_back(text);
        }
    }
    for (const std::string & path : files) {
        std::ifstream file(path, std::ios::binary);
        if (!file) {
            std::cerr << "cannot read " << path << std::endl;
            return 2;
        }
        run(std::string(std::istreambuf_iterator<char>(file), {}));
    }
    if (!files.empty()) {
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

#endif
