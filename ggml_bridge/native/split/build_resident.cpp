#include "build_resident.h"

#include <algorithm>
#include <cstring>

namespace oallama {

void ResidentBuilder::make_sum(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens) {
    ggml_tensor * to = build_.whole_on_device(build_.graph->nodes[node], {node, -1});
    if (tokens.count >= 0) {
        to = build_.view_on_device(to, tokens.shape(to, to->ne[0]), to->nb,
                                   static_cast<size_t>(tokens.first) * to->nb[tokens.dim]);
    }
    if (host != nullptr) {
        build_.segment.host_results.push_back({host, to});
    }
    if (device != nullptr) {
        write(host == nullptr ? ggml_cpy(build_.ctx(), device, to) : ggml_add_inplace(build_.ctx(), to, device));
    }
}

void ResidentBuilder::put(int node, const Value & v, Side side) {
    ggml_tensor * from    = build_.side_of(node, side);
    ggml_tensor * out     = build_.whole_on_device(build_.graph->nodes[node], {node, -1});
    const Tokens  tokens  = tokens_of(v, side);
    const auto    ne      = tokens.shape(out, 1);
    const int64_t n_runs  = out->ne[0] / v.extent; // of each row
    const int64_t n       = ne[1] * ne[2] * ne[3] * n_runs;
    const int64_t count   = count_of(v, side);
    const size_t  run     = static_cast<size_t>(v.extent) * out->nb[0];
    const size_t  nb[]    = {out->nb[0], run, run * static_cast<size_t>(n), run * static_cast<size_t>(n)};
    const auto    skipped = static_cast<size_t>(tokens.first_row(out) * n_runs);
    ggml_tensor * to      = build_.view_on_device(out, {count, n, 1, 1}, nb,
                                                  skipped * run + static_cast<size_t>(begin_of(v, side)) * nb[0]);
    if (side != side_host) {
        write(ggml_cpy(build_.ctx(), ggml_reshape_2d(build_.ctx(), from, count, n), to));
    } else if (count == v.extent || n == 1) {
        build_.segment.host_results.push_back({from, to});
    } else {
        ggml_tensor * sent = ggml_new_tensor_2d(build_.ctx(), out->type, count, n);
        keep_sent(sent);
        build_.segment.host_results.push_back({from, sent});
        write(ggml_cpy(build_.ctx(), sent, to));
    }
}

void ResidentBuilder::write(ggml_tensor * node) {
    build_.program.views.push_back(node);
    build_.join_nodes.push_back(node);
}

} // namespace oallama
