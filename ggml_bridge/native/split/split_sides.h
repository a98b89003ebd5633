// Which elements of a value, and of which tokens, are on which side.

#pragma once

#include "split_values.h"

namespace oallama {

// Some tokens of a tensor: [first, first + count) along dimension dim; count < 0: all.
struct Tokens {
    int     dim   = 1;
    int64_t first = 0;
    int64_t count = -1;

    int64_t count_of(const ggml_tensor * tensor) const { return count < 0 ? tensor->ne[dim] : count; }

    std::array<int64_t, GGML_MAX_DIMS> shape(const ggml_tensor * tensor, int64_t n) const {
        std::array<int64_t, GGML_MAX_DIMS> ne = {n, tensor->ne[1], tensor->ne[2], tensor->ne[3]};
        ne[static_cast<size_t>(dim)]          = count_of(tensor);
        return ne;
    }

    Tokens along(int other) const { return {other, first, count}; }
};

// Elements of a value on one side: [begin, begin + count).
inline int64_t begin_of(const Value & v, Side side) {
    return side == side_stream ? v.cc : side == side_device ? v.cc + v.cg : 0;
}

inline int64_t count_of(const Value & v, Side side) {
    return side == side_stream ? v.cg : side == side_device ? v.extent - v.cc - v.cg : v.cc;
}

// Tokens of a value on one side: CC and CG' share them, CG and GG have all.
inline Tokens tokens_of(const Value & v, Side side) {
    const int64_t on_host = v.n_tokens - v.n_g;
    if (v.n_g > 0 && side == side_host) {
        return {v.token_dim, 0, on_host};
    }
    return side == side_prime ? Tokens{v.token_dim, on_host, v.n_g} : Tokens{v.token_dim};
}

// Whether there is anything of a value on one side.
inline bool has(const Value & v, Side side) {
    const bool tokens = side == side_host ? v.n_g == 0 || v.n_g < v.n_tokens : side != side_prime || v.n_g > 0;
    return tokens && count_of(v, side) > 0;
}

// Rows of a tensor's memory before some tokens.
inline int64_t first_row_of(const ggml_tensor * tensor, Tokens tokens) {
    return tokens.first * (tokens.dim == 2 ? tensor->ne[1] : 1);
}

} // namespace oallama
