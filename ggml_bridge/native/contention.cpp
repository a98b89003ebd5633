#include "contention.h"

#include <algorithm>
#include <cmath>

namespace bridge {

namespace {

constexpr double  parts      = 16.0; // of the time to measure: at least one of them is the first kind's in a round
constexpr double  outlasting = 1.5;  // seconds of the second kind for each of the first
constexpr int64_t most_units = 4096;
constexpr size_t  min_rounds = 3;

// Seconds of so much of both kinds, each alone and then together.
struct Round {
    double first;
    double second;
    double with_second; // of the first, beside the second
    double left;        // of the second's time alone, when the first began beside it
    double waited;      // for the second, once the first was done

    double first_share() const { return first / with_second; }

    // One queue: the first begins when the second is done.
    bool first_waits() const { return with_second > 0.9 * (first + left); }

    // True where the second holds its caller up until most of it is done: it takes turns with the first, and loses
    // nothing by it.
    bool takes_turns() const { return left < 0.5 * with_second; }

    // The first was not beside more of it than was left.
    double second_share() const {
        return takes_turns() ? 1.0 : std::clamp((left - waited) / std::min(left, with_second), 0.0, 1.0);
    }
};

class Pair {
  public:
    Pair(Work first, Work second, bool on_device, const std::function<double()> & clock)
        : first_(std::move(first)), second_(std::move(second)), on_device_(on_device), clock_(clock) {}

    gb_contention measure(double seconds) {
        require(seconds > 0.0 && seconds <= 60.0, "the time to measure must be up to a minute");
        const double       start = clock_();
        std::vector<Round> rounds;
        choose_amounts(seconds / parts);
        do {
            rounds.push_back(run());
        } while (rounds.size() < min_rounds || clock_() - start < 3.0 * seconds);

        const auto median_of = [&rounds](auto && value) {
            std::vector<double> values;
            for (const Round & round : rounds) {
                values.push_back(value(round));
            }
            return median(std::move(values));
        };
        gb_contention result = {};
        result.first_alone = first_.bytes * static_cast<double>(n_first_) / median_of([](auto & r) { return r.first; });
        result.second_alone =
            second_.bytes * static_cast<double>(n_second_) / median_of([](auto & r) { return r.second; });
        result.first_with_second = result.first_alone * median_of([](auto & r) { return r.first_share(); });
        result.second_with_first = result.second_alone * median_of([](auto & r) { return r.second_share(); });
        return result;
    }

  private:
    static void begin(const Work & work, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            work.begin_unit();
        }
    }

    double seconds_of(const Work & work, int64_t n) const {
        const double start = clock_();
        begin(work, n);
        work.finish();
        return clock_() - start;
    }

    Round run() {
        Round round        = {};
        round.first        = seconds_of(first_, n_first_);
        round.second       = seconds_of(second_, n_second_);
        const double start = clock_();
        if (on_device_) {
            begin(first_, n_first_);
        }
        begin(second_, n_second_);
        const double queued = on_device_ ? start : clock_();
        if (!on_device_) {
            begin(first_, n_first_);
        }
        first_.finish();
        const double done = clock_();
        second_.finish();
        round.with_second = done - queued;
        round.left        = std::max(0.0, round.second - (queued - start));
        round.waited      = clock_() - done;
        return round;
    }

    // least: seconds of the first in a round.
    void choose_amounts(double least) {
        const auto unit  = [this](const Work & work) { return std::min(seconds_of(work, 1), seconds_of(work, 1)); };
        const auto units = [](double wanted, double each) {
            return static_cast<int64_t>(std::clamp(std::ceil(wanted / each), 1.0, static_cast<double>(most_units)));
        };
        const double first_unit  = unit(first_);
        const double second_unit = unit(second_);
        // a single unit of the second must not be so long that the first hardly shows beside it
        n_first_  = units(std::max(least, second_unit / (2.0 * outlasting)), first_unit);
        n_second_ = units(outlasting * static_cast<double>(n_first_) * first_unit, second_unit);

        // more of it where it slows the first down so much that it is over too soon, unless no more can be queued
        for (Round round = run(); round.waited < 0.2 * round.with_second && !round.first_waits();) {
            if (2 * n_second_ > most_units || round.second > 8.0 * round.first) {
                return;
            }
            n_second_ *= 2;
            const Round more = run();
            if (more.left <= 1.5 * round.left) {
                n_second_ /= 2;
                return;
            }
            round = more;
        }
    }

    Work                            first_;
    Work                            second_;
    bool                            on_device_;
    const std::function<double()> & clock_;
    int64_t                         n_first_  = 1;
    int64_t                         n_second_ = 1;
};

} // namespace

gb_contention measure_contention(Work first, Work second, bool on_device, double seconds,
                                 const std::function<double()> & clock) {
    return Pair(std::move(first), std::move(second), on_device, clock).measure(seconds);
}

} // namespace bridge
