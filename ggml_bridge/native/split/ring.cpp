#include "ring.h"

#include <algorithm>

#include "stats.h"

namespace oallama {

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

// Bytes into the ring.
size_t Ring::begin_of(const StreamBlock & block, size_t slot) const {
    const size_t last  = bytes_ - block.bytes;
    const size_t begin = slot * (bytes_ / slots_.size() / alignment * alignment);
    return slot > 0 && slot + 1 == slots_.size() ? last : std::min(begin, last);
}

void Ring::bind(ggml_tensor * tensor, const StreamBlock & block, size_t slot, size_t at) const {
    tensor->buffer = buffer_.get();
    tensor->data   = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get())) + begin_of(block, slot) + at;
}

size_t Ring::find(const StreamBlock & block) const {
    for (size_t slot = 0; slot < slots_.size(); slot++) {
        if (slots_[slot].holds == &block) {
            return slot;
        }
    }
    return no_slot;
}

bool Ring::spares(size_t other, const StreamBlock & block, size_t slot) const {
    if (other == no_slot || slots_[other].holds == nullptr) {
        return other != slot;
    }
    const size_t begin = begin_of(block, slot), kept = begin_of(*slots_[other].holds, other);
    return other != slot && (begin + block.bytes <= kept || kept + slots_[other].holds->bytes <= begin);
}

// Every phase ends with an idle device, so nothing computes with what is overwritten here.
void Ring::take(StreamBlock & block, size_t slot) {
    for (size_t i = 0; i < slots_.size(); i++) {
        if (i != slot && !spares(i, block, slot)) {
            slots_[i].holds = nullptr;
            slots_[i].zeros.clear();
        }
    }
    Slot & to = slots_[slot];
    if (to.holds == nullptr || begin_of(*to.holds, slot) != begin_of(block, slot)) {
        to.zeros.clear();
    }
    to.hold(block);
}

} // namespace oallama
