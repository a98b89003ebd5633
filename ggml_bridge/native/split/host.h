// The host side of a context: ggml's CPU backend, its threads, and memory for values that only the host needs.
//
// A context has one Host (run.h), whose functions are called by the thread that computes its graphs. Other work, such
// as joining results, is divided among the same threads. The memory is shared by all programs of the context, of which
// one runs at a time.

#pragma once

#include <functional>
#include <list>
#include <vector>

#include "program.h"

namespace oallama {

// Host memory of the programs whose devices have the same type of pinned memory.
struct Scratch {
    ggml_backend_dev_t pinned_for = nullptr; // one of the devices; NULL: for programs without a device
    BufferPtr          buffer;               // plain memory if the device has no pinned memory
};

class Host {
  public:
    Host(); // throws OALLAMA_FAILED without a CPU
    ~Host();

    Host(const Host &)             = delete;
    Host & operator=(const Host &) = delete;

    ggml_backend_t backend() const { return cpu_.get(); }

    void set_n_threads(int n_threads);
    int  n_threads() const { return n_threads_; }
    void set_abort_callback(ggml_abort_callback callback, void * data) { cpu_.set_abort_callback(callback, data); }

    // Works on n items: each thread on a range [begin, end), as a node of a graph, if the number of bytes is worth
    // waking the threads; else this thread on all.
    using Share = std::function<void(int64_t begin, int64_t end)>;
    void share(int64_t n, size_t bytes, const Share & work);

    // Moves n items of equal size, packed at the front of a tensor's memory, to their places. place: bytes from the
    // front, increasing, and never before the item's present position.
    static void spread(char * data, int64_t n, size_t bytes_each, const std::function<size_t(int64_t item)> & place);

    // Reserves memory for a program's staged tensors, uploads and downloads, which programs share since one runs at a
    // time. Pinned if the program's device has pinned memory; devices with the same type of it share one Scratch.
    void reserve(Program & program);

    // Gives a program's tensors their places in its memory, before each run.
    void place(const Program & program);

    char * scratch() const; // the memory of the program that runs

    // Whether that memory is the device's pinned one.
    bool is_pinned(ggml_backend_dev_t device) const;

  private:
    Cpu                cpu_;
    int                n_threads_ = 0;
    std::list<Scratch> scratches_;         // programs keep pointers to these
    const Scratch *    scratch_ = nullptr; // of the program that runs
    ContextPtr         ctx_;               // of graph_
    ggml_cgraph *      graph_   = nullptr; // one node, which calls work_
    int64_t            n_items_ = 0;
    const Share *      work_    = nullptr;
};

// Address of a mirrored value's bytes on the host.
const char * host_data(const ggml_tensor * tensor);

// Byte offset of a row, counted over all dimensions.
size_t offset_of(const ggml_tensor * tensor, int64_t row);

// Rows of a tensor, over all its dimensions: [first, first + count).
struct Rows {
    int64_t first;
    int64_t count;
};

int64_t n_rows(const ggml_tensor * tensor);

// Elements [begin, begin + count) of each of the rows, one row after the other.
void gather(const ggml_tensor * src, int64_t begin, int64_t count, Rows rows, char * out);

// All numbers of a tensor, of 4 bytes each.
template <typename T> void read_all(const ggml_tensor * tensor, std::vector<T> & out) {
    static_assert(sizeof(T) == 4, "tensors of routings have F32 and I32");
    out.resize(static_cast<size_t>(tensor->ne[0] * n_rows(tensor)));
    gather(tensor, 0, tensor->ne[0], {0, n_rows(tensor)}, reinterpret_cast<char *>(out.data()));
}

} // namespace oallama
