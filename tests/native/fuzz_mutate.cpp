// How inputs are changed, for libFuzzer and for fuzz_main.cpp.

#include <algorithm>
#include <random>

#include "fuzz.h"

namespace fuzz {

namespace {

using Random = std::mt19937_64;

size_t below(Random & random, size_t n) {
    return n == 0 ? 0 : static_cast<size_t>(random() % n);
}

// Begin and end of the words of a text, or of its lines.
std::vector<std::pair<size_t, size_t>> parts(const std::string & text, const char * between) {
    std::vector<std::pair<size_t, size_t>> found;
    for (size_t begin = text.find_first_not_of(between); begin != std::string::npos;) {
        const size_t end = std::min(text.find_first_of(between, begin), text.size());
        found.emplace_back(begin, end);
        begin = text.find_first_not_of(between, end);
    }
    return found;
}

std::string number(Random & random) {
    const int64_t near[] = {0, 1, 31, 32, 64, 128, 256, 4096, 999999999999999999, int64_t{1} << 31, int64_t{1} << 60};
    const int64_t some   = near[below(random, std::size(near))];
    return std::to_string(some + static_cast<int64_t>(below(random, 3)) - 1);
}

void change_word(std::string & text, Random & random) {
    const auto found = parts(text, " \t\r\nx");
    if (found.empty()) {
        return;
    }
    const auto [begin, end] = found[below(random, found.size())];
    const auto [from, to]   = found[below(random, found.size())];
    switch (below(random, 4)) {
        case 0: text.replace(begin, end - begin, number(random)); break;
        case 1: text.replace(begin, end - begin, words()[below(random, words().size())]); break;
        case 2: text.replace(begin, end - begin, text.substr(from, to - from)); break;
        default: text.erase(begin, end - begin); break;
    }
}

void change_line(std::string & text, Random & random) {
    const auto found = parts(text, "\n");
    if (found.empty()) {
        return;
    }
    const auto [begin, end] = found[below(random, found.size())];
    const auto [from, to]   = found[below(random, found.size())];
    const std::string other = text.substr(from, to - from) + "\n";
    switch (below(random, 3)) {
        case 0: text.insert(begin, other); break;
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
        default:
            if (at < text.size()) {
                text[at] = byte;
            }
    }
}

} // namespace

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

#endif
