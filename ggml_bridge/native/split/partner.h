// The device that works beside the CPU.

#pragma once

#include "split_program.h"
#include "stream.h"

namespace oallama {

// The device side of a context: a stream of its own, memory for activations, and host memory that copies go through.
class Partner {
  public:
    explicit Partner(ggml_backend_dev_t device); // throws OALLAMA_FAILED
    ~Partner();

    Partner(const Partner &)             = delete;
    Partner & operator=(const Partner &) = delete;

    ggml_backend_dev_t device() const { return device_; }

    ggml_backend_t backend() const { return backend_.get(); }

    // Gives a program's device tensors their memory, which all programs share since one runs at a time. True where that
    // memory moved: then every other program's tensors are void. Throws OALLAMA_NO_MEMORY, and then they are as well.
    // slot: of the ring, for the first block that it streams.
    bool allocate(Program & program, size_t slot);

    // Marks what is queued now, to be waited for. False: the device has no events.
    bool mark();
    void await_mark() const;

    char * staging() const { return staging_base_; }

    bool pinned() const { return pinned_; }

    // Whether a call that fetches a result returns only when it is there: so it is from CUDA to memory that is not
    // pinned.
    bool fetch_blocks() const { return !pinned_ && ggml_backend_dev_host_buffer_type(device_) != nullptr; }

    // Whether a host tensor lies in memory that the device reads without help.
    bool is_pinned(const ggml_tensor * tensor) const;

    bool streams() const { return stream_ != nullptr; }

    Stream & stream() const { return *stream_; } // where something is streamed

  private:
    void grow_staging(size_t size);
    void place_streamed(Program & program, size_t slot);

    ggml_backend_dev_t device_;
    BackendPtr         backend_;
    GallocrPtr         compute_;
    size_t             compute_bytes_ = 0;
    EventPtr           mark_; // NULL: the device has no events
    BufferPtr          staging_;
    char *             staging_base_ = nullptr;
    bool               pinned_       = false;

    std::unique_ptr<Stream> stream_; // NULL: nothing was streamed yet
};

} // namespace oallama
