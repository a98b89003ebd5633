#include "experts.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace oallama {

void add_weighted(float * sum, const float * row, float weight, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        sum[i] += weight * row[i];
    }
}

int64_t RoutedBatch::n_last_rows() const {
    const auto last = std::find_if(launches.rbegin(), launches.rend(),
                                   [](const RoutedLaunch & launch) { return launch.n_copies > 0; });
    return n_device_rows() - (last == launches.rend() ? 0 : last->begin);
}

void route(RoutedBatch & batch, int64_t n_device, const std::vector<int32_t> & slot_of, int64_t n_slots, bool once,
           int64_t n_hits) {
    n_hits         = std::min(n_hits, n_device);
    batch.n_tokens = static_cast<int64_t>(batch.chosen.size()) / batch.n_used;
    batch.n_device = n_device;
    once           = once || batch.n_tokens > 1;
    for (std::vector<int32_t> * rows : {&batch.slots, &batch.device_rows, &batch.host_ids, &batch.host_rows}) {
        rows->clear();
    }
    batch.launches.clear();
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
        const size_t full  = begin + static_cast<size_t>(n_hits);
        for (int64_t rank = 0; rank < batch.n_used; rank++) {
            const int64_t row    = token * batch.n_used + rank;
            const int32_t expert = batch.chosen[static_cast<size_t>(row)];
            const int32_t slot   = slot_of[static_cast<size_t>(expert)];
            if (slot < 0 || taken_by[static_cast<size_t>(slot)] == token || batch.slots.size() == full) {
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
                    GGML_ASSERT(free != spare.end()); // a token's rows on the device are at most the slots
                }
                taken_by[static_cast<size_t>(*free)] = token;
            }
            batch.slots.push_back(once ? *free : same);
            batch.device_rows.push_back(-1);
        }
    }
}

void route_packed(RoutedBatch & batch, int64_t n_most, const std::vector<int32_t> & slot_of,
                  const std::vector<ExpertTable::Move> & moves) {
    batch.n_tokens = static_cast<int64_t>(batch.chosen.size()) / batch.n_used;
    for (std::vector<int32_t> * rows : {&batch.slots, &batch.device_rows, &batch.host_ids, &batch.host_rows}) {
        rows->clear();
    }
    batch.launches.clear();
    std::vector<int32_t> replaced; // slots, in the order of the first moves there
    for (const ExpertTable::Move & move : moves) {
        if (std::find(replaced.begin(), replaced.end(), move.slot) == replaced.end()) {
            replaced.push_back(move.slot);
        }
    }
    const size_t half = std::max<size_t>(1, replaced.size() / 2); // while one half computes, the other half is copied

    // experts and their slots by launch, and how many of them are copied
    struct Group {
        std::vector<ExpertTable::Move> experts;
        size_t                         n_copies = 0;
    };
    std::vector<Group> groups(3);
    for (int32_t expert = 0; expert < static_cast<int32_t>(slot_of.size()); expert++) {
        const int32_t slot = slot_of[static_cast<size_t>(expert)];
        const auto    at   = std::find(replaced.begin(), replaced.end(), slot);
        const auto    nth  = static_cast<size_t>(at - replaced.begin());
        if (slot >= 0) {
            groups[nth < half ? 0 : nth < replaced.size() ? 1 : 2].experts.push_back({expert, slot});
        }
    }
    for (size_t i = 0; i < moves.size(); i += half) {
        const auto from = moves.begin() + static_cast<std::ptrdiff_t>(i);
        const auto n    = std::min(half, moves.size() - i);
        groups.push_back({{from, from + static_cast<std::ptrdiff_t>(n)}, n});
    }

    std::vector<std::vector<int32_t>> rows_of(slot_of.size());
    for (size_t row = 0; row < batch.chosen.size(); row++) {
        rows_of[static_cast<size_t>(batch.chosen[row])].push_back(static_cast<int32_t>(row));
    }
    std::vector<size_t> done(slot_of.size()); // launches, by slot, when what was there has been computed
    for (const Group & group : groups) {
        const auto begin = static_cast<int64_t>(batch.device_rows.size());
        size_t     after = 0;
        for (const ExpertTable::Move & move : group.experts) {
            std::vector<int32_t> & rows = rows_of[static_cast<size_t>(move.expert)];
            batch.device_rows.insert(batch.device_rows.end(), rows.begin(), rows.end());
            batch.slots.insert(batch.slots.end(), rows.size(), move.slot);
            after = std::max(after, done[static_cast<size_t>(move.slot)]);
            rows.clear();
        }
        const auto end = static_cast<int64_t>(batch.device_rows.size());
        for (int64_t first = begin; first < end; first += n_most) {
            const int64_t last = batch.launches.empty() ? 0
                                                        : batch.launches.back().at + batch.launches.back().end -
                                                              batch.launches.back().begin;
            const int64_t at   = (last + number_alignment - 1) / number_alignment * number_alignment;
            const bool    copy = first == begin;
            batch.launches.push_back({first, std::min(end, first + n_most), at, copy ? group.n_copies : 0,
                                      copy && group.n_copies > 0 ? after : 0});
        }
        for (const ExpertTable::Move & move : group.experts) {
            done[static_cast<size_t>(move.slot)] =
                begin < end ? batch.launches.size() : done[static_cast<size_t>(move.slot)];
        }
    }
    for (size_t row = 0; row < batch.chosen.size(); row++) {
        const int32_t expert = batch.chosen[row];
        if (!rows_of[static_cast<size_t>(expert)].empty()) {
            batch.host_ids.push_back(expert);
            batch.host_rows.push_back(static_cast<int32_t>(row));
        }
    }
    GGML_ASSERT(batch.device_rows.size() + batch.host_rows.size() == batch.chosen.size());
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

// How many of a token's hits the device computes: fewer than there are where both sides were done sooner with more rows
// on the host. So they end together whatever share of a token's experts is in slots (ScheInfer, Eq. 13).
int64_t choose_hits(std::vector<double> & both_s, const RoutedBatch & batch, int64_t n_device,
                    const std::vector<int32_t> & slot_of) {
    constexpr double doubt =
        0.995; // what is passed over is tried again, once in some 30 tokens where it takes 15 % more

    const auto n_used = static_cast<size_t>(batch.n_used);
    if (batch.chosen.size() != n_used || both_s.size() <= n_used) {
        return n_device; // several tokens, or none has been computed yet
    }
    const auto n_missed = std::count_if(batch.chosen.begin(), batch.chosen.end(),
                                        [&](int32_t expert) { return slot_of[static_cast<size_t>(expert)] < 0; });
    const auto least    = static_cast<size_t>(std::max<int64_t>(n_missed, batch.n_used - n_device));
    size_t     best     = least;
    for (size_t rows = least + 1; rows <= n_used && both_s[least] > 0.0; rows++) {
        best = both_s[rows] > 0.0 && both_s[rows] < both_s[best] ? rows : best;
    }
    both_s[least] *= best == least ? 1.0 : doubt;
    return static_cast<int64_t>(n_used - best);
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

void route_segment(Segment & segment, const ggml_cgraph * graph, std::vector<RoutedBatch> & batches,
                   Exchange * exchange, bool in_turns) {
    batches.resize(std::max(batches.size(), segment.routings.size()));
    const bool packs = segment.packs();
    for (size_t i = 0; i < segment.routings.size(); i++) {
        const Routed &                       routed = segment.routings[i];
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
        const std::vector<int32_t> slot_of = table->slot_of();
        count_hits(batch.chosen, slot_of);
        std::vector<ExpertTable::Move> moves;
        if (exchange != nullptr && packs == routed.packs()) { // what is chosen is fetched all in one way
            const int64_t n_rows = packs ? 0 : routed.n_device * routed.n_rows / routed.n_used;
            moves = exchange->choose_fetched(table, batch.chosen, segment.row_times.host_s, segment.row_times.device_s,
                                             n_rows, packs && in_turns);
        }
        if (routed.packs()) {
            route_packed(batch, routed.n_most, slot_of, moves);
        } else {
            const std::vector<int32_t> now    = table->slot_of();
            const bool                 shares = exchange != nullptr && segment.routings.size() == 1;
            route(batch, routed.n_device, now, first.n_slots(), takes_experts_once(routed),
                  shares ? choose_hits(segment.row_times.both_s, batch, routed.n_device, now) : routed.n_device);
        }
        for (const Sized & sized : routed.sized) {
            resize(sized, batch.n_host_rows());
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

namespace {

void pack_numbers(const Routed & routed, const RoutedBatch & batch, Upload::What what, int32_t * out) {
    if (!routed.packs()) {
        std::copy(batch.slots.begin(), batch.slots.end(), out);
        auto * weights = reinterpret_cast<float *>(out) + routed.weights_at;
        for (size_t i = 0; routed.weights_at > 0 && i < batch.device_rows.size(); i++) {
            const int32_t row = batch.device_rows[i];
            weights[i]        = row < 0 ? 0.0F : batch.weights[static_cast<size_t>(row)];
        }
        return;
    }
    for (const RoutedLaunch & launch : batch.launches) {
        for (int64_t i = launch.begin; i < launch.end; i++) {
            const int32_t row = batch.device_rows[static_cast<size_t>(i)];
            int32_t &     to  = out[launch.at + i - launch.begin];
            switch (what) {
                case Upload::What::ids: to = batch.slots[static_cast<size_t>(i)]; break;
                case Upload::What::experts: to = batch.chosen[static_cast<size_t>(row)]; break;
                case Upload::What::tokens: to = row / static_cast<int32_t>(batch.n_used); break;
                default: to = row;
            }
        }
    }
}

} // namespace

void shape(const Routed & routed, const RoutedLaunch & launch) {
    for (const Sized & sized : routed.packed) {
        resize(sized, launch.end - launch.begin);
    }
    for (const Placed & placed : routed.placed) {
        placed.tensor->data =
            static_cast<char *>(placed.whole->data) + static_cast<size_t>(launch.at) * sizeof(int32_t);
        resize({placed.tensor, placed.dim}, launch.end - launch.begin);
    }
}

void pack(Host & host, const Routed & routed, const RoutedBatch & batch, const Upload & upload,
          const ggml_cgraph * graph, char * out) {
    switch (upload.what) {
        case Upload::What::value:
        case Upload::What::biases: return; // nothing of the batch
        case Upload::What::ids:
        case Upload::What::tokens:
        case Upload::What::ranks:
        case Upload::What::experts: pack_numbers(routed, batch, upload.what, reinterpret_cast<int32_t *>(out)); return;
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
    host.spread(data, batch.n_host_rows(), bytes, [&](int64_t i) {
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

// The same of packed rows, the host's first.
void join_packed(Host & host, const RoutedBatch & batch, const float * rows, const ggml_tensor * node) {
    const int64_t        n = node->ne[0];
    std::vector<int64_t> place_of(batch.chosen.size());
    int64_t              place = 0;
    for (const std::vector<int32_t> * of : {&batch.host_rows, &batch.device_rows}) {
        for (const int32_t row : *of) {
            place_of[static_cast<size_t>(row)] = place++;
        }
    }
    host.share(batch.n_tokens, place_of.size() * static_cast<size_t>(n) * sizeof(float),
               [&](int64_t begin, int64_t end) {
                   for (int64_t token = begin; token < end; token++) {
                       auto * sum = reinterpret_cast<float *>(static_cast<char *>(node->data) +
                                                              static_cast<size_t>(token) * node->nb[1]);
                       std::fill(sum, sum + n, 0.0F);
                       for (auto row = static_cast<size_t>(token * batch.n_used);
                            row < static_cast<size_t>((token + 1) * batch.n_used); row++) {
                           add_weighted(sum, rows + place_of[row] * n, batch.weights[row], n);
                       }
                   }
               });
}

// node, [n, n_tokens], becomes the sum of each token's rows times their routing weights. host_rows: the host's, packed;
// device_rows: the device's, or, where summed, their sum; NULL: left out.
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
            if (device_rows == nullptr) {
                std::fill(sum, sum + n, 0.0F);
            } else if (summed) {
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
    } else if (download.packed) {
        join_packed(host, batch, static_cast<const float *>(download.host_rows->data), node);
    } else {
        join_sum(host, batch, static_cast<const float *>(download.host_rows->data),
                 reinterpret_cast<const float *>(from), download.summed, node);
    }
}

void sum_rows(Host & host, const RoutedBatch & batch, const HostSum & sum) {
    join_sum(host, batch, static_cast<const float *>(sum.rows->data), nullptr, /*summed=*/false, sum.to);
}

} // namespace oallama
