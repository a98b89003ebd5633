// Uses of experts: how often tokens are routed to each, from which hot experts are chosen at a next load, and how often
// to the one that was used most of late, the second, and so on: what slots that follow the conversation would serve.
// And how long ago an expert was used before: of that follows how many different ones a batch of any size uses.
//
// An ExpertUses belongs to its plan and keeps its counts for as long, whichever models are loaded and freed meanwhile.
// Any thread adds to it.

#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "expert_table.h"

namespace oallama {

class ExpertUses {
  public:
    static constexpr size_t n_gaps = 12;

    struct Batches {
        int64_t              n_tokens = 0;
        std::vector<int64_t> of_expert;
        std::vector<int64_t> of_rank; // by how many experts had been used more of late when the batch began
        // by tokens since the use before, as powers of two: 1, 2 or 3, 4 to 7, …; the last: longer ago, or never
        std::array<int64_t, n_gaps> of_gap = {};
    };

    // Batches of one token, and larger ones.
    using Totals = std::array<Batches, 2>;

    explicit ExpertUses(int64_t n_expert);

    // n_tokens tokens of one batch were routed to these experts.
    void add(const std::vector<int32_t> & experts, int64_t n_tokens);

    Totals totals() const;

  private:
    mutable std::mutex   mutex_;
    Totals               totals_;
    ExpertTable          of_late_;
    int64_t              n_tokens_ = 0; // of all batches
    std::vector<int64_t> last_;         // by expert, the token that used it last, counted from 1; 0: none
};

} // namespace oallama
