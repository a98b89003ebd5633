#include "experts.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace oallama {

void route(RoutedBatch & batch, int64_t n_device, const std::vector<int32_t> & slot_of, int64_t n_slots, bool once) {
    batch.n_tokens = static_cast<int64_t>(batch.chosen.size()) / batch.n_used;
    batch.n_device = n_device;
    once           = once || batch.n_tokens > 1;
    for (std::vector<int32_t> * rows : {&batch.slots, &batch.device_rows, &batch.host_ids, &batch.host_rows}) {
        rows->clear();
    }
    std::vector<int32_t> spare; // slots with something in them first: only weights are sure to be numbers
    std::copy_if(slot_of.begin(), slot_of.end(), std::back_inserter(spare), [](int32_t slot) { return slot >= 0; });
    for (int32_t slot = 0; slot < static_cast<int32_t>(n_slots); slot++) {
        if (std::find(slot_of.begin(), slot_of.end(), slot) == slot_of.end()) {
            spare.push_back(slot);
        }
    }
    std::vector<int64_t> taken_by(static_cast<size_t>(n_slots), -1); // the last token that uses a slot
    for (int64_t token = 0; token < batch.n_tokens; token++) {
        const size_t begin = batch.slots.size();
        const size_t end   = begin + static_cast<size_t>(n_device);
        for (int64_t rank = 0; rank < batch.n_used; rank++) {
            const int64_t row    = token * batch.n_used + rank;
            const int32_t expert = batch.chosen[static_cast<size_t>(row)];
            const int32_t slot   = slot_of[static_cast<size_t>(expert)];
            if (slot < 0 || taken_by[static_cast<size_t>(slot)] == token || batch.slots.size() == end) {
                batch.host_ids.push_back(expert);
                batch.host_rows.push_back(static_cast<int32_t>(row));
                continue;
            }
            taken_by[static_cast<size_t>(slot)] = token;
            batch.slots.push_back(slot);
            batch.device_rows.push_back(static_cast<int32_t>(row));
        }
        const int32_t same = batch.slots.size() > begin ? batch.slots[begin] : spare.front();
        for (auto free = spare.begin(); batch.slots.size() < end;) {
            if (once) {
                while (taken_by[static_cast<size_t>(*free)] == token) {
                    free++;
                }
                taken_by[static_cast<size_t>(*free)] = token;
            }
            batch.slots.push_back(once ? *free : same);
            batch.device_rows.push_back(-1);
        }
    }
}

namespace {

// Whether the device's kernels keep one rank for each expert and token, as CUDA's for batches do (they sort rows by
// expert), and those for weights in float for one token too (mul_mat_f).
bool takes_experts_once(const Routed & routed) {
    return std::any_of(routed.weights.begin(), routed.weights.end(),
                       [](const SplitWeight * weight) { return !ggml_is_quantized(weight->slice().type); });
}

void check_experts(const std::vector<int32_t> & chosen, int64_t n_expert) {
    for (const int32_t expert : chosen) {
        if (expert < 0 || expert >= n_expert) {
            throw Error(OALLAMA_FAILED,
                        "a token was routed to expert " + std::to_string(expert) + " of " + std::to_string(n_expert));
        }
    }
}

// A hit is on the device when the batch begins, and not because it is fetched for it.
void count_hits(const std::vector<int32_t> & chosen, const std::vector<int32_t> & slot_of) {
    const auto n_hits = std::count_if(chosen.begin(), chosen.end(),
                                      [&](int32_t expert) { return slot_of[static_cast<size_t>(expert)] >= 0; });
    stats().n_uses.fetch_add(static_cast<int64_t>(chosen.size()), std::memory_order_relaxed);
    stats().n_hits.fetch_add(n_hits, std::memory_order_relaxed);
}

void resize(const Sized & sized, int64_t n) {
    ggml_tensor * tensor  = sized.tensor;
    tensor->ne[sized.dim] = n;
    for (int d = sized.dim; d + 1 < GGML_MAX_DIMS; d++) {
        tensor->nb[d + 1] = tensor->nb[d] * static_cast<size_t>(tensor->ne[d]);
    }
}

// Address of a row in a tensor [n, n_used or 1, n_tokens].
char * row_of(const ggml_tensor * tensor, int64_t n_used, int64_t row) {
    return static_cast<char *>(tensor->data) + static_cast<size_t>(row / n_used) * tensor->nb[2] +
           static_cast<size_t>(row % n_used) * tensor->nb[1];
}

} // namespace

void route(Phase & phase, const ggml_cgraph * graph, std::vector<RoutedBatch> & batches, Exchange * exchange) {
    batches.resize(std::max(batches.size(), phase.routings.size()));
    for (size_t i = 0; i < phase.routings.size(); i++) {
        const Routed &                       routed = phase.routings[i];
        RoutedBatch &                        batch  = batches[i];
        const SplitWeight &                  first  = *routed.weights.front();
        const std::shared_ptr<ExpertTable> & table  = first.table();
        for (const SplitWeight * weight : routed.weights) {
            if (weight->table() != table) {
                throw Error(OALLAMA_FAILED, weight->slice().name + " has other hot experts than " + first.slice().name +
                                                "; those of a block must be the same");
            }
        }
        read_all(routed.ids.of(graph), batch.chosen);
        check_experts(batch.chosen, first.slice().e);
        if (routed.weighted) {
            read_all(routed.weighting.of(graph), batch.weights);
        }
        batch.n_used = routed.n_used;
        if (exchange != nullptr) {
            exchange->receive(table);
            table->count(batch.chosen, batch.n_used);
        }
        count_hits(batch.chosen, table->slot_of());
        if (exchange != nullptr) {
            exchange->share(table, batch.chosen, phase.row_s, phase.device_s);
        }
        route(batch, routed.n_device, table->slot_of(), first.n_slots(), takes_experts_once(routed));
        for (const Sized & sized : routed.sized) {
            resize(sized, batch.n_misses());
        }
        std::copy(batch.host_ids.begin(), batch.host_ids.end(), static_cast<int32_t *>(routed.host_ids->data));
        for (const GatheredRows & gathered : routed.gathered) {
            auto * index = static_cast<int32_t *>(gathered.index->data);
            for (const int32_t row : batch.host_rows) {
                *index++ = gathered.by_rank ? row : row / static_cast<int32_t>(routed.n_used);
            }
        }
    }
}

void pack(Host & host, const Routed & routed, const RoutedBatch & batch, const Upload & upload,
          const ggml_cgraph * graph, char * out) {
    switch (upload.what) {
        case Upload::What::value: return; // nothing of a routing
        case Upload::What::ids: std::memcpy(out, batch.slots.data(), batch.slots.size() * sizeof(int32_t)); return;
        case Upload::What::weights:
            for (size_t i = 0; i < batch.device_rows.size(); i++) {
                const int32_t row                 = batch.device_rows[i];
                reinterpret_cast<float *>(out)[i] = row < 0 ? 0.0F : batch.weights[static_cast<size_t>(row)];
            }
            return;
        case Upload::What::biases: {
            const ggml_tensor * biases = upload.source.of(graph);
            for (const int32_t expert : routed.weights.front()->table()->expert_in()) {
                const auto at = static_cast<size_t>(std::max(expert, 0)); // an empty slot computes what is thrown away
                std::memcpy(out, host_data(biases) + at * biases->nb[1], biases->nb[1]);
                out += biases->nb[1];
            }
            return;
        }
        case Upload::What::rows: break;
    }
    const ggml_tensor * x     = upload.source.of(graph);
    const size_t        bytes = ggml_row_size(x->type, x->ne[0]);
    const auto          n     = static_cast<int64_t>(batch.device_rows.size());
    host.share(n, static_cast<size_t>(n) * bytes, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); i++) {
            const int64_t first = static_cast<int64_t>(i) / batch.n_device * batch.n_used; // of the token
            const int64_t row   = batch.device_rows[i] < 0 ? first : batch.device_rows[i];
            std::memcpy(out + i * bytes, row_of(x, batch.n_used, row), bytes);
        }
    });
}

namespace {

// Rows of the batch, from both sides, to where they belong in node, [n, n_used, n_tokens]. The host's lie packed at the
// node's beginning.
void join_rows(Host & host, const RoutedBatch & batch, const char * device, const ggml_tensor * node) {
    const size_t bytes = ggml_row_size(node->type, node->ne[0]);
    char *       data  = static_cast<char *>(node->data);
    host.spread(data, batch.n_misses(), bytes, [&](int64_t i) {
        return static_cast<size_t>(row_of(node, batch.n_used, batch.host_rows[static_cast<size_t>(i)]) - data);
    });
    const auto n = static_cast<int64_t>(batch.device_rows.size());
    host.share(n, static_cast<size_t>(n) * bytes, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); i++) {
            if (batch.device_rows[i] >= 0) {
                std::memcpy(row_of(node, batch.n_used, batch.device_rows[i]), device + i * bytes, bytes);
            }
        }
    });
}

void add_weighted(float * sum, const float * row, float weight, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        sum[i] += weight * row[i];
    }
}

// node, [n, n_tokens], becomes the sum of each token's rows times their routing weights. host_rows: the host's, packed;
// device_rows: the device's, or, where summed, their sum.
void join_sum(Host & host, const RoutedBatch & batch, const float * host_rows, const float * device_rows, bool summed,
              const ggml_tensor * node) {
    const int64_t n       = node->ne[0];
    const auto &  misses  = batch.host_rows;
    const auto    of_some = [&](int64_t begin, int64_t end) {
        const auto first   = std::lower_bound(misses.begin(), misses.end(), begin * batch.n_used);
        size_t     at_host = static_cast<size_t>(first - misses.begin());
        size_t     at_dev  = static_cast<size_t>(begin * batch.n_device);
        for (int64_t token = begin; token < end; token++) {
            auto * sum =
                reinterpret_cast<float *>(static_cast<char *>(node->data) + static_cast<size_t>(token) * node->nb[1]);
            if (summed) {
                std::memcpy(sum, device_rows + token * n, static_cast<size_t>(n) * sizeof(float));
            } else {
                std::fill(sum, sum + n, 0.0F);
                for (int64_t rank = 0; rank < batch.n_device; rank++, at_dev++) {
                    const int32_t row = batch.device_rows[at_dev];
                    if (row >= 0) {
                        add_weighted(sum, device_rows + static_cast<int64_t>(at_dev) * n,
                                     batch.weights[static_cast<size_t>(row)], n);
                    }
                }
            }
            for (; at_host < misses.size() && misses[at_host] / batch.n_used == token; at_host++) {
                add_weighted(sum, host_rows + static_cast<int64_t>(at_host) * n,
                             batch.weights[static_cast<size_t>(misses[at_host])], n);
            }
        }
    };
    const int64_t rows = batch.n_tokens * batch.n_used; // that are read, about
    host.share(batch.n_tokens, static_cast<size_t>(rows * n) * sizeof(float), of_some);
}

} // namespace

void join_routed(Host & host, const RoutedBatch & batch, const Download & download, const ggml_tensor * node,
                 const char * from) {
    if (download.join == Download::Join::rows) {
        join_rows(host, batch, from, node);
    } else {
        join_sum(host, batch, static_cast<const float *>(download.host_rows->data),
                 reinterpret_cast<const float *>(from), download.summed, node);
    }
}

} // namespace oallama
