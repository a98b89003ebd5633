// How results become whole when a phase ends: fetched and joined on the host, or lifted to the device's memory.

#include "split_builder.h"

namespace oallama {

// How node i becomes whole in its original memory when its phase ends.
void ProgramBuilder::join(int i) {
    const Value & v = value(i);
    if (program_.resident) {
        lift(i, v);
        return;
    }
    if (v.state == State::partial) {
        join_partial(i, v);
        return;
    }
    for (const Side side : {side_stream, side_device, side_prime}) {
        const int64_t count = count_of(v, side);
        fetch(i, side_of(i, side), count == v.extent ? Download::Join::copy : Download::Join::scatter,
              begin_of(v, side), count, tokens_of(v, side));
    }
}

// Of the first tokens the host has a part too, unless there is no CC; of the last n_g the device has all of it.
void ProgramBuilder::join_partial(int i, const Value & v) {
    const bool     on_host = has(v, side_host);
    ggml_tensor *  sum     = add(side_of(i, side_device), side_of(i, side_stream));
    ggml_tensor *  prime   = side_of(i, side_prime);
    const Tokens   last    = tokens_of(v, side_prime);
    Download::Join how     = on_host ? Download::Join::add : Download::Join::copy;
    if (prime == nullptr || on_host) {
        fetch(i, sum, how, 0, v.extent, tokens_of(v, prime == nullptr ? side_device : side_host));
    }
    if (prime != nullptr) {
        fetch(i, add(prime, sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], last, false)), Download::Join::copy, 0,
              v.extent, last);
    }
}

// The same in device memory.
void ProgramBuilder::lift(int i, const Value & v) {
    if (v.state == State::shard) {
        for (const Side side : all_sides) {
            if (side_of(i, side) != nullptr) {
                resident_.put(i, v, side, side_of(i, side));
            }
        }
        return;
    }
    ggml_tensor * host  = side_of(i, side_host);
    ggml_tensor * prime = side_of(i, side_prime);
    ggml_tensor * sum   = add(side_of(i, side_device), side_of(i, side_stream));
    const auto of = [&](Tokens tokens) { return sum == nullptr ? nullptr : view(sum, 0, sum->ne[0], tokens, false); };
    if (prime == nullptr || host != nullptr) {
        const Tokens tokens = tokens_of(v, prime == nullptr ? side_device : side_host);
        resident_.add(i, host, of(tokens), tokens);
    }
    if (prime != nullptr) {
        const Tokens last = tokens_of(v, side_prime);
        resident_.add(i, nullptr, add(prime, of(last)), last);
    }
}

// On the device; either may be missing.
ggml_tensor * ProgramBuilder::add(ggml_tensor * a, ggml_tensor * b) {
    if (a == nullptr || b == nullptr) {
        return a == nullptr ? b : a;
    }
    on_stream_.push_back(ggml_add(ctx(), a, b));
    return on_stream_.back();
}

void ProgramBuilder::fetch(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count,
                           Tokens tokens) {
    if (tensor == nullptr) {
        return;
    }
    const ggml_tensor * node     = graph_->nodes[i];
    const Value &       v        = value(i);
    const bool          one_row  = node->ne[1] * node->ne[2] * node->ne[3] == 1;
    const bool          moves    = v.state == State::shard && v.packed && has(v, side_host) && v.cc < v.extent;
    const bool          first    = downloads_.empty() || downloads_.back().node != i;
    const auto          ne       = tokens.shape(node, 1);
    const auto          host_ne  = tokens_of(v, side_host).shape(node, 1);
    Download            download = {};
    download.tensor              = tensor;
    download.node                = i;
    download.join                = how;
    download.begin               = begin;
    download.count               = count;
    download.extent              = v.extent;
    download.first_row           = first_row_of(node, tokens);
    download.n_rows              = ne[1] * ne[2] * ne[3];
    download.spread              = moves && first ? v.cc : 0;
    download.spread_rows         = host_ne[1] * host_ne[2] * host_ne[3];
    download.direct =
        how == Download::Join::copy || (how == Download::Join::scatter && one_row && v.extent == node->ne[0]);
    download.staging = take_staging(tensor);
    ggml_set_output(tensor);
    downloads_.push_back(download);
}

size_t ProgramBuilder::take_staging(const ggml_tensor * tensor) {
    const size_t at = program_.staging_bytes;
    program_.staging_bytes += padded_bytes(tensor);
    return at;
}

} // namespace oallama
