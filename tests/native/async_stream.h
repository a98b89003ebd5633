// What TEST0's streams and events are: a thread that runs commands in order, and points in such orders.

#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace async_device {

class Stream {
  public:
    // before_each: what the thread does before each command.
    explicit Stream(std::function<void()> before_each) : before_each_(std::move(before_each)) {
        thread_ = std::thread([this] { run(); });
    }

    // Runs what has been submitted first.
    ~Stream() {
        submit(nullptr); // the end
        thread_.join();
    }

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

    void submit(std::function<void()> command) {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(std::move(command));
        n_submitted_++;
        changed_.notify_all();
    }

    // Waits for what has been submitted until now.
    void drain() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t               until = n_submitted_;
        changed_.wait(lock, [&] { return n_done_ >= until; });
    }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return !queue_.empty(); });
            std::function<void()> command = std::move(queue_.front());
            queue_.pop_front();
            if (!command) {
                return;
            }
            lock.unlock();
            before_each_();
            command();
            command = nullptr; // frees what it holds before it counts as done
            lock.lock();
            n_done_++;
            changed_.notify_all();
        }
    }

    std::function<void()>             before_each_;
    std::mutex                        mutex_;
    std::condition_variable           changed_;
    std::deque<std::function<void()>> queue_;
    uint64_t                          n_submitted_ = 0;
    uint64_t                          n_done_      = 0;
    std::thread                       thread_;
};

// Who waits, waits for the last point that was recorded until then.
class Event {
  public:
    uint64_t record() {
        std::lock_guard<std::mutex> lock(mutex_);
        return ++n_recorded_;
    }

    uint64_t last() {
        std::lock_guard<std::mutex> lock(mutex_);
        return n_recorded_;
    }

    void reach(uint64_t n) {
        std::lock_guard<std::mutex> lock(mutex_);
        n_reached_ = std::max(n_reached_, n);
        changed_.notify_all();
    }

    void wait(uint64_t n) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return n_reached_ >= n; });
    }

  private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    uint64_t                n_recorded_ = 0;
    uint64_t                n_reached_  = 0;
};

} // namespace async_device
