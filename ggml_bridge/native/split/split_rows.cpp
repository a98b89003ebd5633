// Rows of tokens' experts of which some are hot: the misses on the host, what may be hits on the device.

#include "split_builder.h"

namespace oallama {

void ProgramBuilder::emit_rows(int i) {
    const ggml_tensor * node    = graph_->nodes[i];
    const Value &       v       = value(i);
    Routed &            routed  = routing_of(v.routed_by);
    const int64_t       host[]  = {node->ne[0], 1, routed.n_rows, 1};
    const int64_t       there[] = {node->ne[0], routed.n_device, node->ne[2], 1};
    for (const Side side : {side_host, side_device}) {
        ggml_tensor * out = copy_header(node, side == side_host ? host : there);
        if (is_mul_mat(node->op)) {
            set_routed_sources(i, side, out);
        } else if (node->op == GGML_OP_ADD_ID) {
            const bool on_host = side == side_host;
            out->src[0]        = side_of(inside(i, 0), side);
            out->src[1]        = on_host ? full_on_host(i, 1) : routed_.device_biases(routed, node->src[1], {i, 1});
            out->src[2]        = on_host ? routed.host_ids : routed.device_ids;
        } else {
            for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
                const int  from = inside(i, s);
                const bool rows = from >= 0 && value(from).state == State::routed;
                out->src[s]     = rows ? side_of(from, side) : full_on(side, i, s, {});
            }
        }
        sides(i)[side] = out;
    }
    ggml_tensor * rows  = routed_.host_rows(routed, side_of(i, side_host));
    ggml_tensor * whole = nullptr;
    if (v.is_summed) {
        routed_.keep(routed, rows);
    } else if (program_.resident) {
        whole = routed_.whole(node, rows);
    } else {
        bind(rows, {i, -1}, nullptr);
    }
    ggml_build_forward_expand(program_.host_graph, rows);
    on_device_.push_back(side_of(i, side_device));
    if (v.wanted) {
        fetch_rows(i, Download::Join::rows, side_of(i, side_device), routed, whole);
    }
}

void ProgramBuilder::set_routed_sources(int i, Side side, ggml_tensor * out) {
    const ggml_tensor * node   = graph_->nodes[i];
    const SplitWeight & weight = *weight_of(node->src[0]);
    Routed &            routed = routing_of(i);
    const int           from   = inside(i, 1);
    if (program_.n_tokens == 0) {
        program_.n_tokens = value(i).n_tokens;
    }
    out->src[0] = weight.part(side).tensor;
    out->src[2] = side == side_host ? routed.host_ids : routed.device_ids;
    if (value(i).routed_by != i) { // a routed value itself
        out->src[1] = side_of(from, side);
    } else if (side == side_host) {
        out->src[1] = routed_.host_input(routed, full_on_host(i, 1));
    } else if (node->src[1]->ne[1] == 1) {
        out->src[1] = full_on_device(i, 1, 0, node->src[1]->ne[0], {});
    } else {
        ggml_tensor * host = on_device(node->src[1]) ? full_on_host(i, 1) : nullptr;
        out->src[1] = routed_.device_input(routed, node->src[1], from >= 0 ? Origin{from, -1} : Origin{i, 1}, host);
    }
}

Routed & ProgramBuilder::routing_of(int mul_mat) {
    const int from   = inside(mul_mat, 2);
    Routed &  routed = routed_.routing_of(mul_mat, from >= 0 ? Origin{from, -1} : Origin{mul_mat, 2});
    if (routed.host_chosen == nullptr && on_device(graph_->nodes[mul_mat]->src[2])) {
        routed.host_chosen = full_on_host(mul_mat, 2);
    }
    return routed;
}

void ProgramBuilder::emit_half_of_rows(int i) {
    const ggml_tensor * node   = graph_->nodes[i];
    const int           from   = inside(i, 0);
    const bool          second = node->view_offs != node->src[0]->view_offs;
    for (const Side side : {side_host, side_device}) {
        sides(i)[side] = view(side_of(from, side), second ? node->ne[0] : 0, node->ne[0], {}, side == side_host);
    }
    routed_.host_rows(routing_of(value(i).routed_by), side_of(i, side_host));
}

// Weighted and added up where they come together; on the device, where many rows need not come back then.
void ProgramBuilder::emit_sum(int i) {
    const Value & v       = value(i);
    const int     rows    = inside(v.weighting, 0);
    const int     weights = inside(v.weighting, 1);
    Routed &      routed  = routing_of(value(rows).routed_by);
    routed.weighted       = true;
    routed.weighting      = weights >= 0 ? Origin{weights, -1} : Origin{v.weighting, 1};
    ggml_tensor * there   = side_of(rows, side_device);
    const bool    summed  = are_many(there, graph_->nodes[value(rows).routed_by]->src[0]);
    if (summed) {
        there = routed_.device_sum(routed, there);
        on_device_.push_back(there);
    }
    if (on_device(graph_->nodes[v.weighting]->src[1])) {
        routed.host_weighting = full_on_host(v.weighting, 1);
    }
    fetch_rows(i, Download::Join::sum, there, routed,
               program_.resident ? routed_.whole(graph_->nodes[i], nullptr) : nullptr);
    downloads_.back().host_rows = side_of(rows, side_host);
    downloads_.back().summed    = summed;
}

// whole: where llama.cpp's tensors are in device memory, what the node becomes there.
void ProgramBuilder::fetch_rows(int i, Download::Join how, ggml_tensor * there, const Routed & routed,
                                ggml_tensor * whole) {
    Download download = {};
    download.tensor   = there;
    download.node     = i;
    download.join     = how;
    download.n_rows   = there->ne[1] * there->ne[2];
    download.staging  = take_staging(there);
    download.routed   = routed_.number_of(routed);
    download.to       = whole;
    if (whole != nullptr) {
        resident_.put_whole(i, whole);
    }
    ggml_set_output(there);
    downloads_.push_back(download);
}

} // namespace oallama
