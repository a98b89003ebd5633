// Valid weight data of any type, quickly: some rows with random values, to be repeated as often as needed.

#pragma once

#include "support.h"

namespace bridge {

struct Tile {
    int64_t              rows = 0;
    std::vector<uint8_t> blocks; // `rows` rows of K elements in the weight's type
    std::vector<float>   values; // F32 [K, rows]: what the blocks stand for
};

// At most max_rows rows of k elements, about normal with variance 1/k, so that products with variance 1 keep it.
Tile make_tile(ggml_type type, int64_t k, int64_t max_rows);

} // namespace bridge
