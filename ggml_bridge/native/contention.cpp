// CPU kernels and host-to-device copies read the same DRAM: how fast is each alone, and both at once?

#include <atomic>
#include <exception>
#include <thread>

#include "mul_mat.h"
#include "transfer.h"

namespace bridge {

namespace {

// Copies chunks on a thread of its own until it is stopped, and counts the bytes that have arrived.
class Stream {
  public:
    explicit Stream(Transfer & transfer) : transfer_(transfer), thread_([this] { run(); }) {}
    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;
    ~Stream() { stop(); }

    int64_t bytes_done() const { return bytes_done_.load(); }

    // Returns when the first chunk has arrived, or the thread has failed.
    void wait_until_running() const {
        while (bytes_done() == 0 && !failed_.load()) {
            std::this_thread::yield();
        }
    }

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
                transfer_.run_raw();
                bytes_done_.fetch_add(transfer_.n_bytes());
            }
        } catch (...) {
            error_ = std::current_exception();
            failed_.store(true);
        }
    }

    Transfer &           transfer_;
    std::atomic<bool>    stopping_{false};
    std::atomic<bool>    failed_{false};
    std::atomic<int64_t> bytes_done_{0};
    std::exception_ptr   error_;  // read after the thread has ended
    std::thread          thread_; // declared last: it uses the others
};

// Weight bytes per second of mul-mats on this thread for at least that long.
double multiply_for(MulMat & mul_mat, double seconds) {
    double       bytes = 0.0;
    const double start = seconds_now();
    double       now   = start;
    while (now - start < seconds) {
        mul_mat.run_pass();
        bytes += mul_mat.pass_bytes();
        now = seconds_now();
    }
    return bytes / (now - start);
}

double copy_for(Transfer & transfer, double seconds) {
    double       bytes = 0.0;
    const double start = seconds_now();
    double       now   = start;
    while (now - start < seconds) {
        transfer.run_raw();
        bytes += static_cast<double>(transfer.n_bytes());
        now = seconds_now();
    }
    return bytes / (now - start);
}

gb_contention_result measure(ggml_backend_dev_t device, const gb_mul_mat_params & cpu, int64_t chunk_bytes,
                             double seconds) {
    require(!is_cpu(device), "the CPU has no link to itself");
    require(seconds > 0.0 && seconds <= 60.0, "the time to measure must be up to a minute");
    const bool pinned = ggml_backend_dev_host_buffer_type(device) != nullptr;
    MulMat     mul_mat(cpu);
    Transfer   transfer(device, /*to_device=*/true, pinned, chunk_bytes);

    gb_contention_result result = {};
    result.cpu_alone            = multiply_for(mul_mat, seconds);
    result.link_alone           = copy_for(transfer, seconds);

    Stream stream(transfer);
    stream.wait_until_running();
    const int64_t bytes_before = stream.bytes_done();
    // a starved link may need longer for its first chunk than there is time; but not without end
    double       cpu_bytes = 0.0;
    const double start     = seconds_now();
    double       elapsed   = 0.0;
    do {
        mul_mat.run_pass();
        cpu_bytes += mul_mat.pass_bytes();
        elapsed = seconds_now() - start;
    } while (elapsed < seconds || (stream.bytes_done() == bytes_before && elapsed < 20.0 * seconds));
    result.cpu_with_link = cpu_bytes / elapsed;
    result.link_with_cpu = static_cast<double>(stream.bytes_done() - bytes_before) / elapsed;
    stream.finish();
    return result;
}

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_contention(const char * device, const gb_mul_mat_params * cpu, int64_t chunk_bytes, double seconds,
                  gb_contention_result * result) {
    return guarded([&] {
        require(cpu != nullptr && result != nullptr, "no room for the result");
        *result = measure(find_device(device), *cpu, chunk_bytes, seconds);
    });
}
