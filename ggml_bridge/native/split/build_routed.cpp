#include "build_routed.h"

#include <algorithm>
#include <cstring>

namespace oallama {

namespace {

// Rows of a launch that need no second one. Of more tokens a launch has half of the rows that may be hits: with their
// inputs, which are gathered, they take no more memory than all of them without.
constexpr int64_t least_packed = 64;

// A tensor that several launches read: its memory stays its own.
ggml_tensor * read_again(ggml_tensor * tensor) {
    for (ggml_tensor * view = tensor; view != nullptr; view = view->view_src) {
        ggml_set_output(view);
    }
    return tensor;
}

} // namespace

void RoutedBuilder::emit_rows(int i) {
    const ggml_tensor * node     = build_.graph->nodes[i];
    const Value &       v        = build_.value(i);
    Routed &            routed   = routing_of(is_mul_mat(node->op) ? i : v.routed_by);
    const int64_t       host[]   = {node->ne[0], 1, routed.n_rows, 1};
    const bool          packed   = routed.packs();
    const int64_t       device[] = {node->ne[0], packed ? 1 : routed.n_device, packed ? routed.n_most : node->ne[2], 1};
    for (const Side side : {side_host, side_device}) {
        ggml_tensor * out = build_.copy_header(node, side == side_host ? host : device);
        ggml_tensor * ids = side == side_host ? routed.host_ids : routed.device_ids;
        if (is_mul_mat(node->op)) {
            out->src[0] = weight_of(node->src[0])->part(side).tensor;
            out->src[1] = routed_input(i, side, routed);
            out->src[2] = ids;
        } else if (node->op == GGML_OP_ADD_ID) {
            out->src[0] = build_.side_of(build_.inside(i, 0), side);
            out->src[1] = side == side_host ? build_.mirrored_on_host(i, 1)
                          : packed          ? read_again(build_.mirrored_on_device(i, 1, {}, 0, node->src[1]->ne[0]))
                                            : device_biases(routed, i);
            out->src[2] = side == side_device && packed ? numbers(routed, Upload::What::experts, 1) : ids;
        } else {
            for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
                const int  from = build_.inside(i, s);
                const bool rows = from >= 0 && build_.value(from).state == State::routed;
                out->src[s]     = rows ? build_.side_of(from, side) : build_.mirrored_on(side, i, s, {});
                if (!rows && side == side_device && packed) {
                    read_again(out->src[s]);
                }
            }
        }
        build_.sides(i)[side] = out;
    }
    ggml_tensor * rows  = build_.side_of(i, side_host);
    ggml_tensor * whole = nullptr;
    routed.sized.push_back({rows, 2});
    if (v.is_summed) {
        build_.stage(rows);
    } else if (build_.program.resident) { // the rows lie at the beginning of the whole that they become part of
        whole = build_.stage(ggml_new_tensor(build_.ctx(), node->type, GGML_MAX_DIMS, node->ne));
        build_.program.staged.push_back({rows, build_.program.staged.back().at});
    } else {
        build_.bind(rows, {i, -1}, nullptr);
    }
    ggml_build_forward_expand(build_.program.host_graph, rows);
    if (packed) {
        routed.packed.push_back({build_.side_of(i, side_device), 2});
    }
    (packed ? routed.nodes : build_.device_nodes[side_device]).push_back(build_.side_of(i, side_device));
    if (v.wanted) {
        download_rows(i, Download::Join::rows, build_.side_of(i, side_device), routed, whole);
    }
}

void RoutedBuilder::emit_view(int i) {
    const ggml_tensor * node = build_.graph->nodes[i];
    const int64_t       n    = node->ne[0];
    for (const Side side : {side_host, side_device}) {
        const bool second     = node->view_offs != node->src[0]->view_offs;
        build_.sides(i)[side] = build_.view(build_.side_of(build_.inside(i, 0), side), second ? n : 0, n, {}, side);
    }
    Routed & routed = routing_of(build_.value(i).routed_by);
    routed.sized.push_back({build_.side_of(i, side_host), 2});
    if (routed.packs()) {
        routed.packed.push_back({build_.side_of(i, side_device), 2});
    }
}

void RoutedBuilder::emit_sum(int i) {
    const Value & v           = build_.value(i);
    const int     rows        = build_.inside(v.weighting, 0);
    Routed &      routed      = routing_of(build_.value(rows).routed_by);
    routed.weighted           = true;
    routed.weighting          = build_.source_of(v.weighting, 1);
    ggml_tensor * device_part = build_.side_of(rows, side_device);
    const bool    packed      = routed.packs();
    const bool summed = !packed && (build_.program.resident ||
                                    are_many(device_part, build_.graph->nodes[build_.value(rows).routed_by]->src[0]));
    if (summed) {
        device_part = device_sum(routed, device_part);
        build_.device_nodes[side_device].push_back(device_part);
    }
    const ggml_tensor * node   = build_.graph->nodes[i];
    ggml_tensor *       result = build_.program.resident
                                     ? build_.stage(ggml_new_tensor(build_.ctx(), node->type, GGML_MAX_DIMS, node->ne))
                                     : nullptr;
    if (result != nullptr && summed) {
        build_.segment.sums.push_back({build_.side_of(rows, side_host), result, number_of(routed)});
        resident_.make_sum(i, result, device_part, {});
        return;
    }
    download_rows(i, Download::Join::sum, device_part, routed, result);
    build_.segment.downloads.back().host_rows = build_.side_of(rows, side_host);
    build_.segment.downloads.back().summed    = summed;
}

Routed & RoutedBuilder::routing_of(int mul_mat) {
    const ggml_tensor * chosen = build_.graph->nodes[mul_mat]->src[2];
    const SplitWeight * weight = weight_of(build_.graph->nodes[mul_mat]->src[0]);
    for (Routed & routed : build_.segment.routings) {
        if (routed.ids.origin.of(build_.graph) == chosen &&
            routed.weights.front()->slice().hot == weight->slice().hot) {
            if (std::find(routed.weights.begin(), routed.weights.end(), weight) == routed.weights.end()) {
                routed.weights.push_back(weight);
            }
            return routed;
        }
    }
    build_.segment.routings.emplace_back();
    Routed & routed = build_.segment.routings.back();
    routed.weights  = {weight};
    routed.ids      = build_.source_of(mul_mat, 2);
    routed.n_used   = chosen->ne[0];
    routed.n_rows   = chosen->ne[0] * chosen->ne[1];
    routed.n_device = n_device_ranks(chosen->ne[0], *weight);
    if (weight->table()->is_movable()) {
        const DeviceSpec & device = device_spec_of(build_.graph->nodes[mul_mat]->src[0]);
        build_.program.stream     = device.stream;
        build_.program.exchange   = device.exchange;
    }
    routed.host_ids = build_.stage(ggml_new_tensor_2d(build_.ctx(), GGML_TYPE_I32, 1, routed.n_rows));
    if (weight->table()->is_movable() && chosen->ne[1] > 1) {
        routed.n_most     = std::min(routed.n_rows, std::max(least_packed, (routed.n_device * chosen->ne[1] + 1) / 2));
        routed.device_ids = numbers(routed, Upload::What::ids, 1);
    } else {
        const int64_t n   = routed.n_device * chosen->ne[1];
        ggml_tensor * ids = send(Upload::What::ids, ggml_new_tensor_1d(build_.ctx(), GGML_TYPE_I32, n), routed, {});
        routed.device_ids = ggml_reshape_2d(build_.ctx(), ids, routed.n_device, chosen->ne[1]);
    }
    routed.sized.push_back({routed.host_ids, 1});
    return routed;
}

ggml_tensor * RoutedBuilder::routed_input(int i, Side side, Routed & routed) {
    const ggml_tensor * x = build_.graph->nodes[i]->src[1];
    if (build_.program.n_tokens == 0) {
        build_.program.n_tokens = build_.value(i).n_tokens;
    }
    if (build_.value(i).routed_by != i) { // a routed value itself
        return build_.side_of(build_.inside(i, 1), side);
    }
    if (side == side_host) {
        return rows_for_misses(routed, build_.mirrored_on_host(i, 1));
    }
    if (routed.packs()) {
        return rows_for_launches(routed, build_.mirrored_on_device(i, 1, {}, 0, x->ne[0]));
    }
    if (x->ne[1] == 1) {
        return build_.mirrored_on_device(i, 1, {}, 0, x->ne[0]);
    }
    return send(Upload::What::rows, ggml_new_tensor_3d(build_.ctx(), x->type, x->ne[0], routed.n_device, x->ne[2]),
                routed, build_.source_of(i, 1));
}

ggml_tensor * RoutedBuilder::rows_for_misses(Routed & routed, ggml_tensor * x) {
    for (const GatheredRows & known : routed.gathered) {
        if (known.x == x) {
            return known.rows;
        }
    }
    const bool is_list =
        x->nb[0] == ggml_type_size(x->type) && (x->ne[1] == 1 || x->nb[2] == static_cast<size_t>(x->ne[1]) * x->nb[1]);
    ggml_tensor * whole = is_list ? x : build_.stage(ggml_cont(build_.ctx(), x));
    ggml_tensor * list  = build_.keep_view(
        ggml_view_2d(build_.ctx(), whole, x->ne[0], x->ne[1] * x->ne[2], whole->nb[x->ne[1] == 1 ? 2 : 1], 0),
        side_host);
    ggml_tensor * index = build_.stage(ggml_new_tensor_2d(build_.ctx(), GGML_TYPE_I32, routed.n_rows, 1));
    ggml_tensor * rows  = build_.stage(ggml_get_rows(build_.ctx(), list, index));
    rows->ne[2]         = rows->ne[1];
    rows->ne[1]         = 1;
    rows->nb[2]         = rows->nb[1];
    routed.sized.push_back({index, 0});
    routed.sized.push_back({rows, 2});
    routed.gathered.push_back({x, index, rows, x->ne[1] > 1});
    return rows;
}

ggml_tensor * RoutedBuilder::rows_for_launches(Routed & routed, ggml_tensor * x) {
    ggml_tensor *& known = packed_[{&routed - build_.segment.routings.data(), x}];
    if (known == nullptr) {
        ggml_tensor * index = numbers(routed, x->ne[1] > 1 ? Upload::What::ranks : Upload::What::tokens, 0);
        ggml_tensor * list  = ggml_reshape_2d(build_.ctx(), read_again(x), x->ne[0], x->ne[1] * x->ne[2]);
        ggml_tensor * rows  = ggml_get_rows(build_.ctx(), list, index);
        if (build_.program.resident) {
            build_.program.views.push_back(list); // x may be llama.cpp's
        }
        known = ggml_reshape_3d(build_.ctx(), rows, rows->ne[0], 1, rows->ne[1]);
        routed.packed.push_back({rows, 1});
        routed.packed.push_back({known, 2});
    }
    return known;
}

ggml_tensor * RoutedBuilder::numbers(Routed & routed, Upload::What what, int dim) {
    ggml_tensor * whole = nullptr;
    for (const Upload & upload : build_.segment.uploads) {
        whole = upload.what == what && upload.routed == number_of(routed) ? upload.tensor : whole;
    }
    if (whole == nullptr) {
        whole = send(what, ggml_new_tensor_1d(build_.ctx(), GGML_TYPE_I32, routed.n_numbers()), routed, {});
    }
    ggml_tensor * out = dim == 0 ? ggml_view_1d(build_.ctx(), whole, routed.n_most, 0)
                                 : ggml_view_2d(build_.ctx(), whole, 1, routed.n_most, sizeof(int32_t), 0);
    routed.placed.push_back({out, dim, whole});
    return out;
}

ggml_tensor * RoutedBuilder::device_biases(Routed & routed, int i) {
    const ggml_tensor * biases = build_.graph->nodes[i]->src[1];
    ggml_tensor *       sent =
        send(Upload::What::biases,
             ggml_new_tensor_2d(build_.ctx(), GGML_TYPE_F32, biases->ne[0], routed.weights.front()->n_slots()), routed,
             {{i, 1}});
    build_.segment.uploads.back().biases = biases;
    return sent;
}

ggml_tensor * RoutedBuilder::send(Upload::What what, ggml_tensor * tensor, const Routed & routed, Source source) {
    keep_sent(tensor);
    Upload upload  = {};
    upload.what    = what;
    upload.tensor  = tensor;
    upload.source  = source;
    upload.routed  = number_of(routed);
    upload.staging = build_.take_staging(tensor);
    build_.segment.uploads.push_back(upload);
    return tensor;
}

// They are sent behind the slots, in one copy.
ggml_tensor * RoutedBuilder::weights_of(Routed & routed, int64_t n_ranks, int64_t n_tokens) {
    ggml_tensor * ids = routed.device_ids->view_src;
    const int64_t n   = n_ranks * n_tokens;
    routed.weights_at = GGML_PAD(n, number_alignment);
    ids->ne[0]        = routed.weights_at + n;
    for (int d = 1; d < GGML_MAX_DIMS; d++) {
        ids->nb[d] = ggml_nbytes(ids);
    }
    for (Upload & upload : build_.segment.uploads) {
        upload.staging = upload.tensor == ids ? build_.take_staging(ids) : upload.staging;
    }
    const size_t  row = static_cast<size_t>(n_ranks) * sizeof(float);
    ggml_tensor * out = ggml_view_3d(build_.ctx(), ids, 1, n_ranks, n_tokens, sizeof(float), row,
                                     static_cast<size_t>(routed.weights_at) * sizeof(float));
    out->type         = GGML_TYPE_F32; // as large as the numbers before them
    return out;
}

ggml_tensor * RoutedBuilder::device_sum(Routed & routed, ggml_tensor * rows) {
    ggml_tensor * weights = weights_of(routed, rows->ne[1], rows->ne[2]);
    ggml_tensor * terms   = ggml_mul(build_.ctx(), rows, weights);
    ggml_tensor * sum     = nullptr;
    for (int64_t rank = 0; rank < rows->ne[1]; rank++) {
        ggml_tensor * term = ggml_view_2d(build_.ctx(), terms, terms->ne[0], terms->ne[2], terms->nb[2],
                                          static_cast<size_t>(rank) * terms->nb[1]);
        sum                = sum == nullptr ? term : ggml_add(build_.ctx(), sum, term);
    }
    return sum;
}

void RoutedBuilder::download_rows(int i, Download::Join how, ggml_tensor * rows, const Routed & routed,
                                  ggml_tensor * whole) {
    Download download = {};
    download.tensor   = rows;
    download.node     = i;
    download.join     = how;
    download.n_rows   = rows->ne[1] * rows->ne[2];
    download.packed   = routed.packs();
    if (download.packed && how == Download::Join::rows) {
        download.staging = build_.program.host_bytes;
        build_.program.host_bytes += static_cast<size_t>(routed.n_rows) * rows->nb[2];
    } else if (!download.packed) {
        download.staging = build_.take_staging(rows);
    }
    download.routed = number_of(routed);
    download.to     = whole;
    if (whole != nullptr) {
        build_.segment.host_results.push_back({whole, build_.whole_on_device(build_.graph->nodes[i], {i, -1})});
    }
    ggml_set_output(rows);
    build_.segment.downloads.push_back(download);
}

} // namespace oallama
