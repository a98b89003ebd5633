#include "times.h"

namespace oallama {

namespace {

int64_t class_of(int64_t n_tokens) {
    int64_t most = 1;
    while (most < n_tokens) {
        most *= 2;
    }
    return most;
}

} // namespace

void BlockTime::add(int64_t n_tokens, const RunTimes & took) {
    const BlockTotals added = {1, n_tokens, took[0], took[1], took[2], took[3]};
    for (size_t i = 0; i < added.size(); i++) {
        totals_[i].fetch_add(added[i], std::memory_order_relaxed);
    }
}

BlockTotals BlockTime::take() {
    BlockTotals taken = {};
    for (size_t i = 0; i < taken.size() && (i == 0 || taken[0] > 0); i++) {
        taken[i] = totals_[i].exchange(0, std::memory_order_relaxed);
    }
    return taken;
}

BlockTime & BlockTimes::of(const std::string & name, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<BlockTime> &      time = times_[{name, class_of(n_tokens)}];
    if (time == nullptr) {
        time = std::make_unique<BlockTime>();
    }
    return *time;
}

int64_t BlockTimes::take(int64_t capacity, const std::function<void(const Key &, const BlockTotals &)> & taker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t                           n = 0;
    for (auto time = times_.begin(); time != times_.end() && n < capacity; ++time) {
        const BlockTotals taken = time->second->take();
        if (taken[0] > 0) {
            taker(time->first, taken);
            n++;
        }
    }
    return n;
}

} // namespace oallama
