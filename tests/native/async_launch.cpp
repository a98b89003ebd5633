#include "async_launch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

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

} // namespace

Launch::Launch(const ggml_cgraph * original, const std::function<void *(const ggml_tensor *)> & memory_of) {
    const auto n_nodes = static_cast<size_t>(original->n_nodes);
    const auto n_most  = n_nodes * (1 + GGML_MAX_SRC);
    ctx_.reset(ggml_init({n_most * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_most, false), nullptr,
                          /*no_alloc=*/true}));
    graph_ = ggml_new_graph_custom(ctx_.get(), n_most, false);
    for (size_t i = 0; i < n_nodes; i++) {
        const ggml_tensor * node = original->nodes[i];
        ggml_tensor *       own  = copy(node, memory_of(node));
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
