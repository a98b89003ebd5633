// The parameters of an emulated device: their text, read and checked.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../split/ggml_backend_abi.h"

namespace emulated {

constexpr size_t most_devices = 8; // of one process

// Seconds of a copy of n bytes: a + b * n.
struct Line {
    double a = 0.0;
    double b = 0.0;
};

// A weight's mul-mat: op, type, [K, N, E], experts used (0: MUL_MAT).
using Signature = std::tuple<std::string, ggml_type, int64_t, int64_t, int64_t, int64_t>;
using Curve     = std::vector<std::pair<int64_t, double>>; // (tokens, seconds), ascending

struct Parameters {
    std::string                name = "Emulated0"; // no other device's
    std::string                description;
    int64_t                    memory_bytes = 0;
    int64_t                    pinned_bytes = INT64_MAX; // of host memory that can be pinned at once
    bool                       by_address   = false;     // it takes buffers of its own type alone, as told by address
    bool                       real_values  = false;
    int                        cpu          = -1;
    uint64_t                   seed         = 0;
    double                     bytes_per_s = 0.0, flops_per_s = 0.0, flops_float_per_s = 0.0;
    double                     kernel_s = 0.0;
    double                     launch_s = 0.0, launch_node_s = 0.0, copy_issue_s = 0.0, synchronize_s = 0.0;
    double                     uncaptured_node_s = 0.0; // beside launch_node_s, where CUDA would not have captured it
    std::array<Line, 4>        copies;                  // [2 * out + pageable]
    std::map<Signature, Curve> kernels;
    int64_t                    lost_after = -1;               // graphs; -1: never
    int64_t                    fail_alloc = -1;               // the allocation that is refused, from 1; -1: none
    std::map<int, std::vector<std::vector<int32_t>>> routing; // layer -> rows of experts

    const Line & copy(bool out, bool pinned) const { return copies[2 * (out ? 1U : 0U) + (pinned ? 0U : 1U)]; }
};

// Reads the parameters of one or more devices, separated by lines `---`. Throws oallama::Error naming a line that is
// wrong, and where two devices have the same name or different cores.
std::vector<Parameters> parse_parameters(const std::string & text);

} // namespace emulated
