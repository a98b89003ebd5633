#include "stream.h"

#include <algorithm>
#include <array>

namespace oallama {

namespace {

constexpr size_t page  = 4096;      // what is asked for is a multiple of it, but for the end of a part
constexpr size_t least = 16 * page; // asking for less ahead is not worth it

size_t padded(size_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

size_t part_bytes(const StreamBlock & block, size_t part) {
    return static_cast<size_t>(block.parts[part].first->part_bytes(block.parts[part].second));
}

// Experts of each part; 1 where they differ.
size_t experts_of(const std::vector<StreamedPart> & parts) {
    const int64_t e = parts.front().first->slice().e;
    const bool    same =
        std::all_of(parts.begin(), parts.end(), [&](const StreamedPart & part) { return part.first->slice().e == e; });
    return same ? static_cast<size_t>(e) : 1;
}

void check_experts(const std::vector<int32_t> & experts, const SliceSpec & slice) {
    for (const int32_t expert : experts) {
        require(expert >= 0 && expert < slice.e, slice.name + " has " + std::to_string(slice.e) +
                                                     " experts, none of which is number " + std::to_string(expert));
    }
}

} // namespace

void Slot::hold(StreamBlock & block) {
    holds = &block;
    wanted.assign(block.n_expert, true);
    asked.assign(block.parts.size() * block.n_expert, 0);
}

Stream::Stream(ggml_backend_dev_t device, const StreamSpec & spec)
    : device_(device), backend_(ggml_backend_dev_init(device, nullptr)), slots_(static_cast<size_t>(spec.n_slots)),
      spec_(spec) {
    if (!backend_) {
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(device) +
                                        " cannot be started a second time, for copies");
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(device, &props);
    events_ = props.caps.events;
    for (size_t i = 0; i < slots_.size() && events_; i++) {
        copied_.emplace_back(ggml_backend_event_new(device));
        events_ = copied_.back() != nullptr;
    }
}

Stream::~Stream() {
    ggml_backend_synchronize(backend_.get());
    free_ring();
}

StreamBlock * Stream::block(const std::vector<StreamedPart> & parts, int64_t n_used) {
    std::vector<std::pair<uint64_t, Side>> key;
    for (const auto & [weight, side] : parts) {
        key.emplace_back(weight->id(), side);
    }
    auto found = blocks_.find(key);
    if (found == blocks_.end()) {
        auto block      = std::make_unique<StreamBlock>();
        block->ctx      = new_context(2 * static_cast<int64_t>(parts.size()));
        block->parts    = parts;
        block->n_expert = experts_of(parts);
        block->odds     = ExpertOdds(static_cast<int64_t>(block->n_expert), n_used);
        for (const auto & [weight, side] : parts) {
            ggml_tensor * part = weight->new_tensor(block->ctx.get(), side);
            const size_t  size = ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(device_), part);
            const size_t  used = std::min(size, ggml_nbytes(part));
            const auto    rest = static_cast<int64_t>(size - used);
            block->offsets.push_back(block->bytes);
            block->tails.emplace_back(block->bytes + used, size - used);
            block->part_tensors.push_back(part);
            block->tail_tensors.push_back(rest > 0 ? ggml_new_tensor_1d(block->ctx.get(), GGML_TYPE_I8, rest)
                                                   : nullptr);
            block->bytes += padded(size);
        }
        if (made_ != nullptr && made_->next == nullptr) {
            made_->next = block.get();
        }
        made_ = block.get();
        found = blocks_.emplace(std::move(key), std::move(block)).first;
    }
    StreamBlock & block   = *found->second;
    const auto    planned = static_cast<size_t>(spec_.ring) / alignment * alignment;
    const size_t  wanted  = spec_.ring > 0 ? std::max(planned, block.bytes) : block.bytes * slots_.size();
    if (wanted > ring_bytes_) { // also for a known one, after a growth that failed
        grow(wanted);
    }
    return &block;
}

//
// the ring
//

void Stream::grow(size_t bytes) {
    ggml_backend_synchronize(backend_.get());
    free_ring();
    for (Slot & slot : slots_) {
        slot.holds = nullptr;
        slot.zeros.clear();
    }
    ring_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device_), bytes));
    if (!ring_) {
        // the next ring may be smaller: nothing is copied ahead that was not asked for again
        last_ = nullptr;
        for (const auto & [key, block] : blocks_) {
            block->next = nullptr;
        }
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + ggml_backend_dev_name(device_) +
                                           " has no room for a ring of " + std::to_string(bytes) +
                                           " bytes; plan fewer slots or a smaller CG");
    }
    ggml_backend_buffer_clear(ring_.get(), 0);
    ring_bytes_ = bytes;
    count_compute(device_, static_cast<int64_t>(ggml_backend_buffer_get_size(ring_.get())));
}

void Stream::free_ring() {
    if (ring_) {
        count_compute(device_, -static_cast<int64_t>(ggml_backend_buffer_get_size(ring_.get())));
        ring_.reset();
    }
    ring_bytes_ = 0;
}

// Bytes into the ring.
size_t Stream::begin_of(const StreamBlock & block, size_t slot) const {
    GGML_ASSERT(slot < slots_.size() && block.bytes <= ring_bytes_);
    const size_t last  = ring_bytes_ - block.bytes;
    const size_t begin = slot * (ring_bytes_ / slots_.size() / alignment * alignment);
    return slot > 0 && slot + 1 == slots_.size() ? last : std::min(begin, last);
}

void Stream::bind(ggml_tensor * tensor, const StreamBlock & block, size_t slot, size_t at) const {
    tensor->buffer = ring_.get();
    tensor->data   = static_cast<char *>(ggml_backend_buffer_get_base(ring_.get())) + begin_of(block, slot) + at;
}

// The slot that holds a block; no_slot: none.
size_t Stream::find(const StreamBlock & block) const {
    for (size_t slot = 0; slot < slots_.size(); slot++) {
        if (slots_[slot].holds == &block) {
            return slot;
        }
    }
    return no_slot;
}

// Whether a block in a slot leaves another slot alone; true for no_slot.
bool Stream::spares(size_t other, const StreamBlock & block, size_t slot) const {
    if (other == no_slot || slots_[other].holds == nullptr) {
        return other != slot;
    }
    const size_t begin = begin_of(block, slot), kept = begin_of(*slots_[other].holds, other);
    return other != slot && (begin + block.bytes <= kept || kept + slots_[other].holds->bytes <= begin);
}

// Lets a slot hold a block. Slots that it touches become empty; every segment ends with an idle device, so nothing
// computes with what is overwritten here.
void Stream::take(StreamBlock & block, size_t slot) {
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

//
// copies
//

size_t Stream::acquire(StreamBlock & block, const std::vector<int32_t> * experts, int64_t n_used) {
    GGML_ASSERT(experts == nullptr || block.n_expert > 1);
    if (experts != nullptr) {
        check_experts(*experts, block.parts[0].first->slice());
        block.odds.count(*experts, n_used);
    }
    block.repeats = experts != nullptr && *experts == experts_;
    experts_      = experts == nullptr ? std::vector<int32_t>() : *experts;
    if (last_ != nullptr) {
        last_->next = &block;
    }
    last_       = &block;
    size_t slot = find(block);
    if (slot == no_slot) {
        slot = next_slot();
        take(block, slot);
    }
    last_slot_ = slot;
    needed_.assign(block.n_expert, experts == nullptr);
    for (const int32_t expert : experts_) {
        needed_[static_cast<size_t>(expert)] = true;
    }
    slots_[slot].wanted = needed_;
    copy(slot, Time::max());
    return slot;
}

void Stream::ready(ggml_backend_t compute, size_t slot) {
    if (events_) {
        ggml_backend_event_wait(compute, copied_[slot].get());
    } else {
        ggml_backend_synchronize(backend_.get());
    }
}

void Stream::prefetch(size_t busy, int64_t n_tokens, Time until) {
    if (!spec_.ahead) {
        return;
    }
    std::vector<size_t> kept  = {busy};
    const StreamBlock * after = last_;
    size_t              slot  = last_slot_;
    bool                known = true; // whether the next block needs the same experts as the last one
    for (size_t n = 0; n < slots_.size() && after != nullptr && after->next != nullptr; n++) {
        StreamBlock & next             = *after->next;
        const size_t  found            = find(next);
        after                          = &next;
        slot                           = found == no_slot ? slot_after(slot) : found;
        known                          = known && next.repeats && next.n_expert == needed_.size();
        const std::vector<bool> wanted = known ? needed_ : next.likely(n_tokens);
        if (std::find(wanted.begin(), wanted.end(), true) == wanted.end()) {
            continue;
        }
        if (found == no_slot) {
            const bool free =
                std::all_of(kept.begin(), kept.end(), [&](size_t other) { return spares(other, next, slot); });
            if (!free || allowed(until) == 0) {
                return; // the slot is in use, or the link is busy until then
            }
            take(next, slot);
        }
        kept.push_back(slot);
        if (slot != busy) { // which has what it needs
            slots_[slot].wanted = wanted;
        }
        if (!copy(slot, until)) {
            return;
        }
    }
}

// Zeros behind the parts, unless they are there since the last copy: devices read rows in whole steps, and what is not
// of the row is multiplied by zero.
void Stream::clear_tails(size_t slot) {
    static constexpr std::array<char, page> zeros = {};

    Slot &              to    = slots_[slot];
    const StreamBlock & block = *to.holds;
    if (to.zeros == block.tails) {
        return;
    }
    for (size_t part = 0; part < block.parts.size(); part++) {
        const auto [first, count] = block.tails[part];
        ggml_tensor * tail        = block.tail_tensors[part];
        if (tail == nullptr) {
            continue;
        }
        bind(tail, block, slot, first);
        for (size_t at = 0; at < count; at += zeros.size()) {
            ggml_backend_tensor_set_async(backend_.get(), tail, zeros.data(), at, std::min(count - at, zeros.size()));
        }
    }
    to.zeros = block.tails;
}

// Asks for what a slot still needs, as far as the link can have copied it until then; whether that is all. Experts that
// lie side by side come in one copy.
bool Stream::copy(size_t slot, Time until) {
    clear_tails(slot);
    Slot &              to       = slots_[slot];
    const StreamBlock & block    = *to.holds;
    const size_t        n_expert = block.n_expert;
    int64_t             bytes    = 0;
    bool                goes_on  = true;
    for (size_t part = 0; part < block.parts.size() && goes_on; part++) {
        const size_t all   = part_bytes(block, part);
        const size_t each  = all / n_expert;
        size_t *     known = &to.asked[part * n_expert];
        for (size_t first = 0, end = 0; first < n_expert && goes_on; first = end) {
            end = first + 1;
            if (!to.wanted[first] || known[first] == each) {
                continue;
            }
            while (end < n_expert && to.wanted[end] && known[end] == 0) {
                end++;
            }
            size_t at = first * each + known[first];
            while (at < end * each && goes_on) {
                const size_t left = end * each - at;
                const size_t next = std::min(left, allowed(until));
                // and what the device may read behind the last one, of the next expert
                const size_t more = next == left ? std::min(block.tails[part].second, all - end * each) : 0;
                goes_on           = next > 0;
                if (goes_on) {
                    ask(slot, part, at, next + more);
                    bytes += static_cast<int64_t>(next);
                    at += next;
                }
            }
            for (size_t expert = first; expert < end; expert++) {
                known[expert] = std::min(each, std::max(at, expert * each) - expert * each);
            }
        }
    }
    if (bytes > 0) {
        asked(slot, bytes);
    }
    return goes_on;
}

// Queues one copy: bytes [offset, offset + bytes) of a part.
void Stream::ask(size_t slot, size_t part, size_t offset, size_t bytes) {
    const StreamBlock & block   = *slots_[slot].holds;
    const auto & [weight, side] = block.parts[part];
    const auto * data           = static_cast<const char *>(weight->part(side).tensor->data);
    bind(block.part_tensors[part], block, slot, block.offsets[part]);
    copy_to(block.part_tensors[part], data + offset, offset, bytes);
}

void Stream::copy_to(ggml_tensor * to, const char * data, size_t offset, size_t bytes) {
    ggml_backend_tensor_set_async(backend_.get(), to, data, offset, bytes);
    idle_ = idle() + to_duration(seconds(bytes));
}

void Stream::mark(ggml_backend_event_t event) {
    if (event != nullptr) {
        ggml_backend_event_record(event, backend_.get());
    } else {
        synchronize();
    }
}

// Counts the bytes that were queued for a slot at once, and records its event behind them.
void Stream::asked(size_t slot, int64_t bytes) {
    stats().bytes_streamed.fetch_add(bytes, std::memory_order_relaxed);
    if (events_) {
        ggml_backend_event_record(copied_[slot].get(), backend_.get());
    }
}

size_t Stream::allowed(Time until) const {
    const size_t piece = spec_.piece > 0 ? static_cast<size_t>(spec_.piece) : SIZE_MAX;
    if (spec_.link_bytes_per_s == 0 || until == Time::max()) {
        return piece;
    }
    const Time from = idle();
    if (from >= until) {
        return 0;
    }
    const std::chrono::duration<double> left = until - from;
    const auto bytes = static_cast<size_t>(left.count() * static_cast<double>(spec_.link_bytes_per_s));
    return bytes < std::min(least, piece) ? 0 : std::min(piece, bytes / page * page);
}

} // namespace oallama
