// Copies between host memory and a device.

#include <algorithm>
#include <cstring>
#include <limits>

#include "session.h"
#include "transfer.h"

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

} // namespace

int64_t region_of(int64_t n_bytes) {
    return n_bytes * slots_for(n_bytes);
}

//
// HostMemory
//

HostMemory::HostMemory(ggml_backend_dev_t device, bool pinned, int64_t n_bytes) {
    if (!pinned) {
        pageable_.assign(static_cast<size_t>(n_bytes), 1);
        base_ = pageable_.data();
        return;
    }
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(device);
    if (buft == nullptr) {
        throw Error(OALLAMA_UNSUPPORTED,
                    std::string("device ") + ggml_backend_dev_name(device) + " has no pinned host memory");
    }
    buffer_ = alloc_buffer(buft, n_bytes);
    if (ggml_backend_buffer_get_type(buffer_.get()) != buft) { // CUDA's and Vulkan's give plain memory then
        throw Error(OALLAMA_UNSUPPORTED, std::string("device ") + ggml_backend_dev_name(device) +
                                             " has no pinned host memory left for " + std::to_string(n_bytes) +
                                             " bytes");
    }
    base_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()));
    std::memset(base_, 1, static_cast<size_t>(n_bytes));
}

bool pins(ggml_backend_dev_t device, int64_t n_bytes) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(device);
    if (buft == nullptr) {
        return false;
    }
    const BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, static_cast<size_t>(n_bytes)));
    return buffer && ggml_backend_buffer_get_type(buffer.get()) == buft;
}

//
// Transfer
//

Transfer::Transfer(ggml_backend_dev_t device, bool to_device, bool pinned, int64_t n_bytes)
    : Transfer(device, to_device, pinned, n_bytes, n_bytes) {}

Transfer::Transfer(ggml_backend_dev_t device, bool to_device, bool pinned, int64_t n_bytes, int64_t piece_bytes)
    : to_device_(to_device), n_bytes_(n_bytes), piece_bytes_(piece_bytes), n_slots_(slots_for(n_bytes)),
      host_(device, pinned, n_bytes * n_slots_), backend_(init_backend(device)), ctx_(new_context(1)),
      close_seconds_(to_device ? std::numeric_limits<double>::infinity() : 0.0) {
    require(piece_bytes > 0, "a piece of a transfer must have bytes");
    // floats where they fit: an emulated device writes whole numbers, and only reads what weights are made of
    constexpr auto float_bytes = static_cast<int64_t>(sizeof(float));
    tensor_ = n_bytes % float_bytes == 0 ? ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, n_bytes / float_bytes)
                                         : ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, n_bytes);
    buffer_ = alloc_tensors(ctx_.get(), ggml_backend_dev_buffer_type(device));

    copy();
    const int n_tries = to_device_ ? 10 : 1;
    for (int i = 0; i < n_tries; i++) {
        finish();
    }
}

void Transfer::copy() {
    uint8_t * slot = host_.base() + next_slot_ * n_bytes_;
    next_slot_     = (next_slot_ + 1) % n_slots_;
    for (int64_t begin = 0, n = 0; begin < n_bytes_; begin += n) {
        n                   = std::min(piece_bytes_, n_bytes_ - begin);
        const size_t offset = static_cast<size_t>(begin);
        const size_t size   = static_cast<size_t>(n);
        if (to_device_) {
            ggml_backend_tensor_set_async(backend_.get(), tensor_, slot + begin, offset, size);
        } else {
            ggml_backend_tensor_get_async(backend_.get(), tensor_, slot + begin, offset, size);
        }
    }
}

double Transfer::begin() {
    const double start = seconds_now();
    copy();
    return seconds_now() - start;
}

double Transfer::finish() {
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

double Transfer::run_once() {
    const double begun    = begin();
    const double finished = finish();
    return std::max(begun + finished - close_seconds_, 1e-9); // the clock's resolution bounds it from below
}

//
// what a copy holds up
//

double Issue::run_once() {
    const double seconds = transfer_.begin();
    transfer_.finish();
    return std::max(seconds, 1e-9);
}

double copy_wait(ggml_backend_dev_t device, bool pinned, int64_t n_bytes) {
    require(!is_cpu(device), "the CPU has no link to itself");
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
// what a small copy waits for
//

Input::Input(ggml_backend_dev_t device, bool in_place, int64_t n_bytes)
    : in_place_(in_place), host_(device, /*pinned=*/true, n_bytes), backend_(init_backend(device)),
      ctx_(new_context(2, 1)), input_(ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, n_bytes / int64_t{sizeof(float)})),
      result_(ggml_scale(ctx_.get(), input_, 1.0F)), graph_(new_graph(ctx_.get(), 1)) {
    if (in_place) {
        ggml_backend_tensor_alloc(host_.buffer(), input_, host_.base());
    }
    ggml_build_forward_expand(graph_, result_);
    buffer_ = alloc_tensors(ctx_.get(), ggml_backend_dev_buffer_type(device));
    run_once();
}

double Input::run_once() {
    const size_t end = ggml_nbytes(input_) - sizeof last_;
    last_ += 1.0F;
    std::memcpy(host_.base() + end, &last_, sizeof last_);
    const double start = seconds_now();
    if (!in_place_) {
        ggml_backend_tensor_set_async(backend_.get(), input_, host_.base(), 0, ggml_nbytes(input_));
    }
    const ggml_status status = ggml_backend_graph_compute_async(backend_.get(), graph_);
    float             found  = 0.0F;
    ggml_backend_tensor_get_async(backend_.get(), result_, &found, end, sizeof found);
    ggml_backend_synchronize(backend_.get());
    const double seconds = seconds_now() - start;
    if (status != GGML_STATUS_SUCCESS || (in_place_ && found != last_)) {
        throw Error(OALLAMA_FAILED, "a kernel did not read what the host had written" + ggml_reason());
    }
    return seconds;
}

namespace {

std::vector<gb_copy_beside_sample> beside(ggml_backend_dev_t device, bool pinned, int64_t large_bytes,
                                          int64_t piece_bytes, gb_timer & small, int64_t n) {
    require(large_bytes >= 0 && n >= 0, "sizes and counts must not be negative");
    std::unique_ptr<Transfer> large;
    if (large_bytes > 0) {
        large = std::make_unique<Transfer>(device, /*to_device=*/true, pinned, large_bytes, piece_bytes);
    }
    std::vector<gb_copy_beside_sample> samples(static_cast<size_t>(n));
    for (gb_copy_beside_sample & sample : samples) {
        sample.queue = large ? large->begin() : 0.0;
        sample.small = small.run_once();
        sample.rest  = large ? large->finish() : 0.0;
    }
    return samples;
}

} // namespace

std::vector<gb_copy_beside_sample> copy_beside(ggml_backend_dev_t device, bool pinned, int64_t large_bytes,
                                               int64_t piece_bytes, int64_t small_bytes, int64_t n) {
    require(!is_cpu(device), "the CPU has no link to itself");
    Transfer small(device, /*to_device=*/true, pinned, small_bytes);
    return beside(device, pinned, large_bytes, piece_bytes, small, n);
}

std::vector<gb_copy_beside_sample> input_beside(ggml_backend_dev_t device, bool in_place, int64_t large_bytes,
                                                int64_t piece_bytes, int64_t small_bytes, int64_t n) {
    require(!is_cpu(device), "the CPU has no link to itself");
    require(small_bytes > 0 && small_bytes % int64_t{sizeof(float)} == 0, "an input is made of whole floats");
    const char * reg = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    if (in_place && std::strcmp(reg, "CUDA") != 0) {
        throw Error(OALLAMA_UNSUPPORTED, std::string("kernels of ") + reg + " are not known to read host memory");
    }
    Input small(device, in_place, small_bytes);
    return beside(device, /*pinned=*/true, large_bytes, piece_bytes, small, n);
}

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_pins(const char * device, int64_t n_bytes, int32_t * pinned) {
    return guarded([&] {
        require(pinned != nullptr && n_bytes > 0, "a number of bytes and room for the result are needed");
        *pinned = pins(find_device(device), n_bytes) ? 1 : 0;
    });
}

int gb_transfer_new(const char * device, int32_t host_to_device, int32_t pinned, int64_t n_bytes, gb_timer ** timer) {
    return guarded([&] {
        require(timer != nullptr, "no room for the result");
        *timer = new Transfer(find_device(device), host_to_device != 0, pinned != 0, n_bytes);
    });
}

int gb_issue_new(const char * device, int32_t pinned, int64_t n_bytes, gb_timer ** timer) {
    return guarded([&] {
        require(timer != nullptr, "no room for the result");
        *timer = new Issue(find_device(device), pinned != 0, n_bytes);
    });
}

int gb_copy_wait(const char * device, int32_t pinned, int64_t n_bytes, double * share) {
    return guarded([&] {
        require(share != nullptr, "no room for the result");
        *share = copy_wait(find_device(device), pinned != 0, n_bytes);
    });
}

int gb_copy_beside(const char * device, int32_t pinned, int64_t large_bytes, int64_t piece_bytes, int64_t small_bytes,
                   int64_t n, gb_copy_beside_sample * samples) {
    return guarded([&] {
        require(samples != nullptr, "no room for the result");
        const std::vector<gb_copy_beside_sample> found =
            copy_beside(find_device(device), pinned != 0, large_bytes, piece_bytes, small_bytes, n);
        std::copy(found.begin(), found.end(), samples);
    });
}

int gb_input_beside(const char * device, int32_t in_place, int64_t large_bytes, int64_t piece_bytes,
                    int64_t small_bytes, int64_t n, gb_copy_beside_sample * samples) {
    return guarded([&] {
        require(samples != nullptr, "no room for the result");
        const std::vector<gb_copy_beside_sample> found =
            input_beside(find_device(device), in_place != 0, large_bytes, piece_bytes, small_bytes, n);
        std::copy(found.begin(), found.end(), samples);
    });
}
