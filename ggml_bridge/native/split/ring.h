// Where blocks of weights lie on the device: a ring of slots in its memory. A slot holds a block, and takes as many
// bytes. Of two slots each lies at its own end of the ring, so that any two blocks that fit together can take turns.
// Blocks take the slots in turn, and a block always begins at the same place of a slot: CUDA captures a graph only if
// its tensors lie where they lay the last time.

#pragma once

#include "split_weight.h"

namespace oallama {

using StreamedPart = std::pair<const SplitWeight *, Side>; // its CG or CG'

// Bytes of a block.
using Bytes = std::pair<size_t, size_t>; // the first, and how many

constexpr size_t alignment = 256; // of a weight in a slot, more than any device asks for

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
    std::vector<Bytes> zeros;    // tails of what was copied there last, if nothing else was since
    std::vector<bool>  experts;  // that are there; empty: all that was asked for
    size_t             part = 0; // the first that is not all asked for; the number of parts: none
    size_t             at   = 0; // bytes of it that are

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

    // Gives a tensor the bytes at `at` of a block in a slot.
    void bind(ggml_tensor * tensor, const StreamBlock & block, size_t slot, size_t at) const;

    size_t find(const StreamBlock & block) const; // no_slot: nowhere

    // The slot whose turn it is after that of another; after no_slot, the first.
    size_t after(size_t slot) const { return slot == no_slot ? 0 : (slot + 1) % slots_.size(); }

    // Whether a block in a slot leaves another slot alone; true for no_slot.
    bool spares(size_t other, const StreamBlock & block, size_t slot) const;

    // Lets a slot hold a block. Slots that it touches become empty.
    void take(StreamBlock & block, size_t slot);

  private:
    void   free();
    size_t begin_of(const StreamBlock & block, size_t slot) const;

    ggml_backend_dev_t device_;
    BufferPtr          buffer_;
    size_t             bytes_ = 0;
    std::vector<Slot>  slots_;
};

} // namespace oallama
