// How long each block took, by its cut and by classes of batch sizes: what `oallama tune` plans anew from.

#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "split_plan.h"

namespace oallama {

// Of one run, on the caller's thread.
struct PhaseTime {
    int64_t launch_ns = 0;
    int64_t host_ns   = 0;
    int64_t wait_ns   = 0;
    int64_t join_ns   = 0;
};

class BlockTime {
  public:
    void add(int64_t n_tokens, const PhaseTime & took);

    // Since it was taken last; false where there is nothing.
    bool take(oallama_block_times & out);

  private:
    std::atomic<int64_t> n_runs_{0};
    std::atomic<int64_t> n_tokens_{0};
    std::atomic<int64_t> launch_ns_{0};
    std::atomic<int64_t> host_ns_{0};
    std::atomic<int64_t> wait_ns_{0};
    std::atomic<int64_t> join_ns_{0};
};

// Of a plan's blocks. As many records as there are blocks, cuts of them and classes: they stay while the plan does.
class BlockTimes {
  public:
    // first: the block's first weight, as it is cut.
    BlockTime & of(const SliceSpec & first, int64_t n_tokens);

    // At most `capacity` of them; returns how many.
    int64_t take(oallama_block_times * out, int64_t capacity);

  private:
    struct Key {
        std::string            name;
        std::array<int64_t, 4> numbers; // CC, CG, GG, tokens at most

        bool operator<(const Key & other) const {
            return name != other.name ? name < other.name : numbers < other.numbers;
        }
    };

    std::mutex                                mutex_;
    std::map<Key, std::unique_ptr<BlockTime>> times_;
};

} // namespace oallama
