#include "split_resident.h"

#include <algorithm>

namespace oallama {

ggml_context * Resident::ctx() const {
    return program_.ctx.get();
}

// A tensor of llama.cpp's as the device's graph sees it. Not the allocator's: it has an address, if not yet the right
// one.
ggml_tensor * Resident::whole(const ggml_tensor * tensor, Origin origin) {
    for (const DeviceBinding & bound : program_.device_bindings) {
        if (bound.like == tensor) {
            return bound.tensor;
        }
    }
    ggml_tensor * out = ggml_new_tensor(ctx(), tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(std::begin(tensor->nb), std::end(tensor->nb), std::begin(out->nb));
    out->data = reinterpret_cast<void *>(uintptr_t{1});
    program_.device_bindings.push_back({out, origin, tensor});
    return out;
}

ggml_tensor * Resident::result(int node) {
    return whole(graph_->nodes[node], {node, -1});
}

ggml_tensor * Resident::view(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb,
                             size_t at) {
    ggml_tensor * out = ggml_view_4d(ctx(), of, ne[0], ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], at);
    program_.device_views.push_back(out);
    return out;
}

ggml_tensor * Resident::part(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count, Tokens tokens) {
    for (const Known & known : known_) {
        if (known.tensor == tensor && known.begin == begin && known.count == count && known.tokens.dim == tokens.dim &&
            known.tokens.first == tokens.first && known.tokens.count == tokens.count) {
            return known.part;
        }
    }
    ggml_tensor * out     = whole(tensor, origin);
    const auto    ne      = tokens.shape(tensor, count);
    bool          aligned = true;
    if (!std::equal(ne.begin(), ne.end(), tensor->ne)) {
        const size_t at =
            static_cast<size_t>(begin) * tensor->nb[0] + static_cast<size_t>(tokens.first) * tensor->nb[tokens.dim];
        out     = view(out, ne, tensor->nb, at);
        aligned = at % ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(program_.device)) == 0;
    }
    if (!aligned || !ggml_is_contiguous(out)) {
        out = ggml_cont(ctx(), out);
    }
    known_.push_back({tensor, begin, count, tokens, out});
    return out;
}

ggml_tensor * Resident::rows(int node, Tokens tokens) {
    ggml_tensor * out = result(node);
    return tokens.count < 0 ? out
                            : view(out, tokens.shape(out, out->ne[0]), out->nb,
                                   static_cast<size_t>(tokens.first) * out->nb[tokens.dim]);
}

// A node that writes memory of llama.cpp's, so a view of it.
void Resident::write(ggml_tensor * node) {
    program_.device_views.push_back(node);
    nodes_.push_back(node);
}

void Resident::add(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens) {
    ggml_tensor * to = rows(node, tokens);
    if (host != nullptr) {
        lifts_.push_back({host, to});
    }
    if (device != nullptr) {
        write(host == nullptr ? ggml_cpy(ctx(), device, to) : ggml_add_inplace(ctx(), to, device));
    }
}

void Resident::put(int node, const Value & v, Side side, ggml_tensor * from) {
    ggml_tensor * out     = result(node);
    const Tokens  tokens  = tokens_of(v, side);
    const auto    ne      = tokens.shape(out, 1);
    const int64_t n_runs  = out->ne[0] / v.extent; // of each row
    const int64_t n       = ne[1] * ne[2] * ne[3] * n_runs;
    const int64_t count   = count_of(v, side);
    const size_t  run     = static_cast<size_t>(v.extent) * out->nb[0];
    const size_t  nb[]    = {out->nb[0], run, run * static_cast<size_t>(n), run * static_cast<size_t>(n)};
    const auto    skipped = static_cast<size_t>(first_row_of(out, tokens) * n_runs);
    ggml_tensor * to = view(out, {count, n, 1, 1}, nb, skipped * run + static_cast<size_t>(begin_of(v, side)) * nb[0]);
    if (side != side_host) {
        write(ggml_cpy(ctx(), ggml_reshape_2d(ctx(), from, count, n), to));
    } else if (count == v.extent || n == 1) {
        lifts_.push_back({from, to});
    } else {
        ggml_tensor * sent = ggml_new_tensor_2d(ctx(), out->type, count, n);
        keep_sent(sent);
        lifts_.push_back({from, sent});
        write(ggml_cpy(ctx(), sent, to));
    }
}

void Resident::put_whole(int node, ggml_tensor * host) {
    lifts_.push_back({host, result(node)});
}

//
// running
//

void bind_residents(const Program & program, const ggml_cgraph * graph) {
    for (const DeviceBinding & bound : program.device_bindings) {
        const ggml_tensor * origin = bound.origin.of(graph);
        bound.tensor->data         = origin->data;
        bound.tensor->buffer       = origin->view_src == nullptr ? origin->buffer : origin->view_src->buffer;
    }
    for (ggml_tensor * view : program.device_views) {
        view->data   = static_cast<char *>(view->view_src->data) + view->view_offs;
        view->buffer = view->view_src->buffer;
    }
}

int64_t fetch_inputs(const Phase & phase, const ggml_cgraph * graph, ggml_backend_t device) {
    int64_t fetched = 0;
    for (const Input & input : phase.inputs) {
        const size_t bytes = ggml_nbytes(input.tensor);
        ggml_backend_tensor_get_async(device, input.origin.of(graph), input.tensor->data, 0, bytes);
        fetched += static_cast<int64_t>(bytes);
    }
    return fetched;
}

int64_t send_lifts(const Phase & phase, ggml_backend_t device) {
    int64_t sent = 0;
    for (const Lift & lift : phase.lifts) {
        const size_t bytes = ggml_nbytes(lift.to);
        ggml_backend_tensor_set_async(device, lift.to, lift.from->data, 0, bytes);
        sent += static_cast<int64_t>(bytes);
    }
    return sent;
}

} // namespace oallama
