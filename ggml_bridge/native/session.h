// A graph ready to be computed again and again on a device, as llama.cpp computes its own: through ggml's scheduler,
// with the CPU as last backend, one persistent set of CPU threads, and the CPU's activations in the device's pinned
// memory where it has some.

#pragma once

#include "support.h"

namespace bridge {

// A backend instance of the device; throws OALLAMA_FAILED.
BackendPtr init_backend(ggml_backend_dev_t device);

// The CPU backend with its threads.
class CpuBackend {
  public:
    explicit CpuBackend(int32_t n_threads);
    CpuBackend(const CpuBackend &)             = delete;
    CpuBackend & operator=(const CpuBackend &) = delete;
    ~CpuBackend();

    ggml_backend_t get() const { return backend_.get(); }

  private:
    BackendPtr             backend_;
    ggml_threadpool *      threadpool_      = nullptr; // OpenMP builds keep their threads by themselves
    ggml_threadpool_free_t threadpool_free_ = nullptr;
};

class Session {
  public:
    // Node memory comes from the scheduler unless the nodes have theirs already.
    Session(ggml_backend_dev_t device, int32_t n_threads);

    ggml_backend_dev_t device() const { return device_; }
    ggml_backend_t     device_backend() const { return device_backend_ ? device_backend_.get() : cpu_.get(); }
    ggml_backend_t     cpu_backend() const { return cpu_.get(); }

    // Prepares the graph. The last node's first bytes are read back at the end of each run. pin: called for each node
    // before allocation, returns the backend to run it on, or NULL to let the scheduler choose.
    template <typename Pin> void set_graph(ggml_cgraph * graph, Pin && pin) {
        new_sched(graph);
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            ggml_tensor *  node    = ggml_graph_node(graph, i);
            ggml_backend_t backend = pin(node);
            if (backend != nullptr) {
                ggml_backend_sched_set_tensor_backend(sched_.get(), node, backend);
            }
        }
        alloc(graph);
    }

    // Computes the graph and waits until its last result is on the host: a run that ends on the device is closed by
    // reading 4 bytes of the last node, since over RPC ggml's synchronize only waits until the request is sent.
    double compute(); // seconds

    // The two halves of compute: a device that works by itself goes on when begin has returned; finish waits for all
    // that was begun.
    void begin();
    void finish();

    int n_splits() const { return ggml_backend_sched_get_n_splits(sched_.get()); }

  private:
    void new_sched(ggml_cgraph * graph);
    void alloc(ggml_cgraph * graph);

    ggml_backend_dev_t device_;
    CpuBackend         cpu_;
    BackendPtr         device_backend_; // NULL: the device is the CPU
    SchedPtr           sched_;          // declared last: freed before its backends
    ggml_cgraph *      graph_   = nullptr;
    ggml_tensor *      closing_ = nullptr; // last node, if it is not on the CPU
};

// Seconds of launching a graph of one tiny operation on a device and reading its result.
class Launch : public gb_timer {
  public:
    Launch(ggml_backend_dev_t device, int32_t n_threads);

    double run_once() override { return session_.compute(); }

    // Median of some runs after some to warm up.
    double median_seconds();

  private:
    ContextPtr leaf_ctx_;
    ContextPtr graph_ctx_;
    BufferPtr  leaf_buffer_;
    Session    session_;
};

} // namespace bridge
