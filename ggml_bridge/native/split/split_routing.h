// Which of a batch's rows the device computes, with the hot experts that it holds, and which the host.
//
// A token uses n_used experts, and each mul-mat by them gives it n_used rows, one for each rank. A row is a hit where
// its expert is hot. Rows are counted token by token: rank + n_used * token.

#pragma once

#include <cstdint>
#include <vector>

#include "host.h"

namespace oallama {

struct Routing {
    int64_t n_used   = 0;
    int64_t n_tokens = 0;
    int64_t n_device = 0; // rows that the device computes for each token: as many as can be hits

    // Of the device, [n_device, n_tokens]: hits come first. What is left over computes with some slot, to be thrown
    // away, so that shapes stay as they are.
    std::vector<int32_t> slots;
    std::vector<int32_t> device_rows; // -1: none

    // Of the host, only the misses: it reads the weights of experts that are not hot, and of no other.
    std::vector<int32_t> host_ids;
    std::vector<int32_t> host_rows; // ascending

    int64_t n_misses() const { return static_cast<int64_t>(host_rows.size()); }
};

// Ranks of a token that may be hits.
int64_t n_device_ranks(int64_t n_used, int64_t n_slots);

// ids: [n_used, n_tokens]. slot_of: where the device has each expert; -1: nowhere. What no hit takes computes with the
// slot of a hit where there is one token, which costs no more reading, and else with one that the token does not use:
// kernels for batches sort rows by expert, and take each once for a token. Throws OALLAMA_FAILED for an expert that
// does not exist.
void route(const std::vector<int32_t> & ids, int64_t n_used, const std::vector<int32_t> & slot_of, int64_t n_slots,
           Routing & routing);

// Routing weights of the rows that the device computes, 0 where it computes none.
void device_weights(const Routing & routing, const float * weights, float * out);

// Rows of the batch, from both sides, to where they belong in node, [n, n_used, n_tokens]. The host's lie packed at the
// node's beginning.
void join_rows(Host & host, const Routing & routing, const char * device, const ggml_tensor * node);

// node, [n, n_tokens], becomes the sum of each token's rows times their routing weights. host_rows: the host's, packed;
// device_rows: the device's, or, where summed, their sum.
void join_sum(Host & host, const Routing & routing, const float * weights, const float * host_rows,
              const float * device_rows, bool summed, const ggml_tensor * node);

} // namespace oallama
