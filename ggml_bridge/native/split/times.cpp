#include "times.h"

#include <csignal>
#include <cstdio>
#include <ctime>
#include <utility>

#include <pthread.h>

namespace oallama {

namespace {

int64_t class_of(int64_t n_tokens) {
    int64_t most = 1;
    while (most < n_tokens) {
        most *= 2;
    }
    return most;
}

// The file's content, and the thread that writes it.
struct Writer {
    std::shared_ptr<BlockTimes>            times;
    std::string                            path;
    std::map<BlockTimes::Key, BlockTotals> totals;

    // Whether there was something new.
    bool take() {
        return times->take(INT64_MAX, [this](const BlockTimes::Key & key, const BlockTotals & taken) {
            BlockTotals & sums = totals[key];
            for (size_t i = 0; i < sums.size(); i++) {
                sums[i] += taken[i];
            }
        }) > 0;
    }

    bool write() const {
        const std::string next = path + ".next";
        FILE *            file = std::fopen(next.c_str(), "we");
        if (file == nullptr) {
            return false;
        }
        for (const auto & [key, sums] : totals) {
            std::fprintf(file, "%lld", static_cast<long long>(key.second));
            for (const int64_t sum : sums) {
                std::fprintf(file, " %lld", static_cast<long long>(sum));
            }
            std::fprintf(file, " %s\n", key.first.c_str());
        }
        const bool whole = std::ferror(file) == 0;
        if (std::fclose(file) != 0 || !whole) {
            std::remove(next.c_str());
            return false;
        }
        return std::rename(next.c_str(), path.c_str()) == 0;
    }

    void run() {
        constexpr timespec pause   = {1, 0};
        bool               pending = false;
        while (true) {
            nanosleep(&pause, nullptr);
            pending = take() || pending;
            pending = pending && !write();
        }
    }
};

void * run_writer(void * writer) {
    try {
        std::unique_ptr<Writer>(static_cast<Writer *>(writer))->run();
    } catch (...) { // out of memory: the file stays as it is
    }
    return nullptr;
}

} // namespace

void BlockTime::add(int64_t n_tokens, const PhaseTimes & took) {
    const BlockTotals added = {1, n_tokens, took[0], took[1], took[2], took[3]};
    for (size_t i = 0; i < added.size(); i++) {
        totals_[i].fetch_add(added[i], std::memory_order_relaxed);
    }
}

BlockTotals BlockTime::take() {
    BlockTotals taken = {};
    for (size_t i = 0; i < taken.size() && (i == 0 || taken[0] > 0); i++) {
        taken[i] = totals_[i].exchange(0, std::memory_order_relaxed);
    }
    return taken;
}

BlockTime & BlockTimes::of(const std::string & name, int64_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<BlockTime> &      time = times_[{name, class_of(n_tokens)}];
    if (time == nullptr) {
        time = std::make_unique<BlockTime>();
    }
    return *time;
}

int64_t BlockTimes::take(int64_t capacity, const std::function<void(const Key &, const BlockTotals &)> & taker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t                           n = 0;
    for (auto time = times_.begin(); time != times_.end() && n < capacity; ++time) {
        const BlockTotals taken = time->second->take();
        if (taken[0] > 0) {
            taker(time->first, taken);
            n++;
        }
    }
    return n;
}

void write_times(std::shared_ptr<BlockTimes> times, const std::string & path) noexcept {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the program's own threads
    try {
        auto      writer = std::make_unique<Writer>(Writer{std::move(times), path, {}});
        pthread_t thread;
        if (pthread_create(&thread, nullptr, run_writer, writer.get()) == 0) {
            (void)writer.release();
            pthread_detach(thread);
        }
    } catch (...) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace oallama
