// Weights on their way to the device: a ring of slots there, filled by copies on a stream of their own while the device
// computes with what came before (ScheInfer III-C).
//
// A slot holds a block: what is streamed of the weights of one phase. Of two slots each lies at its own end of the
// ring, so that any two blocks that fit together can take turns. Blocks take the slots in turn, and a block always
// begins at the same place of a slot: CUDA captures a graph only if its tensors lie where they lay the last time.
//
// The next block is learned from the order in which blocks were asked for, which goes round: after the last
// layer of a token comes the first layer of the next one. As soon as a slot is free the copy of the next block begins,
// across layers and across the attention between them, so that the link idles only when the ring is full.
//
// A device has one copy engine a direction, and no copy is interrupted: an activation that is sent while weights are
// copied waits for the copy that is under way. So weights are asked for in pieces, between which other copies pass.
//
// A context has one Stream (run.h), which one thread at a time uses. It owns the ring and the blocks; weights belong to
// their buffers, and outlive the programs that stream them.

#pragma once

#include <map>

#include "weights.h"

namespace oallama {

//
// blocks and slots
//

using StreamedPart = std::pair<const SplitWeight *, Side>; // its CG or CG'

// Bytes of a block.
using Bytes = std::pair<size_t, size_t>; // the first, and how many

constexpr size_t alignment = 256; // of a weight in a slot, more than any device asks for

// The streamed parts of the weights of one phase, which are copied together.
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
    bool               asked = false; // all of the block's copies are
    std::vector<Bytes> zeros;         // tails of what was copied there last, if nothing else was since
};

constexpr size_t no_slot = SIZE_MAX;

//
// the stream
//

class Stream {
  public:
    // spec: slots, pieces, copies ahead of a block's turn or not. Throws OALLAMA_FAILED where the device has no second
    // stream.
    Stream(ggml_backend_dev_t device, const StreamSpec & spec);
    ~Stream();

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

    // The block of these parts, with room for it in the ring. Throws OALLAMA_NO_MEMORY.
    StreamBlock * block(const std::vector<StreamedPart> & parts);

    // Gives a device tensor the bytes of a block in a slot from `at` on.
    void bind(ggml_tensor * tensor, const StreamBlock & block, size_t slot, size_t at) const;

    // The slot that the next block is going to have, if it is in none.
    size_t next_slot() const { return slot_after(last_slot_); }

    // The slot whose turn it is after that of another; after no_slot, the first.
    size_t slot_after(size_t slot) const { return slot == no_slot ? 0 : (slot + 1) % slots_.size(); }

    // The slot of a block whose turn has come; asks for what is missing of it. experts: the only ones needed; NULL:
    // all.
    size_t acquire(StreamBlock & block, const std::vector<int32_t> * experts);

    // Makes what is computed on this backend from now on wait for a slot's copies.
    void ready(ggml_backend_t compute, size_t slot);

    // Asks for the blocks that come next, in slots that nothing computed needs any more. busy: the slot that is
    // computed with, or no_slot.
    void prefetch(size_t busy);

  private:
    // the ring
    void   grow(size_t bytes);
    void   free_ring();
    size_t begin_of(const StreamBlock & block, size_t slot) const;
    size_t find(const StreamBlock & block) const;
    bool   spares(size_t other, const StreamBlock & block, size_t slot) const;
    void   take(StreamBlock & block, size_t slot);

    // copies
    void clear_tails(size_t slot);
    void copy(size_t slot, const std::vector<int32_t> * experts);
    void ask(ggml_tensor * there, const char * from, size_t begin, size_t end);

    ggml_backend_dev_t    device_;
    BackendPtr            backend_;
    BufferPtr             ring_;
    size_t                ring_bytes_ = 0;
    std::vector<Slot>     slots_;
    std::vector<EventPtr> copied_;              // by slot, where the device has events
    StreamBlock *         last_      = nullptr; // whose turn it was
    size_t                last_slot_ = no_slot; // its slot
    bool                  events_    = false;
    StreamSpec            spec_;

    // by the weights' numbers and sides: a weight's address may be another's later
    std::map<std::vector<std::pair<uint64_t, Side>>, std::unique_ptr<StreamBlock>> blocks_;
};

} // namespace oallama
