// How often tokens were routed to each expert of a weight: what hot experts are chosen by at the next load.

#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace oallama {

// Counts batches of one token apart from larger ones.
class ExpertUses {
  public:
    explicit ExpertUses(int64_t n_expert);

    // ids: experts of n_tokens tokens, each of which exists.
    void add(const std::vector<int32_t> & ids, int64_t n_tokens);

    // Adds the counts to a file: lines `TENSOR single|several TOKENS USES…`, nothing where there are no tokens. Counts
    // are lost where the file cannot be written.
    void append_to(const std::string & path, const std::string & tensor);

  private:
    struct Counts {
        int64_t              n_tokens = 0;
        std::vector<int64_t> uses;
    };

    std::mutex            mutex_;
    std::array<Counts, 2> counts_; // of batches of one token, and of larger ones
};

} // namespace oallama
