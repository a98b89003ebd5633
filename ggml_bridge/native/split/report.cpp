#include "report.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <locale>
#include <map>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../emulated/ggml-emulated.h"
#include "times.h"

namespace oallama {

namespace {

//
// JSON
//

// Names are a model's, and may be anything.
std::string quoted(const std::string & text) {
    std::string out = "\"";
    for (const char c : text) {
        char escaped[8];
        if (c == '"' || c == '\\') {
            out += {'\\', c};
        } else if (static_cast<unsigned char>(c) < 0x20) {
            std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
            out += escaped;
        } else {
            out += c;
        }
    }
    return out + "\"";
}

std::string text_of(const std::string & value) {
    return quoted(value);
}

std::string text_of(const char * value) {
    return quoted(value);
}

std::string text_of(int64_t value) {
    return std::to_string(value);
}

std::string text_of(bool value) {
    return value ? "true" : "false";
}

std::string text_of(double value) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.precision(9);
    out << value;
    return out.str();
}

// The members of an object or a list, in the order in which they are added.
class Members {
  public:
    template <typename T> Members & add(const char * key, const T & value) {
        return add_text(quoted(key) + ": " + text_of(value));
    }

    Members & add_object(const char * key, const std::string & object) { return add_text(quoted(key) + ": " + object); }

    Members & add_text(const std::string & text) {
        text_ += (text_.empty() ? "" : ", ") + text;
        return *this;
    }

    std::string object() const { return "{" + text_ + "}"; }

    std::string list() const { return "[" + text_ + "]"; }

  private:
    std::string text_;
};

std::string slices_of(const LoadedPlan & plan) {
    static const char * const axes[] = {"rows", "cols", "halves"};
    Members                   slices;
    for (size_t i = 0; i < plan.spec().slices.size(); i++) {
        const oallama_slice slice = plan.placed(i);
        if (slice.loaded != 0) {
            slices.add_text(Members()
                                .add("name", slice.name)
                                .add("axis", axes[slice.axis])
                                .add("loaded", slice.loaded != 0)
                                .add("cc", slice.cc)
                                .add("cg", slice.cg)
                                .add("gg", slice.gg)
                                .add("n_hot", slice.n_hot)
                                .add("host_bytes", slice.host_bytes)
                                .add("device_bytes", slice.device_bytes)
                                .add("layout", slice.layout)
                                .object());
        }
    }
    return slices.list();
}

std::string blocks_of(const BlockTimes & times) {
    const auto seconds = [](int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; };
    Members    blocks;
    for (const auto & [key, totals] : times.totals()) {
        blocks.add_text(Members()
                            .add("name", key.first)
                            .add("batch", key.second)
                            .add("n_runs", totals[0])
                            .add("n_tokens", totals[1])
                            .add("launch_s", seconds(totals[2]))
                            .add("host_s", seconds(totals[3]))
                            .add("wait_s", seconds(totals[4]))
                            .add("join_s", seconds(totals[5]))
                            .object());
    }
    return blocks.list();
}

std::string experts_of(const LoadedPlan & plan) {
    Members experts;
    for (const auto & [name, totals] : plan.uses()) {
        for (const ExpertUses::Batches & batches : totals) {
            if (batches.n_tokens > 0) {
                Members uses;
                Members ranks;
                Members gaps;
                for (const int64_t n : batches.of_expert) {
                    uses.add_text(text_of(n));
                }
                for (const int64_t n : batches.of_rank) {
                    ranks.add_text(text_of(n));
                }
                for (const int64_t n : batches.of_gap) {
                    gaps.add_text(text_of(n));
                }
                experts.add_text(Members()
                                     .add("name", name)
                                     .add("batches", &batches == totals.data() ? "single" : "several")
                                     .add("n_tokens", batches.n_tokens)
                                     .add_object("uses", uses.list())
                                     .add_object("ranks", ranks.list())
                                     .add_object("gaps", gaps.list())
                                     .object());
            }
        }
    }
    return experts.list();
}

std::string problems_of(const LoadedPlan & plan, bool & usable) {
    Members sentences;
    for (const std::string & sentence : plan.problems(&usable)) {
        sentences.add_text(quoted(sentence));
    }
    return sentences.list();
}

std::string memory_now() {
    oallama_memory held = {};
    oallama_get_memory(&held);
    return Members()
        .add("host_weights", held.host_weights)
        .add("device_weights", held.device_weights)
        .add("host_compute", held.host_compute)
        .add("device_compute", held.device_compute)
        .add("n_weights", held.n_weights)
        .add("n_programs", held.n_programs)
        .object();
}

std::string stats_now(bool single_only) {
    oallama_stats done = {};
    (single_only ? oallama_get_single_stats : oallama_get_stats)(&done);
    return Members()
        .add("n_graphs", done.n_graphs)
        .add("n_segments", done.n_segments)
        .add("n_built", done.n_built)
        .add("launch_s", done.launch_s)
        .add("host_s", done.host_s)
        .add("wait_s", done.wait_s)
        .add("join_s", done.join_s)
        .add("total_s", done.total_s)
        .add("bytes_in", done.bytes_in)
        .add("bytes_out", done.bytes_out)
        .add("bytes_streamed", done.bytes_streamed)
        .add("n_uses", done.n_uses)
        .add("n_hits", done.n_hits)
        .add("n_fetched", done.n_fetched)
        .add("n_exchanged", done.n_exchanged)
        .add("bytes_exchanged", done.bytes_exchanged)
        .object();
}

std::string emulated_now(ggml_backend_reg_t beside) {
    const auto get_stats =
        beside == nullptr ? nullptr : proc_address<decltype(&emulated_get_stats)>(beside, "emulated_get_stats");
    emulated_stats found = {};
    if (get_stats == nullptr || get_stats(&found) != OALLAMA_OK) {
        return "null";
    }
    return Members()
        .add("late_s", found.late_s)
        .add("n_overruns", found.n_overruns)
        .add("n_shared", found.n_shared)
        .add("bytes_in", found.bytes_in)
        .add("bytes_out", found.bytes_out)
        .add("n_graphs", found.n_graphs)
        .add("n_captured", found.n_captured)
        .add("device_bytes", found.device_bytes)
        .add("pinned_bytes", found.pinned_bytes)
        .add("n_allocations", found.n_allocations)
        .object();
}

//
// the file
//

// A file of our own at this path, emptied; NULL: it cannot be written. No link that somebody left there is followed.
FILE * open_anew(const std::string & path) {
    std::remove(path.c_str());
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return descriptor < 0 ? nullptr : fdopen(descriptor, "w");
}

bool replace_whole(const std::string & path, const std::string & text) {
    const std::string next = path + ".next";
    FILE *            file = open_anew(next);
    if (file == nullptr) {
        return false;
    }
    const bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (std::fclose(file) != 0 || !whole) {
        std::remove(next.c_str());
        return false;
    }
    return std::rename(next.c_str(), path.c_str()) == 0;
}

// A pipe that only this user writes to; -1: there is none, and nothing can be asked for. Its other end stays open here,
// so that a reader that leaves does not end it.
int open_pipe(const std::string & path) {
    if (mkfifo(path.c_str(), 0600) != 0 && errno != EEXIST) {
        return -1;
    }
    struct stat found      = {};
    const int   descriptor = open(path.c_str(), O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor >= 0 && (fstat(descriptor, &found) != 0 || !S_ISFIFO(found.st_mode) || found.st_uid != geteuid())) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

std::string with_pid(std::string path) {
    const std::string pid = std::to_string(getpid());
    for (size_t at = path.find("%p"); at != std::string::npos; at = path.find("%p", at + pid.size())) {
        path.replace(at, 2, pid);
    }
    return path;
}

class Report {
  public:
    Report(const std::string & path, std::shared_ptr<LoadedPlan> plan, ggml_backend_reg_t beside)
        : path_(with_pid(path)), plan_(std::move(plan)), beside_(beside), pipe_(open_pipe(path_ + ".ask")) {}

    // Where something is new since it was written last, or always.
    void write(bool always) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto                        now = state();
        if (std::exchange(told_, now) != now || always) {
            replace_whole(path_, text());
        }
    }

    // What its thread does until the process ends.
    void run() {
        constexpr int pause_ms = 1000;
        while (true) {
            pollfd    asked = {pipe_, POLLIN, 0};
            const int n     = poll(&asked, 1, pause_ms);
            if (n > 0 && read_request()) {
                write(true);
            } else if (n == 0) {
                write(false);
            }
        }
    }

  private:
    // Changes with whatever may be new.
    std::pair<int64_t, size_t> state() const {
        bool usable = true;
        return {stats(SEVERAL).n_graphs.load() + stats(SINGLE).n_graphs.load() + 1, plan_->problems(&usable).size()};
    }

    // Of what was written to the pipe, the last number: whoever asked before is answered with it.
    bool read_request() {
        char          text[256];
        const ssize_t n = read(pipe_, text, sizeof text - 1);
        if (n <= 0) {
            return false;
        }
        text[n]          = '\0';
        const char * end = std::strrchr(text, '\n');
        while (end != nullptr && end > text && end[-1] != '\n') {
            end--;
        }
        const int64_t number = end == nullptr ? 0 : std::strtoll(end, nullptr, 10);
        request_             = std::max(request_.load(), number);
        return number > 0;
    }

    std::string text() const {
        bool              usable   = true;
        const std::string problems = problems_of(*plan_, usable);
        return Members()
                   .add("oallama_report", int64_t{1})
                   .add("pid", static_cast<int64_t>(getpid()))
                   .add("request", request_.load())
                   .add("usable", usable)
                   .add_object("problems", problems)
                   .add_object("slices", slices_of(*plan_))
                   .add_object("memory", memory_now())
                   .add_object("stats", stats_now(false))
                   .add_object("single", stats_now(true))
                   .add_object("blocks", blocks_of(plan_->times()))
                   .add_object("experts", experts_of(*plan_))
                   .add_object("emulated", emulated_now(beside_))
                   .object() +
               "\n";
    }

    const std::string                 path_;
    const std::shared_ptr<LoadedPlan> plan_;
    const ggml_backend_reg_t          beside_;
    const int                         pipe_;
    std::atomic<int64_t>              request_{0};
    std::mutex                        mutex_; // one thread writes at a time
    std::pair<int64_t, size_t>        told_;
};

// Never freed: models are freed, and its thread runs, until the process has ended.
std::atomic<Report *> the_report{nullptr};

void * run_report(void * report) {
    try {
        static_cast<Report *>(report)->run();
    } catch (...) { // out of memory: the file stays as it is
    }
    return nullptr;
}

} // namespace

void keep_report(const std::string & path, std::shared_ptr<LoadedPlan> plan, ggml_backend_reg_t beside) {
    auto report = std::make_unique<Report>(path, std::move(plan), beside);

    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the program's own threads
    pthread_t thread;
    if (pthread_create(&thread, nullptr, run_report, report.get()) == 0) {
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    the_report = report.release();
}

void write_report(bool always) noexcept {
    if (Report * report = the_report.load(); report != nullptr) {
        guarded([&] { report->write(always); });
    }
}

} // namespace oallama
