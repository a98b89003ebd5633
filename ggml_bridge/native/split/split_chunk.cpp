#include "split_chunk.h"

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

int64_t chunk_of(const ggml_cgraph * graph) {
    const ggml_tensor * node = graph->nodes[0];
    if (graph->n_nodes != 1 || node->op != GGML_OP_MUL_MAT || !is_of_tokens(node) || !is_of_tokens(node->src[1])) {
        return 0;
    }
    const SliceSpec * slice = planned(node->src[0]);
    return slice != nullptr && node->ne[1] > slice->chunk ? slice->chunk : 0;
}

Chunk::Chunk(const ggml_cgraph * whole, int64_t first, int64_t count)
    : result_(*whole->nodes[0]), x_(*whole->nodes[0]->src[1]), graph_(*whole) {
    take_rows(result_, first, count);
    take_rows(x_, first, count);
    result_.src[1] = &x_;
    graph_.nodes   = &node_;
    graph_.uid     = 0;
}

} // namespace oallama
