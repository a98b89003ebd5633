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

// All but views: of anything, nothing is computed.
bool is_computed(const ggml_tensor * node) {
    return node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE && node->op != GGML_OP_PERMUTE;
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

Launch::Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of)
    : launch_(original, memory_of, is_computed) {}

void Launch::run(ggml_backend_t cpu) {
    const ggml_cgraph * graph = launch_.graph();
    for (int i = 0; i < graph->n_nodes; i++) { // the CPU's kernels are unknown to the thread sanitizer
        const ggml_tensor * node = graph->nodes[i];
        check_padding(node);
        for (const ggml_tensor * src : node->src) {
            if (src != nullptr) {
                __tsan_read_range(src->data, ggml_nbytes(src));
            }
        }
        __tsan_write_range(node->data, ggml_nbytes(node));
    }
    if (launch_.run(cpu) != GGML_STATUS_SUCCESS) {
        std::fprintf(stderr, "TEST0: ggml's CPU backend failed to compute a graph\n");
        std::abort();
    }
}

} // namespace async_device
