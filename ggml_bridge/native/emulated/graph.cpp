#include "graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace emulated {

namespace {

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

// Bytes of a node's result and of all its operands.
double moved_bytes(const ggml_tensor * node) {
    double bytes = shown_bytes(node);
    for (const ggml_tensor * src : node->src) {
        bytes += shown_bytes(src);
    }
    return bytes;
}

bool in_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

double roofline(const Parameters & parameters, double flop, double bytes, bool with_float) {
    const double rate = with_float ? parameters.flops_float_per_s : parameters.flops_per_s;
    return std::max(flop / rate, bytes / parameters.bytes_per_s) + parameters.kernel_s;
}

// Linear between the batch sizes that were measured, constant below, in proportion above.
double interpolate(const Curve & curve, int64_t n_tokens) {
    if (n_tokens <= curve.front().first) {
        return curve.front().second;
    }
    for (size_t i = 1; i < curve.size(); i++) {
        const auto [n0, s0] = curve[i - 1];
        const auto [n1, s1] = curve[i];
        if (n_tokens <= n1) {
            return s0 + (s1 - s0) / static_cast<double>(n1 - n0) * static_cast<double>(n_tokens - n0);
        }
    }
    const auto [last_n, last_s] = curve.back();
    return last_s * static_cast<double>(n_tokens) / static_cast<double>(last_n);
}

// Experts that n_tokens tokens use, each n_used of n at random.
double distinct_experts(double n, double n_used, double n_tokens) {
    return n * (1.0 - std::pow(1.0 - n_used / n, n_tokens));
}

// One number for a tensor's place and shape.
uint64_t mixed(uint64_t hash, const ggml_tensor * tensor) {
    const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15U; };
    add(reinterpret_cast<uintptr_t>(tensor->data));
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        add(static_cast<uint64_t>(tensor->ne[d]));
        add(tensor->nb[d]);
    }
    return hash ^ (hash >> 32U);
}

} // namespace

//
// kernels
//

namespace {

// As a roofline has it. read: matrices of the weight that are read.
double matrix_seconds(const Parameters & parameters, ggml_type type, int64_t k, int64_t n, double read,
                      double columns) {
    const double matrix = static_cast<double>(ggml_row_size(type, k)) * static_cast<double>(n);
    const double moved  = 4.0 * columns * static_cast<double>(k + n);
    const double flop   = 2.0 * static_cast<double>(k) * static_cast<double>(n) * columns;
    return roofline(parameters, flop, read * matrix + moved, in_float(type));
}

} // namespace

double mul_mat_seconds(const Parameters & parameters, ggml_type type, int64_t k, int64_t n, int64_t e,
                       int64_t n_expert_used, int64_t n_tokens) {
    const char * op    = n_expert_used > 0 ? "MUL_MAT_ID" : "MUL_MAT";
    const auto   known = parameters.kernels.find({op, type, k, n, e, n_expert_used});
    if (known != parameters.kernels.end()) {
        return interpolate(known->second, n_tokens);
    }
    const double tokens  = static_cast<double>(n_tokens);
    const double experts = static_cast<double>(e);
    const double used    = static_cast<double>(n_expert_used);
    return n_expert_used > 0
               ? matrix_seconds(parameters, type, k, n, distinct_experts(experts, used, tokens), tokens * used)
               : matrix_seconds(parameters, type, k, n, experts, tokens * experts);
}

RoutedMulMat::RoutedMulMat(const ggml_tensor * node, const char * ids)
    : type_(node->src[0]->type), k_(node->src[0]->ne[0]), n_(node->src[0]->ne[1]), e_(node->src[0]->ne[2]),
      n_used_(node->ne[1]), n_tokens_(node->ne[2]), ids_(ids), nb_({node->src[2]->nb[0], node->src[2]->nb[1]}) {}

int64_t RoutedMulMat::n_distinct() const {
    std::vector<bool> used(static_cast<size_t>(e_));
    for (int64_t token = 0; token < n_tokens_; token++) {
        for (int64_t rank = 0; rank < n_used_; rank++) {
            int32_t expert = 0;
            std::memcpy(&expert, ids_ + static_cast<size_t>(token) * nb_[1] + static_cast<size_t>(rank) * nb_[0],
                        sizeof expert);
            if (expert >= 0 && expert < e_) {
                used[static_cast<size_t>(expert)] = true;
            }
        }
    }
    return std::count(used.begin(), used.end(), true);
}

double RoutedMulMat::seconds(const Parameters & parameters, int64_t n_distinct) const {
    const double used    = static_cast<double>(n_used_);
    const double tokens  = static_cast<double>(n_tokens_);
    const auto   reading = [&](double n_experts) {
        return matrix_seconds(parameters, type_, k_, n_, n_experts, used * tokens);
    };
    return mul_mat_seconds(parameters, type_, k_, n_, e_, n_used_, n_tokens_) *
           reading(static_cast<double>(n_distinct)) / reading(distinct_experts(static_cast<double>(e_), used, tokens));
}

bool has_kernel(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return false;
        default: return n_elements(node) > 0.0;
    }
}

bool cuda_supports(const ggml_tensor * op) {
    return op->op != GGML_OP_MUL_MAT_ID || op->op_params[3] != GGML_PREC_F32; // where ggml_prec_set_src notes it
}

bool is_routing(const ggml_tensor * node) {
    return node->op == GGML_OP_ARGSORT || node->op == GGML_OP_TOP_K;
}

double kernel_seconds(const Parameters & parameters, const ggml_tensor * node) {
    const ggml_tensor * a = node->src[0];
    const ggml_tensor * b = node->src[1];
    switch (node->op) {
        case GGML_OP_MUL_MAT:
            if (a->ne[3] == 1 && a->ne[2] == b->ne[2] && b->ne[3] == 1) { // a weight, or one for each head
                return mul_mat_seconds(parameters, a->type, a->ne[0], a->ne[1], a->ne[2], 0, b->ne[1]);
            }
            // attention without flash: one matrix serves several heads
            return roofline(parameters, 2.0 * static_cast<double>(a->ne[0]) * n_elements(node), moved_bytes(node),
                            in_float(a->type));
        case GGML_OP_MUL_MAT_ID:
            return mul_mat_seconds(parameters, a->type, a->ne[0], a->ne[1], a->ne[2], node->ne[1], node->ne[2]);
        case GGML_OP_FLASH_ATTN_EXT: { // q [d, tokens, heads], k [d, positions, kv heads]
            const double pairs =
                static_cast<double>(a->ne[1]) * static_cast<double>(a->ne[2]) * static_cast<double>(b->ne[1]);
            return roofline(parameters, 4.0 * static_cast<double>(a->ne[0]) * pairs, moved_bytes(node), true);
        }
        case GGML_OP_GET_ROWS: return roofline(parameters, 0.0, 2.0 * shown_bytes(node), true);
        case GGML_OP_SET_ROWS: return roofline(parameters, 0.0, 2.0 * shown_bytes(a), true);
        default: return roofline(parameters, 0.0, moved_bytes(node), true);
    }
}

int64_t offload_batch(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_GET_ROWS: return 0;
        case GGML_OP_MUL_MAT: return op->ne[1];
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK: return op->ne[2];
        default: return op->ne[1] * op->ne[2] * op->ne[3];
    }
}

//
// launches
//

bool Captures::launch(const ggml_cgraph * graph) {
    if (graph->n_nodes == 0) {
        return false;
    }
    uint64_t places = static_cast<uint64_t>(graph->n_nodes);
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        places                   = mixed(places ^ reinterpret_cast<uintptr_t>(node), node);
        for (const ggml_tensor * src : node->src) {
            places = src == nullptr ? places : mixed(places, src);
        }
    }
    Known & known = known_[graph->nodes[0]];
    known.n_same  = known.places == places ? known.n_same + 1 : 1;
    known.places  = places;
    return known.n_same > 2;
}

Launch::Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of)
    : ctx_(oallama::new_context(int64_t{original->n_nodes} * (1 + GGML_MAX_SRC), 1,
                                int64_t{original->n_nodes} * (1 + GGML_MAX_SRC))) {
    const auto n_nodes = static_cast<size_t>(original->n_nodes);
    graph_             = ggml_new_graph_custom(ctx_.get(), n_nodes * (1 + GGML_MAX_SRC), false);
    for (size_t i = 0; i < n_nodes; i++) {
        const ggml_tensor * node = original->nodes[i];
        if (!has_kernel(node)) { // a view: of whatever, maybe of memory that is not the device's
            continue;
        }
        ggml_tensor * copied = copy(node, memory_of(node));
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * src = node->src[j];
            if (src == nullptr) {
                continue;
            }
            const auto known = copies_.find(src);
            if (known != copies_.end()) {
                copied->src[j] = known->second;
            } else { // a view, or no node of this graph: what computed it did so before
                copied->src[j]     = copy(src, memory_of(src));
                copied->src[j]->op = GGML_OP_NONE;
            }
        }
        ggml_build_forward_expand(graph_, copied);
        copied->flags = node->flags; // ggml has set the flag that says whether a node is to be computed
    }
}

ggml_tensor * Launch::copy(const ggml_tensor * original, void * memory) {
    ggml_tensor * copied = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, 1);
    *copied              = *original;
    copied->data         = memory;
    copied->buffer       = nullptr;
    copied->view_src     = nullptr;
    std::memset(copied->src, 0, sizeof copied->src);
    copies_[original] = copied;
    return copied;
}

ggml_status Launch::run(ggml_backend_t cpu) {
    return ggml_backend_graph_compute(cpu, graph_);
}

} // namespace emulated
