// Times of each block by classes of batch sizes, from which `oallama tune` plans anew.
//
// A BlockTimes belongs to its plan, and keeps a record of each block and class for as long. Any thread adds to a
// record, which takes no lock.

#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace oallama {

// Nanoseconds of one run on the caller's thread: launching, the host's work, waiting, joining.
using RunTimes = std::array<int64_t, 4>;

// Number of runs, their tokens, and the sums of their RunTimes.
using BlockTotals = std::array<int64_t, 2 + std::tuple_size<RunTimes>::value>;

class BlockTime {
  public:
    void add(int64_t n_tokens, const RunTimes & took);

    BlockTotals totals() const;

  private:
    std::array<std::atomic<int64_t>, std::tuple_size<BlockTotals>::value> totals_{};
};

class BlockTimes {
  public:
    // The block's first weight; tokens at most: a power of two.
    using Key = std::pair<std::string, int64_t>;

    // The record of a block; name: its first weight's.
    BlockTime & of(const std::string & name, int64_t n_tokens);

    // Returns the totals of each block and class that has run.
    std::map<Key, BlockTotals> totals() const;

  private:
    mutable std::mutex                        mutex_;
    std::map<Key, std::unique_ptr<BlockTime>> times_;
};

} // namespace oallama
