#include "build.h"

#include <algorithm>
#include <cstring>

namespace oallama {

namespace {

size_t padded_bytes(const ggml_tensor * tensor) {
    return (ggml_nbytes(tensor) + 63) / 64 * 64;
}

} // namespace

void keep_sent(ggml_tensor * tensor) {
    ggml_set_input(tensor);
    ggml_set_output(tensor);
}

int Build::inside(int node, int src) const {
    const ggml_tensor * tensor = graph->nodes[node]->src[src];
    return tensor == nullptr ? -1 : find_node(graph, tensor, node);
}

Origin Build::origin_of(int node, int src) const {
    const int from = inside(node, src);
    return from >= 0 ? Origin{from, -1} : Origin{node, src};
}

Source Build::source_of(int i, int s) {
    return {origin_of(i, s), on_device(graph->nodes[i]->src[s]) ? mirrored_on_host(i, s) : nullptr};
}

//
// mirrored values on either side: bound to llama.cpp's memory, sent when the segment begins, or downloaded
//

namespace {

// Has these tokens of an input downloaded; all where they do not lie one behind another.
void read(std::vector<Input> & inputs, const ggml_tensor * tensor, Tokens tokens) {
    size_t bytes = ggml_nbytes(tensor);
    if (tokens.count >= 0 &&
        std::all_of(tensor->ne + tokens.dim + 1, tensor->ne + GGML_MAX_DIMS, [](int64_t n) { return n == 1; })) {
        bytes = std::min(bytes, static_cast<size_t>(tokens.first + tokens.count) * tensor->nb[tokens.dim]);
    }
    for (Input & input : inputs) {
        input.bytes = input.tensor == tensor ? std::max(input.bytes, bytes) : input.bytes;
    }
}

} // namespace

ggml_tensor * Build::mirrored_on(Side side, int i, int s, Tokens tokens, int64_t begin, int64_t count) {
    const int64_t n = count < 0 ? graph->nodes[i]->src[s]->ne[0] : count;
    return side == side_host ? view(mirrored_on_host(i, s, tokens), begin, n, tokens, side)
                             : mirrored_on_device(i, s, tokens, begin, n);
}

ggml_tensor * Build::mirrored_on_host(int i, int s, Tokens tokens) {
    const ggml_tensor * src    = graph->nodes[i]->src[s];
    const SplitWeight * weight = weight_of(src);
    if (weight != nullptr) { // a bias that lies among the cut weights
        return weight->whole_on_host().tensor;
    }
    const int from = inside(i, s);
    if (from >= 0 && value(from).state == State::mirrored && side_of(from, side_host) != nullptr) {
        return side_of(from, side_host);
    }
    if (on_device(src)) {
        return input(src, origin_of(i, s), tokens);
    }
    for (const Binding & bound : program.bindings) { // gate and up share one
        if (bound.tensor->op == GGML_OP_NONE && bound.origin.of(graph) == src) {
            return bound.tensor;
        }
    }
    ggml_tensor * out = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, src->ne);
    bind(out, origin_of(i, s), src);
    return out;
}

ggml_tensor * Build::input(const ggml_tensor * src, Origin origin, Tokens tokens) {
    const int root = src->view_src == nullptr ? -1 : find_node(graph, src->view_src, graph->n_nodes);
    if (root >= 0 && value(root).state == State::mirrored && side_of(root, side_host) != nullptr) {
        return keep_view(ggml_view_4d(ctx(), side_of(root, side_host), src->ne[0], src->ne[1], src->ne[2], src->ne[3],
                                      src->nb[1], src->nb[2], src->nb[3], src->view_offs),
                         side_host);
    }
    ggml_tensor *& known = inputs_[src];
    if (known == nullptr) {
        known = stage(like(src));
        segment.inputs.push_back({known, origin, 0});
    }
    for (Segment & earlier : program.segments) {
        read(earlier.inputs, known, tokens);
    }
    read(segment.inputs, known, tokens);
    return known;
}

ggml_tensor * Build::mirrored_on_device(int i, int s, Tokens tokens, int64_t begin, int64_t count) {
    const ggml_tensor * src = graph->nodes[i]->src[s];
    if (weight_of(src) != nullptr) {
        weight_of(src)->whole_on_host(); // is sent from there
    }
    if (on_device(src)) {
        return part_on_device(src, origin_of(i, s), begin, count, tokens);
    }
    const auto    ne        = tokens.shape(src, count);
    const int64_t first_row = tokens.first_row(src);
    for (const Upload & upload : segment.uploads) {
        if (upload.what != Upload::What::value || upload.source.origin.of(graph) != src || upload.begin != begin ||
            upload.count != count) {
            continue;
        }
        if (upload.first_row == first_row && std::equal(ne.begin(), ne.end(), upload.tensor->ne)) {
            return upload.tensor;
        }
        const bool   all = upload.first_row == 0 && upload.tensor->ne[tokens.dim] == src->ne[tokens.dim];
        const size_t at  = static_cast<size_t>(tokens.first) * upload.tensor->nb[tokens.dim];
        if (all && is_aligned(at)) {
            return view(upload.tensor, 0, count, tokens, side_device);
        }
    }
    Upload upload    = {};
    upload.tensor    = ggml_new_tensor(ctx(), src->type, GGML_MAX_DIMS, ne.data());
    upload.source    = {origin_of(i, s)};
    upload.begin     = begin;
    upload.count     = count;
    upload.first_row = first_row;
    upload.packed    = count == src->ne[0] && ggml_is_contiguous(src);
    upload.staging   = take_staging(upload.tensor);
    keep_sent(upload.tensor);
    segment.uploads.push_back(upload);
    return upload.tensor;
}

bool Build::is_aligned(size_t at) const {
    return at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(program.device)) == 0;
}

//
// llama.cpp's tensors in device memory
//

ggml_tensor * Build::whole_on_device(const ggml_tensor * tensor, Origin origin) {
    for (const Binding & bound : program.bindings) {
        if (bound.origin.of(graph) == tensor) {
            return bound.tensor;
        }
    }
    ggml_tensor * out = like(tensor);
    out->data         = reinterpret_cast<void *>(uintptr_t{1});
    program.bindings.push_back({out, origin});
    return out;
}

ggml_tensor * Build::view_on_device(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb,
                                    size_t at) {
    ggml_tensor * out = ggml_view_4d(ctx(), of, ne[0], ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], at);
    program.views.push_back(out);
    return out;
}

ggml_tensor * Build::part_on_device(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count,
                                    Tokens tokens) {
    ggml_tensor * out     = whole_on_device(tensor, origin);
    const auto    ne      = tokens.shape(tensor, count);
    bool          aligned = true;
    if (!std::equal(ne.begin(), ne.end(), tensor->ne)) {
        const size_t at =
            static_cast<size_t>(begin) * tensor->nb[0] + static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
        out     = view_on_device(out, ne, tensor->nb, at);
        aligned = is_aligned(at);
    }
    if (!aligned || !ggml_is_contiguous(out)) {
        out = ggml_cont(ctx(), out);
    }
    return out;
}

//
// tensors
//

ggml_tensor * Build::copy_header(const ggml_tensor * node, const int64_t * ne) {
    ggml_tensor * out = ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, ne);
    out->op           = node->op;
    std::memcpy(out->op_params, node->op_params, sizeof out->op_params);
    return out;
}

ggml_tensor * Build::like(const ggml_tensor * tensor) {
    ggml_tensor * out = ggml_new_tensor(ctx(), tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(std::begin(tensor->nb), std::end(tensor->nb), std::begin(out->nb));
    return out;
}

void Build::bind(ggml_tensor * tensor, Origin origin, const ggml_tensor * strides) {
    if (strides != nullptr) {
        std::copy(std::begin(strides->nb), std::end(strides->nb), std::begin(tensor->nb));
    }
    program.bindings.push_back({tensor, origin});
}

ggml_tensor * Build::stage(ggml_tensor * tensor) {
    program.staged.push_back({tensor, take_staging(tensor)});
    return tensor;
}

size_t Build::take_staging(const ggml_tensor * tensor) {
    const size_t at = program.host_bytes;
    program.host_bytes += padded_bytes(tensor);
    return at;
}

ggml_tensor * Build::keep_view(ggml_tensor * view, Side side) {
    if (side == side_host) {
        program.views.push_back(view);
    }
    return view;
}

ggml_tensor * Build::view(ggml_tensor * whole, int64_t begin, int64_t n, Tokens tokens, Side side) {
    if (n == whole->ne[0] && tokens.count_of(whole) == whole->ne[tokens.dim]) {
        return whole;
    }
    const auto   ne = tokens.shape(whole, n);
    const size_t at =
        static_cast<size_t>(begin) * whole->nb[0] + static_cast<size_t>(tokens.first) * whole->nb[tokens.dim];
    return keep_view(
        ggml_view_4d(ctx(), whole, ne[0], ne[1], ne[2], ne[3], whole->nb[1], whole->nb[2], whole->nb[3], at), side);
}

} // namespace oallama
