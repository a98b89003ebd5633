#include "split_weight.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

namespace oallama {

namespace {

constexpr int64_t gather_bytes = int64_t{4} << 20; // strided rows go to the device in pieces of this size

int64_t row_size(ggml_type type, int64_t n) {
    return static_cast<int64_t>(ggml_row_size(type, n));
}

// Adds a range to those that are there, which do not touch; whether all of [0, whole) is.
bool add_range(std::map<int64_t, int64_t> & ranges, int64_t begin, int64_t end, int64_t whole) {
    auto next = ranges.upper_bound(begin);
    if (next != ranges.begin() && std::prev(next)->second >= begin) {
        --next;
        begin = next->first;
    }
    while (next != ranges.end() && next->first <= end) {
        end  = std::max(end, next->second);
        next = ranges.erase(next);
    }
    ranges[begin] = end;
    return begin == 0 && end == whole;
}

uint64_t next_id() {
    static std::atomic<uint64_t> n_weights{0};
    return ++n_weights;
}

} // namespace

SplitWeight::SplitWeight(const ggml_tensor * tensor, SliceSpec slice)
    : id_(next_id()), slice_(std::move(slice)), row_bytes_(row_size(tensor->type, tensor->ne[0])) {
    set_hot(slice_.hot);
}

void SplitWeight::set_hot(std::vector<int32_t> hot) {
    slice_.hot = std::move(hot);
    slot_of_.assign(slice_.hot.empty() ? 0 : static_cast<size_t>(slice_.e), -1);
    for (size_t slot = 0; slot < slice_.hot.size(); slot++) {
        slot_of_[static_cast<size_t>(slice_.hot[slot])] = static_cast<int32_t>(slot);
    }
    move_cuts(slice_.cg, slice_.gg);
}

void SplitWeight::count_uses() {
    if (!slice_.hot.empty()) {
        uses_ = std::make_unique<ExpertUses>(slice_.e);
    }
}

void SplitWeight::count(const std::vector<int32_t> & ids, int64_t n_tokens) const {
    if (uses_ != nullptr) {
        uses_->add(ids, n_tokens);
    }
}

void SplitWeight::append_uses(const std::string & path) const {
    if (uses_ != nullptr) {
        uses_->append_to(path, slice_.name);
    }
}

void SplitWeight::move_cuts(int64_t cg, int64_t gg) {
    slice_.cg           = cg;
    slice_.gg           = gg;
    slice_.cc           = slice_.extent() - cg - gg;
    parts_[side_host]   = Part{0, slice_.cc, nullptr, true};
    parts_[side_stream] = Part{slice_.cc, cg, nullptr, true};
    parts_[side_device] = slice_.hot.empty() ? Part{slice_.cc + cg, gg, nullptr, true} : parts_[side_host];
    parts_[side_prime]  = parts_[side_host];
}

std::array<int64_t, 3> SplitWeight::shape(Side side) const {
    const int64_t count = parts_[side].count;
    if (side == side_device && !slice_.hot.empty()) {
        return {slice_.k, slice_.n, n_slots()};
    }
    switch (slice_.axis) {
        case Axis::cols: return {count, slice_.n, slice_.e};
        case Axis::halves: return {slice_.k, 2 * count, slice_.e};
        case Axis::rows: break;
    }
    return {slice_.k, count, slice_.e};
}

int64_t SplitWeight::part_bytes(Side side) const {
    const std::array<int64_t, 3> ne = shape(side);
    return row_size(slice_.type, ne[0]) * ne[1] * ne[2];
}

const Part & SplitWeight::whole_on_host() const {
    const Part & part = parts_[side_host];
    if (slice_.cg > 0 || slice_.gg > 0 || !part.pieces) {
        throw Error(OALLAMA_UNSUPPORTED, slice_.name + " is read by something that is no mul-mat");
    }
    return part;
}

SplitWeight::Segment SplitWeight::segment(int64_t offset, int64_t size) const {
    const int64_t row     = offset / row_bytes_; // over all rows of all matrices
    const int64_t col     = offset % row_bytes_; // bytes into the row
    const auto    side_at = [this](int64_t position, auto && size_of) {
        const bool on_host = position < size_of(slice_.cc);
        return on_host ? side_host : position < size_of(slice_.cc + slice_.cg) ? side_stream : side_device;
    };
    if (slice_.axis == Axis::cols) {
        const auto    size_of = [this](int64_t elements) { return row_size(slice_.type, elements); };
        const Side    side    = side_at(col, size_of);
        const int64_t from    = size_of(parts_[side].begin);
        const int64_t width   = size_of(parts_[side].count);
        return {side, row * width + col - from, std::min(size, from + width - col)};
    }
    const int64_t run    = slice_.extent(); // rows that are cut together: a matrix, or half of one
    const int64_t n_run  = row / run;
    const int64_t in_run = row % run;
    const Side    side   = side_at(in_run, [](int64_t elements) { return elements; });
    const Part &  part   = parts_[side];
    const int64_t left   = (part.begin + part.count - in_run) * row_bytes_ - col;
    return {side, (n_run * part.count + in_run - part.begin) * row_bytes_ + col, std::min(size, left)};
}

void SplitWeight::set(const void * data, size_t offset, size_t size) {
    const char * bytes = static_cast<const char *>(data);
    int64_t      at    = static_cast<int64_t>(offset);
    int64_t      left  = static_cast<int64_t>(size);
    while (left > 0) {
        const Segment piece = segment(at, left);
        write(piece.side, bytes, piece.offset, piece.size);
        if (piece.side == side_host && prime_is_copy()) {
            write(side_prime, bytes, piece.offset, piece.size);
        }
        if (!slot_of_.empty()) {
            write_hot(bytes, piece.offset, piece.size);
        }
        bytes += piece.size;
        at += piece.size;
        left -= piece.size;
    }
    for (const Side side : {side_host, side_stream, side_device, side_prime}) {
        if (parts_[side].pieces) {
            flush(side);
        }
    }
}

// Bytes of whole experts, which are on the host, once more for those that are hot.
void SplitWeight::write_hot(const char * data, int64_t offset, int64_t size) {
    const int64_t whole = expert_bytes();
    while (size > 0) {
        const int64_t begin = offset % whole;
        const int64_t count = std::min(size, whole - begin);
        const int32_t slot  = slot_of_[static_cast<size_t>(offset / whole)];
        if (slot >= 0) {
            write(side_device, data, slot * whole + begin, count);
        }
        data += count;
        offset += count;
        size -= count;
    }
}

int64_t SplitWeight::host_bytes() const {
    return part_bytes(side_host) + part_bytes(side_stream) + (prime_is_copy() ? part_bytes(side_prime) : 0);
}

// Which is written by itself.
bool SplitWeight::prime_is_copy() const {
    return has_prime() && parts_[side_prime].tensor != parts_[side_host].tensor;
}

void SplitWeight::write(Side side, const char * data, int64_t offset, int64_t size) {
    Part &        part    = parts_[side];
    Pending &     pending = pending_[side];
    const int64_t whole   = part_bytes(side);
    if (part.pieces && ggml_backend_buffer_is_host(part.tensor->buffer)) {
        std::memcpy(static_cast<char *>(part.tensor->data) + offset, data, static_cast<size_t>(size));
        return;
    }
    if (size == whole || (part.pieces && size >= gather_bytes)) { // nothing to collect
        if (part.pieces) {
            flush(side);
        }
        pending = Pending{};
        ggml_backend_tensor_set(part.tensor, data, static_cast<size_t>(offset), static_cast<size_t>(size));
        return;
    }
    if (!part.pieces) { // a repacked part is converted in one go, so all of it has to be there
        pending.bytes.resize(static_cast<size_t>(whole));
        std::memcpy(pending.bytes.data() + offset, data, static_cast<size_t>(size));
        if (add_range(pending.ranges, offset, offset + size, whole)) {
            pending.filled = whole;
            flush(side);
        }
        return;
    }
    const bool follows = offset == pending.offset + pending.filled;
    if (!follows || pending.filled + size > gather_bytes) {
        flush(side);
    }
    if (pending.filled == 0) {
        pending.bytes.resize(static_cast<size_t>(std::min(gather_bytes, whole)));
        pending.offset = offset;
    }
    std::memcpy(pending.bytes.data() + pending.filled, data, static_cast<size_t>(size));
    pending.filled += size;
}

void SplitWeight::flush(Side side) {
    Pending & pending = pending_[side];
    if (pending.filled > 0) {
        ggml_backend_tensor_set(parts_[side].tensor, pending.bytes.data(), static_cast<size_t>(pending.offset),
                                static_cast<size_t>(pending.filled));
    }
    pending = Pending{};
}

void SplitWeight::get(void * data, size_t offset, size_t size) const {
    char *  bytes = static_cast<char *>(data);
    int64_t at    = static_cast<int64_t>(offset);
    int64_t left  = static_cast<int64_t>(size);
    while (left > 0) {
        const Segment piece = segment(at, left);
        const Part &  part  = parts_[piece.side];
        if (!part.pieces) {
            throw Error(OALLAMA_UNSUPPORTED,
                        slice_.name + " is kept in the layout " + slice_.layout + ", which cannot be read back");
        }
        ggml_backend_tensor_get(part.tensor, bytes, static_cast<size_t>(piece.offset), static_cast<size_t>(piece.size));
        bytes += piece.size;
        at += piece.size;
        left -= piece.size;
    }
}

} // namespace oallama
