// Weights on their way to the device: a ring of slots in device memory, filled by copies on a stream of their own while
// the device computes with what came before (ScheInfer III-C).
//
// Which block comes next is learned from the order in which blocks were asked for, which goes round: after the last
// layer of a token comes the first layer of the next one. As soon as a slot is free the copy of the next block begins,
// across layers and across the attention between them, so that the link idles only when the ring is full.

#pragma once

#include <map>

#include "split_weight.h"

namespace oallama {

using StreamedPart = std::pair<const SplitWeight *, Side>; // its CG or CG'

// Bytes of a slot.
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

class Stream {
  public:
    // ahead: of a block's turn. Throws OALLAMA_FAILED where the device has no second stream.
    Stream(ggml_backend_dev_t device, int64_t n_slots, bool ahead);
    ~Stream();

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

    // The block of these parts, with room for it in every slot. Throws OALLAMA_NO_MEMORY.
    StreamBlock * block(const std::vector<StreamedPart> & parts);

    // Gives a device tensor the place of a block's part in a slot.
    void bind(ggml_tensor * tensor, const StreamBlock & block, size_t part, size_t slot) const;

    // A slot that holds the block, or will when ready says so. experts: the only ones needed; NULL: all.
    size_t acquire(StreamBlock & block, const std::vector<int32_t> * experts);

    // Makes what is computed on this backend from now on wait for a slot's copies.
    void ready(ggml_backend_t compute, size_t slot);

    // Begins to copy the blocks that come next into slots that nothing computed needs any more. busy: the slot that is
    // computed with; n_slots: none.
    void prefetch(size_t busy);

    size_t n_slots() const { return slots_.size(); }

  private:
    struct Slot {
        StreamBlock *        holds = nullptr;
        std::vector<Bytes>   zeros;   // tails of what was copied there last
        std::vector<bool>    experts; // that are there; empty: all
        ggml_backend_event_t copied = nullptr;
        uint64_t             used   = 0; // when it was last asked for or filled
    };

    void   grow(size_t bytes);
    void   copy(StreamBlock & block, size_t slot, const std::vector<int32_t> * experts);
    void   clear_tails(const StreamBlock & block, size_t slot);
    size_t find(const StreamBlock & block) const; // n_slots: nowhere

    ggml_backend_dev_t device_;
    BackendPtr         backend_;
    BufferPtr          ring_;
    size_t             slot_bytes_ = 0;
    std::vector<Slot>  slots_;
    StreamBlock *      last_   = nullptr;
    uint64_t           clock_  = 0;
    bool               events_ = false;
    bool               ahead_;

    // by the weights' numbers and sides: a weight's address may be another's later
    std::map<std::vector<std::pair<uint64_t, Side>>, std::unique_ptr<StreamBlock>> blocks_;
};

} // namespace oallama
