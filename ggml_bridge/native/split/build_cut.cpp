#include "build_cut.h"

#include <algorithm>

#include "experts.h"

namespace oallama {

void CutBuilder::emit_sides(int i) {
    const Value & v = build_.value(i);
    if (v.state == State::partial && is_weighting(build_.graph->nodes[i])) {
        weighting_ = i;
        sum_       = find_sum(build_.graph, i);
        sum_       = sum_ >= 0 && build_.value(sum_).state == State::partial ? sum_ : -1;
    }
    for (const Side side : all_sides) {
        if (!has(v, side)) {
            continue;
        }
        if (side == side_host && i <= sum_) { // in one pass: ggml takes each step through memory
            build_.sides(i)[side] = i == sum_ ? weighted_sum() : nullptr;
        } else {
            build_.sides(i)[side] = is_mul_mat(build_.graph->nodes[i]->op) ? mul_mat(i, side) : elementwise(i, side);
        }
    }
    if (ggml_tensor * host = build_.side_of(i, side_host); host != nullptr) {
        if (build_.program.resident) {
            build_.stage(host);
        } else {
            build_.bind(host, {i, -1}, nullptr);
        }
        ggml_build_forward_expand(build_.program.host_graph, host);
    }
    for (const Side side : device_sides) {
        if (build_.side_of(i, side) != nullptr) {
            build_.device_nodes[side].push_back(build_.side_of(i, side));
        }
    }
    if (v.wanted) {
        join(i);
    }
}

void CutBuilder::emit_view(int i) {
    const ggml_tensor * node = build_.graph->nodes[i];
    const Value &       v    = build_.value(i);
    for (const Side side : all_sides) {
        ggml_tensor * whole = build_.side_of(build_.inside(i, 0), side);
        if (whole == nullptr) {
            continue;
        }
        if (v.state == State::partial) {
            const size_t at = node->view_offs / node->src[0]->nb[1] * whole->nb[1];
            build_.sides(i)[side] =
                build_.keep_view(ggml_view_2d(build_.ctx(), whole, whole->ne[0], whole->ne[2], whole->nb[2], at), side);
            continue;
        }
        const int64_t n       = count_of(v, side);
        const bool    second  = node->view_offs != node->src[0]->view_offs;
        build_.sides(i)[side] = build_.view(whole, second ? n : 0, n, {}, side);
    }
}

ggml_tensor * CutBuilder::mul_mat(int i, Side side) {
    const ggml_tensor * node   = build_.graph->nodes[i];
    const SplitWeight & weight = *weight_of(node->src[0]);
    const SliceSpec &   slice  = weight.slice();
    const Part &        part   = weight.part(side);
    const Tokens        tokens = tokens_of(build_.value(i), side);
    if (build_.program.n_tokens == 0) {
        build_.program.n_tokens = build_.value(i).n_tokens;
        build_.program.times    = &plan_of(node->src[0])->times().of(slice.name, build_.program.n_tokens);
    }
    const bool    streamed = side == side_stream || side == side_prime;
    ggml_tensor * w        = streamed ? slot_of(i, weight, side) : part.tensor;
    const int64_t n        = slice.axis == Axis::cols ? node->ne[0] : w->ne[1];
    ggml_tensor * x   = build_.value(i).x_is_cut   ? build_.side_of(build_.inside(i, 1), side)
                        : slice.axis != Axis::cols ? build_.mirrored_on(side, i, 1, tokens)
                                                   : build_.mirrored_on(side, i, 1, tokens, part.begin, part.count);
    ggml_tensor * out = build_.copy_header(node, tokens.shape(node, n).data());
    out->src[0]       = w;
    out->src[1]       = side == side_host ? for_kernel_of(slice, x, build_.value(i).x_is_cut) : x;
    if (node->op == GGML_OP_MUL_MAT_ID) {
        out->src[2] = build_.mirrored_on(side, i, 2, tokens.along(1));
    }
    return out;
}

ggml_tensor * CutBuilder::for_kernel_of(const SliceSpec & slice, ggml_tensor * x, bool x_is_cut) {
    const bool plain = slice.layout == plain_layout;
    if (slice.axis == Axis::cols && !x_is_cut && !plain && !ggml_is_contiguous(x)) {
        x = build_.stage(ggml_cont(build_.ctx(), x));
    }
    return x->type == GGML_TYPE_F32 || (plain && x->type == slice.type)
               ? x
               : build_.stage(ggml_cast(build_.ctx(), x, GGML_TYPE_F32));
}

ggml_tensor * CutBuilder::elementwise(int i, Side side) {
    const ggml_tensor * node    = build_.graph->nodes[i];
    const Value &       v       = build_.value(i);
    const Tokens        tokens  = tokens_of(v, side);
    const bool          partial = v.state == State::partial;
    const int64_t       n       = count_of(v, side);
    const int64_t       all     = partial ? node->ne[0] : 2 * v.extent == node->ne[0] ? 2 * n : n;
    ggml_tensor *       out     = build_.copy_header(node, tokens.shape(node, all).data());
    for (int s = 0; s < GGML_MAX_SRC && node->src[s] != nullptr; s++) {
        const int from = build_.inside(i, s);
        out->src[s]    = from >= 0 && build_.value(from).state == v.state ? build_.side_of(from, side)
                         : partial                                        ? build_.mirrored_on(side, i, s, tokens)
                         : node->src[s]->ne[0] == 1 ? build_.mirrored_on(side, i, s, {})
                                                    : build_.mirrored_on(side, i, s, {}, begin_of(v, side), n);
    }
    return out;
}

namespace {

// dst[t] = the sum over r of rows[t][r] times weights[t][r], in the order of ggml's own steps.
void sum_ranks(ggml_tensor * dst, int ith, int nth, void * /*data*/) {
    const auto at = [](const ggml_tensor * tensor, int64_t r, int64_t t) {
        const char * data = static_cast<const char *>(tensor->data);
        return reinterpret_cast<const float *>(data + static_cast<size_t>(r) * tensor->nb[1] +
                                               static_cast<size_t>(t) * tensor->nb[2]);
    };
    const int64_t n_tokens = dst->ne[1];
    for (int64_t t = n_tokens * ith / nth; t < n_tokens * (ith + 1) / nth; t++) {
        float * sum = static_cast<float *>(dst->data) + t * dst->ne[0];
        std::fill(sum, sum + dst->ne[0], 0.0F);
        for (int64_t r = 0; r < dst->src[0]->ne[1]; r++) {
            add_weighted(sum, at(dst->src[0], r, t), *at(dst->src[1], r, t), dst->ne[0]);
        }
    }
}

} // namespace

ggml_tensor * CutBuilder::weighted_sum() {
    ggml_tensor * rows   = build_.side_of(build_.inside(weighting_, 0), side_host);
    const Tokens  tokens = tokens_of(build_.value(weighting_), side_host);
    ggml_tensor * args[] = {rows, build_.mirrored_on(side_host, weighting_, 1, tokens)};
    return ggml_custom_4d(build_.ctx(), GGML_TYPE_F32, rows->ne[0], rows->ne[2], 1, 1, args, 2, sum_ranks,
                          GGML_N_TASKS_MAX, nullptr);
}

ggml_tensor * CutBuilder::slot_of(int i, const SplitWeight & weight, Side side) {
    note_choice(i, weight.slice().e);
    const StreamedPart part = {&weight, side};
    for (const Streamed & streamed : build_.segment.streamed) {
        if (streamed.part == part) {
            return streamed.tensor;
        }
    }
    ggml_tensor * out = weight.new_tensor(build_.ctx(), side);
    build_.segment.streamed.push_back({part, out});
    build_.program.stream = device_spec_of(build_.graph->nodes[i]->src[0]).stream;
    return out;
}

void CutBuilder::note_choice(int i, int64_t n_expert) {
    const ggml_tensor * node = build_.graph->nodes[i];
    const ggml_tensor * ids  = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
    if (build_.segment.streamed.empty()) {
        build_.chosen_by   = ids != nullptr && ids->ne[0] < n_expert ? ids : nullptr;
        build_.n_expert    = n_expert;
        build_.segment.ids = build_.chosen_by == nullptr ? Source{} : build_.source_of(i, 2);
    } else if (ids != build_.chosen_by || n_expert != build_.n_expert) {
        build_.chosen_by = nullptr;
    }
}

void CutBuilder::join(int i) {
    const Value & v = build_.value(i);
    if (v.state == State::axis_0) {
        for (const Side side : all_sides) {
            if (build_.side_of(i, side) != nullptr && build_.program.resident) {
                resident_.put(i, v, side);
            } else if (build_.side_of(i, side) != nullptr && side != side_host) {
                const int64_t count = count_of(v, side);
                download(i, build_.side_of(i, side), Download::Join::scatter, begin_of(v, side), count,
                         tokens_of(v, side));
            }
        }
        return;
    }
    const int64_t n     = build_.graph->nodes[i]->ne[0];
    ggml_tensor * host  = build_.side_of(i, side_host);
    ggml_tensor * prime = build_.side_of(i, side_prime);
    ggml_tensor * sum =
        add(build_.side_of(i, side_device), build_.side_of(i, side_stream), build_.device_nodes[side_stream]);
    const auto of = [&](Tokens tokens) {
        return sum == nullptr ? nullptr : build_.view(sum, 0, sum->ne[0], tokens, side_device);
    };
    if (prime == nullptr || host != nullptr) {
        const Tokens tokens = tokens_of(v, prime == nullptr ? side_device : side_host);
        if (build_.program.resident) {
            resident_.make_sum(i, host, of(tokens), tokens);
        } else {
            download(i, sum, host != nullptr ? Download::Join::add : Download::Join::scatter, 0, n, tokens);
        }
    }
    if (prime != nullptr) {
        const Tokens  last  = tokens_of(v, side_prime);
        ggml_tensor * whole = add(prime, of(last), build_.device_nodes[side_prime]);
        if (build_.program.resident) {
            resident_.make_sum(i, nullptr, whole, last);
        } else {
            download(i, whole, Download::Join::scatter, 0, n, last);
        }
    }
}

ggml_tensor * CutBuilder::add(ggml_tensor * a, ggml_tensor * b, std::vector<ggml_tensor *> & nodes) {
    if (a == nullptr || b == nullptr) {
        return a == nullptr ? b : a;
    }
    nodes.push_back(ggml_add(build_.ctx(), a, b));
    return nodes.back();
}

void CutBuilder::download(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count,
                          Tokens tokens) {
    if (tensor == nullptr) {
        return;
    }
    const ggml_tensor * node     = build_.graph->nodes[i];
    const Value &       v        = build_.value(i);
    const bool          one_row  = node->ne[1] * node->ne[2] * node->ne[3] == 1;
    const bool          moves    = v.state == State::axis_0 && has(v, side_host) && v.cc < v.extent;
    const bool          first    = build_.segment.downloads.empty() || build_.segment.downloads.back().node != i;
    const auto          ne       = tokens.shape(node, 1);
    const auto          host_ne  = tokens_of(v, side_host).shape(node, 1);
    Download            download = {};
    download.tensor              = tensor;
    download.node                = i;
    download.join                = how;
    download.begin               = begin;
    download.count               = count;
    download.extent              = v.state == State::axis_0 ? v.extent : node->ne[0];
    download.first_row           = tokens.first_row(node);
    download.n_rows              = ne[1] * ne[2] * ne[3];
    download.spread              = moves && first ? v.cc : 0;
    download.spread_rows         = host_ne[1] * host_ne[2] * host_ne[3];
    download.direct =
        how == Download::Join::scatter && (count == download.extent || (one_row && download.extent == node->ne[0]));
    download.staging = build_.take_staging(tensor);
    ggml_set_output(tensor);
    build_.segment.downloads.push_back(download);
}

} // namespace oallama
