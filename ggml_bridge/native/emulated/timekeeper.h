// The devices' time: streams of items, three engines of each device that serve them, and the one thread that keeps the
// clock of all.

#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shared_core.h"

namespace emulated {

using Nanoseconds = int64_t;

Nanoseconds now();
Nanoseconds nanoseconds(double seconds);

// Holds the calling thread until then, as a driver's call does: computing, not sleeping.
void spin_until(Nanoseconds then);

enum Engine { engine_in, engine_out, engine_compute, n_engines };

// A point in a stream, reached when all that is before it is done.
struct Point {
    std::atomic<bool> reached{false};
    Nanoseconds       end = 0; // virtual; read after `reached`
};

using PointPtr = std::shared_ptr<Point>;

struct Copy {
    void *       dst    = nullptr;
    const void * src    = nullptr;
    size_t       size   = 0;
    size_t       period = 0;    // src is so long and is read again and again; 0: as long as the copy
    bool         write  = true; // false: src is read, as DMA does, and dst left as it is
};

struct Item {
    enum Kind { work, record, wait };

    Kind                         kind      = work;
    Engine                       engine    = engine_compute;
    Nanoseconds                  submitted = 0;
    Nanoseconds                  duration  = 0; // of its engine
    Nanoseconds                  latency   = 0; // from then on, until its end
    Copy                         copy;
    std::vector<char>            staged; // what src was when the call returned, where the copy keeps it
    std::function<Nanoseconds()> lasts;  // the duration, where it is known when the turn has come
    std::function<void()>        run;    // computed when its time has come
    PointPtr                     point;  // record: reached when its turn comes; wait: waited for
};

// Items are done in the order in which they were submitted, by the engines of one device.
class Stream {
  public:
    explicit Stream(size_t number) : device_(number) {}

    uint64_t n_submitted() const { return n_submitted_.load(); }
    bool     done(uint64_t n) const { return n_done_.load() >= n; }

  private:
    friend class Timekeeper;

    struct Flight {
        Nanoseconds start = 0, engine_end = 0, end = 0;
        size_t      copied = 0;
        bool        ran    = false;
    };

    const size_t          device_;
    std::atomic<uint64_t> n_submitted_{0};
    std::atomic<uint64_t> n_done_{0};
    // the rest is the thread's
    std::deque<Item> queue_;
    Nanoseconds      ready_  = 0; // end of all that was done, and of what was waited for
    Nanoseconds      queued_ = 0; // the same for the engine that did the last, which the latency does not hold up
    Engine           engine_ = engine_compute; // that did the last
    bool             flying_ = false;
    Flight           flight_;
};

using StreamPtr = std::shared_ptr<Stream>;

class Timekeeper {
  public:
    // cpu: the core that the thread keeps for itself; -1: none.
    Timekeeper(int cpu, size_t n_devices);
    Timekeeper(const Timekeeper &)             = delete;
    Timekeeper & operator=(const Timekeeper &) = delete;
    ~Timekeeper(); // every stream must be done

    StreamPtr new_stream(size_t device);

    void submit(const StreamPtr & stream, Item && item);
    // Holds the caller until all that was submitted to the stream is done.
    void finish(const Stream & stream) const;

    void rest();

    // Times that another emulated device wanted the same core at the same time, ever.
    int64_t n_shared() const { return core_ ? static_cast<int64_t>(core_->n_shared()) : 0; }

    std::atomic<int64_t> late_ns{0};    // in which at least one item was late
    std::atomic<int64_t> n_overruns{0}; // items whose real work took longer than their modelled time

  private:
    using Arrival = std::pair<StreamPtr, Item>;

    void pause() const; // of who waits for the other side
    void run();
    void want_core(Nanoseconds at);
    void wait_for_work();
    void take_arrivals();
    bool step(); // whether there is anything to do
    void pass_markers(Stream & stream);
    void start_what_is_due(Nanoseconds at);
    void work_on(Stream & stream, Nanoseconds at); // one chunk, or the end
    void note_late(Nanoseconds since, Nanoseconds at);
    void note_overrun(Nanoseconds overrun);

    std::unique_ptr<SharedCore> core_;

    std::mutex              mutex_;
    std::condition_variable wake_;
    std::vector<Arrival>    arrivals_;
    std::atomic<size_t>     n_arrivals_{0};
    std::atomic<bool>       resting_{false};
    bool                    asleep_ = false; // under mutex_
    bool                    ending_ = false; // under mutex_

    std::vector<StreamPtr>                          streams_; // with items; the thread's
    std::vector<std::array<Nanoseconds, n_engines>> free_;    // of each device; virtual; the thread's
    Nanoseconds                                     last_work_  = 0;
    Nanoseconds                                     last_ask_   = 0;
    Nanoseconds                                     late_until_ = 0; // counted so far

    std::thread thread_; // last: it uses the others
};

} // namespace emulated
