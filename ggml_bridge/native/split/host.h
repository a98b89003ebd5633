// The host side of a context: ggml's CPU backend, its threads, and memory for what the host makes for itself.

#pragma once

#include <functional>

#include "split_program.h"
#include "thread_settings.h"

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

    // Works on n items: all threads on a range [begin, end) each, as a node of a graph, where this many bytes pay for
    // waking them; else this thread on all.
    using Share = std::function<void(int64_t begin, int64_t end)>;
    void share(int64_t n, size_t bytes, const Share & work);

    // Moves n items of equal size, which lie packed at the front of a tensor's memory, to their places: bytes from the
    // front, increasing, and none before where the item lies.
    void spread(char * data, int64_t n, size_t bytes_each, const std::function<size_t(int64_t item)> & place);

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
    ThreadSettings     settings_;             // of the thread that made the pool
    BufferPtr          made_;                 // NULL: no program needed it yet
    ggml_backend_dev_t pinned_for_ = nullptr; // the device whose pinned memory it was asked to be in, if there is some
    ContextPtr         ctx_;                  // of graph_
    ggml_cgraph *      graph_   = nullptr;    // one node, which calls work_
    int64_t            n_items_ = 0;
    const Share *      work_    = nullptr;
};

} // namespace oallama
