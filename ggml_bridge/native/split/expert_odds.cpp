#include "expert_odds.h"

#include <algorithm>
#include <cmath>

#include "expert_table.h"

namespace oallama {

namespace {

// Shape of how often experts are used, as in oallama/core/types.py (LEAST_SPREAD, SPREAD_EXPERTS).
constexpr double least_spread   = 0.25;
constexpr double spread_experts = 32;

} // namespace

ExpertOdds::ExpertOdds(int64_t n_expert, int64_t n_used)
    : spread_(std::max(least_spread, spread_experts / static_cast<double>(n_expert))), n_used_(n_used),
      uses_(static_cast<size_t>(n_expert)) {}

void ExpertOdds::count(const std::vector<int32_t> & chosen, int64_t n_used) {
    n_used_             = n_used;
    const auto   n      = static_cast<double>(chosen.size()) / static_cast<double>(n_used);
    const double fading = std::pow(use_decay, n);
    for (double & uses : uses_) {
        uses *= fading;
    }
    n_tokens_ = n_tokens_ * fading + n;
    for (const int32_t expert : chosen) {
        uses_[static_cast<size_t>(expert)] += 1.0;
    }
}

std::vector<bool> ExpertOdds::likely(int64_t n_tokens) const {
    std::vector<bool> likely(uses_.size());
    if (n_used_ == 0) {
        return likely;
    }
    const double known = spread_ * static_cast<double>(uses_.size()) / static_cast<double>(n_used_) + n_tokens_;
    const double idle  = std::log(known / (known + static_cast<double>(n_tokens))); // of one use that was counted
    std::transform(uses_.begin(), uses_.end(), likely.begin(),
                   [&](double uses) { return (spread_ + uses) * idle <= std::log(0.5); });
    return likely;
}

} // namespace oallama
