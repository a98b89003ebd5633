// Full values on either side: bound to llama.cpp's memory, sent when the phase begins, or fetched.

#include <algorithm>

#include "split_builder.h"

namespace oallama {

// Source s of node i, whole rows of some tokens.
ggml_tensor * ProgramBuilder::full_on(Side side, int i, int s, Tokens tokens) {
    const int64_t n = graph_->nodes[i]->src[s]->ne[0];
    return side == side_host ? view(full_on_host(i, s), 0, n, tokens, true) : full_on_device(i, s, 0, n, tokens);
}

ggml_tensor * ProgramBuilder::full_on_host(int i, int s) {
    const ggml_tensor * src    = graph_->nodes[i]->src[s];
    const SplitWeight * weight = weight_of(src);
    if (weight != nullptr) { // a bias that lies among the cut weights
        return weight->whole_on_host().tensor;
    }
    const int from = inside(i, s);
    if (from >= 0 && value(from).state == State::full && side_of(from, side_host) != nullptr) {
        return side_of(from, side_host);
    }
    if (program_.resident && !is_on_host(src)) {
        return input(src, from >= 0 ? Origin{from, -1} : Origin{i, s});
    }
    for (const Binding & bound : program_.bindings) { // gate and up share one
        if (bound.tensor->op == GGML_OP_NONE && bound.origin.of(graph_) == src) {
            return bound.tensor;
        }
    }
    ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
    return bind(out, from >= 0 ? Origin{from, -1} : Origin{i, s}, src);
}

// A full value that is in device memory: fetched when the phase begins, or a view of what the host computes.
ggml_tensor * ProgramBuilder::input(const ggml_tensor * src, Origin origin) {
    const int root = src->view_src == nullptr ? -1 : find_node(graph_, src->view_src, graph_->n_nodes);
    if (root >= 0 && value(root).state == State::full && side_of(root, side_host) != nullptr) {
        program_.host_views.push_back(ggml_view_4d(ctx(), side_of(root, side_host), src->ne[0], src->ne[1], src->ne[2],
                                                   src->ne[3], src->nb[1], src->nb[2], src->nb[3], src->view_offs));
        return program_.host_views.back();
    }
    const auto known = [&](const Input & one) { return one.origin.of(graph_) == src; };
    for (const Phase & phase : program_.phases) {
        const auto found = std::find_if(phase.inputs.begin(), phase.inputs.end(), known);
        if (found != phase.inputs.end()) {
            return found->tensor;
        }
    }
    const auto found = std::find_if(inputs_.begin(), inputs_.end(), known);
    if (found != inputs_.end()) {
        return found->tensor;
    }
    ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
    std::copy(std::begin(src->nb), std::end(src->nb), std::begin(out->nb));
    inputs_.push_back({stage(out), origin});
    return out;
}

// A full value on the device: elements [begin, begin + count) of each row of some tokens, sent when the phase
// begins unless it is there.
ggml_tensor * ProgramBuilder::full_on_device(int i, int s, int64_t begin, int64_t count, Tokens tokens) {
    const ggml_tensor * src  = graph_->nodes[i]->src[s];
    const int           from = inside(i, s);
    if (weight_of(src) != nullptr) {
        weight_of(src)->whole_on_host(); // is sent from there
    }
    if (program_.resident && !is_on_host(src)) {
        return resident_.part(src, from >= 0 ? Origin{from, -1} : Origin{i, s}, begin, count, tokens);
    }
    const auto    ne        = tokens.shape(src, count);
    const int64_t first_row = first_row_of(src, tokens);
    for (const Upload & upload : uploads_) {
        if (upload.origin.of(graph_) != src || upload.begin != begin || upload.count != count) {
            continue;
        }
        if (upload.first_row == first_row && std::equal(ne.begin(), ne.end(), upload.tensor->ne)) {
            return upload.tensor;
        }
        const bool all = upload.first_row == 0 && upload.tensor->ne[tokens.dim] == src->ne[tokens.dim];
        if (all && is_aligned(upload.tensor, tokens)) {
            return view(upload.tensor, 0, count, tokens, false);
        }
    }
    Upload upload    = {};
    upload.tensor    = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, ne.data());
    upload.origin    = from >= 0 ? Origin{from, -1} : Origin{i, s};
    upload.begin     = begin;
    upload.count     = count;
    upload.first_row = first_row;
    upload.packed    = count == src->ne[0] && ggml_is_contiguous(src);
    upload.staging   = take_staging(upload.tensor);
    keep_sent(upload.tensor);
    uploads_.push_back(upload);
    return upload.tensor;
}

// Whether kernels can read the device's tensor from these tokens on: to some, such as Vulkan's mul-mats, memory may
// not be given from just anywhere. A few experts' numbers are soon misaligned.
bool ProgramBuilder::is_aligned(const ggml_tensor * tensor, Tokens tokens) const {
    const size_t at = static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
    return at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(values_.device)) == 0;
}

// What the host's kernel takes: those of repacked layouts F32 only, the others that or the weight's own type.
ggml_tensor * ProgramBuilder::for_kernel_of(const SliceSpec & slice, ggml_tensor * x) {
    if (x->type == GGML_TYPE_F32 || (slice.layout == plain_layout && x->type == slice.type)) {
        return x;
    }
    return stage(ggml_cast(ctx(), x, GGML_TYPE_F32));
}

// The host's columns of a full input; for kernels of repacked layouts without gaps between rows.
ggml_tensor * ProgramBuilder::columns_of_input(int i, const Part & part, const std::string & layout, Tokens tokens) {
    ggml_tensor * columns = view(full_on_host(i, 1), part.begin, part.count, tokens, true);
    if (layout == plain_layout || ggml_is_contiguous(columns)) {
        return columns;
    }
    return stage(ggml_cont(ctx(), columns));
}

} // namespace oallama
