#include "trace.h"

#include <algorithm>
#include <cstdio>

namespace oallama {

Trace & Trace::get() {
    static auto * the_trace = new Trace; // threads of other libraries may still compute when this one is unloaded
    return *the_trace;
}

void Trace::start(size_t max_spans, oallama_trace_of of) {
    stop();
    const std::lock_guard<std::mutex> lock(mutex_);
    spans_.clear();
    spans_.reserve(max_spans);
    max_spans_ = max_spans;
    of_        = of;
    n_phases_  = 0;
    phase_     = {};
    started_   = std::chrono::steady_clock::now();
    on_        = true;
}

std::vector<oallama_span> Trace::stop() {
    const std::lock_guard<std::mutex>               alone(stopping_);
    std::map<ggml_backend_t, std::unique_ptr<Lane>> lanes;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        on_     = false;
        ending_ = true;
        lanes.swap(lanes_);
    }
    for (auto & [backend, lane] : lanes) {
        lane->changed.notify_all();
        lane->thread.join();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = false;
    std::stable_sort(spans_.begin(), spans_.end(),
                     [](const oallama_span & a, const oallama_span & b) { return a.end_s < b.end_s; });
    return std::move(spans_);
}

void Trace::begin_phase(const char * name, int32_t n_tokens) {
    const std::lock_guard<std::mutex> lock(mutex_);
    phase_          = {};
    phase_.phase    = n_phases_++;
    phase_.n_tokens = n_tokens;
    std::snprintf(phase_.name, sizeof phase_.name, "%s", name);
}

void Trace::host(oallama_step step, Time begin, int64_t bytes) {
    const Time                        end = std::chrono::steady_clock::now();
    const std::lock_guard<std::mutex> lock(mutex_);
    oallama_span                      span = phase_;
    span.step                              = step;
    span.begin_s                           = std::max(0.0, seconds(begin));
    span.end_s                             = seconds(end);
    span.bytes                             = bytes;
    keep(span);
}

bool Trace::open_lane(ggml_backend_t backend) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto                        found = lanes_.find(backend);
        if (found != lanes_.end()) {
            return found->second->has_events;
        }
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(ggml_backend_get_device(backend), &props);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!on_ || lanes_.count(backend) > 0) {
        return on_ && props.caps.events;
    }
    auto lane        = std::make_unique<Lane>();
    lane->has_events = props.caps.events;
    lane->thread     = std::thread([this, own = lane.get()] { watch(*own); });
    lanes_.emplace(backend, std::move(lane));
    return props.caps.events;
}

void Trace::device(oallama_step step, ggml_backend_t backend, const ggml_tensor * result, int64_t bytes,
                   const char * name) {
    ggml_backend_event_t event = of_ != OALLAMA_TRACE_CALLER && open_lane(backend)
                                     ? ggml_backend_event_new(ggml_backend_get_device(backend))
                                     : nullptr;
    if (event == nullptr) {
        return;
    }
    Waiting waiting = {event, {}, nullptr};
    if (of_ == OALLAMA_TRACE_READ_BACK && result != nullptr && ggml_nbytes(result) >= sizeof(int32_t)) {
        waiting.read = std::make_shared<int32_t>();
        ggml_backend_tensor_get_async(backend, result, waiting.read.get(), 0, sizeof(int32_t));
    }
    ggml_backend_event_record(event, backend);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto                        lane = lanes_.find(backend);
        if (on_ && lane != lanes_.end()) {
            waiting.span         = phase_;
            waiting.span.step    = step;
            waiting.span.bytes   = bytes;
            waiting.span.begin_s = seconds(std::chrono::steady_clock::now());
            if (name != nullptr) {
                std::snprintf(waiting.span.name, sizeof waiting.span.name, "%s", name);
            }
            lane->second->queue.push_back(waiting);
            lane->second->changed.notify_all();
            return;
        }
    }
    // stopped by another thread meanwhile
    ggml_backend_event_synchronize(event);
    ggml_backend_event_free(event);
}

// A step begins when it was queued, or when the one before it on its stream was done.
void Trace::watch(Lane & lane) {
    double                       last = 0.0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        lane.changed.wait(lock, [&] { return !lane.queue.empty() || ending_; });
        if (lane.queue.empty()) {
            return;
        }
        Waiting waiting = lane.queue.front();
        lane.queue.pop_front();
        lock.unlock();
        ggml_backend_event_synchronize(waiting.event);
        waiting.span.end_s   = seconds(std::chrono::steady_clock::now());
        waiting.span.begin_s = std::max(waiting.span.begin_s, last);
        last                 = waiting.span.end_s;
        ggml_backend_event_free(waiting.event);
        lock.lock();
        keep(waiting.span);
    }
}

// Also called by threads that have no caller to tell: without memory the trace ends here.
void Trace::keep(const oallama_span & span) {
    if (spans_.size() >= max_spans_) {
        return;
    }
    try {
        spans_.push_back(span);
    } catch (const std::bad_alloc &) {
        max_spans_ = spans_.size();
    }
}

} // namespace oallama
