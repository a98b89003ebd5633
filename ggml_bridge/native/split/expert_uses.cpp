#include "expert_uses.h"

#include <fstream>

namespace oallama {

ExpertUses::ExpertUses(int64_t n_expert) {
    for (Counts & counts : counts_) {
        counts.uses.assign(static_cast<size_t>(n_expert), 0);
    }
}

void ExpertUses::add(const std::vector<int32_t> & ids, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Counts &                          counts = counts_[n_tokens == 1 ? 0 : 1];
    counts.n_tokens += n_tokens;
    for (const int32_t expert : ids) {
        counts.uses[static_cast<size_t>(expert)]++;
    }
}

void ExpertUses::append_to(const std::string & path, const std::string & tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::ofstream                     file(path, std::ios::app);
    for (size_t i = 0; i < counts_.size(); i++) {
        const Counts & counts = counts_[i];
        if (counts.n_tokens == 0) {
            continue;
        }
        file << tensor << (i == 0 ? " single " : " several ") << counts.n_tokens;
        for (const int64_t uses : counts.uses) {
            file << ' ' << uses;
        }
        file << '\n';
    }
}

} // namespace oallama
