// Weights on their way to the device: a ring of slots there, filled by copies on a stream of their own while the device
// computes with what came before (ScheInfer III-C).
//
// A slot holds a block: what is streamed of the weights of one phase. Of two slots each lies at its own end of the
// ring, so that any two blocks that fit together can take turns. Blocks take the slots in turn, and a block always
// begins at the same place of a slot: CUDA captures a graph only if its tensors lie where they lay the last time.
//
// The next block is learned from the order in which blocks were asked for, which goes round: after the last
// layer of a token comes the first layer of the next one. As soon as a slot is free the copy of the next block begins,
// across layers and across the attention between them, so that the link idles only when the ring is full. Of experts
// those are copied ahead that the batch is likely to use (expert_odds.h); once the router has chosen, what is missing
// follows, and what is not needed and was not asked for is left out.
//
// A device has one copy engine a direction, and no copy is interrupted: an activation that is sent while weights are
// copied waits for them. So weights are asked for in pieces, between which other copies pass, and no more of them ahead
// than the link can have done when the next activation is due. Tokens are alike: what passed the last times between two
// small copies is what will pass this time. Without it an 8B in 3 GiB takes 5.8 % longer (docs/decisions.md).
//
// A context has one Stream (run.h), which one thread at a time uses. It owns the ring and the blocks; weights belong to
// their buffers, and outlive the programs that stream them.

#pragma once

#include <algorithm>
#include <chrono>
#include <map>

#include "expert_odds.h"
#include "weights.h"

namespace oallama {

//
// when the next small copy is due
//

using Clock = std::chrono::steady_clock;
using Time  = Clock::time_point;

inline Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// From one small copy to the next: the mean of the last times. A time far above it is a pause, such as a user's
// between two requests, and changes nothing; the second in a row is how long it takes now.
class Interval {
  public:
    void begin(Time now = Clock::now()) { begun_ = now; }

    void end(Time now = Clock::now()) {
        const double seconds = std::chrono::duration<double>(now - begun_).count();
        paused_              = known_ && !paused_ && seconds > pause * seconds_;
        if (!paused_) {
            seconds_ = known_ ? seconds_ + (seconds - seconds_) / n_remembered : seconds;
            known_   = true;
        }
    }

    // When it will end that has begun; the first time, never.
    Time due() const { return known_ ? begun_ + to_duration(seconds_) : Time::max(); }

  private:
    static constexpr double n_remembered = 4; // the last times weigh as much as the ones before together
    static constexpr double pause        = 4; // times the mean

    Time   begun_;
    double seconds_ = 0.0;
    bool   known_   = false;
    bool   paused_  = false; // the last time
};

// After each small copy of a phase, until the next one.
struct CopyPacing {
    Interval sent;                 // its activations
    Interval lifted;               // what the host computed, where the result is made whole on the device
    Interval fed;                  // its result, by llama.cpp, which has told the device since to compute with it
    bool     feeds_device = false; // the last one is sent as soon as the phase has ended
};

// Which small copy was the last one.
class SmallCopies {
  public:
    // It has been made; NULL: the next one is about to be.
    void copied(Interval * after) {
        if (after_ != nullptr) {
            after_->end();
        }
        after_ = after;
        if (after_ != nullptr) {
            after_->begin();
        }
    }

    // Ends the interval that began with the last one, without measuring it.
    void forget() { after_ = nullptr; }

    bool is_last(const Interval & after) const { return after_ == &after; }

    // When the next one is due; where nothing is known of the last one, at any moment.
    Time due() const { return after_ != nullptr ? after_->due() : Time::min(); }

  private:
    Interval * after_ = nullptr;
};

//
// blocks and slots
//

using StreamedPart = std::pair<const SplitWeight *, Side>; // its CG or CG'

// Bytes of a block.
using Bytes = std::pair<size_t, size_t>; // the first, and how many

constexpr size_t alignment = 256; // of a weight in a slot, more than any device asks for

// The streamed parts of the weights of one phase, which are copied together.
struct StreamBlock {
    std::vector<StreamedPart>  parts;
    std::vector<size_t>        offsets; // bytes into the slot
    std::vector<Bytes>         tails;   // what the device may read behind each part, and must not find NaN in
    ContextPtr                 ctx;     // of the headers that copies are made to, each bound to a slot before
    std::vector<ggml_tensor *> part_tensors;
    std::vector<ggml_tensor *> tail_tensors; // NULL: there is none
    size_t                     bytes    = 0;
    size_t                     n_expert = 1;       // of every part; 1: they are copied whole
    StreamBlock *              next     = nullptr; // asked for after it the last time
    ExpertOdds                 odds     = ExpertOdds(1);

    // The experts that a batch of so many tokens is likely to need.
    std::vector<bool> likely(int64_t n_tokens) const {
        return n_expert == 1 ? std::vector<bool>{true} : odds.likely(n_tokens);
    }
};

struct Slot {
    StreamBlock *       holds = nullptr;
    std::vector<Bytes>  zeros;  // tails of what was copied there last, if nothing else was since
    std::vector<bool>   wanted; // by expert
    std::vector<size_t> asked;  // by part and expert: bytes from its beginning that were asked for

    // Makes the slot this block's; none of its bytes are asked for yet.
    void hold(StreamBlock & block);
};

constexpr size_t no_slot = SIZE_MAX;

//
// the stream
//

class Stream {
  public:
    // spec: slots, pieces, the link's speed, copies ahead of a block's turn or not. Throws
    // OALLAMA_FAILED where the device has no second stream.
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

    // The slot of a block whose turn has come; asks for what is missing of it. experts: the only ones needed, n_used of
    // each token; NULL: all.
    size_t acquire(StreamBlock & block, const std::vector<int32_t> * experts, int64_t n_used);

    // Makes what is computed on this backend from now on wait for a slot's copies.
    void ready(ggml_backend_t compute, size_t slot);

    // Asks for the blocks that a batch of so many tokens needs next, in slots that nothing computed needs any more, but
    // for no more than the link can have copied until then. busy: the slot that is computed with, or no_slot.
    void prefetch(size_t busy, int64_t n_tokens, Time until);

    // For what else goes the same way (exchange.h): queues a copy of bytes from the host to a tensor on the device,
    // from `offset` on.
    void copy_to(ggml_tensor * to, const char * data, size_t offset, size_t bytes);

    // Bytes of the next copy at most, so that the link has made it until then; 0: not worth asking.
    size_t allowed(Time until) const;

    // When the link has done what it was asked for, as far as its speed is known.
    Time idle() const { return std::max(idle_, Clock::now()); }

    // Seconds of a copy; 0: the link's speed is not known.
    double seconds(size_t bytes) const {
        return spec_.link_bytes_per_s > 0 ? static_cast<double>(bytes) / static_cast<double>(spec_.link_bytes_per_s)
                                          : 0.0;
    }

    // Makes all copies that are queued from now on wait for an event.
    void await(ggml_backend_event_t event) { ggml_backend_event_wait(backend_.get(), event); }

    // A point behind all that was queued, in an event of the device's; waited for here where the device has none.
    void mark(ggml_backend_event_t event);

    ggml_backend_dev_t device() const { return device_; }

    bool has_events() const { return events_; }

    void synchronize() { ggml_backend_synchronize(backend_.get()); }

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
    bool copy(size_t slot, Time until);
    void ask(size_t slot, size_t part, size_t offset, size_t bytes);
    void asked(size_t slot, int64_t bytes);

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
    Time                  idle_; // when the link has done what it was asked for, at the speed that the plan says

    // by the weights' numbers and sides: a weight's address may be another's later
    std::map<std::vector<std::pair<uint64_t, Side>>, std::unique_ptr<StreamBlock>> blocks_;
};

} // namespace oallama
