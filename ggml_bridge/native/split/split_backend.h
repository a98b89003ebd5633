// The backend: one per llama.cpp context. Runs programs on the CPU and on the partner device at the same time.

#pragma once

#include "host.h"
#include "partner.h"
#include "program_cache.h"
#include "split_routed.h"

namespace oallama {

class SplitBackend { // throws OALLAMA_FAILED without a CPU
  public:
    Host & host() { return host_; }

    // Prepares a sub-graph before llama.cpp allocates its tensors, and keeps alive what the device still reads. memory:
    // the device's that they are in; NULL: the host's.
    void prepare(ggml_cgraph * graph, ggml_backend_dev_t memory, ggml_backend_graph_optimize_params * params);

    ggml_status compute(ggml_cgraph * graph, ggml_backend_dev_t memory);

    // Called where llama.cpp asks for an input that another device has been told to compute.
    void device_computes();

  private:
    Program &   find(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot);
    Program &   build(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot);
    Program *   find_held();
    size_t      next_slot() const;
    void        forget();
    void        forget_turns();
    ggml_status run(Program & program, ggml_cgraph * graph);
    void        end(Phase & phase);
    void        ask_ahead();
    void        launch(Program & program, Phase & phase, const ggml_cgraph * graph);
    void        start(Program & program, int begin, int end);
    void        lift(Program & program, Phase & phase);
    void        note_pageable(const ggml_cgraph * graph, const Program & program) const;
    size_t      acquire(const Phase & phase, const ggml_cgraph * graph);
    int64_t     send(const Phase & phase, const ggml_cgraph * graph);
    int64_t     send_routed(const Phase & phase, const ggml_cgraph * graph);
    bool        lands(const Download & download, const ggml_tensor * node) const;
    void        fetch(const Phase & phase, const ggml_cgraph * graph);
    void        join(const Phase & phase, const ggml_cgraph * graph);

    Host                     host_;
    std::unique_ptr<Partner> partner_;
    ProgramCache             programs_;
    bool                     prepared_  = true;  // all of llama.cpp's graph
    bool                     preparing_ = false; // since the last one was computed
    size_t                   foreseen_  = 0;     // the next streamed block's slot, of a graph that is prepared
    Signature                scratch_;
    Turns                    turns_;              // of small copies to the device
    Phase *                  last_     = nullptr; // that ended, until the next one is launched
    size_t                   slot_     = no_slot; // that the device computes with
    int64_t                  n_tokens_ = 0;       // of the program that runs, or ran last
    int64_t                  streamed_ = 0;       // of the last one that streamed
    std::vector<int32_t>     experts_;
    std::vector<RoutedBatch> batches_; // of the phase at hand
};

} // namespace oallama
