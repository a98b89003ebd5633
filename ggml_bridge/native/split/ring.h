// Where blocks of weights lie on the device: a ring of slots in its memory. A slot holds a block, and takes as many
// bytes. Of two slots each lies at its own end of the ring, so that any two blocks that fit together can take turns.

#pragma once

#include "split_weight.h"

namespace oallama {

using StreamedPart = std::pair<const SplitWeight *, Side>; // its CG or CG'

// Bytes of a slot, or of the ring.
using Bytes = std::pair<size_t, size_t>; // the first, and how many

// What is streamed of the weights of one phase, which is copied together.
struct StreamBlock {
    std::vector<StreamedPart> parts;
    std::vector<size_t>       offsets; // bytes into the slot
    std::vector<Bytes>        tails;   // what the device may read behind each part, and must not find NaN in
    size_t                    bytes  = 0;
    StreamBlock *             next   = nullptr; // asked for after it the last time
    bool                      routed = false;   // asked for expert by expert the last time: cannot be foreseen
};

struct Slot {
    StreamBlock *      holds = nullptr;
    size_t             begin = 0; // bytes into the ring
    std::vector<Bytes> zeros;     // tails of what was copied there last, if nothing else was since
    std::vector<bool>  experts;   // that are there; empty: all that was asked for
    uint64_t           used = 0;  // when it was last asked for or filled
    size_t             part = 0;  // the first that is not all asked for; the number of parts: none
    size_t             at   = 0;  // bytes of it that are

    // Nothing of the block is asked for yet.
    void hold(StreamBlock & block);
};

constexpr size_t no_slot = SIZE_MAX;

class Ring {
  public:
    Ring(ggml_backend_dev_t device, size_t n_slots) : device_(device), slots_(n_slots) {}

    ~Ring() { free(); }

    Ring(const Ring &)             = delete;
    Ring & operator=(const Ring &) = delete;

    size_t n_slots() const { return slots_.size(); }

    size_t bytes() const { return bytes_; }

    Slot & operator[](size_t slot) { return slots_[slot]; }

    // Becomes so large, and empty. False: the device has no room, and there is no ring.
    bool resize(size_t bytes);

    // Gives a tensor the bytes at `at` of a slot; no_slot: of the ring.
    void bind(ggml_tensor * tensor, size_t slot, size_t at) const;

    size_t find(const StreamBlock & block) const; // no_slot: nowhere

    // The slot that was used or filled longest ago; no_slot: all are kept. kept: may be empty for none.
    size_t oldest(const std::vector<bool> & kept) const;

    // A slot that holds a block from now on, and leaves alone those that are kept; no_slot: there is no room.
    size_t take(StreamBlock & block, const std::vector<bool> & kept);

    void use(size_t slot) { slots_[slot].used = ++clock_; }

  private:
    void   free();
    size_t room_beside(size_t bytes, const std::vector<bool> & kept) const;

    ggml_backend_dev_t device_;
    BufferPtr          buffer_;
    size_t             bytes_ = 0;
    std::vector<Slot>  slots_;
    uint64_t           clock_ = 0;
};

} // namespace oallama
