// When the next small copy is due: copies of weights that were asked for before would hold it up (stream.h).
//
// Tokens are alike: what passed the last times between two moments of a phase is what will pass this time.

#pragma once

#include <chrono>

namespace oallama {

using Clock = std::chrono::steady_clock;
using Time  = Clock::time_point;

inline Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// From one moment to another, which come round in turns.
class Interval {
  public:
    void begin() {
        begun_   = Clock::now();
        running_ = true;
    }

    void end() {
        if (!running_) {
            return;
        }
        const double seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
        seconds_             = known_ ? seconds_ + (seconds - seconds_) / n_remembered : seconds;
        known_               = true;
        running_             = false;
    }

    bool known() const { return known_; }

    Clock::duration length() const { return to_duration(seconds_); }

    // When it will end that has begun.
    Time due() const { return known_ ? begun_ + length() : Time::max(); }

  private:
    static constexpr double n_remembered = 4; // the last times weigh as much as the ones before together

    Time   begun_;
    double seconds_ = 0.0;
    bool   known_   = false;
    bool   running_ = false;
};

// The moments of a phase after which nothing small is sent for a while.
struct Pace {
    Interval compute;              // from its own activations to its end
    Interval rest;                 // from its end to the next phase's activations
    Interval device;               // from an input that the device still computes to the next phase's activations
    bool     feeds_device = false; // llama.cpp sends its result to the device as soon as it has ended
    bool     lifts        = false; // its result is sent to the device when the host has computed it

    // When the next small copy is due, seen from where its own were sent.
    Time after_send() const {
        const Time end = compute.due();
        return feeds_device || lifts || end == Time::max() ? end : rest.known() ? end + rest.length() : Time::max();
    }
};

} // namespace oallama
