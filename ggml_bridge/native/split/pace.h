// When the next small copy is due: copies of weights that were asked for before would hold it up (stream.h).
//
// Tokens are alike: what passed the last times between two small copies is what will pass this time.

#pragma once

#include <chrono>

namespace oallama {

using Clock = std::chrono::steady_clock;
using Time  = Clock::time_point;

inline Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// From one small copy to the next: the mean of the last times. A time far above it is a pause, such as a user's
// between two requests, and changes nothing; the second in a row is how long it takes now.
class Interval {
  public:
    void begin(Time now = Clock::now()) { begun_ = now; }

    void end(Time now = Clock::now()) {
        const double seconds = std::chrono::duration<double>(now - begun_).count();
        paused_              = known_ && !paused_ && seconds > pause * seconds_;
        if (!paused_) {
            seconds_ = known_ ? seconds_ + (seconds - seconds_) / n_remembered : seconds;
            known_   = true;
        }
    }

    // When it will end that has begun; the first time, never.
    Time due() const { return known_ ? begun_ + to_duration(seconds_) : Time::max(); }

  private:
    static constexpr double n_remembered = 4; // the last times weigh as much as the ones before together
    static constexpr double pause        = 4; // times the mean

    Time   begun_;
    double seconds_ = 0.0;
    bool   known_   = false;
    bool   paused_  = false; // the last time
};

// After each small copy of a phase, until the next one.
struct Pace {
    Interval sent;                 // its activations
    Interval lifted;               // what the host computed, where the result is made whole on the device
    Interval fed;                  // its result, by llama.cpp, which has told the device since to compute with it
    bool     feeds_device = false; // the last one is sent as soon as the phase has ended
};

// Which small copy was the last one.
class Turns {
  public:
    // It has been made; NULL: the next one is about to be.
    void made(Interval * after) {
        if (after_ != nullptr) {
            after_->end();
        }
        after_ = after;
        if (after_ != nullptr) {
            after_->begin();
        }
    }

    // Nothing is learnt from the last one.
    void forget() { after_ = nullptr; }

    bool is_last(const Interval & after) const { return after_ == &after; }

    // When the next one is due; where nothing is known of the last one, at any moment.
    Time due() const { return after_ != nullptr ? after_->due() : Time::min(); }

  private:
    Interval * after_ = nullptr;
};

} // namespace oallama
