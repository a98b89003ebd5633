// The C interface of libggml-emulated: ggml devices with GPUs' proportions, whose timing is emulated. A device's
// memory, its streams, its link and its callers' costs are those of a card as parameters describe it; what the CPU does
// beside it is real. So a plan can be tried, and timed, where there is no card.
//
// Time. One thread, on a core of its own, is all devices of a process. Every item of work (a copy, a graph) has a start
// in virtual time: when it was submitted, what is before it in its stream is done and its engine (copies in, copies
// out, compute) is free; and an end: start + modelled time. The thread tells its end when the clock has come to it, so
// that being late never adds up. Calls that take a driver some microseconds hold up the caller for as long. Weights are
// loaded in no time: bytes for a buffer of weights that come before the first graph since its allocation.
//
// Values. `real`: graphs are computed with ggml's CPU kernels, copies are made; for tests, times mean nothing then.
// `drawn`: nothing is computed; copies to the device are read as DMA reads them, and what the host reads back is drawn
// at random, experts distinct. Whole numbers (positions, ids) are always real.
//
// Parameters: one a line, a name and what it is, words separated by blanks; # begins a comment line. A line `---`
// begins another device, of another name and the same core. Between two devices ggml copies through the host.
//
//     name Emulated0                      of the ggml device
//     description NVIDIA GeForce …        the rest of the line
//     memory_bytes 12884901888
//     pinned_bytes 1073741824             of host memory that can be pinned; the rest of it is plain, as with CUDA
//     knows_buffers_by name|address       its own buffer type; by address no other one is taken for its own
//     values real|drawn
//     cpu 1                               the device's core; -1: none of its own (values real only; times mean nothing)
//     seed 0
//     bytes_per_s, flops_per_s, flops_float_per_s, pinned_bytes_per_s, pageable_bytes_per_s       as in oallama's Card
//     kernel_s, launch_s, launch_node_s, uncaptured_node_s, copy_s, copy_issue_s, synchronize_s
//     copy in|out pinned|pageable 8e-06 4e-11        instead of those: seconds = a + b * bytes
//     kernel MUL_MAT Q4_0 4096x14336x1 0 512 0.0021  op, type, shape [K, N, E] of the weight, experts used (0: no
//                                                    MUL_MAT_ID), tokens, seconds: as a real card was measured
//     lost_after 100                      graphs; then every graph fails, as on a card that is gone
//     fail_alloc 3                        the allocation of device or pinned memory that is refused, counted from 1:
//                                         plain memory is given instead of pinned memory
//     routing FILE                        lines "LAYER ID ID …": experts of one token each, used in turn, drawn only
//
// Python registers the devices; stock programs load the library as a back end (ggml_backend_init).
//
// Python's cffi reads the part between the two "cdef" lines. Functions return a status as libggml-oallama's; on failure
// emulated_last_error() of the same thread says in one sentence what went wrong. No exception crosses this boundary.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

// cdef begin

#define EMULATED_ABI 6

int          emulated_abi(void);
const char * emulated_last_error(void);

// Adds the devices to ggml's registry, or replaces them while nobody uses any. Keeps every other thread of this process
// off their core.
int emulated_register(const char * parameters);

// Takes them out of ggml's registry. What uses them must have been freed.
int emulated_unregister(void);

typedef struct emulated_stats {
    double  late_s;     // time in which at least one item was late
    int64_t n_overruns; // items whose real work took longer than their modelled time
    int64_t n_shared;   // times that another emulated device wanted the same core at the same time
    int64_t bytes_in;   // copied
    int64_t bytes_out;
    int64_t n_graphs;
    int64_t n_captured;   // of these: launched as CUDA launches a graph that it has captured
    int64_t device_bytes; // held now
    int64_t pinned_bytes;
    int64_t n_allocations; // of device or pinned memory, ever
} emulated_stats;

// Sums over all devices since the last reset; device_bytes and pinned_bytes are held now.
int emulated_get_stats(emulated_stats * stats);
int emulated_reset_stats(void);

// Lets the device's thread sleep until the next call: between measurements its core is for others.
int emulated_rest(void);

// Seconds that the first device takes for one mul-mat, as in `kernel` lines.
int emulated_mul_mat_seconds(int32_t type, int64_t k, int64_t n, int64_t e, int64_t n_expert_used, int64_t n_tokens,
                             double * seconds);

// cdef end

// The entry point of a library that GGML_BACKEND_PATH or OALLAMA_EXTRA_BACKENDS names. Returns the same
// ggml_backend_reg_t for every call, or NULL, the first time with one sentence on stderr. The devices' parameters are
// in the file that OALLAMA_EMULATED names.
void * ggml_backend_init(void);

#ifdef __cplusplus
}
#endif
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
