// The C interface of libggml-oallama, a ggml backend that computes one mul-mat (or a whole FFN) on the CPU and on
// another device at the same time: every weight is stored once, a part of it in host memory for the CPU (CC), a part in
// host memory that is streamed to the device when its turn comes (CG), and a part in device memory (GG); partial
// results are joined (ScheInfer, section III).
//
// Two ways in. A program that loads models itself hands a plan over with oallama_plan_new, and gives the plan's buffer
// type to llama_model_params.tensor_buft_overrides. Stock binaries load the library by GGML_BACKEND_PATH, which calls
// ggml_backend_init; it reads the plan file that OALLAMA_PLAN names, and `-ot 'regex=OALLAMA_Split'` chooses the
// tensors. `-ot` also knows the CPU's layouts then: CPU_REPACK, AMX, …, and OALLAMA_CPU for plain memory. Other back
// ends that are wanted, as GGML_BACKEND_PATH takes one, are the libraries that OALLAMA_EXTRA_BACKENDS names, separated
// by colons. What was done and held is in the file that OALLAMA_REPORT names (report.h).
//
// Of a large batch, the device may also compute CC for the last n_g of the tokens (CG', ScheInfer IV-B), to which it is
// streamed like CG.
//
// Plan text: one item a line, words separated by blanks; empty lines and lines that begin with # are skipped.
//
//     oallama-plan 1                  first line: format and version
//     model 9f2c…                     fingerprint of the GGUF, for the reader
//     device RPC0                     ggml device; needed where any CG or GG > 0. Each further device line begins
//                                     the settings of that device, and the tensors of its layers
//     staging 22151168                bytes of the device to leave for activations and the ring; default 0
//     slots 2                         of the ring that CG is copied to, 1 to 64, each as large as what it holds;
//                                     default 2
//     ring 101711872                  bytes of the ring, more where one block needs more; default: as if each of the
//                                     slots held the largest block
//     prefetch ahead                  ahead (default): copies begin as soon as a slot is free; layer: not before their
//                                     block's turn
//     exchange idle                   off (default); idle: hot experts are exchanged for those that tokens use more,
//                                     while the link has nothing else to do, and missed ones are fetched where that is
//                                     faster than computing them on the CPU; eager: whatever the link has to do. Needs
//                                     CC in pinned memory and a layout the device can read, or twice
//     piece 262144                    bytes of CG that are asked for at once at most, so that other copies get through;
//                                     4096 at least; default: all of a part
//     link 12000000000                bytes a second that the link copies: no more is asked for ahead than it can have
//                                     done when the next activation is sent; default: not known, no limit
//     sum 262144                      experts' results are weighted and added up on either side, before they are
//                                     joined, where so many bytes or more then need not come back; default: never
//     count 1                         1: how often tokens use each expert of the plan's tensors is counted, for the
//                                     report; default 0
//     tokens 32 0                     of a batch of 32 tokens, n_g is 0; of 512 it is 200; linear in between, 0 below,
//     tokens 512 200                  the same share above, less where the host's tokens would leave rows over that
//                                     its kernels take one by one; none: n_g is 0
//     twice 1                         1: CC in a repacked layout is kept in the plain one as well, since only that can
//                                     be streamed for n_g or exchanged; default 0: such weights have no n_g, and their
//                                     hot experts stay
//     tensor blk.0.ffn_gate.weight Q4_0 2048x8192x1 rows 5120 0 3072 CPU_REPACK
//     tensor blk.0.ffn_down.weight Q4_0 8192x2048x1 cols 5120 0 3072 CPU_REPACK
//     tensor output.weight Q4_0 2048x32000x1 rows 5120 0 26880 CPU_REPACK chunk=64 n_g=0
//            name                  type KxNxE       axis CC  CG GG   layout
//     tensor blk.9.attn_q.weight Q4_0 2048x2048x1 rows 1024 0 1024 CPU resident
//     tensor blk.1.ffn_up_exps.weight Q4_0 2048x768x128 rows 768 0 0 CPU_REPACK hot=0,17,93
//
// axis: rows cuts ne[1] (gate, up, any lone mul-mat), cols cuts ne[0] (down), halves cuts both halves of ne[1] alike
// (a fused gate_up). CC + CG + GG is the extent: ne[1], ne[0], or ne[1] / 2. CC comes first, GG last along the axis;
// cuts are at whole quantisation blocks and groups of 32. layout: the host buffer type of CC (CPU_REPACK, AMX, CPU);
// - where CC is 0. n_g=0: whatever the table of tokens says, the device computes nothing of CC. resident: what the
// mul-mat reads and what it gives lie in the device's memory, where llama.cpp computes what comes before and after;
// else in host memory. Gate, up and down of one FFN run as one block when their counts are equal. chunk: where nothing
// else is computed with it, so many tokens are computed at the same time at most, which takes less memory; a resident
// tensor and one of several matrices have none. input=F32: llama.cpp sets ggml_prec_set_src(…, GGML_PREC_F32, 1) for
// its mul-mat, which a device may have no kernel for: then all of it is computed on the host.
//
// hot: experts, ascending, that the device has whole as well, in a tensor of so many matrices. It computes what tokens
// are routed to these, the CPU computes the rest at the same time, and each token's results are weighted and added up
// where they come together. CC is then all of the tensor. Gate, up and down run as one block when they are the same.
//
// Python's cffi reads the part between the two "cdef" lines. Functions return an oallama_status; on failure
// oallama_last_error() of the same thread says in one sentence what went wrong. No exception crosses this boundary.

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

#define OALLAMA_ABI 13
#define OALLAMA_NAME_BYTES 128

typedef enum oallama_status {
    OALLAMA_OK          = 0,
    OALLAMA_INVALID     = 1, // the plan or an argument is wrong
    OALLAMA_UNSUPPORTED = 2, // this device or layout cannot do that
    OALLAMA_NO_MEMORY   = 3, // an allocation failed
    OALLAMA_MISMATCH    = 4, // the loaded ggml is not the one this library was written for
    OALLAMA_FAILED      = 5  // anything else
} oallama_status;

typedef enum oallama_axis { OALLAMA_ROWS = 0, OALLAMA_COLS = 1, OALLAMA_HALVES = 2 } oallama_axis;

int          oallama_abi(void);
const char * oallama_last_error(void);

// Compares version, struct layouts, op and type numbers of the loaded ggml with the ones compiled in.
int oallama_check(void);

// Adds the backend's devices to ggml's registry, once a process; every llama context made later can use it.
int oallama_register(void);

//
// plans
//

typedef struct oallama_plan oallama_plan;

// Reads and checks a plan text: types, counts, granularity, and that the device exists. Needs oallama_register first.
int oallama_plan_new(const char * text, oallama_plan ** plan);

// Models loaded with the plan keep what they need of it.
void oallama_plan_free(oallama_plan * plan);

// ggml_backend_buffer_type_t for tensor_buft_overrides. A tensor that the plan does not name is kept whole in plain
// host memory; one whose type or shape differs from the plan's fails the load.
int oallama_plan_buft(oallama_plan * plan, void ** buft);

typedef struct oallama_slice {
    char    name[OALLAMA_NAME_BYTES];
    int32_t axis;
    int32_t loaded; // a model holds this tensor now
    int64_t cc;     // elements along the axis; as loaded, else as planned
    int64_t cg;
    int64_t gg;
    int64_t n_hot;      // experts that the device has too; as loaded, else as planned
    int64_t host_bytes; // as loaded
    int64_t device_bytes;
    char    layout[32]; // host buffer type; as loaded, else as planned
} oallama_slice;

int oallama_plan_count(const oallama_plan * plan, int64_t * n_slices);
int oallama_plan_slice(const oallama_plan * plan, int64_t index, oallama_slice * slice);

// Why the last load with this plan did not do what the plan says: one sentence a line, empty when it did. A device
// that had too little memory has GG of the first weights alone, and gives a line here; host memory that ran out makes
// the load unusable (*usable = 0: computing with it fails).
int oallama_plan_problems(const oallama_plan * plan, int32_t * usable, char * text, int64_t capacity);

//
// what is held and what was done, over all models and contexts of the process
//

typedef struct oallama_memory {
    int64_t host_weights; // bytes
    int64_t device_weights;
    int64_t host_compute;
    int64_t device_compute;
    int64_t n_weights;  // tensors
    int64_t n_programs; // prepared sub-graphs: 3,000 of a context at most, some 5 KB each
} oallama_memory;

int oallama_get_memory(oallama_memory * memory);

// Bytes of device_compute that are on one device. device: its name in ggml.
int oallama_get_device_compute(const char * device, int64_t * bytes);

typedef struct oallama_stats {
    int64_t n_graphs;        // sub-graphs that llama.cpp gave us
    int64_t n_segments;      // launch, compute, join; one for an FFN, more where a result is needed in between
    int64_t n_built;         // programs built rather than found
    double  launch_s;        // sending inputs and starting the device, on the caller's thread
    double  host_s;          // computing CC
    double  wait_s;          // waiting for the device after CC was done
    double  join_s;          // adding and interleaving results
    double  total_s;         // inside the backend
    int64_t bytes_in;        // copied to the device
    int64_t bytes_out;       // copied back
    int64_t bytes_streamed;  // of CG and CG'
    int64_t n_uses;          // of experts of which some are hot, by tokens
    int64_t n_hits;          // of these, by experts that were on the device when the batch began
    int64_t n_fetched;       // missed experts that the device was sent for the batch that needs them
    int64_t n_exchanged;     // that it was sent while the link had nothing else to do
    int64_t bytes_exchanged; // of both
} oallama_stats;

int oallama_get_stats(oallama_stats * stats);
int oallama_get_single_stats(oallama_stats * stats); // of batches of one token alone
int oallama_reset_stats(void);

// cdef end

// What GGML_BACKEND_PATH calls: ggml_backend_reg_t, the same for every call, or NULL, the first time with one sentence
// on stderr.
void * ggml_backend_init(void);

#ifdef __cplusplus
}
#endif
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
