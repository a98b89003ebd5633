// TEST0, a ggml device for tests of what works with any device: type GPU, memory of its own that the host cannot read,
// asynchronous, with events, pinned host memory and any number of streams. It computes with ggml's CPU kernels, so its
// results are those of the CPU bit by bit, but it is strict where real devices are only sometimes:
//
//   - addresses of its memory fault when the host follows them, and fresh memory holds NaN
//   - a copy reads or writes the host's bytes when its turn in the queue comes, not when it is asked for
//   - copies that do not go through a stream do not wait for one
//   - a copy to host memory that is not pinned holds up its caller until it is made, as CUDA's does
//   - where no pinned memory is left, its buffer type gives plain memory, as CUDA's does
//   - a graph is taken as it is when it is launched; it may only touch this device's memory
//   - it computes nothing by experts whose input must be read in F32, as CUDA and Vulkan do not
//   - rows of quantised weights are padded as CUDA pads them, and what is read behind a row must be numbers
//   - of experts in float a token uses each once
//
// Under the thread sanitizer, what a graph reads and writes is made known to it.

#pragma once

#include <cstddef>
#include <cstdint>

#include "split/ggml_backend_abi.h"

namespace async_device {

constexpr const char * device_name = "TEST0";

struct Options {
    uint64_t seed              = 1;
    int64_t  max_delay_us      = 0;   // a random delay up to this before each step of a stream
    double   set_ns_per_byte   = 0.0; // a slow link: how long set_tensor_async takes
    size_t   max_alloc_bytes   = SIZE_MAX;
    size_t   capacity_bytes    = size_t{1} << 30;
    size_t   pinned_capacity   = SIZE_MAX; // bytes; beyond them pinned host memory is plain memory
    bool     by_address        = false;    // supports_buft is true for its own buffer type alone, as told by address
    bool     refuse_events     = false;    // no events
    bool     no_vmm            = false;    // it tells of itself what ggml-cuda without virtual memory does
    int32_t  refused_type      = -1;       // supports_op answers false for operations on tensors of this ggml_type
    int64_t  graphs_until_lost = -1;       // so many graphs are computed, then graph_compute fails; -1: never
    bool     waits_for_graph   = false;    // copies to pinned memory wait for a later graph of another stream
};

struct Counters {
    int64_t device_bytes = 0; // held now
    int64_t pinned_bytes = 0; // held now
    int64_t n_pinned     = 0; // allocations of pinned memory that were asked for, since the start
    int64_t most_pinned  = 0; // bytes of the largest of them
    int64_t n_streams    = 0; // held now
    int64_t n_events     = 0; // held now
    int64_t n_allocs     = 0; // since the start
    int64_t n_graphs     = 0;
    int64_t n_copies_in  = 0; // set_tensor_async
    int64_t n_copies_out = 0; // get_tensor_async
    int64_t n_blocking   = 0; // copies that the caller waits for
    int64_t n_moved      = 0; // graphs whose tensors lie elsewhere than the last time: CUDA captures none of these
    int64_t n_beside     = 0; // copies to pinned memory, made since the start, that waited for such a graph
};

// The registry that TEST0 is in, not yet registered with ggml.
ggml_backend_reg_t registry();

// Registers TEST0 with ggml, once a process.
ggml_backend_dev_t add();

// For what is asked of the device from now on.
void set_options(const Options & options);

Counters counters();

} // namespace async_device
