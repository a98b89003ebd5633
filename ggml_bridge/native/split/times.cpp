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

BlockTotals BlockTime::totals() const {
    BlockTotals totals = {};
    for (size_t i = 0; i < totals.size(); i++) {
        totals[i] = totals_[i].load(std::memory_order_relaxed);
    }
    return totals;
}

BlockTime & BlockTimes::of(const std::string & name, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<BlockTime> &      time = times_[{name, class_of(n_tokens)}];
    if (time == nullptr) {
        time = std::make_unique<BlockTime>();
    }
    return *time;
}

std::map<BlockTimes::Key, BlockTotals> BlockTimes::totals() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<Key, BlockTotals>        totals;
    for (const auto & [key, time] : times_) {
        if (const BlockTotals of_block = time->totals(); of_block[0] > 0) {
            totals[key] = of_block;
        }
    }
    return totals;
}

} // namespace oallama
