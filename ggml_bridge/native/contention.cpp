// Two kinds of work at the same time, mul-mats and copies to a device, share memory, cores or a queue: how fast is each
// alone, and both at once?

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "mul_mat.h"
#include "transfer.h"

namespace bridge {

namespace {

// One kind of work, done again and again.
class Load {
  public:
    virtual ~Load()              = default;
    virtual double run()         = 0; // once; seconds
    virtual double bytes() const = 0; // multiplied or copied each time
};

class MulMatLoad : public Load {
  public:
    explicit MulMatLoad(const gb_mul_mat_params & params) : mul_mat_(params) {}

    double run() override { return mul_mat_.run_pass(); }
    double bytes() const override { return mul_mat_.pass_bytes(); }

  private:
    MulMat mul_mat_;
};

class CopyLoad : public Load {
  public:
    CopyLoad(ggml_backend_dev_t device, int64_t chunk_bytes)
        : transfer_(device, /*to_device=*/true, ggml_backend_dev_host_buffer_type(device) != nullptr, chunk_bytes) {}

    double run() override { return transfer_.run_raw(); }
    double bytes() const override { return static_cast<double>(transfer_.n_bytes()); }

  private:
    Transfer transfer_;
};

// Does its work on a thread of its own until it is stopped, and notes when how much was done.
class Background {
  public:
    struct Progress {
        int64_t n_runs = 0;
        double  at     = 0.0; // when the last of them was done
    };

    explicit Background(Load & load) : load_(load), thread_([this] { run(); }) {}
    Background(const Background &)             = delete;
    Background & operator=(const Background &) = delete;
    ~Background() { stop(); }

    Progress progress() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return progress_;
    }

    // Returns when the first run is done, or the thread has failed.
    void wait_until_running() const {
        while (progress().n_runs == 0 && !failed_.load()) {
            std::this_thread::yield();
        }
    }

    bool failed() const { return failed_.load(); }

    // Ends the thread, and throws what it failed with.
    void finish() {
        stop();
        if (error_) {
            std::rethrow_exception(error_);
        }
    }

  private:
    void stop() {
        stopping_.store(true);
        if (thread_.joinable()) {
            thread_.join();
        }
    }

    void run() {
        try {
            while (!stopping_.load()) {
                load_.run();
                const std::lock_guard<std::mutex> lock(mutex_);
                progress_ = {progress_.n_runs + 1, seconds_now()};
            }
        } catch (...) {
            error_ = std::current_exception();
            failed_.store(true);
        }
    }

    Load &             load_;
    std::atomic<bool>  stopping_{false};
    std::atomic<bool>  failed_{false};
    mutable std::mutex mutex_;
    Progress           progress_;
    std::exception_ptr error_;  // read after the thread has ended
    std::thread        thread_; // declared last: it uses the others
};

// Bytes per second on this thread for at least that long, and until `enough` says so; but not without end.
template <typename Enough> double rate_for(Load & load, double seconds, Enough && enough) {
    double       bytes   = 0.0;
    double       elapsed = 0.0;
    const double start   = seconds_now();
    do {
        load.run();
        bytes += load.bytes();
        elapsed = seconds_now() - start;
    } while (elapsed < seconds || (!enough() && elapsed < 20.0 * seconds));
    return bytes / elapsed;
}

double rate_for(Load & load, double seconds) {
    return rate_for(load, seconds, [] { return true; });
}

gb_sharing_result measure(Load & first, Load & second, double seconds) {
    require(seconds > 0.0 && seconds <= 60.0, "the time to measure must be up to a minute");
    gb_sharing_result result = {};
    result.first_alone       = rate_for(first, seconds);
    result.second_alone      = rate_for(second, seconds);

    Background background(second);
    background.wait_until_running();
    const Background::Progress before = background.progress();
    // what is starved may need longer for one run than there is time
    result.first_with_second =
        rate_for(first, seconds, [&] { return background.failed() || background.progress().n_runs > before.n_runs; });
    const Background::Progress after = background.progress();
    if (after.n_runs > before.n_runs) {
        result.second_with_first =
            second.bytes() * static_cast<double>(after.n_runs - before.n_runs) / (after.at - before.at);
    }
    background.finish();
    return result;
}

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_share_link(const gb_mul_mat_params * first, const char * device, int64_t chunk_bytes, double seconds,
                  gb_sharing_result * result) {
    return guarded([&] {
        require(first != nullptr && result != nullptr, "no room for the result");
        ggml_backend_dev_t to = find_device(device);
        require(!is_cpu(to), "the CPU has no link to itself");
        MulMatLoad mul_mats(*first);
        CopyLoad   copies(to, chunk_bytes);
        *result = measure(mul_mats, copies, seconds);
    });
}

int gb_share_compute(const gb_mul_mat_params * first, const gb_mul_mat_params * second, double seconds,
                     gb_sharing_result * result) {
    return guarded([&] {
        require(first != nullptr && second != nullptr && result != nullptr, "no room for the result");
        MulMatLoad one(*first);
        MulMatLoad other(*second);
        *result = measure(one, other, seconds);
    });
}
