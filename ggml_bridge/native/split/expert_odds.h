// Expert odds: which of a block's experts a batch is likely to use, before its router has chosen.
//
// Tokens of one text use some experts far more than others. How often is a gamma distribution before anything is known
// of an expert, and sharper with each token that is counted; so the chance that no token of a batch uses it is negative
// binomial. Counts of batches fade as others follow.

#pragma once

#include <cstdint>
#include <vector>

namespace oallama {

class ExpertOdds {
  public:
    // n_used: experts of each token; 0: not known before some are counted, and none is likely.
    ExpertOdds(int64_t n_expert, int64_t n_used);

    // Tokens of a batch were routed to these experts, n_used each.
    void count(const std::vector<int32_t> & chosen, int64_t n_used);

    // By expert, whether a batch of so many tokens is as likely to use it as not.
    std::vector<bool> likely(int64_t n_tokens) const;

  private:
    double              spread_; // shape of the gamma distribution
    int64_t             n_used_;
    double              n_tokens_ = 0.0; // counted
    std::vector<double> uses_;           // by expert
};

} // namespace oallama
