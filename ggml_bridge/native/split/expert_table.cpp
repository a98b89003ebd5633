#include "expert_table.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "ggml.h"

namespace oallama {

namespace {

constexpr double largest_unit = 1e100; // then counts are written anew, far from overflowing

} // namespace

ExpertTable::ExpertTable(const std::vector<int32_t> & hot, int64_t n_expert, std::vector<const SplitWeight *> weights)
    : movable_(!weights.empty()), weights_(std::move(weights)), slot_of_(static_cast<size_t>(n_expert), -1),
      expert_in_(hot), coming_(hot.size(), -1), uses_(static_cast<size_t>(n_expert)),
      last_(static_cast<size_t>(n_expert)) {
    for (size_t slot = 0; slot < hot.size(); slot++) {
        slot_of_[static_cast<size_t>(hot[slot])] = static_cast<int32_t>(slot);
    }
}

std::vector<int32_t> ExpertTable::slot_of() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return slot_of_;
}

std::vector<int32_t> ExpertTable::expert_in() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return expert_in_;
}

bool ExpertTable::claim(const void * context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    owner_  = owner_ == nullptr ? context : owner_;
    shared_ = shared_ || owner_ != context;
    return !shared_ && !weights_.empty();
}

void ExpertTable::release(const void * context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    owner_ = owner_ == context ? nullptr : owner_;
}

void ExpertTable::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    weights_.clear();
}

std::vector<const SplitWeight *> ExpertTable::weights() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return weights_;
}

void ExpertTable::count(const std::vector<int32_t> & chosen, int64_t n_used) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::fill(last_.begin(), last_.end(), false);
    for (size_t i = 0; i < chosen.size(); i++) {
        if (i % static_cast<size_t>(n_used) == 0) {
            unit_ /= use_decay;
        }
        uses_[static_cast<size_t>(chosen[i])] += unit_;
        last_[static_cast<size_t>(chosen[i])] = true;
    }
    if (unit_ > largest_unit) {
        for (double & uses : uses_) {
            uses /= unit_;
        }
        unit_ = 1.0;
    }
}

std::vector<int32_t> ExpertTable::missed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int32_t>              missed;
    for (size_t expert = 0; expert < last_.size(); expert++) {
        const auto number = static_cast<int32_t>(expert);
        if (last_[expert] && slot_of_[expert] < 0 &&
            std::find(coming_.begin(), coming_.end(), number) == coming_.end()) {
            missed.push_back(number);
        }
    }
    std::stable_sort(missed.begin(), missed.end(), [this](int32_t a, int32_t b) {
        return uses_[static_cast<size_t>(a)] > uses_[static_cast<size_t>(b)];
    });
    return missed;
}

std::vector<int32_t> ExpertTable::ranks() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int32_t>              order(uses_.size());
    std::vector<int32_t>              ranks(uses_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](int32_t a, int32_t b) {
        return uses_[static_cast<size_t>(a)] > uses_[static_cast<size_t>(b)];
    });
    for (size_t rank = 0; rank < order.size(); rank++) {
        ranks[static_cast<size_t>(order[rank])] = static_cast<int32_t>(rank);
    }
    return ranks;
}

// Returns how much the expert in a slot is used; a negative number for an empty slot.
double ExpertTable::uses_in(int32_t slot) const {
    const int32_t expert = expert_in_[static_cast<size_t>(slot)];
    return expert < 0 ? -1.0 : uses_[static_cast<size_t>(expert)];
}

void ExpertTable::vacate(int32_t slot, int32_t expert) {
    int32_t & held = expert_in_[static_cast<size_t>(slot)];
    if (held >= 0) {
        slot_of_[static_cast<size_t>(held)] = -1;
    }
    held                               = -1;
    coming_[static_cast<size_t>(slot)] = expert;
}

ExpertTable::Move ExpertTable::next() {
    const std::vector<int32_t>        wanted = missed();
    const std::lock_guard<std::mutex> lock(mutex_);
    // one at a time: so the device's ranks find slots with something in them (n_device_ranks)
    if (wanted.empty() || shared_ || weights_.empty() ||
        std::any_of(coming_.begin(), coming_.end(), [](int32_t expert) { return expert >= 0; })) {
        return {};
    }
    int32_t slot = 0;
    for (int32_t other = 1; other < static_cast<int32_t>(expert_in_.size()); other++) {
        slot = uses_in(other) < uses_in(slot) ? other : slot;
    }
    const int32_t held = expert_in_[static_cast<size_t>(slot)];
    if (held >= 0 && uses_[static_cast<size_t>(wanted.front())] <= uses_[static_cast<size_t>(held)]) {
        return {};
    }
    vacate(slot, wanted.front());
    return {wanted.front(), slot};
}

std::vector<ExpertTable::Move> ExpertTable::take(const std::vector<int32_t> & experts, bool in_turns) {
    const std::lock_guard<std::mutex>              lock(mutex_);
    std::vector<std::tuple<bool, double, int32_t>> slots; // those that the batch uses come last
    size_t                                         n = 0;
    for (int32_t slot = 0; slot < static_cast<int32_t>(expert_in_.size()); slot++) {
        const int32_t expert = expert_in_[static_cast<size_t>(slot)];
        if (coming_[static_cast<size_t>(slot)] < 0) {
            slots.emplace_back(expert >= 0 && last_[static_cast<size_t>(expert)], uses_in(slot), slot);
            n += std::get<bool>(slots.back()) ? 0 : 1;
        }
    }
    std::sort(slots.begin(), slots.end());
    n = in_turns ? std::min(std::max(n, (expert_in_.size() + 1) / 2), slots.size()) : n;
    std::vector<Move> moves;
    n = shared_ || weights_.empty() ? 0 : n; // another context may have claimed the table meanwhile
    for (size_t i = 0; n > 0 && i < (in_turns ? experts.size() : std::min(n, experts.size())); i++) {
        moves.push_back({experts[i], std::get<int32_t>(slots[i % n])});
        vacate(moves.back().slot, moves.back().expert);
        fill(moves.back());
    }
    return moves;
}

void ExpertTable::put(const Move & move) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fill(move);
}

void ExpertTable::fill(const Move & move) {
    GGML_ASSERT(coming_[static_cast<size_t>(move.slot)] == move.expert &&
                slot_of_[static_cast<size_t>(move.expert)] < 0);
    coming_[static_cast<size_t>(move.slot)]    = -1;
    expert_in_[static_cast<size_t>(move.slot)] = move.expert;
    slot_of_[static_cast<size_t>(move.expert)] = move.slot;
}

void ExpertTable::drop(const Move & move) {
    const std::lock_guard<std::mutex> lock(mutex_);
    coming_[static_cast<size_t>(move.slot)] = -1;
    if (expert_in_[static_cast<size_t>(move.slot)] == move.expert) {
        vacate(move.slot, -1);
    }
}

} // namespace oallama
