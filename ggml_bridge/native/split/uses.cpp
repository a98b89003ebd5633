#include "uses.h"

#include <algorithm>

namespace oallama {

namespace {

size_t gap_class(int64_t n_tokens) {
    size_t power = 0;
    while (n_tokens > 1 && power + 1 < ExpertUses::n_gaps) {
        n_tokens /= 2;
        power++;
    }
    return power;
}

} // namespace

ExpertUses::ExpertUses(int64_t n_expert) : of_late_({}, n_expert, {}), last_(static_cast<size_t>(n_expert)) {
    for (Batches & batches : totals_) {
        batches.of_expert.assign(static_cast<size_t>(n_expert), 0);
        batches.of_rank.assign(static_cast<size_t>(n_expert), 0);
    }
}

void ExpertUses::add(const std::vector<int32_t> & experts, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Batches &                         batches = totals_[n_tokens == 1 ? 0 : 1];
    const auto                        n       = static_cast<int32_t>(batches.of_expert.size());
    batches.n_tokens += n_tokens;
    if (n_tokens == 0 || std::any_of(experts.begin(), experts.end(), [n](int32_t e) { return e < 0 || e >= n; })) {
        return;
    }
    const std::vector<int32_t> ranks  = of_late_.ranks();
    const auto                 n_used = static_cast<int64_t>(experts.size()) / n_tokens;
    const int64_t              before = n_tokens_;
    for (size_t i = 0; i < experts.size(); i++) {
        const auto    expert = static_cast<size_t>(experts[i]);
        const int64_t now    = before + 1 + static_cast<int64_t>(i) / n_used;
        batches.of_expert[expert]++;
        batches.of_rank[static_cast<size_t>(ranks[expert])] += before > 0 ? 1 : 0;
        batches.of_gap[last_[expert] == 0 ? n_gaps - 1 : gap_class(now - last_[expert])]++;
        last_[expert] = now;
    }
    of_late_.count(experts, n_used);
    n_tokens_ += n_tokens;
}

ExpertUses::Totals ExpertUses::totals() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return totals_;
}

} // namespace oallama
