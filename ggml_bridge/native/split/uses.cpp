#include "uses.h"

namespace oallama {

ExpertUses::ExpertUses(int64_t n_expert) {
    for (Batches & batches : totals_) {
        batches.of_expert.assign(static_cast<size_t>(n_expert), 0);
    }
}

void ExpertUses::add(const std::vector<int32_t> & experts, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Batches &                         batches = totals_[n_tokens == 1 ? 0 : 1];
    batches.n_tokens += n_tokens;
    for (const int32_t expert : experts) {
        if (expert >= 0 && static_cast<size_t>(expert) < batches.of_expert.size()) {
            batches.of_expert[static_cast<size_t>(expert)]++;
        }
    }
}

ExpertUses::Totals ExpertUses::totals() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return totals_;
}

} // namespace oallama
