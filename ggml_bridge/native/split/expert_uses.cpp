#include "expert_uses.h"

#include <algorithm>
#include <fstream>
#include <utility>

namespace oallama {

ExpertUses::ExpertUses(int64_t n_expert) {
    for (Counts & counts : counts_) {
        counts.uses.assign(static_cast<size_t>(n_expert), 0);
    }
}

void ExpertUses::add(const std::vector<int32_t> & ids, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Counts &                          counts = counts_[n_tokens == 1 ? OALLAMA_SINGLE : OALLAMA_SEVERAL];
    counts.n_tokens += n_tokens;
    for (const int32_t expert : ids) {
        counts.uses[static_cast<size_t>(expert)]++;
    }
}

int64_t ExpertUses::take(oallama_batches of, int64_t * uses) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Counts &                          counts = counts_[of];
    std::copy(counts.uses.begin(), counts.uses.end(), uses);
    std::fill(counts.uses.begin(), counts.uses.end(), 0);
    return std::exchange(counts.n_tokens, 0);
}

void ExpertUses::append_to(const std::string & path, const std::string & tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::ofstream                     file(path, std::ios::app);
    for (const oallama_batches of : {OALLAMA_SINGLE, OALLAMA_SEVERAL}) {
        const Counts & counts = counts_[of];
        if (counts.n_tokens == 0) {
            continue;
        }
        file << tensor << (of == OALLAMA_SINGLE ? " single " : " several ") << counts.n_tokens;
        for (const int64_t uses : counts.uses) {
            file << ' ' << uses;
        }
        file << '\n';
    }
}

} // namespace oallama
