#include "split_join.h"

#include <cstring>

namespace oallama {

namespace {

// Calls f(row - rows.first, offset in the original) for every row, in order or backwards.
template <typename F> void for_rows(const ggml_tensor * tensor, Rows rows, bool backwards, F && f) {
    for (int64_t i = 0; i < rows.count; i++) {
        const int64_t at  = backwards ? rows.count - 1 - i : i;
        const int64_t row = rows.first + at;
        const auto    i1  = static_cast<size_t>(row % tensor->ne[1]);
        const auto    i2  = static_cast<size_t>(row / tensor->ne[1] % tensor->ne[2]);
        const auto    i3  = static_cast<size_t>(row / tensor->ne[1] / tensor->ne[2]);
        f(at, i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3]);
    }
}

// Moves the host's elements of each row (or of each half of one) from where they lie packed to where they belong. From
// the end, because every run moves to a higher address or stays.
void spread(const Download & download, const ggml_tensor * node) {
    char *       data  = static_cast<char *>(node->data);
    const size_t bytes = static_cast<size_t>(download.spread) * node->nb[0];
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    const size_t n_run = static_cast<size_t>(node->ne[0] / download.extent);
    for_rows(node, {0, download.spread_rows}, true, [&](int64_t row, size_t offset) {
        for (size_t r = n_run; r-- > 0;) {
            std::memmove(data + offset + r * run, data + (static_cast<size_t>(row) * n_run + r) * bytes, bytes);
        }
    });
}

// The device's elements into their gaps.
void scatter(const Download & download, const ggml_tensor * node, const char * from) {
    char *       data  = static_cast<char *>(node->data) + static_cast<size_t>(download.begin) * node->nb[0];
    const size_t bytes = static_cast<size_t>(download.count) * node->nb[0];
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    const size_t n_run = static_cast<size_t>(node->ne[0] / download.extent);
    for_rows(node, {download.first_row, download.n_rows}, false, [&](int64_t row, size_t offset) {
        for (size_t r = 0; r < n_run; r++) {
            std::memcpy(data + offset + r * run, from + (static_cast<size_t>(row) * n_run + r) * bytes, bytes);
        }
    });
}

void add(const Download & download, const ggml_tensor * node, const char * from) {
    auto *        sum = static_cast<float *>(node->data) + download.first_row * node->ne[0];
    const auto *  b   = reinterpret_cast<const float *>(from);
    const int64_t n   = download.n_rows * node->ne[0];
    for (int64_t i = 0; i < n; i++) {
        sum[i] += b[i];
    }
}

} // namespace

const char * host_data(const ggml_tensor * tensor) {
    const SplitWeight * weight = weight_of(tensor);
    return static_cast<const char *>(weight == nullptr ? tensor->data : weight->whole_on_host().tensor->data);
}

int64_t n_rows(const ggml_tensor * tensor) {
    return tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}

void gather(const ggml_tensor * src, int64_t begin, int64_t count, Rows rows, char * out) {
    const char * data  = host_data(src) + static_cast<size_t>(begin) * src->nb[0];
    const size_t bytes = static_cast<size_t>(count) * src->nb[0];
    if (count == src->ne[0] && ggml_is_contiguous(src)) { // routing weights are rows of one number
        std::memcpy(out, data + static_cast<size_t>(rows.first) * bytes, static_cast<size_t>(rows.count) * bytes);
        return;
    }
    for_rows(src, rows, false, [&](int64_t row, size_t offset) {
        std::memcpy(out + static_cast<size_t>(row) * bytes, data + offset, bytes);
    });
}

char * place_of(const Download & download, const ggml_tensor * node) {
    const int64_t begin = download.join == Download::Join::scatter ? download.begin : 0;
    return static_cast<char *>(node->data) + static_cast<size_t>(begin) * node->nb[0] +
           static_cast<size_t>(download.first_row) * node->nb[1];
}

size_t download_bytes(const Download & download) {
    return static_cast<size_t>(download.n_rows) * download.tensor->nb[1];
}

void join(const Download & download, const ggml_tensor * node, const char * from) {
    switch (download.join) {
        case Download::Join::copy: std::memcpy(place_of(download, node), from, download_bytes(download)); break;
        case Download::Join::add: add(download, node, from); break;
        case Download::Join::scatter:
            if (download.spread > 0) {
                spread(download, node);
            }
            scatter(download, node, from);
            break;
        case Download::Join::rows:
        case Download::Join::sum: break; // join_routed
    }
}

} // namespace oallama
