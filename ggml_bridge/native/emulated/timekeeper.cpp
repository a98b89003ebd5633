#include "timekeeper.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>

namespace emulated {

namespace {

constexpr size_t      chunk_bytes = 32 << 10; // some microseconds, for which another end may be late
constexpr Nanoseconds never       = INT64_MAX;
constexpr Nanoseconds idle_ns     = 100 * 1000 * 1000; // without work, then the thread sleeps

// Reads each line of the cache once, as a device reads host memory.
void read_only(const void * memory, size_t size) {
    const auto * bytes = static_cast<const volatile unsigned char *>(memory);
    unsigned     sum   = 0;
    for (size_t i = 0; i < size; i += 64) {
        sum += bytes[i];
    }
    static std::atomic<unsigned> sink; // so that the reads are not left out
    sink.store(sum, std::memory_order_relaxed);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

} // namespace

Nanoseconds now() {
    timespec time = {};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return Nanoseconds{1000000000} * time.tv_sec + time.tv_nsec;
}

Nanoseconds nanoseconds(double seconds) {
    return static_cast<Nanoseconds>(std::llround(seconds * 1e9));
}

void spin_until(Nanoseconds then) {
    while (now() < then) {
        relax();
    }
}

//
// caller's side
//

Timekeeper::Timekeeper(int cpu, size_t n_devices) : free_(n_devices) {
    std::promise<void> started;
    thread_ = std::thread([this, cpu, &started] {
        try {
            if (cpu >= 0) {
                pin_this_thread(cpu);
                core_ = std::make_unique<SharedCore>(cpu);
                keep_others_off(cpu);
            }
        } catch (...) {
            started.set_exception(std::current_exception());
            return;
        }
        started.set_value();
        run();
    });
    try {
        started.get_future().get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Timekeeper::~Timekeeper() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    resting_ = true;
    wake_.notify_all();
    thread_.join();
}

StreamPtr Timekeeper::new_stream(size_t device) {
    return std::make_shared<Stream>(device);
}

void Timekeeper::submit(const StreamPtr & stream, Item && item) {
    bool asleep = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        arrivals_.emplace_back(stream, std::move(item));
        stream->n_submitted_++; // nobody waits for what could not be queued
        n_arrivals_ = arrivals_.size();
        asleep      = asleep_;
    }
    if (asleep) {
        wake_.notify_one();
    }
}

void Timekeeper::finish(const Stream & stream) const {
    const uint64_t n = stream.n_submitted();
    while (!stream.done(n)) {
        pause();
    }
}

void Timekeeper::rest() {
    resting_ = true;
}

void Timekeeper::pause() const {
    if (core_) {
        relax();
    } else { // times mean nothing, and whoever is waited for may need this core
        std::this_thread::yield();
    }
}

//
// the thread
//

void Timekeeper::run() {
    if (core_) {
        core_->take();
    }
    last_work_ = now();
    for (;;) {
        take_arrivals();
        if (step()) {
            last_work_ = now();
            want_core(last_work_);
            relax(); // a core that shares its units with this one computes meanwhile
            continue;
        }
        if (n_arrivals_.load() == 0 && (resting_.load() || now() - last_work_ > idle_ns)) {
            if (core_) {
                core_->give_back();
            }
            wait_for_work();
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                if (ending_ && arrivals_.empty()) {
                    return;
                }
            }
            if (core_) {
                core_->take();
            }
            last_work_ = now();
        } else {
            pause();
        }
    }
}

// Asks again and again for a core that another device has, which counts that.
void Timekeeper::want_core(Nanoseconds at) {
    constexpr Nanoseconds asks_ns = 1000 * 1000;
    if (core_ && !core_->is_taken() && at - last_ask_ > asks_ns) {
        core_->take();
        last_ask_ = at;
    }
}

void Timekeeper::wait_for_work() {
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_ = true;
    wake_.wait(lock, [this] { return !arrivals_.empty() || ending_; });
    asleep_  = false;
    resting_ = false;
}

void Timekeeper::take_arrivals() {
    if (n_arrivals_.load() == 0) {
        return;
    }
    std::vector<Arrival> arrivals;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        arrivals.swap(arrivals_);
        n_arrivals_ = 0;
        resting_    = false;
    }
    for (auto & [stream, item] : arrivals) {
        if (stream->queue_.empty()) {
            streams_.push_back(stream);
        }
        stream->queue_.push_back(std::move(item));
    }
}

bool Timekeeper::step() {
    if (streams_.empty()) {
        return false;
    }
    for (bool passed = true; passed;) { // a point reached by one stream lets another go on
        passed = false;
        for (const StreamPtr & stream : streams_) {
            const size_t before = stream->queue_.size();
            pass_markers(*stream);
            passed = passed || stream->queue_.size() != before;
        }
    }
    start_what_is_due(now());
    for (const StreamPtr & stream : streams_) {
        if (stream->flying_) {
            work_on(*stream, now());
        }
    }
    const auto done = [](const StreamPtr & stream) { return stream->queue_.empty(); };
    streams_.erase(std::remove_if(streams_.begin(), streams_.end(), done), streams_.end());
    return true;
}

// Points at the head of a stream, from one stream to another.
void Timekeeper::pass_markers(Stream & stream) {
    while (!stream.queue_.empty() && !stream.flying_ && stream.queue_.front().kind != Item::work) {
        Item & item   = stream.queue_.front();
        stream.ready_ = std::max(stream.ready_, item.kind == Item::record ? item.submitted : Nanoseconds{0});
        if (item.kind == Item::record) {
            item.point->end     = stream.ready_;
            item.point->reached = true;
        } else if (item.point->reached.load()) {
            stream.ready_  = std::max(stream.ready_, item.point->end);
            stream.queued_ = std::max(stream.queued_, item.point->end);
        } else {
            return;
        }
        stream.queue_.pop_front();
        stream.n_done_++;
    }
}

// An engine serves what was ready first. Starts are taken in the order of their times, so that what one makes ready for
// another engine is seen.
void Timekeeper::start_what_is_due(Nanoseconds at) {
    for (;;) {
        Stream *    chosen       = nullptr;
        Nanoseconds chosen_start = never;
        Nanoseconds chosen_ready = never;
        for (const StreamPtr & stream : streams_) {
            if (stream->flying_ || stream->queue_.empty() || stream->queue_.front().kind != Item::work) {
                continue;
            }
            const Item &      item  = stream->queue_.front();
            const bool        same  = item.engine == stream->engine_;
            const Nanoseconds ready = std::max(item.submitted, same ? stream->queued_ : stream->ready_);
            const Nanoseconds start = std::max(ready, free_[stream->device_][item.engine]);
            if (start < chosen_start || (start == chosen_start && ready < chosen_ready)) {
                chosen = stream.get(), chosen_start = start, chosen_ready = ready;
            }
        }
        if (chosen == nullptr || chosen_start > at) {
            return;
        }
        Item & item = chosen->queue_.front();
        if (item.lasts) {
            item.duration = item.lasts();
        }
        chosen->flying_ = true;
        chosen->flight_ = {chosen_start, chosen_start + item.duration, chosen_start + item.duration + item.latency};
        free_[chosen->device_][item.engine] = chosen->flight_.engine_end;
    }
}

void Timekeeper::work_on(Stream & stream, Nanoseconds at) {
    Item &           item   = stream.queue_.front();
    Stream::Flight & flight = stream.flight_;
    note_late(flight.end, at);
    if (item.run && !flight.ran) {
        item.run();
        flight.ran = true;
        at         = now();
    }
    if (flight.copied < item.copy.size) { // spread over its time, as a device's reads are
        const double share = static_cast<double>(flight.copied) / static_cast<double>(item.copy.size);
        const auto   due   = flight.start + static_cast<Nanoseconds>(share * static_cast<double>(item.duration));
        if (at < due) {
            return;
        }
        const size_t size   = std::min(chunk_bytes, item.copy.size - flight.copied);
        const size_t at_src = item.copy.period > 0 ? flight.copied % item.copy.period : flight.copied;
        const char * from   = static_cast<const char *>(item.copy.src) + at_src;
        if (item.copy.write) {
            std::memcpy(static_cast<char *>(item.copy.dst) + flight.copied, from, size);
        } else {
            read_only(from, size);
        }
        flight.copied += size;
        at = now();
        if (flight.copied < item.copy.size) {
            return;
        }
        note_overrun(at - flight.end);
    }
    if (at < flight.end) {
        return;
    }
    note_late(flight.end, at);
    if (item.run) {
        note_overrun(at - flight.end);
    }
    stream.ready_  = flight.end;
    stream.queued_ = flight.engine_end;
    stream.engine_ = item.engine;
    stream.flying_ = false;
    stream.queue_.pop_front();
    stream.n_done_++;
}

// Items that are late at the same time hold nobody up twice. `at` never goes back.
void Timekeeper::note_late(Nanoseconds since, Nanoseconds at) {
    since = std::max(since, late_until_);
    if (since < at) {
        late_until_ = at;
        late_ns += at - since;
    }
}

void Timekeeper::note_overrun(Nanoseconds overrun) {
    constexpr Nanoseconds much = 5000;
    n_overruns += overrun > much ? 1 : 0;
}

} // namespace emulated
