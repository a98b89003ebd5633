#include "row_times.h"

#include <algorithm>
#include <chrono>

#include "experts.h"
#include "program.h"

namespace oallama {

namespace {

// The largest power of two that is at most n.
int64_t power_below(int64_t n) {
    int64_t power = 1;
    while (power <= n / 2) {
        power *= 2;
    }
    return power;
}

} // namespace

int64_t n_host_rows(const Segment & segment, const std::vector<RoutedBatch> & batches) {
    int64_t n_rows = 0;
    for (size_t i = 0; i < segment.routings.size(); i++) {
        n_rows += batches[i].n_host_rows();
    }
    return n_rows;
}

double RowClock::expected(const Segment & segment, int64_t n_tokens, int n_threads) const {
    constexpr double usual = 30e9; // operations of a thread per second, with quantised weights
    if (!host_s_.empty()) {
        const auto known = host_s_.lower_bound(power_below(n_tokens));
        return known != host_s_.end() ? known->second : host_s_.rbegin()->second;
    }
    double n = 0.0;
    for (const Routed & routed : segment.routings) {
        for (const SplitWeight * weight : routed.weights) {
            n += 2.0 * static_cast<double>(weight->slice().k) * static_cast<double>(weight->slice().n);
        }
    }
    return n / (usual * std::max(1, n_threads));
}

void RowClock::note_host(Segment & segment, const std::vector<RoutedBatch> & batches, int64_t n_tokens,
                         int64_t host_ns) {
    if (const int64_t n_rows = n_host_rows(segment, batches); n_rows > 0) {
        remember(segment.row_times.host_s, 1e-9 * static_cast<double>(host_ns) / static_cast<double>(n_rows));
        if (n_tokens > 1) {
            host_s_[power_below(n_tokens)] = segment.row_times.host_s;
        }
    }
}

void RowClock::note_device(Segment & segment, const std::vector<RoutedBatch> & batches, const Exchange * exchange,
                           int64_t waited_ns) {
    constexpr int64_t is_waiting = 20000; // ns: less is the call alone
    if (exchange == nullptr || segment.routings.empty()) {
        return;
    }
    int64_t n_rows = 0;
    int64_t n_last = 0;
    for (size_t i = 0; i < segment.routings.size(); i++) {
        n_rows += batches[i].n_device_rows();
        n_last += batches[i].n_last_rows();
    }
    if (n_rows == 0) {
        return;
    }
    const Time   now   = Clock::now();
    const auto   since = [&](Time begun) { return std::max(0.0, std::chrono::duration<double>(now - begun).count()); };
    const double row_s = std::min(since(exchange->chosen_at()) / static_cast<double>(n_rows),
                                  since(exchange->ready()) / static_cast<double>(n_last));
    double &     known_s = segment.row_times.device_s;
    if (waited_ns >= is_waiting) {
        remember(known_s, row_s);
    } else {
        known_s = std::min(known_s, row_s);
    }
}

void RowClock::note_both(Segment & segment, const std::vector<RoutedBatch> & batches, int64_t ns) {
    if (segment.routings.size() != 1 || batches.front().n_tokens != 1) {
        return;
    }
    std::vector<double> & both_s = segment.row_times.both_s;
    both_s.resize(static_cast<size_t>(batches.front().n_used) + 1);
    remember(both_s[static_cast<size_t>(batches.front().n_host_rows())], 1e-9 * static_cast<double>(ns));
}

} // namespace oallama
