#include "async_launch.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void * address, unsigned long size);
extern "C" void __tsan_write_range(void * address, unsigned long size);
#else
static void __tsan_read_range(void *, unsigned long) {}
static void __tsan_write_range(void *, unsigned long) {}
#endif

namespace async_device {

namespace {

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE;
}

constexpr int64_t row_step = 512; // elements; CUDA's matrix kernels read rows in such steps

// What follows a row of a quantised weight is multiplied by zero, which gives zero unless it is NaN.
void check_behind(const ggml_tensor * weight, const char * row_end) {
    const int64_t      n = row_step - weight->ne[0] % row_step;
    std::vector<float> values(static_cast<size_t>(n));
    ggml_get_type_traits(weight->type)->to_float(row_end, values.data(), n);
    for (const float value : values) {
        if (!std::isfinite(value)) {
            std::fprintf(stderr, "TEST0: what is read behind a row of %s is no number\n", weight->name);
            std::abort();
        }
    }
}

// Behind the last row of a weight, or of each expert that is used.
void check_padding(const ggml_tensor * node) {
    const ggml_tensor * weight = node->src[0];
    if ((node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) || !ggml_is_quantized(weight->type) ||
        weight->ne[0] % row_step == 0) {
        return;
    }
    const auto * data = static_cast<const char *>(weight->data);
    check_behind(weight, data + ggml_nbytes(weight));
    const ggml_tensor * ids = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
    if (ids == nullptr || ids->op != GGML_OP_NONE) {
        return; // the graph has yet to compute them
    }
    for (int64_t i = 0; i < ids->ne[0] * ids->ne[1]; i++) {
        const auto at     = static_cast<size_t>(i / ids->ne[0]) * ids->nb[1] + static_cast<size_t>(i % ids->ne[0]) * 4;
        int32_t    expert = 0;
        std::memcpy(&expert, static_cast<const char *>(ids->data) + at, sizeof expert);
        check_behind(weight, data + static_cast<size_t>(expert + 1) * weight->nb[2]);
    }
}

} // namespace

Launch::Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of) {
    const auto n_nodes = static_cast<size_t>(original->n_nodes);
    const auto n_most  = n_nodes * (1 + GGML_MAX_SRC);
    ctx_.reset(ggml_init({n_most * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_most, false), nullptr,
                          /*no_alloc=*/true}));
    graph_ = ggml_new_graph_custom(ctx_.get(), n_most, false);
    for (size_t i = 0; i < n_nodes; i++) {
        const ggml_tensor * node = original->nodes[i];
        if (is_view(node)) { // of anything: nothing is computed
            continue;
        }
        ggml_tensor * own = copy(node, memory_of(node));
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * src = node->src[j];
            if (src == nullptr) {
                continue;
            }
            const auto known = copies_.find(src);
            if (known != copies_.end()) {
                own->src[j] = known->second;
            } else { // no node of this graph: whatever computed it did so before
                own->src[j]     = copy(src, memory_of(src));
                own->src[j]->op = GGML_OP_NONE;
            }
        }
        ggml_build_forward_expand(graph_, own);
        own->flags = node->flags; // ggml has set the flag that says whether a node is to be computed
    }
}

ggml_tensor * Launch::copy(const ggml_tensor * original, void * memory) {
    ggml_tensor * own = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, 1);
    *own              = *original;
    own->data         = memory;
    own->buffer       = nullptr;
    own->view_src     = nullptr;
    std::memset(own->src, 0, sizeof own->src);
    copies_[original] = own;
    return own;
}

void Launch::run(ggml_backend_t cpu) {
    for (int i = 0; i < graph_->n_nodes; i++) { // the CPU's kernels are unknown to the thread sanitizer
        const ggml_tensor * node = graph_->nodes[i];
        if (is_view(node)) {
            continue;
        }
        check_padding(node);
        for (const ggml_tensor * src : node->src) {
            if (src != nullptr) {
                __tsan_read_range(src->data, ggml_nbytes(src));
            }
        }
        __tsan_write_range(node->data, ggml_nbytes(node));
    }
    if (ggml_backend_graph_compute(cpu, graph_) != GGML_STATUS_SUCCESS) {
        std::fprintf(stderr, "TEST0: ggml's CPU backend failed to compute a graph\n");
        std::abort();
    }
}

} // namespace async_device
