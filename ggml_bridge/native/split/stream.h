// Weights on their way to the device: a ring there (ring.h), filled by copies on a stream of their own while the device
// computes with what came before (ScheInfer III-C).
//
// Which block comes next is learned from the order in which blocks were asked for, which goes round: after the last
// layer of a token comes the first layer of the next one. As soon as a slot is free the copy of the next block begins,
// across layers and across the attention between them, so that the link idles only when the ring is full.
//
// A device has one copy engine a direction, and no copy is interrupted: an activation that is sent while weights are
// copied waits for them. So weights are asked for in pieces, between which other copies pass, and no more of them ahead
// than the link can have done when the next activation is due (pace.h).

#pragma once

#include <map>

#include "pace.h"
#include "ring.h"

namespace oallama {

class Stream {
  public:
    // What the plan says of streaming: slots, pieces, the link's speed, copies ahead of a block's turn or not. Throws
    // OALLAMA_FAILED where the device has no second stream.
    Stream(ggml_backend_dev_t device, const StreamSpec & spec);
    ~Stream();

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

    // The block of these parts, with room for it in the ring. Throws OALLAMA_NO_MEMORY.
    StreamBlock * block(const std::vector<StreamedPart> & parts);

    // Gives a device tensor the place of a block's part in a slot.
    void bind(ggml_tensor * tensor, const StreamBlock & block, size_t part, size_t slot) const;

    // The slot that the next block is going to have, if it is in none.
    size_t next_slot() const { return ring_.after(last_slot_); }

    size_t slot_after(size_t slot) const { return ring_.after(slot); }

    size_t n_slots() const { return ring_.n_slots(); }

    bool is_in(size_t slot, const StreamBlock & block) const { return ring_.find(block) == slot; }

    // The slot of a block whose turn has come; asks for what is missing of it. experts: the only ones needed; NULL:
    // all.
    size_t acquire(StreamBlock & block, const std::vector<int32_t> * experts);

    // Makes what is computed on this backend from now on wait for a slot's copies.
    void ready(ggml_backend_t compute, size_t slot);

    // Asks for the blocks that come next, in slots that nothing computed needs any more, but for no more than the link
    // can have copied until then. busy: the slot that is computed with, or no_slot.
    void prefetch(size_t busy, Time until);

  private:
    void   grow(size_t bytes);
    void   clear_tails(size_t slot);
    bool   copy(size_t slot, Time until);
    void   copy_experts(size_t slot, const std::vector<int32_t> & experts);
    void   ask(size_t slot, size_t part, ggml_tensor * there, size_t offset, size_t bytes);
    void   asked(size_t slot, int64_t bytes);
    size_t allowed(Time until) const;

    ggml_tensor * place_of(ggml_context * ctx, size_t slot, size_t part);

    ggml_backend_dev_t    device_;
    BackendPtr            backend_;
    Ring                  ring_;
    std::vector<EventPtr> copied_;              // by slot, where the device has events
    StreamBlock *         last_      = nullptr; // whose turn it was
    size_t                last_slot_ = no_slot; // its slot
    bool                  events_    = false;
    StreamSpec            spec_;
    Time                  idle_; // when the link has done what it was asked for, at the speed that the plan says

    // by the weights' numbers and sides: a weight's address may be another's later
    std::map<std::vector<std::pair<uint64_t, Side>>, std::unique_ptr<StreamBlock>> blocks_;
};

} // namespace oallama
