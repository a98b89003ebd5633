// Two kinds of work at the same time, mul-mats and copies to a device, share memory, cores or a queue: how fast is each
// alone, and both at once?
//
// Both are asked for by one thread, as the split backend does it: it queues work on the device, computes with all
// threads, then waits. So much is queued that the device is still at it when the first kind is done. What the first
// lost is by how much longer it took than alone; what the second lost meanwhile, by how much later than alone it was
// done.

#include <algorithm>
#include <cmath>
#include <vector>

#include "mul_mat.h"
#include "transfer.h"

namespace bridge {

namespace {

constexpr double  parts      = 16.0; // of the time to measure: at least one of them is the first kind's in a round
constexpr double  outlasting = 1.5;  // seconds of the second kind for each of the first
constexpr int64_t most_units = 4096;
constexpr size_t  min_rounds = 3;

// One kind of work, in units that are all alike.
class Work {
  public:
    virtual ~Work()              = default;
    virtual void   begin()       = 0; // one unit; a device that works by itself is not done with it on return
    virtual void   finish()      = 0; // waits for all that was begun
    virtual double bytes() const = 0; // of one unit: multiplied or copied

    void begin(int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            begin();
        }
    }

    double seconds(int64_t n) {
        const double start = seconds_now();
        begin(n);
        finish();
        return seconds_now() - start;
    }
};

class MulMatWork : public Work {
  public:
    explicit MulMatWork(const gb_mul_mat_params & params) : mul_mat_(params) {}

    using Work::begin;
    void   begin() override { mul_mat_.begin_pass(); }
    void   finish() override { mul_mat_.finish_passes(); }
    double bytes() const override { return mul_mat_.pass_bytes(); }

  private:
    MulMat mul_mat_;
};

class CopyWork : public Work {
  public:
    CopyWork(ggml_backend_dev_t device, int64_t chunk_bytes)
        : transfer_(device, /*to_device=*/true, pins(device, region_of(chunk_bytes)), chunk_bytes) {}

    using Work::begin;
    void   begin() override { transfer_.begin(); }
    void   finish() override { transfer_.finish(); }
    double bytes() const override { return static_cast<double>(transfer_.n_bytes()); }

  private:
    Transfer transfer_;
};

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

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

    // What holds its caller up until most of it is done takes turns with the first, and loses nothing by it.
    bool takes_turns() const { return left < 0.5 * with_second; }

    // The first was not beside more of it than was left.
    double second_share() const {
        return takes_turns() ? 1.0 : std::clamp((left - waited) / std::min(left, with_second), 0.0, 1.0);
    }
};

class Pair {
  public:
    // on_device: the first works by itself, so that it can be queued before the second.
    Pair(Work & first, Work & second, bool on_device) : first_(first), second_(second), on_device_(on_device) {}

    gb_sharing_result measure(double seconds) {
        require(seconds > 0.0 && seconds <= 60.0, "the time to measure must be up to a minute");
        const double       start = seconds_now();
        std::vector<Round> rounds;
        choose_amounts(seconds / parts);
        do {
            rounds.push_back(run());
        } while (rounds.size() < min_rounds || seconds_now() - start < 3.0 * seconds);

        const auto median_of = [&rounds](auto && value) {
            std::vector<double> values;
            for (const Round & round : rounds) {
                values.push_back(value(round));
            }
            return median(std::move(values));
        };
        gb_sharing_result result = {};
        result.first_alone =
            first_.bytes() * static_cast<double>(n_first_) / median_of([](auto & r) { return r.first; });
        result.second_alone =
            second_.bytes() * static_cast<double>(n_second_) / median_of([](auto & r) { return r.second; });
        result.first_with_second = result.first_alone * median_of([](auto & r) { return r.first_share(); });
        result.second_with_first = result.second_alone * median_of([](auto & r) { return r.second_share(); });
        return result;
    }

  private:
    Round run() {
        Round round        = {};
        round.first        = first_.seconds(n_first_);
        round.second       = second_.seconds(n_second_);
        const double start = seconds_now();
        if (on_device_) {
            first_.begin(n_first_);
        }
        second_.begin(n_second_);
        const double queued = on_device_ ? start : seconds_now();
        if (!on_device_) {
            first_.begin(n_first_);
        }
        first_.finish();
        const double done = seconds_now();
        second_.finish();
        round.with_second = done - queued;
        round.left        = std::max(0.0, round.second - (queued - start));
        round.waited      = seconds_now() - done;
        return round;
    }

    // least: seconds of the first in a round.
    void choose_amounts(double least) {
        const auto unit  = [](Work & work) { return std::min(work.seconds(1), work.seconds(1)); };
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

    Work &  first_;
    Work &  second_;
    bool    on_device_;
    int64_t n_first_  = 1;
    int64_t n_second_ = 1;
};

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_share_link(const gb_mul_mat_params * first, const char * device, int64_t chunk_bytes, double seconds,
                  gb_sharing_result * result) {
    return guarded([&] {
        require(first != nullptr && result != nullptr, "no room for the result");
        ggml_backend_dev_t to = find_device(device);
        require(!is_cpu(to), "the CPU has no link to itself");
        MulMatWork mul_mats(*first);
        CopyWork   copies(to, chunk_bytes);
        *result = Pair(mul_mats, copies, !is_cpu(find_device(first->device))).measure(seconds);
    });
}

int gb_share_compute(const gb_mul_mat_params * first, const gb_mul_mat_params * second, double seconds,
                     gb_sharing_result * result) {
    return guarded([&] {
        require(first != nullptr && second != nullptr && result != nullptr, "no room for the result");
        MulMatWork one(*first);
        MulMatWork other(*second);
        *result = Pair(one, other, !is_cpu(find_device(first->device))).measure(seconds);
    });
}
