#include "stream.h"

#include <algorithm>
#include <array>

#include "split_backend.h"
#include "trace.h"

namespace oallama {

namespace {

constexpr size_t alignment = 256; // of a weight in a slot, more than any device asks for

size_t padded(size_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

void check_experts(const std::vector<int32_t> & experts, const SliceSpec & slice) {
    for (const int32_t expert : experts) {
        require(expert >= 0 && expert < slice.e, slice.name + " has " + std::to_string(slice.e) +
                                                     " experts, none of which is number " + std::to_string(expert));
    }
}

} // namespace

Stream::Stream(ggml_backend_dev_t device, int64_t n_slots, bool ahead)
    : device_(device), backend_(ggml_backend_dev_init(device, nullptr)), slots_(static_cast<size_t>(n_slots)),
      ahead_(ahead) {
    if (!backend_) {
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(device) +
                                        " cannot be started a second time, for copies");
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(device, &props);
    events_ = props.caps.events;
    for (Slot & slot : slots_) {
        slot.copied = events_ ? ggml_backend_event_new(device) : nullptr;
        events_     = events_ && slot.copied != nullptr;
    }
}

Stream::~Stream() {
    ggml_backend_synchronize(backend_.get());
    for (const Slot & slot : slots_) {
        if (slot.copied != nullptr) {
            ggml_backend_event_free(slot.copied);
        }
    }
    if (ring_) {
        counters().device_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(ring_.get()));
    }
}

StreamBlock * Stream::block(const std::vector<StreamedPart> & parts) {
    std::vector<std::pair<uint64_t, Side>> key;
    for (const auto & [weight, side] : parts) {
        key.emplace_back(weight->id(), side);
    }
    auto found = blocks_.find(key);
    if (found == blocks_.end()) {
        auto       block = std::make_unique<StreamBlock>();
        ContextPtr ctx   = new_context(static_cast<int64_t>(parts.size()));
        block->parts     = parts;
        for (const auto & [weight, side] : parts) {
            const std::array<int64_t, 3> ne = weight->shape(side);
            const ggml_tensor * like        = ggml_new_tensor_3d(ctx.get(), weight->slice().type, ne[0], ne[1], ne[2]);
            const size_t        size = ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(device_), like);
            block->offsets.push_back(block->bytes);
            const size_t used = std::min(size, ggml_nbytes(like));
            block->tails.emplace_back(block->bytes + used, size - used);
            block->bytes += padded(size);
        }
        found = blocks_.emplace(std::move(key), std::move(block)).first;
    }
    StreamBlock & block = *found->second;
    if (block.bytes > slot_bytes_) { // also of a known one, after a growth that failed
        grow(block.bytes);
    }
    return &block;
}

void Stream::grow(size_t bytes) {
    ggml_backend_synchronize(backend_.get());
    if (ring_) {
        counters().device_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(ring_.get()));
        ring_.reset();
    }
    slot_bytes_ = 0;
    for (Slot & slot : slots_) {
        slot.holds = nullptr;
        slot.zeros.clear();
    }
    ring_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device_), bytes * slots_.size()));
    if (!ring_) {
        // the next ring may have smaller slots: nothing is copied ahead that was not asked for again
        last_ = nullptr;
        for (const auto & [key, block] : blocks_) {
            block->next = nullptr;
        }
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + ggml_backend_dev_name(device_) + " has no room for " +
                                           std::to_string(slots_.size()) + " slots of " + std::to_string(bytes) +
                                           " bytes; plan fewer slots or a smaller CG");
    }
    ggml_backend_buffer_clear(ring_.get(), 0);
    slot_bytes_ = bytes;
    counters().device_compute += static_cast<int64_t>(ggml_backend_buffer_get_size(ring_.get()));
}

void Stream::bind(ggml_tensor * tensor, const StreamBlock & block, size_t part, size_t slot) const {
    char * base    = static_cast<char *>(ggml_backend_buffer_get_base(ring_.get()));
    tensor->buffer = ring_.get();
    tensor->data   = base + slot * slot_bytes_ + block.offsets[part];
}

size_t Stream::find(const StreamBlock & block) const {
    size_t slot = 0;
    while (slot < slots_.size() && slots_[slot].holds != &block) {
        slot++;
    }
    return slot;
}

size_t Stream::acquire(StreamBlock & block, const std::vector<int32_t> * experts) {
    if (experts != nullptr) {
        check_experts(*experts, block.parts[0].first->slice());
    }
    block.routed = experts != nullptr;
    if (last_ != nullptr) {
        last_->next = &block;
    }
    last_       = &block;
    size_t slot = find(block);
    if (slot == slots_.size()) {
        // nothing is computed between phases, so any slot may go: the one that was used or filled longest ago
        slot = 0;
        for (size_t i = 1; i < slots_.size(); i++) {
            slot = slots_[i].used < slots_[slot].used ? i : slot;
        }
        slots_[slot].holds = nullptr;
        copy(block, slot, experts);
    } else if (!slots_[slot].experts.empty()) {
        copy(block, slot, experts); // those that are missing
    }
    slots_[slot].used = ++clock_;
    return slot;
}

void Stream::ready(ggml_backend_t compute, size_t slot) {
    if (events_) {
        ggml_backend_event_wait(compute, slots_[slot].copied);
    } else {
        ggml_backend_synchronize(backend_.get());
    }
}

void Stream::prefetch(size_t busy) {
    if (!ahead_) {
        return;
    }
    std::vector<bool> kept(slots_.size());
    if (busy < slots_.size()) {
        kept[busy] = true;
    }
    const StreamBlock * after = last_;
    for (size_t n = 0; n < slots_.size() && after != nullptr && after->next != nullptr; n++) {
        StreamBlock & next = *after->next;
        after              = &next;
        if (next.routed) {
            continue;
        }
        size_t slot = find(next);
        if (slot == slots_.size()) {
            for (size_t i = 0; i < slots_.size(); i++) {
                if (!kept[i] && (slot == slots_.size() || slots_[i].used < slots_[slot].used)) {
                    slot = i;
                }
            }
            if (slot == slots_.size()) {
                return; // the ring is full
            }
            slots_[slot].holds = nullptr;
            copy(next, slot, nullptr);
            slots_[slot].used = ++clock_;
        }
        kept[slot] = true;
    }
}

// Zeros behind the parts, unless they are there since the last copy: devices read rows in whole steps, and what is not
// of the row is multiplied by zero.
void Stream::clear_tails(const StreamBlock & block, size_t slot) {
    static constexpr std::array<char, 4096> zeros = {};

    if (slots_[slot].zeros == block.tails) {
        return;
    }
    ContextPtr ctx = new_context(static_cast<int64_t>(block.tails.size()));
    for (const auto & [first, count] : block.tails) {
        if (count == 0) {
            continue;
        }
        ggml_tensor * there = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, static_cast<int64_t>(count));
        there->buffer       = ring_.get();
        there->data = static_cast<char *>(ggml_backend_buffer_get_base(ring_.get())) + slot * slot_bytes_ + first;
        for (size_t at = 0; at < count; at += zeros.size()) {
            ggml_backend_tensor_set_async(backend_.get(), there, zeros.data(), at, std::min(count - at, zeros.size()));
        }
    }
    slots_[slot].zeros = block.tails;
}

// Queues the copies; every phase ends with an idle device, so nothing computes with what they overwrite.
void Stream::copy(StreamBlock & block, size_t slot, const std::vector<int32_t> * experts) {
    Slot &     to  = slots_[slot];
    ContextPtr ctx = new_context(static_cast<int64_t>(block.parts.size()));
    const bool all = experts == nullptr;
    if (to.holds != &block) {
        clear_tails(block, slot);
        to.holds = &block;
        to.experts.assign(all ? 0 : static_cast<size_t>(block.parts[0].first->slice().e), false);
    }
    int64_t           copied = 0;
    ggml_tensor *     last   = nullptr;
    std::vector<bool> wanted;
    if (!all) {
        wanted.resize(to.experts.size());
        for (const int32_t expert : *experts) {
            wanted[static_cast<size_t>(expert)] = !to.experts[static_cast<size_t>(expert)];
        }
    }
    for (size_t i = 0; i < block.parts.size(); i++) {
        const SplitWeight &          weight = *block.parts[i].first;
        const Side                   side   = block.parts[i].second;
        const std::array<int64_t, 3> ne     = weight.shape(side);
        const auto *                 data   = static_cast<const char *>(weight.part(side).tensor->data);
        const auto                   bytes  = static_cast<size_t>(weight.part_bytes(side));
        ggml_tensor *                there  = ggml_new_tensor_3d(ctx.get(), weight.slice().type, ne[0], ne[1], ne[2]);
        bind(there, block, i, slot);
        last              = there;
        const size_t each = wanted.empty() ? bytes : bytes / wanted.size();
        for (size_t e = 0; e * each < bytes; e++) {
            if (wanted.empty() || wanted[e]) { // and what the device may read behind it, of the next expert
                const size_t size = std::min(each + block.tails[i].second, bytes - e * each);
                ggml_backend_tensor_set_async(backend_.get(), there, data + e * each, e * each, size);
                copied += static_cast<int64_t>(each);
            }
        }
    }
    stats().bytes_streamed.fetch_add(copied, std::memory_order_relaxed);
    if (all) {
        to.experts.clear();
    } else {
        for (const int32_t expert : *experts) {
            to.experts[static_cast<size_t>(expert)] = true;
        }
    }
    if (events_) {
        ggml_backend_event_record(to.copied, backend_.get());
    }
    if (Trace::get().on()) {
        Trace::get().device(OALLAMA_COPY, backend_.get(), last, copied, block.parts[0].first->slice().name.c_str());
    }
}

} // namespace oallama
