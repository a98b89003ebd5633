// The host side of a context: ggml's CPU backend, its threads, and memory for what the host makes for itself.

#pragma once

#include "split_program.h"

namespace oallama {

class Host {
  public:
    Host(); // throws OALLAMA_FAILED without a CPU
    ~Host();

    Host(const Host &)             = delete;
    Host & operator=(const Host &) = delete;

    ggml_backend_t backend() const { return backend_.get(); }

    void set_n_threads(int n_threads);
    void set_abort_callback(ggml_abort_callback callback, void * data);

    // Memory for what a program makes on the host, which all programs share since one runs at a time. Pinned where the
    // device's copies begin and end there.
    void reserve(const Program & program);

    // Whether that memory is the device's pinned one.
    bool is_pinned(ggml_backend_dev_t device) const;

    // Gives a program's tensors their places in it, before each run.
    void place(const Program & program) const;

  private:
    BackendPtr         backend_;
    ggml_backend_reg_t reg_       = nullptr;
    ggml_threadpool *  pool_      = nullptr; // where ggml was built without OpenMP, whose threads are shared anyway
    int                n_threads_ = 0;
    BufferPtr          made_;                 // NULL: no program needed it yet
    ggml_backend_dev_t pinned_for_ = nullptr; // the device whose pinned memory it was asked to be in, if there is some
};

} // namespace oallama
