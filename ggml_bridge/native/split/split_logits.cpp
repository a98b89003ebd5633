#include "split_logits.h"

#include <cstring>

namespace oallama {

namespace {

bool is_of_tokens(const ggml_tensor * tensor) {
    return tensor->ne[2] == 1 && tensor->ne[3] == 1;
}

void take_rows(ggml_tensor & tensor, int64_t first, int64_t count) {
    tensor.ne[1] = count;
    if (tensor.data != nullptr) { // it is prepared before it is allocated
        tensor.data = static_cast<char *>(tensor.data) + static_cast<size_t>(first) * tensor.nb[1];
    }
}

} // namespace

bool is_of_many_logits(const ggml_cgraph * graph, ggml_backend_dev_t memory) {
    if (memory != nullptr || graph->n_nodes != 1) {
        return false;
    }
    const ggml_tensor * node = graph->nodes[0];
    return node->op == GGML_OP_MUL_MAT && std::strcmp(node->src[0]->name, "output.weight") == 0 &&
           node->ne[1] > logits_at_once && is_of_tokens(node) && is_of_tokens(node->src[1]);
}

SomeLogits::SomeLogits(const ggml_cgraph * whole, int64_t first, int64_t count)
    : logits_(*whole->nodes[0]), x_(*whole->nodes[0]->src[1]), graph_(*whole) {
    take_rows(logits_, first, count);
    take_rows(x_, first, count);
    logits_.src[1] = &x_;
    graph_.nodes   = &node_;
    graph_.uid     = 0;
}

} // namespace oallama
