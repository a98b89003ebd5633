// Copies between host memory and a device: how long they take, what they hold up, and how computing at the same time
// shares with them.

#include <algorithm>
#include <cstring>
#include <limits>

#include "contention.h"
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
// stream whose result is read back anyway, since over RPC only an answer proves that the bytes have arrived.
class Transfer : public gb_timer {
  public:
    Transfer(ggml_backend_dev_t device, gb_transfer_kind kind, bool pinned, int64_t n_bytes,
             int64_t piece_bytes = max_bytes)
        : kind_(kind), to_device_(kind != GB_FROM_DEVICE), n_bytes_(n_bytes), piece_bytes_(piece_bytes),
          n_slots_(slots_for(n_bytes)), host_(device, pinned, n_bytes * n_slots_), backend_(init_backend(device)),
          ctx_(new_context(1)), close_seconds_(to_device_ ? std::numeric_limits<double>::infinity() : 0.0) {
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
        // the clock's resolution bounds it from below
        return std::max(kind_ == GB_ISSUE ? begun : begun + finished - close_seconds_, 1e-9);
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
    gb_transfer_kind kind_;
    bool             to_device_;
    int64_t          n_bytes_;
    int64_t          piece_bytes_;
    int64_t          n_slots_;
    int64_t          next_slot_ = 0;
    HostMemory       host_;
    BackendPtr       backend_;
    ContextPtr       ctx_;
    BufferPtr        buffer_;
    ggml_tensor *    tensor_    = nullptr;
    uint8_t          last_byte_ = 0;
    double           close_seconds_;
};

// Share of a copy under way that a result of another stream of the device waits for, 0 to 1.
double copy_wait(ggml_backend_dev_t device, bool pinned, int64_t n_bytes) {
    constexpr int n_tries = 9;
    Transfer      transfer(device, GB_TO_DEVICE, pinned, n_bytes);
    const auto    launch = new_launch(device, /*n_threads=*/1);

    // The least of each, as all that other programs do is to make it longer. From before the call on: after it, this
    // thread may have to wait for a core until a thread of the driver is done with the copy.
    double alone  = launch_seconds(*launch);
    double called = transfer.begin();
    double copied = called + transfer.finish();
    double waited = copied + alone;
    for (int i = 0; i < n_tries; i++) {
        alone                 = std::min(alone, launch->run_once());
        const double begun    = transfer.begin();
        const double finished = transfer.finish();
        called                = std::min(called, begun);
        copied                = std::min(copied, begun + finished - transfer.close_seconds());
        const double before   = seconds_now();
        transfer.begin();
        launch->run_once();
        waited = std::min(waited, seconds_now() - before);
        transfer.finish();
    }
    const double under_way = copied - called; // of a copy that is over with its call there is nothing to wait for
    return under_way > alone ? std::clamp((waited - called - alone) / under_way, 0.0, 1.0) : 0.0;
}

Work work_of(MulMat & mul_mat) {
    return {[&] { mul_mat.begin_pass(); }, [&] { mul_mat.finish_passes(); }, mul_mat.pass_bytes()};
}

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_pins(const char * device, int64_t n_bytes, int32_t * pinned) {
    return guarded([&] {
        require(n_bytes > 0, "a number of bytes is needed");
        *pinned = oallama::new_pinned(find_device(device), static_cast<size_t>(n_bytes)) != nullptr ? 1 : 0;
    });
}

int gb_transfer_new(const char * device, gb_transfer_kind kind, int32_t pinned, int64_t n_bytes, int64_t piece_bytes,
                    gb_timer ** timer) {
    return guarded([&] { *timer = new Transfer(find_device(device), kind, pinned != 0, n_bytes, piece_bytes); });
}

int gb_transfer_begin(gb_timer * timer, double * seconds) {
    return guarded([&] { *seconds = timer_of<Transfer>(timer).begin(); });
}

int gb_transfer_finish(gb_timer * timer, double * seconds) {
    return guarded([&] { *seconds = timer_of<Transfer>(timer).finish(); });
}

int gb_copy_wait(const char * device, int32_t pinned, int64_t n_bytes, double * share) {
    return guarded([&] { *share = copy_wait(find_link(device), pinned != 0, n_bytes); });
}

int gb_link_contention(const gb_mul_mat_params * first, const char * device, int64_t chunk_bytes, double seconds,
                       gb_contention * result) {
    return guarded([&] {
        ggml_backend_dev_t to = find_link(device);
        MulMat             mul_mats(*first);
        const bool         pinned =
            oallama::new_pinned(to, static_cast<size_t>(chunk_bytes * slots_for(chunk_bytes))) != nullptr;
        Transfer   copies(to, GB_TO_DEVICE, pinned, chunk_bytes);
        const Work copying = {[&] { copies.begin(); }, [&] { copies.finish(); }, static_cast<double>(chunk_bytes)};
        *result = measure_contention(work_of(mul_mats), copying, !is_cpu(find_device(first->device)), seconds);
    });
}

int gb_compute_contention(const gb_mul_mat_params * first, const gb_mul_mat_params * second, double seconds,
                          gb_contention * result) {
    return guarded([&] {
        MulMat one(*first);
        MulMat other(*second);
        *result = measure_contention(work_of(one), work_of(other), !is_cpu(find_device(first->device)), seconds);
    });
}
