// Copies between host memory and a device: how long they take, what they hold up, and what computing at the same time
// loses by them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "mul_mat.h"

namespace bridge {

namespace {

// Host memory is read in turn from a region of this size, so that it comes from DRAM and not from a cache.
constexpr int64_t region_bytes = 128 << 20;

// RPC carries a tensor's dimensions in 32 bits.
constexpr int64_t max_bytes = int64_t{1} << 31;

int64_t slots_for(int64_t n_bytes) {
    require(n_bytes > 0 && n_bytes <= max_bytes, "a transfer must be of 1 byte to 2 GiB");
    return std::clamp<int64_t>(region_bytes / n_bytes, 1, 1024);
}

ggml_backend_dev_t find_link(const char * name) {
    ggml_backend_dev_t device = find_device(name);
    require(!is_cpu(device), "the CPU has no link to itself");
    return device;
}

//
// copies
//

// Host memory to copy from or to: pageable, or the device's pinned kind.
struct HostMemory {
    HostMemory(ggml_backend_dev_t device, bool pinned, int64_t n_bytes) {
        if (!pinned) {
            pageable.assign(static_cast<size_t>(n_bytes), 1);
            base = pageable.data();
            return;
        }
        buffer = oallama::new_pinned(device, static_cast<size_t>(n_bytes));
        if (!buffer) {
            const bool used_up = ggml_backend_dev_host_buffer_type(device) != nullptr;
            throw Error(OALLAMA_UNSUPPORTED, std::string("device ") + ggml_backend_dev_name(device) +
                                                 " has no pinned host memory" +
                                                 (used_up ? " left for " + std::to_string(n_bytes) + " bytes" : ""));
        }
        base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer.get()));
        std::memset(base, 1, static_cast<size_t>(n_bytes));
    }

    std::vector<uint8_t> pageable;
    BufferPtr            buffer;
    uint8_t *            base = nullptr;
};

// One copy at a time, on a stream of its own, queued as a whole or in pieces. To the device: what a copy adds to a
// stream whose result is read back anyway, since over RPC only an answer proves that the bytes have arrived. From the
// device: the whole time.
class Transfer : public gb_timer {
  public:
    Transfer(ggml_backend_dev_t device, bool to_device, bool pinned, int64_t n_bytes, int64_t piece_bytes = max_bytes)
        : to_device_(to_device), n_bytes_(n_bytes), piece_bytes_(piece_bytes), n_slots_(slots_for(n_bytes)),
          host_(device, pinned, n_bytes * n_slots_), backend_(init_backend(device)), ctx_(new_context(1)),
          close_seconds_(to_device ? std::numeric_limits<double>::infinity() : 0.0) {
        require(piece_bytes > 0, "a piece of a transfer must have bytes");
        // floats where they fit: an emulated device writes whole numbers, and only reads what weights are made of
        constexpr auto float_bytes = static_cast<int64_t>(sizeof(float));
        tensor_ = n_bytes % float_bytes == 0 ? ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, n_bytes / float_bytes)
                                             : ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, n_bytes);
        buffer_ = alloc_tensors(ctx_.get(), ggml_backend_dev_buffer_type(device));
        begin();
        const int n_tries = to_device_ ? 10 : 1;
        for (int i = 0; i < n_tries; i++) {
            finish();
        }
    }

    double run_once() override {
        const double begun    = begin();
        const double finished = finish();
        return std::max(begun + finished - close_seconds_, 1e-9); // the clock's resolution bounds it from below
    }

    // The two halves of a copy, each with its seconds: until the call that begins it has returned, and until everything
    // is done and, to the device, read back.
    double begin() {
        const double start = seconds_now();
        uint8_t *    slot  = host_.base + next_slot_ * n_bytes_;
        next_slot_         = (next_slot_ + 1) % n_slots_;
        for (int64_t at = 0; at < n_bytes_; at += piece_bytes_) {
            const auto offset = static_cast<size_t>(at);
            const auto size   = static_cast<size_t>(std::min(piece_bytes_, n_bytes_ - at));
            if (to_device_) {
                ggml_backend_tensor_set_async(backend_.get(), tensor_, slot + at, offset, size);
            } else {
                ggml_backend_tensor_get_async(backend_.get(), tensor_, slot + at, offset, size);
            }
        }
        return seconds_now() - start;
    }

    double finish() {
        const double start = seconds_now();
        if (to_device_) {
            ggml_backend_tensor_get_async(backend_.get(), tensor_, &last_byte_, static_cast<size_t>(n_bytes_ - 1), 1);
        }
        ggml_backend_synchronize(backend_.get());
        const double seconds = seconds_now() - start;
        // The least, as other programs and a copy that is waited for only add to the closing read.
        close_seconds_ = std::min(close_seconds_, seconds);
        return seconds;
    }

    double close_seconds() const { return close_seconds_; } // least yet of a closing read; 0 from the device

  private:
    bool          to_device_;
    int64_t       n_bytes_;
    int64_t       piece_bytes_;
    int64_t       n_slots_;
    int64_t       next_slot_ = 0;
    HostMemory    host_;
    BackendPtr    backend_;
    ContextPtr    ctx_;
    BufferPtr     buffer_;
    ggml_tensor * tensor_    = nullptr;
    uint8_t       last_byte_ = 0;
    double        close_seconds_;
};

//
// what a copy holds up
//

// For how long a copy to the device holds up the thread that asks for it.
class Issue : public gb_timer {
  public:
    Issue(ggml_backend_dev_t device, bool pinned, int64_t n_bytes) : transfer_(device, true, pinned, n_bytes) {}

    double run_once() override {
        const double seconds = transfer_.begin();
        transfer_.finish();
        return std::max(seconds, 1e-9);
    }

  private:
    Transfer transfer_;
};

// Share of a copy under way that a result of another stream of the device waits for, 0 to 1.
double copy_wait(ggml_backend_dev_t device, bool pinned, int64_t n_bytes) {
    constexpr int n_tries = 9;
    Transfer      transfer(device, /*to_device=*/true, pinned, n_bytes);
    Launch        launch(device, /*n_threads=*/1);

    // The least of each, as all that other programs do is to make it longer. From before the call on: after it, this
    // thread may have to wait for a core until a thread of the driver is done with the copy.
    double alone  = launch.median_seconds();
    double called = transfer.begin();
    double copied = called + transfer.finish();
    double waited = copied + alone;
    for (int i = 0; i < n_tries; i++) {
        alone                 = std::min(alone, launch.run_once());
        const double begun    = transfer.begin();
        const double finished = transfer.finish();
        called                = std::min(called, begun);
        copied                = std::min(copied, begun + finished - transfer.close_seconds());
        const double before   = seconds_now();
        transfer.begin();
        launch.run_once();
        waited = std::min(waited, seconds_now() - before);
        transfer.finish();
    }
    const double under_way = copied - called; // of a copy that is over with its call there is nothing to wait for
    return under_way > alone ? std::clamp((waited - called - alone) / under_way, 0.0, 1.0) : 0.0;
}

//
// two kinds of work at once
//
// Mul-mats and copies share memory, cores or a queue: how fast is each alone, and both at once? Both are asked for by
// one thread, as the split backend does it: it queues work on the device, computes with all threads, then waits. So
// much is queued that the device is still at it when the first kind is done. What the first lost is by how much longer
// it took than alone; what the second lost meanwhile, by how much later than alone it was done.
//

constexpr double  parts      = 16.0; // of the time to measure: at least one of them is the first kind's in a round
constexpr double  outlasting = 1.5;  // seconds of the second kind for each of the first
constexpr int64_t most_units = 4096;
constexpr size_t  min_rounds = 3;

// One kind of work, in units that are all alike.
struct Work {
    std::function<void()> begin_unit; // a device that works by itself is not done with it on return
    std::function<void()> finish;     // waits for all that was begun
    double                bytes;      // of one unit: multiplied or copied

    void begin(int64_t n) const {
        for (int64_t i = 0; i < n; i++) {
            begin_unit();
        }
    }

    double seconds(int64_t n) const {
        const double start = seconds_now();
        begin(n);
        finish();
        return seconds_now() - start;
    }
};

Work work_of(MulMat & mul_mat) {
    return {[&] { mul_mat.begin_pass(); }, [&] { mul_mat.finish_passes(); }, mul_mat.pass_bytes()};
}

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
    Pair(Work first, Work second, bool on_device)
        : first_(std::move(first)), second_(std::move(second)), on_device_(on_device) {}

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
        result.first_alone = first_.bytes * static_cast<double>(n_first_) / median_of([](auto & r) { return r.first; });
        result.second_alone =
            second_.bytes * static_cast<double>(n_second_) / median_of([](auto & r) { return r.second; });
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
        const auto unit  = [](const Work & work) { return std::min(work.seconds(1), work.seconds(1)); };
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

    Work    first_;
    Work    second_;
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

int gb_pins(const char * device, int64_t n_bytes, int32_t * pinned) {
    return guarded([&] {
        require(pinned != nullptr && n_bytes > 0, "a number of bytes and room for the result are needed");
        *pinned = oallama::new_pinned(find_device(device), static_cast<size_t>(n_bytes)) != nullptr ? 1 : 0;
    });
}

int gb_transfer_new(const char * device, int32_t host_to_device, int32_t pinned, int64_t n_bytes, gb_timer ** timer) {
    return new_timer(timer,
                     [&] { return new Transfer(find_device(device), host_to_device != 0, pinned != 0, n_bytes); });
}

int gb_issue_new(const char * device, int32_t pinned, int64_t n_bytes, gb_timer ** timer) {
    return new_timer(timer, [&] { return new Issue(find_device(device), pinned != 0, n_bytes); });
}

int gb_copy_wait(const char * device, int32_t pinned, int64_t n_bytes, double * share) {
    return guarded([&] {
        require(share != nullptr, "no room for the result");
        *share = copy_wait(find_link(device), pinned != 0, n_bytes);
    });
}

int gb_copy_beside(const char * device, int32_t pinned, int64_t large_bytes, int64_t piece_bytes, int64_t small_bytes,
                   int64_t n, gb_copy_beside_sample * samples) {
    return guarded([&] {
        require(samples != nullptr && large_bytes >= 0 && n >= 0, "sizes and counts must not be negative");
        ggml_backend_dev_t        to = find_link(device);
        Transfer                  small(to, /*to_device=*/true, pinned != 0, small_bytes);
        std::unique_ptr<Transfer> large;
        if (large_bytes > 0) {
            large = std::make_unique<Transfer>(to, /*to_device=*/true, pinned != 0, large_bytes, piece_bytes);
        }
        for (int64_t i = 0; i < n; i++) {
            samples[i].queue_s = large ? large->begin() : 0.0;
            samples[i].small_s = small.run_once();
            samples[i].rest_s  = large ? large->finish() : 0.0;
        }
    });
}

int gb_share_link(const gb_mul_mat_params * first, const char * device, int64_t chunk_bytes, double seconds,
                  gb_sharing_result * result) {
    return guarded([&] {
        require(first != nullptr && result != nullptr, "no room for the result");
        ggml_backend_dev_t to = find_link(device);
        MulMat             mul_mats(*first);
        const bool         pinned =
            oallama::new_pinned(to, static_cast<size_t>(chunk_bytes * slots_for(chunk_bytes))) != nullptr;
        Transfer   copies(to, /*to_device=*/true, pinned, chunk_bytes);
        const Work copying = {[&] { copies.begin(); }, [&] { copies.finish(); }, static_cast<double>(chunk_bytes)};
        *result            = Pair(work_of(mul_mats), copying, !is_cpu(find_device(first->device))).measure(seconds);
    });
}

int gb_share_compute(const gb_mul_mat_params * first, const gb_mul_mat_params * second, double seconds,
                     gb_sharing_result * result) {
    return guarded([&] {
        require(first != nullptr && second != nullptr && result != nullptr, "no room for the result");
        MulMat one(*first);
        MulMat other(*second);
        *result = Pair(work_of(one), work_of(other), !is_cpu(find_device(first->device))).measure(seconds);
    });
}
