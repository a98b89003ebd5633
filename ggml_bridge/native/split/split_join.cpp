#include "split_join.h"

#include <cstring>

namespace oallama {

namespace {

// Byte offset of a row, counted over all dimensions.
size_t offset_of(const ggml_tensor * tensor, int64_t row) {
    const auto i1 = static_cast<size_t>(row % tensor->ne[1]);
    const auto i2 = static_cast<size_t>(row / tensor->ne[1] % tensor->ne[2]);
    const auto i3 = static_cast<size_t>(row / tensor->ne[1] / tensor->ne[2]);
    return i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
}

// Moves the host's elements of each row (or of each half of one) from where they lie packed to where they belong.
void spread(Host & host, const Download & download, const ggml_tensor * node) {
    const size_t  bytes = static_cast<size_t>(download.spread) * node->nb[0];
    const size_t  run   = static_cast<size_t>(download.extent) * node->nb[0];
    const int64_t n_run = node->ne[0] / download.extent;
    host.spread(static_cast<char *>(node->data), download.spread_rows * n_run, bytes,
                [&](int64_t item) { return offset_of(node, item / n_run) + static_cast<size_t>(item % n_run) * run; });
}

// The device's elements into their gaps.
void scatter(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    char *       data  = static_cast<char *>(node->data) + static_cast<size_t>(download.begin) * node->nb[0];
    const size_t bytes = static_cast<size_t>(download.count) * node->nb[0];
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    const size_t n_run = static_cast<size_t>(node->ne[0] / download.extent);
    host.share(download.n_rows, static_cast<size_t>(download.n_rows) * n_run * bytes, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            for (size_t r = 0; r < n_run; r++) {
                std::memcpy(data + offset_of(node, download.first_row + row) + r * run,
                            from + (static_cast<size_t>(row) * n_run + r) * bytes, bytes);
            }
        }
    });
}

void add(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    auto *        sum = static_cast<float *>(node->data) + download.first_row * node->ne[0];
    const auto *  b   = reinterpret_cast<const float *>(from);
    const int64_t n   = download.n_rows * node->ne[0];
    host.share(n, static_cast<size_t>(n) * sizeof(float), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            sum[i] += b[i];
        }
    });
}

void copy(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    char *       to    = place_of(download, node);
    const size_t bytes = download_bytes(download);
    host.share(static_cast<int64_t>(bytes), bytes, [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
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
    for (int64_t row = 0; row < rows.count; row++) {
        std::memcpy(out + static_cast<size_t>(row) * bytes, data + offset_of(src, rows.first + row), bytes);
    }
}

char * place_of(const Download & download, const ggml_tensor * node) {
    const int64_t begin = download.join == Download::Join::scatter ? download.begin : 0;
    return static_cast<char *>(node->data) + static_cast<size_t>(begin) * node->nb[0] +
           static_cast<size_t>(download.first_row) * node->nb[1];
}

size_t download_bytes(const Download & download) {
    return static_cast<size_t>(download.n_rows) * download.tensor->nb[1];
}

void join(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    switch (download.join) {
        case Download::Join::copy: copy(host, download, node, from); break;
        case Download::Join::add: add(host, download, node, from); break;
        case Download::Join::scatter:
            if (download.spread > 0) {
                spread(host, download, node);
            }
            scatter(host, download, node, from);
            break;
        case Download::Join::rows:
        case Download::Join::sum: break; // join_routed
    }
}

} // namespace oallama
