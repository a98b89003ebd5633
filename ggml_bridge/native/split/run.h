// A context's back end: runs programs on the CPU and on other devices at the same time.
//
// A llama_context has one SplitBackend, which all of its backends share (ggml-oallama.cpp). ggml calls `prepare` for
// each sub-graph before it allocates a graph, and `compute` for each in turn, all in one thread. The SplitBackend owns
// the sides, the CPU (host.h) and each device (device_side.h), and the programs, whose tensors share the sides' memory:
// one program runs at a time, on the CPU and one device, and each phase ends with that device idle.

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

    // Called where llama.cpp asks for an input that this device has been told to compute.
    void computes_input(ggml_backend_dev_t device);

  private:
    // programs
    Program &    find(const ggml_cgraph * graph, ggml_backend_dev_t memory, bool foreseen);
    Program &    build(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot);
    DeviceSide * side_of(ggml_backend_dev_t device) const;
    void         forget_programs_on(DeviceSide & side);
    void         forget();

    // a run
    ggml_status run(Program & program, const ggml_cgraph * graph);
    void        bind(const Program & program, const ggml_cgraph * graph);
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
    void        ask_ahead(Time until) const;

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

    Host                                     host_;
    std::vector<std::unique_ptr<DeviceSide>> sides_;               // of the devices that programs needed
    DeviceSide *                             side_      = nullptr; // of the program that runs; NULL: it has none
    bool                                     preparing_ = false;   // since the last one was computed
    Signature                                signature_;
    int64_t                                  n_tokens_ = 0; // of the program that runs, or ran last
    std::vector<int32_t>                     experts_;
    std::vector<RoutedBatch>                 batches_; // of the phase at hand
    std::map<int64_t, double>                row_s_;   // of a routed row on the host, by tokens (a power of two)

    // Programs that were prepared, to be used again. A server computes batches of ever new sizes, and each needs a
    // program for each block: all are dropped where one more would be too much.
    std::map<Signature, std::unique_ptr<Program>> programs_;
};

} // namespace oallama
