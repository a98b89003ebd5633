// A graph ready to be computed again and again on a device, as llama.cpp computes its own: through ggml's scheduler,
// with the CPU as last backend, one persistent set of CPU threads, and the CPU's activations in the device's pinned
// memory where it has some.

#pragma once

#include <functional>

#include "support.h"

namespace bridge {

// A backend instance of the device; throws OALLAMA_FAILED.
BackendPtr init_backend(ggml_backend_dev_t device);

class Session {
  public:
    // Node memory comes from the scheduler unless the nodes have theirs already.
    Session(ggml_backend_dev_t device, int32_t n_threads);

    ggml_backend_t device_backend() const { return device_backend_ ? device_backend_.get() : cpu_.get(); }
    ggml_backend_t cpu_backend() const { return cpu_.get(); }

    // Prepares the graph, whose nodes all run on the device unless backend_of says otherwise. The last node's first
    // bytes are read back at the end of each run.
    void set_graph(ggml_cgraph * graph, const std::function<ggml_backend_t(ggml_tensor *)> & backend_of = nullptr);

    // Computes the graph and waits until its last result is on the host: a run that ends on the device is closed by
    // reading 4 bytes of the last node, since over RPC ggml's synchronize only waits until the request is sent.
    double compute(); // seconds

    // Seconds of each of the graph's n equal parts, without what an empty launch takes.
    double compute_each(int64_t n, double launch_seconds);

    // The two halves of compute: a device that works by itself goes on when begin has returned; finish waits for all
    // that was begun.
    void begin();
    void finish();

    int n_splits() const { return ggml_backend_sched_get_n_splits(sched_.get()); }

  private:
    ggml_backend_dev_t device_;
    oallama::Cpu       cpu_;
    BackendPtr         device_backend_; // NULL: the device is the CPU
    SchedPtr           sched_;          // declared last: freed before its backends
    ggml_cgraph *      graph_   = nullptr;
    ggml_tensor *      closing_ = nullptr; // last node, if it is not on the CPU
};

// Computes one graph, which it owns.
struct GraphTimer : gb_timer {
    GraphTimer(ggml_backend_dev_t device, int32_t n_threads) : session(device, n_threads) {}

    double run_once() override { return session.compute(); }

    ContextPtr leaf_ctx;
    ContextPtr graph_ctx;
    BufferPtr  leaf_buffer;
    Session    session;
};

// Seconds of launching a graph of one tiny operation on a device and reading its result.
std::unique_ptr<GraphTimer> new_launch(ggml_backend_dev_t device, int32_t n_threads);

// Median of some runs of it, after some to warm up.
double launch_seconds(gb_timer & launch);

} // namespace bridge
