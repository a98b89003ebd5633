#include "split_routed.h"

#include <algorithm>
#include <cstring>

#include "split_join.h"

namespace oallama {

namespace {

// Rows [., ne[1], ne[2]] of a tensor as one list of rows.
bool is_list_of_rows(const ggml_tensor * x) {
    return x->nb[0] == ggml_type_size(x->type) &&
           (x->ne[1] == 1 || x->nb[2] == static_cast<size_t>(x->ne[1]) * x->nb[1]);
}

void resize(const Sized & sized, int64_t n) {
    ggml_tensor * tensor  = sized.tensor;
    tensor->ne[sized.dim] = n;
    for (int d = sized.dim; d + 1 < GGML_MAX_DIMS; d++) {
        tensor->nb[d + 1] = tensor->nb[d] * static_cast<size_t>(tensor->ne[d]);
    }
}

// Numbers of 4 bytes, one for each expert that a token uses.
template <typename T> void read_all(const ggml_tensor * tensor, std::vector<T> & out) {
    out.resize(static_cast<size_t>(tensor->ne[0] * n_rows(tensor)));
    gather(tensor, 0, tensor->ne[0], {0, n_rows(tensor)}, reinterpret_cast<char *>(out.data()));
}

void pack_biases(const Routed & routed, const ggml_tensor * biases, char * out) {
    for (const int32_t expert : routed.weights.front()->slice().hot) {
        const int32_t row = std::max(expert, 0); // of a slot that is free nothing is used
        std::memcpy(out, host_data(biases) + static_cast<size_t>(row) * biases->nb[1], biases->nb[1]);
        out += biases->nb[1];
    }
}

} // namespace

//
// building
//

ggml_tensor * RoutedBuilder::stage(ggml_tensor * tensor) {
    program_.host_staged.push_back({tensor, program_.host_bytes});
    program_.host_bytes += (ggml_nbytes(tensor) + 63) / 64 * 64;
    return tensor;
}

ggml_tensor * RoutedBuilder::send(Routed & routed, SentRows::What what, ggml_tensor * tensor, Origin origin,
                                  ggml_tensor * host) {
    keep_sent(tensor);
    routed.sent.push_back({what, tensor, origin, host, program_.staging_bytes});
    program_.staging_bytes += (ggml_nbytes(tensor) + 63) / 64 * 64;
    return tensor;
}

Routed & RoutedBuilder::routing_of(int mul_mat, Origin ids) {
    const ggml_tensor * chosen = graph_->nodes[mul_mat]->src[2];
    const SplitWeight * weight = weight_of(graph_->nodes[mul_mat]->src[0]);
    for (Routed & routed : routed_) {
        if (routed.ids.of(graph_) == chosen && routed.weights.front()->slice().hot == weight->slice().hot) {
            if (std::find(routed.weights.begin(), routed.weights.end(), weight) == routed.weights.end()) {
                routed.weights.push_back(weight);
            }
            return routed;
        }
    }
    Routed routed;
    routed.weights  = {weight};
    routed.ids      = ids;
    routed.n_used   = chosen->ne[0];
    routed.n_rows   = chosen->ne[0] * chosen->ne[1];
    routed.n_device = n_device_ranks(chosen->ne[0], weight->n_slots());
    routed_.push_back(std::move(routed));
    Routed & made = routed_.back();
    made.host_ids = stage(ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, 1, made.n_rows));
    made.device_ids =
        send(made, SentRows::What::ids, ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, made.n_device, chosen->ne[1]));
    made.sized.push_back({made.host_ids, 1});
    return made;
}

ggml_tensor * RoutedBuilder::host_input(Routed & routed, ggml_tensor * x) {
    for (const GatheredRows & known : routed.gathered) {
        if (known.x == x && !known.reused) {
            return known.rows;
        }
    }
    ggml_tensor * whole = is_list_of_rows(x) ? x : stage(ggml_cont(ctx(), x));
    ggml_tensor * list = ggml_view_2d(ctx(), whole, x->ne[0], x->ne[1] * x->ne[2], whole->nb[x->ne[1] == 1 ? 2 : 1], 0);
    program_.host_views.push_back(list);
    ggml_tensor * index = stage(ggml_new_tensor_2d(ctx(), GGML_TYPE_I32, routed.n_rows, 1));
    ggml_tensor * rows  = stage(ggml_get_rows(ctx(), list, index));
    rows->ne[2]         = rows->ne[1];
    rows->ne[1]         = 1;
    rows->nb[2]         = rows->nb[1];
    routed.sized.push_back({index, 0});
    routed.sized.push_back({rows, 2});
    routed.gathered.push_back({x, index, rows, program_.host_staged.back().at, x->ne[1] > 1});
    return rows;
}

ggml_tensor * RoutedBuilder::device_input(Routed & routed, const ggml_tensor * x, Origin origin, ggml_tensor * host) {
    return send(routed, SentRows::What::rows, ggml_new_tensor_3d(ctx(), x->type, x->ne[0], routed.n_device, x->ne[2]),
                origin, host);
}

ggml_tensor * RoutedBuilder::device_biases(Routed & routed, const ggml_tensor * biases, Origin origin) {
    return send(routed, SentRows::What::biases,
                ggml_new_tensor_2d(ctx(), GGML_TYPE_F32, biases->ne[0], routed.weights.front()->n_slots()), origin);
}

ggml_tensor * RoutedBuilder::host_rows(Routed & routed, ggml_tensor * rows) {
    routed.sized.push_back({rows, 2});
    return rows;
}

ggml_tensor * RoutedBuilder::whole(const ggml_tensor * node, ggml_tensor * rows) {
    ggml_tensor * out = stage(ggml_new_tensor(ctx(), node->type, GGML_MAX_DIMS, node->ne));
    if (rows != nullptr) {
        program_.host_staged.push_back({rows, program_.host_staged.back().at});
    }
    return out;
}

// Where an input's rows were, if they are as large: what they were for has been computed by then.
ggml_tensor * RoutedBuilder::keep(Routed & routed, ggml_tensor * rows) {
    for (GatheredRows & used : routed.gathered) {
        if (ggml_nbytes(used.rows) == ggml_nbytes(rows) && !used.reused && used.rows != rows->src[1]) {
            used.reused = true;
            program_.host_staged.push_back({rows, used.at});
            return rows;
        }
    }
    return stage(rows);
}

ggml_tensor * RoutedBuilder::device_sum(Routed & routed, ggml_tensor * rows) {
    ggml_tensor * weights =
        send(routed, SentRows::What::weights, ggml_new_tensor_3d(ctx(), GGML_TYPE_F32, 1, rows->ne[1], rows->ne[2]));
    ggml_tensor * terms = ggml_mul(ctx(), rows, weights);
    ggml_tensor * sum   = nullptr;
    for (int64_t rank = 0; rank < rows->ne[1]; rank++) {
        ggml_tensor * term = ggml_view_2d(ctx(), terms, terms->ne[0], terms->ne[2], terms->nb[2],
                                          static_cast<size_t>(rank) * terms->nb[1]);
        sum                = sum == nullptr ? term : ggml_add(ctx(), sum, term);
    }
    return sum;
}

//
// running
//

void route(Phase & phase, const ggml_cgraph * graph, std::vector<RoutedBatch> & batches) {
    batches.resize(std::max(batches.size(), phase.routings.size()));
    for (size_t i = 0; i < phase.routings.size(); i++) {
        const Routed &      routed = phase.routings[i];
        RoutedBatch &       batch  = batches[i];
        const SplitWeight & first  = *routed.weights.front();
        for (const SplitWeight * weight : routed.weights) {
            if (weight->slot_of() != first.slot_of()) {
                throw Error(OALLAMA_FAILED, weight->slice().name + " has other hot experts than " + first.slice().name +
                                                "; those of a block must be the same");
            }
        }
        read_all(routed.host_chosen == nullptr ? routed.ids.of(graph) : routed.host_chosen, batch.chosen);
        if (routed.weighted) {
            read_all(routed.host_weighting == nullptr ? routed.weighting.of(graph) : routed.host_weighting,
                     batch.weights);
        }
        route(batch.chosen, routed.n_used, first.slot_of(), first.n_slots(), batch.routing);
        for (const SplitWeight * weight : routed.weights) {
            weight->count(batch.chosen, batch.routing.n_tokens);
        }
        const int64_t n_misses = batch.routing.n_misses();
        for (const Sized & sized : routed.sized) {
            resize(sized, n_misses);
        }
        std::copy(batch.routing.host_ids.begin(), batch.routing.host_ids.end(),
                  static_cast<int32_t *>(routed.host_ids->data));
        for (const GatheredRows & gathered : routed.gathered) {
            auto * index = static_cast<int32_t *>(gathered.index->data);
            for (const int32_t row : batch.routing.host_rows) {
                *index++ = gathered.by_rank ? row : row / static_cast<int32_t>(routed.n_used);
            }
        }
    }
}

void pack(Host & host, const Routed & routed, const RoutedBatch & batch, const SentRows & sent,
          const ggml_cgraph * graph, char * out) {
    const Routing & routing = batch.routing;
    switch (sent.what) {
        case SentRows::What::ids:
            std::memcpy(out, routing.slots.data(), routing.slots.size() * sizeof(int32_t));
            return;
        case SentRows::What::weights:
            device_weights(routing, batch.weights.data(), reinterpret_cast<float *>(out));
            return;
        case SentRows::What::biases: pack_biases(routed, sent.origin.of(graph), out); return;
        case SentRows::What::rows: break;
    }
    const ggml_tensor * x     = sent.host == nullptr ? sent.origin.of(graph) : sent.host;
    const size_t        bytes = ggml_row_size(x->type, x->ne[0]);
    const char *        data  = host_data(x);
    const auto          n     = static_cast<int64_t>(routing.device_rows.size());
    host.share(n, static_cast<size_t>(n) * bytes, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); i++) {
            const int64_t first = static_cast<int64_t>(i) / routing.n_device * routing.n_used; // of the token
            const int64_t row   = routing.device_rows[i] < 0 ? first : routing.device_rows[i];
            std::memcpy(out + i * bytes,
                        data + static_cast<size_t>(row / routing.n_used) * x->nb[2] +
                            static_cast<size_t>(row % routing.n_used) * x->nb[1],
                        bytes);
        }
    });
}

void join_routed(Host & host, const RoutedBatch & batch, const Download & download, const ggml_tensor * node,
                 const char * from) {
    if (download.join == Download::Join::rows) {
        join_rows(host, batch.routing, from, node);
        return;
    }
    join_sum(host, batch.routing, batch.weights.data(), static_cast<const float *>(download.host_rows->data),
             reinterpret_cast<const float *>(from), download.summed, node);
}

} // namespace oallama
