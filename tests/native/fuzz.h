// What a fuzz target gives: LLVMFuzzerTestOneInput, as libFuzzer calls it, and what sound inputs are made of.

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
