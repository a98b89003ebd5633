#include "ring.h"

#include <algorithm>

#include "stats.h"

namespace oallama {

namespace {

constexpr size_t nowhere = SIZE_MAX;

} // namespace

void Slot::hold(StreamBlock & block) {
    holds = &block;
    part  = 0;
    at    = 0;
    experts.clear();
}

void Ring::free() {
    if (buffer_) {
        counters().device_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(buffer_.get()));
        buffer_.reset();
    }
}

bool Ring::resize(size_t bytes) {
    free();
    bytes_ = 0;
    for (Slot & slot : slots_) {
        slot.holds = nullptr;
        slot.used  = 0;
        slot.zeros.clear();
    }
    buffer_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device_), bytes));
    if (!buffer_) {
        return false;
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    bytes_ = bytes;
    counters().device_compute += static_cast<int64_t>(ggml_backend_buffer_get_size(buffer_.get()));
    return true;
}

void Ring::bind(ggml_tensor * tensor, size_t slot, size_t at) const {
    char * base    = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get()));
    tensor->buffer = buffer_.get();
    tensor->data   = base + (slot == no_slot ? 0 : slots_[slot].begin) + at;
}

size_t Ring::find(const StreamBlock & block) const {
    for (size_t slot = 0; slot < slots_.size(); slot++) {
        if (slots_[slot].holds == &block) {
            return slot;
        }
    }
    return no_slot;
}

size_t Ring::oldest(const std::vector<bool> & kept) const {
    size_t found = no_slot;
    for (size_t i = 0; i < slots_.size(); i++) {
        if ((kept.empty() || !kept[i]) && (found == no_slot || slots_[i].used < slots_[found].used)) {
            found = i;
        }
    }
    return found;
}

// Where so many bytes begin that touch no slot that is kept: at the ring's end, if what is kept leaves them there last.
size_t Ring::room_beside(size_t bytes, const std::vector<bool> & kept) const {
    std::vector<Bytes> taken;
    for (size_t i = 0; i < slots_.size(); i++) {
        if (kept[i] && slots_[i].holds != nullptr) {
            taken.emplace_back(slots_[i].begin, slots_[i].holds->bytes);
        }
    }
    std::sort(taken.begin(), taken.end());
    size_t free = 0;
    for (const auto & [begin, count] : taken) {
        if (begin - free >= bytes) {
            return free;
        }
        free = begin + count;
    }
    return bytes_ - free >= bytes ? bytes_ - bytes : nowhere;
}

// Every phase ends with an idle device, so nothing computes with what its copies overwrite but what is kept.
size_t Ring::take(StreamBlock & block, const std::vector<bool> & kept) {
    const size_t slot  = oldest(kept);
    const size_t begin = slot == no_slot ? nowhere : room_beside(block.bytes, kept);
    if (begin == nowhere) {
        return no_slot;
    }
    for (size_t i = 0; i < slots_.size(); i++) {
        Slot &       other = slots_[i];
        const size_t end   = other.begin + (other.holds == nullptr ? 0 : other.holds->bytes);
        const bool   stays = i == slot && other.begin == begin;
        if (!stays && (i == slot || (other.begin < begin + block.bytes && begin < end))) {
            other.holds = nullptr;
            other.used  = 0;
            other.zeros.clear();
        }
    }
    slots_[slot].begin = begin;
    slots_[slot].hold(block);
    return slot;
}

} // namespace oallama
