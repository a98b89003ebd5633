// What a fuzz target gives: LLVMFuzzerTestOneInput, as libFuzzer calls it, and what sound inputs are made of.
//
// With clang they are linked with libFuzzer, else with fuzz_main.cpp, which takes the same flags. Either changes inputs
// by fuzz_mutate.cpp: it knows words and lines, as the texts have them that are parsed.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size);

namespace fuzz {

const std::vector<std::string> & seeds(); // sound inputs
const std::vector<std::string> & words(); // to be put in place of others

inline std::vector<std::string> words_of(const std::string & text) {
    std::istringstream stream(text);
    return {std::istream_iterator<std::string>(stream), {}};
}

// An input with one to four words, lines or bytes changed.
std::string mutated(std::string input, uint64_t seed);

// Ends the process, as a sanitizer would, where a condition does not hold.
inline void must(bool holds, const char * what) {
    if (!holds) {
        std::fprintf(stderr, "does not hold: %s\n", what);
        std::abort();
    }
}

// Holds where a parser that failed gave one sentence.
inline void must_be_refused_in_one_sentence(bool invalid, const std::string & sentence) {
    must(invalid && !sentence.empty() && sentence.find('\n') == std::string::npos,
         "a text is refused with one sentence");
}

} // namespace fuzz
