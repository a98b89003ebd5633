// Shared by every file here: errors and the log, owners of ggml's objects, pinned host memory, counters.
//
// No exception crosses the C interface or a vtable of ggml's: `guarded` turns it into a status, and into a sentence
// that the same thread reads with oallama_last_error; `logged` also tells ggml's log, for callbacks that return no
// reason.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-oallama.h"
#include "ggml_backend_abi.h"

namespace oallama {

//
// errors
//

struct Error : std::runtime_error {
    Error(oallama_status what, const std::string & message) : std::runtime_error(message), status(what) {}

    oallama_status status;
};

void require(bool condition, const std::string & message); // throws OALLAMA_INVALID

void         set_last_error(const char * message) noexcept;
const char * last_error() noexcept;

// Runs f and turns every exception into a status and a message.
template <typename F> int guarded(F && f) noexcept {
    try {
        f();
        return OALLAMA_OK;
    } catch (const Error & error) {
        set_last_error(error.what());
        return error.status;
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
        return OALLAMA_NO_MEMORY;
    } catch (const std::exception & error) {
        set_last_error(error.what());
        return OALLAMA_FAILED;
    } catch (...) {
        set_last_error("unknown C++ exception");
        return OALLAMA_FAILED;
    }
}

// Text with its line ends, through whatever callback ggml logs with.
void log(ggml_log_level level, const char * text) noexcept;

void log_error(const char * message) noexcept; // one line

template <typename F> int logged(F && f) noexcept {
    const int status = guarded(f);
    if (status != OALLAMA_OK) {
        log_error(last_error());
    }
    return status;
}

// The text of the file that a variable of the environment names. Throws OALLAMA_INVALID where it cannot be read.
std::string read_file(const char * variable, const char * path);

//
// ggml's objects
//

template <auto Free> struct Deleter {
    template <typename T> void operator()(T * object) const noexcept { Free(object); }
};

using ContextPtr = std::unique_ptr<ggml_context, Deleter<ggml_free>>;
using BufferPtr  = std::unique_ptr<ggml_backend_buffer, Deleter<ggml_backend_buffer_free>>;
using GallocrPtr = std::unique_ptr<ggml_gallocr, Deleter<ggml_gallocr_free>>;
using BackendPtr = std::unique_ptr<ggml_backend, Deleter<ggml_backend_free>>;
using SchedPtr   = std::unique_ptr<ggml_backend_sched, Deleter<ggml_backend_sched_free>>;
using EventPtr   = std::unique_ptr<ggml_backend_event, Deleter<ggml_backend_event_free>>;

// A context for the headers of n_tensors tensors, and of graphs of n_nodes nodes together in n_graphs.
ContextPtr new_context(int64_t n_tensors, int64_t n_graphs = 0, int64_t n_nodes = 0);

// Whether a buffer is in this device's pinned memory, in which its copies begin and end without holding up their
// caller; false for NULL. The pinned buffer types of CUDA and Vulkan give plain memory where none is left: only the
// type of the buffer tells.
bool is_pinned(ggml_backend_buffer_t buffer, ggml_backend_dev_t device);

// A buffer in pinned memory; NULL: the device has none, or none is left.
BufferPtr new_pinned(ggml_backend_dev_t device, size_t size);

//
// the CPU
//

template <typename F> F proc_address(ggml_backend_reg_t reg, const char * name) {
    return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(reg, name));
}

ggml_backend_dev_t cpu_device(); // throws OALLAMA_FAILED where there is none

// Buffer types that the CPU keeps weights in, best first: its extra ones, then plain memory.
std::vector<ggml_backend_buffer_type_t> cpu_layouts();

// False for a mul-mat that ggml says a layout can do, and that writes past its result: over several matrices at once in
// an extra layout. AMX's kernels count bytes from one matrix to the next where they address elements, and its buffers
// have room for the first matrix only (amx/mmq.cpp of ggml 0.25.3 and 0.26.0). No other extra layout takes such
// weights.
bool multiplies_right(ggml_backend_buffer_type_t layout, const ggml_tensor * mul_mat);

// Whether a back end says of itself that it was built with, or found, something.
bool has_feature(ggml_backend_reg_t reg, const char * name);

// ggml's CPU back end.
class Cpu {
  public:
    Cpu(); // throws OALLAMA_FAILED

    ggml_backend_t get() const { return backend_.get(); }

    void set_n_threads(int n_threads);
    void set_abort_callback(ggml_abort_callback callback, void * data);

  private:
    using Threadpool = std::unique_ptr<ggml_threadpool, void (*)(ggml_threadpool *)>;

    void keep_threads(int n_threads);

    Threadpool threads_        = {nullptr, nullptr}; // NULL: OpenMP's, or none beside the caller's
    int        n_threads_kept_ = 1;                  // as many as were ever asked for
    BackendPtr backend_;
};

//
// counters, over the whole process
//

// Held now.
struct Counters {
    std::atomic<int64_t> host_weights{0}, device_weights{0}, host_compute{0}, device_compute{0}; // bytes
    std::atomic<int64_t> n_weights{0}, n_programs{0};
};

inline Counters & counters() {
    static Counters the_counters;
    return the_counters;
}

// Counts bytes that contexts compute in on a device, which are among `device_compute`.
void    count_compute(ggml_backend_dev_t device, int64_t bytes);
int64_t compute_on(ggml_backend_dev_t device);

// Done since the last reset.
struct Stats {
    std::atomic<int64_t> n_graphs{0}, n_segments{0}, n_built{0};
    std::atomic<int64_t> launch_ns{0}, host_ns{0}, wait_ns{0}, join_ns{0}, total_ns{0};
    std::atomic<int64_t> bytes_in{0}, bytes_out{0}, bytes_streamed{0}, bytes_exchanged{0};
    std::atomic<int64_t> n_uses{0}, n_hits{0}, n_fetched{0}, n_exchanged{0}; // of hot experts
};

enum BatchKind { SEVERAL, SINGLE, N_KINDS }; // tokens of a batch

inline thread_local BatchKind current_batch = SEVERAL; // that this thread computes

inline Stats & stats(BatchKind kind = current_batch) {
    static Stats the_stats[N_KINDS];
    return the_stats[kind];
}

class Stopwatch {
  public:
    // Adds the time since the last call to a counter, and returns it.
    int64_t lap(std::atomic<int64_t> & counter) {
        const auto    now         = std::chrono::steady_clock::now();
        const int64_t nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
        counter.fetch_add(nanoseconds, std::memory_order_relaxed);
        last_ = now;
        return nanoseconds;
    }

  private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

} // namespace oallama
