// Uses of experts: how often tokens are routed to each, from which hot experts are chosen at a next load.
//
// An ExpertUses belongs to its plan and keeps its counts for as long, whichever models are loaded and freed meanwhile.
// Any thread adds to it.

#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

namespace oallama {

class ExpertUses {
  public:
    struct Batches {
        int64_t              n_tokens = 0;
        std::vector<int64_t> of_expert;
    };

    // Batches of one token, and larger ones.
    using Totals = std::array<Batches, 2>;

    explicit ExpertUses(int64_t n_expert);

    // n_tokens tokens of one batch were routed to these experts.
    void add(const std::vector<int32_t> & experts, int64_t n_tokens);

    Totals totals() const;

  private:
    mutable std::mutex mutex_;
    Totals             totals_;
};

} // namespace oallama
