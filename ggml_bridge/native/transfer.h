// Copies between host memory and a device.

#pragma once

#include "support.h"

namespace bridge {

// Host memory to copy from or to: pageable, or the device's pinned kind.
class HostMemory {
  public:
    HostMemory(ggml_backend_dev_t device, bool pinned, int64_t n_bytes); // throws OALLAMA_UNSUPPORTED: no pinned memory

    uint8_t *             base() const { return base_; }
    ggml_backend_buffer_t buffer() const { return buffer_.get(); }

  private:
    std::vector<uint8_t> pageable_;
    BufferPtr            buffer_;
    uint8_t *            base_ = nullptr;
};

// Whether the device has so many bytes of pinned host memory.
bool pins(ggml_backend_dev_t device, int64_t n_bytes);

// Bytes of host memory that a Transfer of n_bytes copies from or to, one piece after the other.
int64_t region_of(int64_t n_bytes);

// One copy at a time, on a stream of its own, queued as a whole or in pieces. To the device: what a copy adds to a
// stream whose result is read back anyway, since over RPC only an answer proves that the bytes have arrived. From the
// device: the whole time.
class Transfer : public gb_timer {
  public:
    Transfer(ggml_backend_dev_t device, bool to_device, bool pinned, int64_t n_bytes); // whole
    Transfer(ggml_backend_dev_t device, bool to_device, bool pinned, int64_t n_bytes, int64_t piece_bytes);

    double  run_once() override;
    int64_t n_bytes() const { return n_bytes_; }

    // The two halves of a copy, each with its seconds: until the call that begins it has returned, and until everything
    // is done and, to the device, read back.
    double begin();
    double finish();

    double close_seconds() const { return close_seconds_; } // least yet of a closing read; 0 from the device

  private:
    void copy();

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

// For how long a copy to the device holds up the thread that asks for it.
class Issue : public gb_timer {
  public:
    Issue(ggml_backend_dev_t device, bool pinned, int64_t n_bytes)
        : transfer_(device, /*to_device=*/true, pinned, n_bytes) {}

    double run_once() override;

  private:
    Transfer transfer_;
};

// Seconds until a kernel has computed with n_bytes of pinned host memory and its result is on the host. The bytes are
// copied to the device first, or the kernel reads them where they are.
class Input : public gb_timer {
  public:
    Input(ggml_backend_dev_t device, bool in_place, int64_t n_bytes);

    double run_once() override;

  private:
    bool          in_place_;
    HostMemory    host_;
    BackendPtr    backend_;
    ContextPtr    ctx_;
    ggml_tensor * input_;
    ggml_tensor * result_;
    ggml_cgraph * graph_;
    BufferPtr     buffer_;
    float         last_ = 0.0F; // of the input; other in every run
};

// Share of a copy under way that a result of another stream of the device waits for, 0 to 1.
double copy_wait(ggml_backend_dev_t device, bool pinned, int64_t n_bytes);

// Samples of a small copy to the device that is begun while pieces of a large one are queued on another stream; no
// bytes: it is begun alone.
std::vector<gb_copy_beside_sample> copy_beside(ggml_backend_dev_t device, bool pinned, int64_t large_bytes,
                                               int64_t piece_bytes, int64_t small_bytes, int64_t n);

// The same for a kernel that computes with n_bytes of pinned host memory: copied before, or read in place.
std::vector<gb_copy_beside_sample> input_beside(ggml_backend_dev_t device, bool in_place, int64_t large_bytes,
                                                int64_t piece_bytes, int64_t small_bytes, int64_t n);

} // namespace bridge
