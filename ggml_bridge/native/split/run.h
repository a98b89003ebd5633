// A context's back end: runs programs on the CPU and on other devices at the same time.
//
// A llama_context has one SplitBackend, which all of its backends share (ggml-oallama.cpp). ggml calls `prepare` for
// each sub-graph before it allocates a graph, and `compute` for each in turn, all in one thread. One program runs at a
// time, on the CPU and one device.
//
// A segment of a program: `launch` queues GG, then CG, on the device's stream of computing; copies of CG are queued on
// a stream of their own, which the device's CG waits for. Meanwhile the calling thread computes CC with ggml's CPU
// backend. Then it waits until the device is idle, and `join` adds or interleaves both results.
//
// Who owns which memory:
//
//     weights: CC, CG, a second copy of CC, GG     their split buffer (weights.h), as long as the model is loaded
//     the ring that CG is copied to                Stream (stream.h), one for each DeviceSide
//     activations on a device                      DeviceSide (device_side.h), shared by all its programs
//     host memory (pinned if possible) for inputs
//     and results in transit, and host values      Host (host.h), shared by all programs
//     tensor headers and both graphs               Program (program.h)
//     inputs and results of a sub-graph            llama.cpp
//
// The SplitBackend owns the Host, the DeviceSides and the programs.

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

    // Prepares a sub-graph before llama.cpp allocates its tensors, and keeps inputs allocated as long as the device
    // reads them. memory: the device in whose memory the tensors are; NULL: the host.
    void prepare(ggml_cgraph * graph, ggml_backend_dev_t memory, ggml_backend_graph_optimize_params * params);

    ggml_status compute(ggml_cgraph * graph, ggml_backend_dev_t memory);

    // Called when llama.cpp waits for an input that this device was given to compute.
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
    void        launch(Program & program, Segment & segment, const ggml_cgraph * graph);
    void        count_experts(const Segment & segment, const ggml_cgraph * graph);
    void        start(Program & program, int begin, int end);
    void        start_packed(Program & program, const Segment & segment);
    void        join_on_device(Program & program, Segment & segment);
    Time        due(const Segment & segment) const;
    void        ask_ahead(Time until) const;

    // copies
    void    download_packed(const Segment & segment, size_t number, const RoutedLaunch & launch);
    int64_t download_inputs(const Segment & segment, const ggml_cgraph * graph);
    int64_t send(const Program & program, const Segment & segment, const ggml_cgraph * graph);
    int64_t send_biases(const Upload & upload, const ggml_cgraph * graph);
    void    send_value(const Upload & upload, const ggml_cgraph * graph, bool prepared);
    bool    download_blocks() const;
    bool    reaches(const ggml_tensor * tensor) const;
    bool    lands(const Download & download, const ggml_tensor * node) const;
    void    download(const Segment & segment, const ggml_cgraph * graph);
    void    join(const Segment & segment, const ggml_cgraph * graph);

    Host                                     host_;
    std::vector<std::unique_ptr<DeviceSide>> sides_;               // of the devices that programs needed
    DeviceSide *                             side_      = nullptr; // of the program that runs; NULL: no device
    bool                                     preparing_ = false;   // a graph is prepared; no sub-graph ran since
    Signature                                signature_;
    int64_t                                  n_tokens_ = 0; // of the program that runs, or ran last
    std::vector<int32_t>                     experts_;
    std::vector<RoutedBatch>                 batches_; // of the segment at hand
    RowClock                                 row_clock_;

    // All prepared programs, by signature. A server computes batches of ever new sizes, and each size needs a program
    // for each block; when max_programs is reached, all are dropped.
    std::map<Signature, std::unique_ptr<Program>> programs_;
};

} // namespace oallama
