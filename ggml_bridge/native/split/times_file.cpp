#include "times_file.h"

#include <cmath>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <map>
#include <utility>
#include <vector>

#include <pthread.h>

namespace oallama {

namespace {

constexpr int64_t  max_taken = 256;
constexpr timespec pause     = {1, 0};

struct Totals {
    int64_t n_runs   = 0;
    int64_t n_tokens = 0;
    double  launch_s = 0;
    double  host_s   = 0;
    double  wait_s   = 0;
    double  join_s   = 0;

    void add(const oallama_block_times & taken) {
        n_runs += taken.n_runs;
        n_tokens += taken.n_tokens;
        launch_s += taken.launch_s;
        host_s += taken.host_s;
        wait_s += taken.wait_s;
        join_s += taken.join_s;
    }
};

struct Writer {
    std::shared_ptr<BlockTimes>                       times;
    std::string                                       path;
    std::map<std::pair<std::string, int64_t>, Totals> totals; // by name and class of batch sizes
    std::vector<oallama_block_times>                  taken = std::vector<oallama_block_times>(max_taken);

    // Whether there was something new.
    bool take() {
        bool    any = false;
        int64_t n   = max_taken;
        while (n == max_taken) { // what there was no room for is left
            n = times->take(taken.data(), max_taken);
            for (int64_t i = 0; i < n; i++) {
                totals[{taken[i].name, taken[i].batch}].add(taken[i]);
            }
            any = any || n > 0;
        }
        return any;
    }

    bool write() const {
        const std::string next = path + ".next";
        FILE *            file = std::fopen(next.c_str(), "we");
        if (file == nullptr) {
            return false;
        }
        const auto ns = [](double seconds) { return std::llround(seconds * 1e9); };
        for (const auto & [key, total] : totals) {
            std::fprintf(file, "%lld %lld %lld %lld %lld %lld %lld %s\n", static_cast<long long>(key.second),
                         static_cast<long long>(total.n_runs), static_cast<long long>(total.n_tokens),
                         ns(total.launch_s), ns(total.host_s), ns(total.wait_s), ns(total.join_s), key.first.c_str());
        }
        const bool whole = std::ferror(file) == 0;
        if (std::fclose(file) != 0 || !whole) {
            std::remove(next.c_str());
            return false;
        }
        return std::rename(next.c_str(), path.c_str()) == 0;
    }

    void run() {
        bool pending = false;
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

void write_times(std::shared_ptr<BlockTimes> times, const std::string & path) noexcept {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the program's own threads
    try {
        auto writer   = std::make_unique<Writer>();
        writer->times = std::move(times);
        writer->path  = path;
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
