#include "block_times.h"

#include <cstdio>

namespace oallama {

namespace {

int64_t class_of(int64_t n_tokens) {
    int64_t most = 1;
    while (most < n_tokens) {
        most *= 2;
    }
    return most;
}

double seconds(std::atomic<int64_t> & nanoseconds) {
    return static_cast<double>(nanoseconds.exchange(0, std::memory_order_relaxed)) * 1e-9;
}

} // namespace

void BlockTime::add(int64_t n_tokens, const PhaseTime & took) {
    n_runs_.fetch_add(1, std::memory_order_relaxed);
    n_tokens_.fetch_add(n_tokens, std::memory_order_relaxed);
    launch_ns_.fetch_add(took.launch_ns, std::memory_order_relaxed);
    host_ns_.fetch_add(took.host_ns, std::memory_order_relaxed);
    wait_ns_.fetch_add(took.wait_ns, std::memory_order_relaxed);
    join_ns_.fetch_add(took.join_ns, std::memory_order_relaxed);
}

bool BlockTime::take(oallama_block_times & out) {
    out.n_runs = n_runs_.exchange(0, std::memory_order_relaxed);
    if (out.n_runs == 0) {
        return false;
    }
    out.n_tokens = n_tokens_.exchange(0, std::memory_order_relaxed);
    out.launch_s = seconds(launch_ns_);
    out.host_s   = seconds(host_ns_);
    out.wait_s   = seconds(wait_ns_);
    out.join_s   = seconds(join_ns_);
    return true;
}

BlockTime & BlockTimes::of(const SliceSpec & first, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<BlockTime> &      time = times_[{first.name, {first.cc, first.cg, first.gg, class_of(n_tokens)}}];
    if (time == nullptr) {
        time = std::make_unique<BlockTime>();
    }
    return *time;
}

int64_t BlockTimes::take(oallama_block_times * out, int64_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t                           n = 0;
    for (const auto & [key, time] : times_) {
        if (n == capacity) {
            break;
        }
        if (!time->take(out[n])) {
            continue;
        }
        std::snprintf(out[n].name, sizeof out[n].name, "%s", key.name.c_str());
        out[n].cc    = key.numbers[0];
        out[n].cg    = key.numbers[1];
        out[n].gg    = key.numbers[2];
        out[n].batch = key.numbers[3];
        n++;
    }
    return n;
}

} // namespace oallama
