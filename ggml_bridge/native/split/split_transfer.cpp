// What the back end copies between host and device in a phase: activations there, the experts that are used, results
// back.

#include <algorithm>

#include "split_backend.h"
#include "split_join.h"
#include "stats.h"

namespace oallama {

// Bytes sent to the device. From pinned memory, so that the call does not wait: what lies elsewhere is moved there
// first, piece by piece, while the piece before is on its way.
int64_t SplitBackend::send(const Phase & phase, const ggml_cgraph * graph) {
    constexpr int64_t piece = int64_t{1} << 20;

    int64_t sent = 0;
    for (const Upload & upload : phase.uploads) {
        const ggml_tensor * source = upload.origin.of(graph);
        const size_t        bytes  = ggml_nbytes(upload.tensor);
        sent += static_cast<int64_t>(bytes);
        if (upload.packed && prepared_ && (!partner_->pinned() || partner_->is_pinned(source))) {
            const char * data = host_data(source) + static_cast<size_t>(upload.first_row) * source->nb[1];
            ggml_backend_tensor_set_async(partner_->backend(), upload.tensor, data, 0, bytes);
            continue;
        }
        char *        staged   = partner_->staging() + upload.staging;
        const size_t  row      = upload.tensor->nb[1];
        const int64_t all_rows = n_rows(upload.tensor);
        const int64_t at_once  = std::max<int64_t>(1, piece / static_cast<int64_t>(row));
        for (int64_t first = 0; first < all_rows; first += at_once) {
            const int64_t count = std::min(at_once, all_rows - first);
            const size_t  begin = static_cast<size_t>(first) * row;
            host_.share(count, static_cast<size_t>(count) * row, [&](int64_t from, int64_t to) {
                gather(source, upload.begin, upload.count, {upload.first_row + first + from, to - from},
                       staged + begin + static_cast<size_t>(from) * row);
            });
            ggml_backend_tensor_set_async(partner_->backend(), upload.tensor, staged + begin, begin,
                                          static_cast<size_t>(count) * row);
        }
    }
    stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
    return sent;
}

// Which slots and which routing weights the device computes with.
int64_t SplitBackend::send_routed(const Phase & phase, const ggml_cgraph * graph) {
    int64_t sent = 0;
    for (size_t i = 0; i < phase.routings.size(); i++) {
        for (const SentRows & rows : phase.routings[i].sent) {
            char *       staged = partner_->staging() + rows.staging;
            const size_t bytes  = ggml_nbytes(rows.tensor);
            pack(host_, phase.routings[i], batches_[i], rows, graph, staged);
            ggml_backend_tensor_set_async(partner_->backend(), rows.tensor, staged, 0, bytes);
            sent += static_cast<int64_t>(bytes);
        }
    }
    stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
    return sent;
}

// A slot with the phase's CG, or with the experts of it that are used.
size_t SplitBackend::acquire(const Phase & phase, const ggml_cgraph * graph) {
    if (!phase.routed) {
        return partner_->stream().acquire(*phase.block, nullptr);
    }
    const ggml_tensor * ids = phase.host_ids == nullptr ? phase.ids.of(graph) : phase.host_ids;
    experts_.resize(static_cast<size_t>(ids->ne[0] * ids->ne[1]));
    gather(ids, 0, ids->ne[0], {0, n_rows(ids)}, reinterpret_cast<char *>(experts_.data()));
    return partner_->stream().acquire(*phase.block, &experts_);
}

// Whether a result is fetched to where it belongs. A call that fetches it to memory that is not pinned may wait for it.
bool SplitBackend::lands(const Download & download, const ggml_tensor * node) const {
    return download.direct && (!partner_->pinned() || partner_->is_pinned(node));
}

// Bytes that come back, queued behind the computation. Through pinned memory where the device has some, so that the
// call does not wait; where there is none left, the host has computed its side before.
void SplitBackend::fetch(const Phase & phase, const ggml_cgraph * graph) {
    int64_t fetched = 0;
    for (const Download & download : phase.downloads) {
        const ggml_tensor * node  = graph->nodes[download.node];
        const size_t        bytes = download_bytes(download);
        char * to = lands(download, node) ? place_of(download, node) : partner_->staging() + download.staging;
        ggml_backend_tensor_get_async(partner_->backend(), download.tensor, to, 0, bytes);
        fetched += static_cast<int64_t>(bytes);
    }
    stats().bytes_out.fetch_add(fetched, std::memory_order_relaxed);
}

void SplitBackend::join(const Phase & phase, const ggml_cgraph * graph) {
    for (const Download & download : phase.downloads) {
        const ggml_tensor * node = graph->nodes[download.node];
        const char *        from = partner_->staging() + download.staging;
        if (lands(download, node)) {
            continue;
        }
        if (download.join == Download::Join::rows || download.join == Download::Join::sum) {
            join_routed(host_, batches_[static_cast<size_t>(download.routed)], download,
                        download.to == nullptr ? node : download.to, from);
        } else {
            oallama::join(host_, download, node, from);
        }
    }
}

} // namespace oallama
