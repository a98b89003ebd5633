// The backend: one per llama.cpp context. Runs programs on the CPU and on the partner device at the same time.

#pragma once

#include <unordered_map>

#include "split_program.h"

namespace oallama {

struct Stats {
    std::atomic<int64_t> n_graphs{0};
    std::atomic<int64_t> n_phases{0};
    std::atomic<int64_t> n_built{0};
    std::atomic<int64_t> launch_ns{0};
    std::atomic<int64_t> host_ns{0};
    std::atomic<int64_t> wait_ns{0};
    std::atomic<int64_t> join_ns{0};
    std::atomic<int64_t> total_ns{0};
    std::atomic<int64_t> bytes_in{0};
    std::atomic<int64_t> bytes_out{0};
};

Stats & stats();

// The device side of a context: a stream of its own, memory for activations, and host memory that copies go through.
class Partner {
  public:
    explicit Partner(ggml_backend_dev_t device); // throws OALLAMA_FAILED
    ~Partner();

    Partner(const Partner &)             = delete;
    Partner & operator=(const Partner &) = delete;

    ggml_backend_dev_t device() const { return device_; }

    ggml_backend_t backend() const { return backend_.get(); }

    // Gives a program's device tensors their memory, which all programs share since one runs at a time. True where the
    // memory had to grow: then every other program's tensors are void. Throws OALLAMA_NO_MEMORY.
    bool allocate(Program & program);

    char * staging() const { return staging_base_; }

    bool pinned() const { return pinned_; }

  private:
    void grow_staging(size_t size);

    ggml_backend_dev_t device_;
    BackendPtr         backend_;
    GallocrPtr         compute_;
    size_t             compute_bytes_ = 0;
    BufferPtr          staging_;
    char *             staging_base_ = nullptr;
    bool               pinned_       = false;
};

class SplitBackend {
  public:
    SplitBackend(); // throws OALLAMA_FAILED without a CPU
    ~SplitBackend();

    SplitBackend(const SplitBackend &)             = delete;
    SplitBackend & operator=(const SplitBackend &) = delete;

    void set_n_threads(int n_threads);
    void set_abort_callback(ggml_abort_callback callback, void * data);

    // Prepares a sub-graph before llama.cpp allocates its tensors, and keeps alive what the device still reads.
    void prepare(ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);

    ggml_status compute(ggml_cgraph * graph);

  private:
    using Programs = std::unordered_map<uint64_t, std::vector<std::unique_ptr<Program>>>;

    Program &   find(const ggml_cgraph * graph);
    Program &   build(const ggml_cgraph * graph, uint64_t key);
    void        evict();
    ggml_status run(Program & program, ggml_cgraph * graph);
    void        launch(Program & program, const Phase & phase, const ggml_cgraph * graph);
    void        fetch(const Phase & phase, const ggml_cgraph * graph);
    void        join(const Phase & phase, const ggml_cgraph * graph);

    BackendPtr               cpu_;
    ggml_backend_reg_t       cpu_reg_ = nullptr;
    ggml_threadpool *        pool_    = nullptr; // where ggml was built without OpenMP, whose threads are shared anyway
    int                      n_threads_ = 0;
    std::unique_ptr<Partner> partner_;
    Programs                 programs_;
    size_t                   n_programs_ = 0;
    uint64_t                 clock_      = 0;
    Signature                scratch_;
};

} // namespace oallama
