#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

namespace emulated {

namespace {

enum class Kind { none, mul_mat, mul_mat_id, flash_attention, get_rows, set_rows, routing, other };

// ggml's numbers of operations by name: what is not named moves its operands and its result once.
Kind kind_of(ggml_op op) {
    static const std::unordered_map<std::string, Kind> names = {
        {"NONE", Kind::none},
        {"RESHAPE", Kind::none},
        {"VIEW", Kind::none},
        {"PERMUTE", Kind::none},
        {"TRANSPOSE", Kind::none},
        {"MUL_MAT", Kind::mul_mat},
        {"MUL_MAT_ID", Kind::mul_mat_id},
        {"FLASH_ATTN_EXT", Kind::flash_attention},
        {"GET_ROWS", Kind::get_rows},
        {"SET_ROWS", Kind::set_rows},
        {"ARGSORT", Kind::routing},
        {"TOP_K", Kind::routing},
    };
    static const std::vector<Kind> kinds = [] {
        std::vector<Kind> made;
        for (int i = 0; i < 256; i++) {
            const char * name  = i <= GGML_OP_GLU ? ggml_op_name(static_cast<ggml_op>(i)) : nullptr;
            const auto   found = name == nullptr ? names.end() : names.find(name);
            made.push_back(found == names.end() ? Kind::other : found->second);
        }
        return made;
    }();
    const auto index = static_cast<size_t>(op);
    return index < kinds.size() ? kinds[index] : Kind::other;
}

double n_bytes(const ggml_tensor * tensor) {
    return tensor == nullptr ? 0.0 : static_cast<double>(ggml_nbytes(tensor));
}

double n_elements(const ggml_tensor * tensor) {
    return static_cast<double>(tensor->ne[0]) * static_cast<double>(tensor->ne[1]) *
           static_cast<double>(tensor->ne[2]) * static_cast<double>(tensor->ne[3]);
}

// Bytes of what a tensor shows, not of what lies between its rows.
double shown_bytes(const ggml_tensor * tensor) {
    return tensor == nullptr ? 0.0
                             : n_elements(tensor) / static_cast<double>(ggml_blck_size(tensor->type)) *
                                   static_cast<double>(ggml_type_size(tensor->type));
}

bool in_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

double roofline(const Parameters & parameters, double flop, double bytes, bool with_float) {
    const double rate = with_float ? parameters.flops_float_per_s : parameters.flops_per_s;
    return std::max(flop / rate, bytes / parameters.bytes_per_s) + parameters.kernel_s;
}

// Linear between the batch sizes that were measured, constant below, the last slope above.
double interpolate(const Curve & curve, int64_t n_tokens) {
    if (n_tokens <= curve.front().first || curve.size() == 1) {
        const double grown =
            static_cast<double>(n_tokens) / static_cast<double>(std::max<int64_t>(curve.front().first, 1));
        return curve.front().second * std::max(1.0, grown);
    }
    size_t i = 1;
    while (i + 1 < curve.size() && curve[i].first < n_tokens) {
        i++;
    }
    const auto [n0, s0] = curve[i - 1];
    const auto [n1, s1] = curve[i];
    double slope        = (s1 - s0) / static_cast<double>(n1 - n0);
    if (n_tokens > n1) {
        slope = std::max(0.0, slope);
        return s1 + slope * static_cast<double>(n_tokens - n1);
    }
    return s0 + slope * static_cast<double>(n_tokens - n0);
}

// Experts that n_tokens tokens use, each n_used of n at random.
double distinct_experts(double n, double n_used, double n_tokens) {
    return n * (1.0 - std::pow(1.0 - n_used / n, n_tokens));
}

} // namespace

double mul_mat_seconds(const Parameters & parameters, ggml_type type, int64_t k, int64_t n, int64_t e,
                       int64_t n_expert_used, int64_t n_tokens) {
    const char * op    = n_expert_used > 0 ? "MUL_MAT_ID" : "MUL_MAT";
    const auto   known = parameters.kernels.find({op, type, k, n, e, n_expert_used});
    if (known != parameters.kernels.end()) {
        return interpolate(known->second, n_tokens);
    }
    const double tokens = static_cast<double>(n_tokens);
    const double columns =
        n_expert_used > 0 ? tokens * static_cast<double>(n_expert_used) : tokens * static_cast<double>(e);
    const double matrix  = static_cast<double>(ggml_row_size(type, k)) * static_cast<double>(n);
    const double experts = static_cast<double>(e);
    const double read    = n_expert_used > 0
                               ? distinct_experts(experts, static_cast<double>(n_expert_used), tokens) * matrix
                               : experts * matrix;
    const double moved   = 4.0 * columns * static_cast<double>(k + n);
    const double flop    = 2.0 * static_cast<double>(k) * static_cast<double>(n) * columns;
    return roofline(parameters, flop, read + moved, in_float(type));
}

bool has_kernel(const ggml_tensor * node) {
    return kind_of(node->op) != Kind::none && n_elements(node) > 0.0;
}

bool is_routing(const ggml_tensor * node) {
    return kind_of(node->op) == Kind::routing;
}

double kernel_seconds(const Parameters & parameters, const ggml_tensor * node) {
    const ggml_tensor * a = node->src[0];
    const ggml_tensor * b = node->src[1];
    switch (kind_of(node->op)) {
        case Kind::none: return 0.0;
        case Kind::mul_mat:
            if (a->ne[3] == 1 && a->ne[2] == b->ne[2] && b->ne[3] == 1) { // a weight, or one for each head
                return mul_mat_seconds(parameters, a->type, a->ne[0], a->ne[1], a->ne[2], 0, b->ne[1]);
            }
            // attention without flash: one matrix serves several heads
            return roofline(parameters, 2.0 * static_cast<double>(a->ne[0]) * n_elements(node),
                            shown_bytes(a) + shown_bytes(b) + shown_bytes(node), in_float(a->type));
        case Kind::mul_mat_id:
            return mul_mat_seconds(parameters, a->type, a->ne[0], a->ne[1], a->ne[2], node->ne[1], node->ne[2]);
        case Kind::flash_attention: { // q [d, tokens, heads], k [d, positions, kv heads]
            const double pairs =
                static_cast<double>(a->ne[1]) * static_cast<double>(a->ne[2]) * static_cast<double>(b->ne[1]);
            double bytes = shown_bytes(node);
            for (const ggml_tensor * src : node->src) {
                bytes += shown_bytes(src);
            }
            return roofline(parameters, 4.0 * static_cast<double>(a->ne[0]) * pairs, bytes, true);
        }
        case Kind::get_rows: return roofline(parameters, 0.0, 2.0 * n_bytes(node), true);
        case Kind::set_rows: return roofline(parameters, 0.0, 2.0 * shown_bytes(a), true);
        case Kind::routing:
        case Kind::other: break;
    }
    double bytes = shown_bytes(node);
    for (const ggml_tensor * src : node->src) {
        bytes += shown_bytes(src);
    }
    return roofline(parameters, 0.0, bytes, true);
}

int64_t offload_batch(const ggml_tensor * op) {
    const char * name = ggml_op_name(op->op);
    if (std::strcmp(name, "GET_ROWS") == 0) {
        return 0;
    }
    if (std::strcmp(name, "MUL_MAT") == 0) {
        return op->ne[1];
    }
    if (std::strcmp(name, "MUL_MAT_ID") == 0 || std::strcmp(name, "ROPE") == 0 || std::strcmp(name, "ROPE_BACK") == 0) {
        return op->ne[2];
    }
    return op->ne[1] * op->ne[2] * op->ne[3];
}

} // namespace emulated
