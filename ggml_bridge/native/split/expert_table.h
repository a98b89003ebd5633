// Expert tables: which experts of a block the device holds, in which slots, and how often tokens use each.
//
// The weights of a block (gate, up and down of one layer) have a table together, made when they are loaded. It says
// where experts are at a load, and where plan and memory allow it, they follow what tokens use: a missed expert that is
// used more than the least used one in a slot takes that one's place. Counts decay by `use_decay` with each token,
// which of many rules served most uses in recorded routing (docs/decisions.md).
//
// A slot whose expert is on its way (exchange.h) counts as empty, so a token finds the old expert or the new one, never
// half of one. One context moves a table's experts; once a second one computes with them they stay where they are.
// Every function may be called by any thread.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace oallama {

class SplitWeight;

// The factor by which counts of uses decay with each token. Recorded routing of gpt-oss-20b
// (AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting), a quarter of a layer's experts in slots: 0.98 serves 68 % of later
// uses, 0.99 66 %, 0.998 58 %, the last used ones 65 %, a fixed set 50 %.
constexpr double use_decay = 0.98;

class ExpertTable {
  public:
    // hot: experts by slot. weights: whose experts these are, where they may move; else none.
    ExpertTable(const std::vector<int32_t> & hot, int64_t n_expert, std::vector<const SplitWeight *> weights);

    // Whether experts may ever move; never changes.
    bool is_movable() const { return movable_; }

    // What lies there: slot by expert, and expert by slot; -1: nowhere, or nothing.
    std::vector<int32_t> slot_of() const;
    std::vector<int32_t> expert_in() const;

    // A context is about to compute with these experts: whether it may move them. It may until another one comes.
    bool claim(const void * context);
    void release(const void * context);

    // A weight is freed: nothing moves any more.
    void close();

    // The weights, for as long as one of them is not freed; empty afterwards.
    std::vector<const SplitWeight *> weights() const;

    size_t n_slots() const { return expert_in_.size(); }

    // Counts what a batch uses, [n_used, n_tokens].
    void count(const std::vector<int32_t> & chosen, int64_t n_used);

    // By expert, how many others have been used more of late; of those that are alike, the first come first.
    std::vector<int32_t> ranks() const;

    // Experts that the last batch used and the device has not, the most used first.
    std::vector<int32_t> missed() const;

    struct Move {
        int32_t expert = -1; // -1: none
        int32_t slot   = -1;
    };

    // The move that is due: of the missed expert that is used most to the slot of the least used one, if that is used
    // less, and nothing else is on its way. The slot is empty from here on.
    Move next();

    // Slots for experts that a batch needs at once: those of the least used ones that the batch does not use, as far as
    // there are any, or, in turns, of half of all slots at least, each for several experts one after the other. They
    // count as there from here on, of a slot's the last one.
    std::vector<Move> take(const std::vector<int32_t> & experts, bool in_turns);

    void put(const Move & move);  // the expert's bytes are in the slot, or are when what computes with them begins
    void drop(const Move & move); // they are not, and will not be

  private:
    double uses_in(int32_t slot) const;
    void   vacate(int32_t slot, int32_t expert);
    void   fill(const Move & move);

    const bool         movable_;
    mutable std::mutex mutex_; // of all that follows

    std::vector<const SplitWeight *> weights_;
    std::vector<int32_t>             slot_of_;
    std::vector<int32_t>             expert_in_;
    std::vector<int32_t>             coming_;       // by slot, what is on its way there; -1: nothing
    std::vector<double>              uses_;         // by expert, in units of `unit_`
    std::vector<bool>                last_;         // by expert, whether the last batch uses it
    double                           unit_   = 1.0; // what a use now adds: grows, as all that was counted decays
    const void *                     owner_  = nullptr;
    bool                             shared_ = false; // by two contexts at the same time, once
};

} // namespace oallama
