// Weights on their way to the device: a ring in device memory, filled by copies on a stream of their own while the
// device computes with what came before (ScheInfer III-C). A slot of it holds a block, and takes as many bytes. Of two
// slots each lies at its own end of the ring, so that any two blocks that fit together can take turns.
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

constexpr size_t no_slot = SIZE_MAX;

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

    // Gives a device tensor the place of a block's part in a slot; no_slot: anywhere in the ring, until its turn comes.
    void bind(ggml_tensor * tensor, const StreamBlock & block, size_t part, size_t slot) const;

    // The slot of a block whose turn has come; asks for what is missing of it. experts: the only ones needed; NULL:
    // all.
    size_t acquire(StreamBlock & block, const std::vector<int32_t> * experts);

    // Makes what is computed on this backend from now on wait for a slot's copies.
    void ready(ggml_backend_t compute, size_t slot);

    // Asks for the blocks that come next, in slots that nothing computed needs any more, but for no more than the link
    // can have copied until then. busy: the slot that is computed with, or no_slot.
    void prefetch(size_t busy, Time until);

  private:
    struct Slot {
        StreamBlock *        holds = nullptr;
        size_t               begin = 0; // bytes into the ring
        std::vector<Bytes>   zeros;     // tails of what was copied there last, if nothing else was since
        std::vector<bool>    experts;   // that are there; empty: all that was asked for
        ggml_backend_event_t copied = nullptr;
        uint64_t             used   = 0; // when it was last asked for or filled
        size_t               part   = 0; // the first that is not all asked for; the number of parts: none
        size_t               at     = 0; // bytes of it that are
    };

    void   grow(size_t bytes);
    size_t find(const StreamBlock & block) const; // no_slot: nowhere
    size_t oldest(const std::vector<bool> & kept) const;
    size_t room_beside(size_t bytes, const std::vector<bool> & kept) const;
    size_t take(StreamBlock & block, const std::vector<bool> & kept);
    void   start(StreamBlock & block, size_t slot);
    void   clear_tails(const StreamBlock & block, size_t slot);
    bool   copy(size_t slot, Time until);
    void   copy_experts(size_t slot, const std::vector<int32_t> & experts);
    void   ask(size_t slot, size_t part, ggml_tensor * there, size_t offset, size_t bytes);
    void   asked(size_t slot, const ggml_tensor * last, int64_t bytes);
    size_t allowed(Time until) const;

    ggml_tensor * place_of(ggml_context * ctx, size_t slot, size_t part) const;

    ggml_backend_dev_t device_;
    BackendPtr         backend_;
    BufferPtr          ring_;
    size_t             ring_bytes_ = 0;
    std::vector<Slot>  slots_;
    StreamBlock *      last_   = nullptr;
    uint64_t           clock_  = 0;
    bool               events_ = false;
    StreamSpec         spec_;
    Time               idle_; // when the link has done what it was asked for, at the speed that the plan says

    // by the weights' numbers and sides: a weight's address may be another's later
    std::map<std::vector<std::pair<uint64_t, Side>>, std::unique_ptr<StreamBlock>> blocks_;
};

} // namespace oallama
