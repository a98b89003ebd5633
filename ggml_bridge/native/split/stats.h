// What is held now and what was done, over the whole process.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace oallama {

// Bytes and objects held now.
struct Counters {
    std::atomic<int64_t> host_weights{0};
    std::atomic<int64_t> device_weights{0};
    std::atomic<int64_t> host_compute{0};
    std::atomic<int64_t> device_compute{0};
    std::atomic<int64_t> n_weights{0};
    std::atomic<int64_t> n_programs{0};
    std::atomic<int64_t> program_bytes{0};
};

inline Counters & counters() {
    static Counters the_counters;
    return the_counters;
}

// What was done since the last reset.
struct Stats {
    std::atomic<int64_t> n_graphs{0};
    std::atomic<int64_t> n_phases{0};
    std::atomic<int64_t> n_built{0};
    std::atomic<int64_t> launch_ns{0};
    std::atomic<int64_t> host_ns{0};
    std::atomic<int64_t> wait_ns{0};
    std::atomic<int64_t> join_ns{0};
    std::atomic<int64_t> total_ns{0};
    std::atomic<int64_t> bytes_in{0};
    std::atomic<int64_t> bytes_out{0};
    std::atomic<int64_t> bytes_streamed{0};
};

inline Stats & stats() {
    static Stats the_stats;
    return the_stats;
}

class Stopwatch {
  public:
    // Adds the time since the last call to a counter, and returns it.
    int64_t lap(std::atomic<int64_t> & counter) {
        const auto    now         = std::chrono::steady_clock::now();
        const int64_t nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
        counter.fetch_add(nanoseconds, std::memory_order_relaxed);
        last_ = now;
        return nanoseconds;
    }

  private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

} // namespace oallama
