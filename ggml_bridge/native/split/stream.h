// The stream of weights to a device: a ring of slots in device memory, filled by copies on a stream of their own while
// the device computes with earlier slots (ScheInfer III-C).
//
// A slot holds a block: the CG and CG' parts of the weights of one segment. Two slots lie at the two ends of the ring,
// so that any two blocks that fit together can alternate. Blocks take the slots in turn, and a block always begins at
// the same address of a slot: CUDA captures a graph only if its tensors have not moved since the last launch.
//
// The next block is at first the one that was made next, as graphs are prepared in the order of their layers, then
// learned from the order of requests, which is cyclic: the last layer of a token is followed by the first layer of the
// next one. The copy of the next block begins as soon as a slot is free, across layers and across the attention between
// them, so that the link idles only when the ring is full. Of experts, those that the batch is likely to use are copied
// ahead (expert_odds.h); once the router has chosen, missing ones follow, and those that are neither needed nor
// requested yet are left out. Further blocks of the same router are requested by its choice, not by the odds: a missing
// expert would wait for all copies that were requested in between.
//
// A device has one copy engine per direction, and no copy is interrupted: an activation that is sent during a copy of
// weights waits for its end. So weights are requested in pieces, between which other copies pass, and only as many
// ahead as the link can copy before the next activation is due. When it is due follows from earlier tokens (Interval).
// Without this limit an 8B in 3 GiB takes 5.8 % longer (docs/decisions.md).
//
// A DeviceSide has one Stream, which one thread at a time uses. It owns the ring and the blocks; weights belong to
// their buffers, and outlive the programs that stream them.

#pragma once

#include <algorithm>
#include <chrono>
#include <map>

#include "expert_odds.h"
#include "weights.h"

namespace oallama {

//
// pacing: when the next small copy (an activation or a result) is due
//

using Clock = std::chrono::steady_clock;
using Time  = Clock::time_point;

inline Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

constexpr int64_t n_remembered = 4; // of a running mean: the last times weigh as much as the ones before together

// Adds a time to a running mean; 0: there was none.
inline void remember(double & mean_s, double seconds) {
    mean_s = mean_s == 0.0 ? seconds : mean_s + (seconds - mean_s) / n_remembered;
}

// The time from one small copy to the next: a running mean. A time far above it is a pause, e.g. between two requests,
// and is ignored; a second one in a row is taken as the new duration.
class Interval {
  public:
    void begin(Time now = Clock::now()) { begun_ = now; }

    void end(Time now = Clock::now()) {
        const double seconds = std::chrono::duration<double>(now - begun_).count();
        paused_              = known_ && !paused_ && seconds > pause * seconds_;
        if (!paused_) {
            remember(seconds_, seconds);
            known_ = true;
        }
    }

    // The expected end of the interval that has begun; before the first measurement, never.
    Time due() const { return known_ ? begun_ + to_duration(seconds_) : Time::max(); }

  private:
    static constexpr double pause = 4; // times the mean

    Time   begun_;
    double seconds_ = 0.0;
    bool   known_   = false;
    bool   paused_  = false; // the last time
};

// The intervals that begin with each small copy of a segment and end with the next one.
struct CopyPacing {
    Interval sent;                 // after its activations
    Interval results_sent;         // after the host's part of a result, if the result is made whole on the device
    Interval fed;                  // after its result, which llama.cpp sends to the device to compute with
    bool     feeds_device = false; // whether llama.cpp sends the result as soon as the segment has ended
};

// The last small copy, and when the next one is due.
class SmallCopies {
  public:
    // A small copy was made, with which this interval begins; NULL: the next one is about to be made.
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

    // When the next one is due; if the last one is unknown, now.
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

// The streamed parts of the weights of one segment, which are copied together.
struct StreamBlock {
    std::vector<StreamedPart>  parts;
    std::vector<size_t>        offsets; // bytes into the slot
    std::vector<Bytes>         tails;   // padding after each part, which the device may read; must not hold NaN
    ContextPtr                 ctx;     // of the tensor headers that copies write to; bound to a slot before each copy
    std::vector<ggml_tensor *> part_tensors;
    std::vector<ggml_tensor *> tail_tensors; // NULL: there is none
    size_t                     bytes    = 0;
    size_t                     n_expert = 1;       // of every part; 1: they are copied whole
    StreamBlock *              next     = nullptr; // the block that was requested after it the last time, or made
    bool                       repeats  = false;   // whether its experts were those of the block before it
    ExpertOdds                 odds     = ExpertOdds(1, 0);

    // The experts that a batch of so many tokens is likely to need.
    std::vector<bool> likely(int64_t n_tokens) const {
        return n_expert == 1 ? std::vector<bool>{true} : odds.likely(n_tokens);
    }
};

struct Slot {
    StreamBlock *       holds = nullptr;
    std::vector<Bytes>  zeros;  // tails that are zero since the last copy
    std::vector<bool>   wanted; // by expert
    std::vector<size_t> asked;  // by part and expert: bytes from its beginning that were requested

    // Gives the slot to this block; none of its bytes are requested yet.
    void hold(StreamBlock & block);
};

constexpr size_t no_slot = SIZE_MAX;

//
// the stream
//

class Stream {
  public:
    // spec: slots, pieces, the link's speed, whether copies run ahead. Throws OALLAMA_FAILED if the device has no
    // second stream.
    Stream(ggml_backend_dev_t device, const StreamSpec & spec);
    ~Stream();

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

    // The block of these parts; grows the ring if it does not fit. n_used: experts of each token, if parts of some
    // experts are copied. Throws OALLAMA_NO_MEMORY.
    StreamBlock * block(const std::vector<StreamedPart> & parts, int64_t n_used);

    // Gives a device tensor the bytes of a block in a slot from `at` on.
    void bind(ggml_tensor * tensor, const StreamBlock & block, size_t slot, size_t at) const;

    // The slot that the next block will get, unless it is in one already.
    size_t next_slot() const { return slot_after(last_slot_); }

    // The slot after another one, in turn; after no_slot, the first.
    size_t slot_after(size_t slot) const { return slot == no_slot ? 0 : (slot + 1) % slots_.size(); }

    // The slot of the block that is computed now; requests what it still lacks. experts: the needed ones, n_used of
    // each token; NULL: all.
    size_t acquire(StreamBlock & block, const std::vector<int32_t> * experts, int64_t n_used);

    // Makes all further work of this backend wait for a slot's copies.
    void ready(ggml_backend_t compute, size_t slot);

    // Requests the next blocks of a batch of n_tokens tokens, in slots that are no longer needed, but no more bytes
    // than the link can copy before `until`. busy: the slot in use, or no_slot.
    void prefetch(size_t busy, int64_t n_tokens, Time until);

    // Queues a copy of bytes from the host to a tensor on the device, from `offset` on; also used by exchange.h.
    void copy_to(ggml_tensor * to, const char * data, size_t offset, size_t bytes);

    // Most bytes of the next copy, so that the link ends it before `until`; 0: too few to be worth a request.
    size_t allowed(Time until) const;

    // When the link has done all requests, by its planned speed.
    Time idle() const { return std::max(idle_, Clock::now()); }

    // Seconds of a copy; 0: the link's speed is not known.
    double seconds(size_t bytes) const {
        return spec_.link_bytes_per_s > 0 ? static_cast<double>(bytes) / static_cast<double>(spec_.link_bytes_per_s)
                                          : 0.0;
    }

    // Makes all further copies wait for an event.
    void await(ggml_backend_event_t event) { ggml_backend_event_wait(backend_.get(), event); }

    // Records an event behind all queued copies; without events, waits for them here.
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
    StreamBlock *         made_      = nullptr; // the block that was made last
    StreamBlock *         last_      = nullptr; // the block that was acquired last
    size_t                last_slot_ = no_slot; // its slot
    std::vector<int32_t>  experts_;             // that it needs, of each token; empty: all
    std::vector<bool>     needed_;              // by expert
    bool                  events_ = false;
    StreamSpec            spec_;
    Time                  idle_; // when the link has done all requests, at the planned speed

    // by the weights' ids and sides, as an address may be reused
    std::map<std::vector<std::pair<uint64_t, Side>>, std::unique_ptr<StreamBlock>> blocks_;
};

} // namespace oallama
