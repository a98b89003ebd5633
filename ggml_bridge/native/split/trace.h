// What the host, the device and the link did when, for pictures and for comparison with predictions. Off unless asked
// for: then an event is recorded behind every step of the device's streams, and a thread for each stream notes when it
// is reached.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "error.h"

namespace oallama {

class Trace {
  public:
    using Time = std::chrono::steady_clock::time_point;

    static Trace & get();

    bool on() const { return on_.load(std::memory_order_relaxed); }

    // Keeps the first max_spans spans from now on.
    void start(size_t max_spans, oallama_trace_of of);

    // Waits for what is on its way. In the order in which the spans ended.
    std::vector<oallama_span> stop();

    // The phase that what follows belongs to. name: of its first weight.
    void begin_phase(const char * name, int32_t n_tokens);

    // The caller's thread did something since `begin`.
    void host(oallama_step step, Time begin, int64_t bytes = 0);

    // What has been queued on a backend since the last call for it is this step, and `result` something on the device
    // that it leaves. Devices without events leave no spans. name: of the weight, where it is not the phase's.
    void device(oallama_step step, ggml_backend_t backend, const ggml_tensor * result, int64_t bytes = 0,
                const char * name = nullptr);

  private:
    Trace() = default;

    struct Waiting {
        ggml_backend_event_t     event;
        oallama_span             span;
        std::shared_ptr<int32_t> read; // where bytes are read back to
    };

    // One stream of a device.
    struct Lane {
        bool                    has_events = false; // asking a device may take its time, so it is asked once
        std::deque<Waiting>     queue;
        std::condition_variable changed;
        std::thread             thread;
    };

    // Whether what a backend does can be followed; makes its lane if need be.
    bool   open_lane(ggml_backend_t backend);
    void   watch(Lane & lane);
    void   keep(const oallama_span & span);
    double seconds(Time time) const { return std::chrono::duration<double>(time - started_).count(); }

    std::atomic<bool>                               on_{false};
    std::mutex                                      stopping_; // one thread at a time: it waits for all lanes
    std::mutex                                      mutex_;    // of what follows
    Time                                            started_;
    size_t                                          max_spans_ = 0;
    bool                                            ending_    = false;
    std::atomic<oallama_trace_of>                   of_{OALLAMA_TRACE_EVENTS};
    oallama_span                                    phase_    = {};
    int64_t                                         n_phases_ = 0;
    std::vector<oallama_span>                       spans_;
    std::map<ggml_backend_t, std::unique_ptr<Lane>> lanes_;
};

// Notes the time between its construction and done().
class Step {
  public:
    Step() : begin_(Trace::get().on() ? std::chrono::steady_clock::now() : Trace::Time{}) {}

    void done(oallama_step step, int64_t bytes = 0) {
        if (Trace::get().on()) {
            Trace::get().host(step, begin_, bytes);
            begin_ = std::chrono::steady_clock::now();
        }
    }

  private:
    Trace::Time begin_;
};

} // namespace oallama
