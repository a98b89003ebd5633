// A context's back end: runs programs on the CPU and on another device at the same time.
//
// A llama_context has one SplitBackend, which all of its backends share (ggml-oallama.cpp). ggml calls `prepare` for
// each sub-graph before it allocates a graph, and `compute` for each in turn, all in one thread. The SplitBackend owns
// both sides, the CPU (host.h) and the device (device_side.h), and the programs, whose tensors share the sides' memory:
// one program runs at a time, and each phase ends with an idle device.

#pragma once

#include <map>

#include "experts.h"

namespace oallama {

class DeviceSide;

class SplitBackend {
  public:
    SplitBackend(); // throws OALLAMA_FAILED without a CPU
    ~SplitBackend();

    SplitBackend(const SplitBackend &)             = delete;
    SplitBackend & operator=(const SplitBackend &) = delete;

    Host & host() { return host_; }

    // Prepares a sub-graph before llama.cpp allocates its tensors, and keeps alive what the device still reads. memory:
    // the device's that they are in; NULL: the host's.
    void prepare(ggml_cgraph * graph, ggml_backend_dev_t memory, ggml_backend_graph_optimize_params * params);

    ggml_status compute(ggml_cgraph * graph, ggml_backend_dev_t memory);

    // Called where llama.cpp asks for an input that another device has been told to compute.
    void device_computes();

  private:
    // programs
    Program & find(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot);
    Program & build(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot);
    size_t    next_slot() const;
    void      forget();
    void      forget_copies();

    // a run
    ggml_status run(Program & program, const ggml_cgraph * graph);
    void        bind(const Program & program, const ggml_cgraph * graph) const;
    void        launch(Program & program, Phase & phase, const ggml_cgraph * graph);
    void        count_experts(const Phase & phase, const ggml_cgraph * graph);
    void        start(Program & program, int begin, int end);
    void        start_packed(Program & program, const Phase & phase);
    void        lift(Program & program, Phase & phase);
    void        note_rows(Phase & phase, int64_t host_ns);
    double      row_seconds(const Phase & phase) const;
    void        note_device(Phase & phase, int64_t waited_ns) const;
    void        note_both(Phase & phase, int64_t ns) const;
    int64_t     n_host_rows(const Phase & phase) const;
    Time        due(const Phase & phase) const;
    void        ask_ahead(Time until);

    // copies
    void    fetch_packed(const Phase & phase, size_t number, const RoutedLaunch & launch);
    int64_t fetch_inputs(const Phase & phase, const ggml_cgraph * graph);
    int64_t send(const Program & program, const Phase & phase, const ggml_cgraph * graph);
    int64_t send_biases(const Upload & upload, const ggml_cgraph * graph);
    void    send_value(const Upload & upload, const ggml_cgraph * graph, bool prepared);
    bool    fetch_blocks() const;
    bool    reaches(const ggml_tensor * tensor) const;
    bool    lands(const Download & download, const ggml_tensor * node) const;
    void    fetch(const Phase & phase, const ggml_cgraph * graph);
    void    join(const Phase & phase, const ggml_cgraph * graph);

    Host                        host_;
    std::unique_ptr<DeviceSide> device_side_;       // NULL: no program needed one yet
    std::unique_ptr<Exchange>   exchange_;          // NULL: no program has experts that may move
    bool                        preparing_ = false; // since the last one was computed
    size_t                      foreseen_  = 0;     // the next streamed block's slot, of a graph that is prepared
    Signature                   signature_;
    SmallCopies                 small_copies_;         // of small copies to the device
    Phase *                     last_phase_ = nullptr; // that ended, until the next one is launched
    size_t                      slot_       = no_slot; // that the device computes with
    int64_t                     n_tokens_   = 0;       // of the program that runs, or ran last
    int64_t                     streamed_   = 0;       // of the last one that streamed
    std::vector<int32_t>        experts_;
    std::vector<RoutedBatch>    batches_; // of the phase at hand
    std::map<int64_t, double>   row_s_;   // seconds of a routed row on the host, by tokens of a batch (power of two)

    // Programs that were prepared, to be used again. A server computes batches of ever new sizes, and each needs a
    // program for each block: all are dropped where one more would be too much.
    std::map<Signature, std::unique_ptr<Program>> programs_;
};

} // namespace oallama
