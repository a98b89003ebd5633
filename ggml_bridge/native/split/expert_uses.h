// How often tokens were routed to each expert: what those who choose hot experts learn from while a model runs.

#pragma once

#include <array>
#include <mutex>
#include <string>
#include <vector>

#include "ggml-oallama.h"

namespace oallama {

// Of one weight, since it was taken last; batches of one token by themselves.
class ExpertUses {
  public:
    explicit ExpertUses(int64_t n_expert);

    // ids: experts of n_tokens tokens, each of which exists.
    void add(const std::vector<int32_t> & ids, int64_t n_tokens);

    // uses: room for one number an expert. Returns the tokens.
    int64_t take(oallama_batches of, int64_t * uses);

    // Adds what was not taken to a file: lines `TENSOR single|several TOKENS USES…`, nothing where there are no tokens.
    // A file that cannot be written loses it.
    void append_to(const std::string & path, const std::string & tensor);

  private:
    struct Counts {
        int64_t              n_tokens = 0;
        std::vector<int64_t> uses;
    };

    std::mutex            mutex_;
    std::array<Counts, 2> counts_; // by oallama_batches
};

} // namespace oallama
