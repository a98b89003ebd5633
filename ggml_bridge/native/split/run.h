// A context's back end: runs programs on the CPU and on another device at the same time.

#pragma once

#include <list>
#include <unordered_map>

#include "experts.h"

namespace oallama {

// The device side of a context: a stream of its own, memory for activations, and host memory that copies go through.
class Partner {
  public:
    explicit Partner(ggml_backend_dev_t device); // throws OALLAMA_FAILED
    ~Partner();

    Partner(const Partner &)             = delete;
    Partner & operator=(const Partner &) = delete;

    ggml_backend_dev_t device() const { return device_; }

    ggml_backend_t backend() const { return backend_.get(); }

    // Gives a program's device tensors their memory, which all programs share since one runs at a time. True where that
    // memory moved: then every other program's tensors are void. Throws OALLAMA_NO_MEMORY, and then they are as well.
    // slot: of the ring, for the first block that it streams.
    bool allocate(Program & program, size_t slot);

    // Marks what is queued now, to be waited for. False: the device has no events.
    bool mark();
    void await_mark() const;

    char * staging() const { return staging_base_; }

    bool pinned() const { return pinned_; }

    // Whether a call that fetches a result returns only when it is there: so it is from CUDA to memory that is not
    // pinned.
    bool fetch_blocks() const { return !pinned_ && ggml_backend_dev_host_buffer_type(device_) != nullptr; }

    // Whether a host tensor lies in memory that the device reads without help.
    bool is_pinned(const ggml_tensor * tensor) const;

    bool streams() const { return stream_ != nullptr; }

    Stream & stream() const { return *stream_; } // where something is streamed

  private:
    void grow_staging(size_t size);
    void place_streamed(Program & program, size_t slot);

    ggml_backend_dev_t device_;
    BackendPtr         backend_;
    GallocrPtr         compute_;
    size_t             compute_bytes_ = 0;
    EventPtr           mark_; // NULL: the device has no events
    BufferPtr          staging_;
    char *             staging_base_ = nullptr;
    bool               pinned_       = false;

    std::unique_ptr<Stream> stream_; // NULL: nothing was streamed yet
};

// Programs that were prepared, to be used again: those used last, as many as there is room for.
//
// A server computes batches of ever new sizes, and each needs a program for each block.
class ProgramCache {
  public:
    ProgramCache() = default;

    ~ProgramCache() { clear(); }

    ProgramCache(const ProgramCache &)             = delete;
    ProgramCache & operator=(const ProgramCache &) = delete;

    // The program of a sub-graph, which is now the one used last; NULL: there is none.
    Program * find(const Signature & signature);

    // Where so much more may not be held, drops what was used longest ago, half of all at once: what was made at about
    // the same time lies together, so that memory is not full of small holes. Whether anything was dropped.
    bool make_room(size_t bytes);

    Program & add(std::unique_ptr<Program> program);

    void clear();

  private:
    using List = std::list<std::unique_ptr<Program>>;

    void drop_last();

    List                                              programs_; // used last first
    std::unordered_multimap<uint64_t, List::iterator> by_hash_;  // of the signature
    size_t                                            bytes_ = 0;
};

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
