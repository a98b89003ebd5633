// Cores and scheduling priority of a thread: what a user gives llama.cpp's threads holds for our thread pool.

#pragma once

#include <vector>

#include "error.h"

namespace oallama {

class ThreadSettings {
  public:
    static ThreadSettings of_this_thread();

    // Parameters of a pool that the thread with these settings makes: its threads inherit cores and priority. A thread
    // with one core belongs to a pool of llama.cpp's that gave each thread its own: ours get that pool's cores, one
    // each.
    ggml_threadpool_params pool_params(int n_threads) const;

    bool operator==(const ThreadSettings & other) const;

  private:
    std::vector<bool> cores_;
    int               policy_   = 0;
    int               priority_ = 0;
};

} // namespace oallama
