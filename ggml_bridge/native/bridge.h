// The C interface of libggml_bridge: the one ABI between Python and the native code.
//
// Python's cffi reads the part between the two "cdef" lines of this very file, so it holds plain C declarations only.
// Every function returns an oallama_status of split/ggml-oallama.h, 0 being success; on failure gb_last_error() of the
// same thread says in one sentence what went wrong. No exception crosses this boundary. Sizes are bytes, times are
// seconds. A gb_timer belongs to one thread at a time. Strings that a function fills are NUL-terminated; lists are
// joined by '\n'.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

// cdef begin

#define GB_ABI 18
#define GB_NAME_BYTES 128

//
// library
//

int          gb_abi(void);
const char * gb_last_error(void);
const char * gb_ggml_version(void);
const char * gb_ggml_commit(void);

// Keeps ggml's log for the reasons of errors, makes a ggml abort print one line on stderr instead of running a
// debugger, and compares struct layouts, op and type numbers of the loaded ggml with the ones compiled in.
int gb_open(void);

//
// types
//

typedef struct gb_type_info {
    char    name[GB_NAME_BYTES]; // as in GGUF: Q4_0, IQ2_XXS; empty: number not in use
    int32_t number;
    int64_t block_elements;
    int64_t block_bytes;
    int32_t quantized;
    int32_t mul_mat; // the CPU can multiply a weight of this type
} gb_type_info;

int gb_type_count(void);
int gb_get_type_info(int number, gb_type_info * info);

//
// devices
//

typedef struct gb_device_info {
    char      name[GB_NAME_BYTES];
    char      description[2 * GB_NAME_BYTES];
    char      backend[GB_NAME_BYTES]; // name of the registry: CPU, CUDA, Vulkan, RPC
    char      type[8];                // CPU, GPU, IGPU, ACCEL, META
    int64_t   memory_total;           // bytes
    int64_t   memory_free;            // bytes
    int32_t   asynchronous;
    int32_t   host_buffer;
    int32_t   events;
    int32_t   takes_residents; // it takes a buffer type that is its own in all but its address: blocks can live there
    uintptr_t pointer;         // ggml_backend_dev_t
} gb_device_info;

int gb_device_count(void);
// ask_server 0: an RPC device gets its name, backend and type only. The rest is its server's to say, and ggml waits for
// ever or aborts where that is gone.
int gb_get_device_info(int index, int32_t ask_server, gb_device_info * info);
int gb_cpu_features(char * text, int64_t capacity);

// The buffer type (ggml_backend_buffer_type_t) of a layout, or of "CPU_Mapped", ggml's second one for plain memory;
// NULL: the device's own.
int gb_buft(const char * device, const char * layout, void ** buft);

// True where the device has so many bytes of pinned host memory: where none is left, its buffer type gives plain
// memory.
int gb_pins(const char * device, int64_t n_bytes, int32_t * pinned);

// Layouts the CPU keeps weights in, best first: its extra buffer types, then plain "CPU".
int gb_cpu_layouts(char * text, int64_t capacity);
// Whether stock llama.cpp keeps such a weight in that layout; sound 1: and the product is right.
int gb_layout_supports(const char * layout, int32_t type, int64_t k, int64_t n, int64_t e, int64_t n_expert_used,
                       int32_t sound, int32_t * supported);

// Loads a ggml back end from a library of the user's and registers its devices; name: that of its registry.
int gb_backend_load(const char * path, char * name, int64_t capacity);

// Connects to a ggml RPC server and registers its devices; names: the devices' names. ggml aborts the process when
// the server does not answer its handshake: probe first.
int gb_rpc_add(const char * endpoint, char * names, int64_t capacity);

//
// timers
//

typedef struct gb_timer gb_timer;

// Runs n times and stores n times in seconds; what one of them means is said at each constructor.
int  gb_timer_run(gb_timer * timer, int64_t n, double * seconds);
void gb_timer_free(gb_timer * timer);

typedef struct gb_mul_mat_params {
    const char * device; // ggml device name
    const char * layout; // buffer type of the weight; NULL: the device's default
    int32_t      type;   // ggml_type of the weight
    int64_t      k;      // weight [K, N, E]
    int64_t      n;
    int64_t      e;
    int64_t      n_expert_used; // 0: MUL_MAT over E matrices; else MUL_MAT_ID choosing so many of E per token
    int64_t      n_tokens;
    int64_t      working_set_bytes; // weight bytes to touch before one is touched again; 0: one copy
    int32_t      n_threads;         // of the CPU
    int32_t      input_f32;         // the input must be read in F32: ggml_prec_set_src(…, GGML_PREC_F32, 1)
} gb_mul_mat_params;

typedef struct gb_mul_mat_info {
    int64_t n_copies;       // weights in the set
    int64_t n_nodes;        // mul-mats in the timed graph
    int64_t copy_bytes;     // bytes of one weight
    int64_t tile_rows;      // row r of the weight [K, N * E] is row r % tile_rows of the tile
    double  launch_seconds; // time of an empty launch, taken off before dividing
} gb_mul_mat_info;

// One value: seconds of a single mul-mat (MUL_MAT or MUL_MAT_ID).
int gb_mul_mat_new(const gb_mul_mat_params * params, gb_mul_mat_info * info, gb_timer ** timer);

typedef enum gb_mul_mat_part {
    GB_MUL_MAT_TILE = 0, // F32 [K, tile_rows]: the weight's values after quantisation
    GB_MUL_MAT_SRC1 = 1, // F32 [K, n_tokens, E], or [K, n_expert_used, n_tokens]
    GB_MUL_MAT_IDS  = 2, // I32 [n_expert_used, n_tokens] of the graph's last node
    GB_MUL_MAT_DST  = 3  // F32 [N, n_tokens, E], or [N, n_expert_used, n_tokens], of the graph's last node
} gb_mul_mat_part;

// Reads what the last run computed with, so that a test can compute it again.
int gb_mul_mat_read(gb_timer * timer, gb_mul_mat_part part, void * data, int64_t n_bytes);

typedef enum gb_transfer_kind {
    GB_TO_DEVICE   = 0, // what a copy adds to a stream that is read back
    GB_FROM_DEVICE = 1, // a whole copy
    GB_ISSUE       = 2  // for how long a copy to the device holds up the thread that asks for it
} gb_transfer_kind;

// One value: seconds of a copy of n_bytes, which is queued in pieces of piece_bytes.
int gb_transfer_new(const char * device, gb_transfer_kind kind, int32_t pinned, int64_t n_bytes, int64_t piece_bytes,
                    gb_timer ** timer);

// The halves of such a copy, so that something else can be timed between them: queue it; wait until it is done.
int gb_transfer_begin(gb_timer * timer, double * seconds);
int gb_transfer_finish(gb_timer * timer, double * seconds);

// One value: seconds to launch a graph of one tiny operation and to see its result on the host.
int gb_launch_new(const char * device, int32_t n_threads, gb_timer ** timer);

// One value: seconds that queueing a graph of as many operations as an FFN has, none of any size, takes of the time of
// the thread that does it: how much later fixed work is done that begins with the call.
int gb_launch_issue_new(const char * device, gb_timer ** timer);

// One value: seconds of a graph that a real scheduler runs over [device, CPU], whose activation of n_bytes makes
// n_excursions trips CPU -> device -> CPU, with work for the CPU in between. The CPU's side of it is in the device's
// pinned memory where it has any, as llama.cpp's is. on_cpu != 0: the same graph, all on the CPU. n_splits: parts that
// the scheduler cut it into.
int gb_boundary_new(const char * device, int64_t n_bytes, int64_t n_excursions, int32_t on_cpu, int32_t n_threads,
                    int64_t * n_splits, gb_timer ** timer);

typedef struct gb_layer_rest_params {
    const char * device;
    int64_t      n_tokens;
    int64_t      n_kv; // positions in the KV cache, the batch's own among them
    int64_t      n_embd;
    int64_t      n_head;
    int64_t      n_head_kv;
    int64_t      head_dim_k;
    int64_t      head_dim_v;
    int64_t      n_ff; // 0: no feed-forward activation
    int64_t      n_layers;
    int32_t      type_k; // ggml_type of the K cache
    int32_t      type_v;
    int32_t      flash_attn;
    int32_t      n_threads;
} gb_layer_rest_params;

// One value: seconds per layer of a Llama block without its weight mul-mats. ops: names of the graph's operations in
// order, all layers, views left out.
int gb_layer_rest_new(const gb_layer_rest_params * params, char * ops, int64_t capacity, gb_timer ** timer);

typedef struct gb_contention {
    double first_alone; // bytes per second: of weights multiplied, or copied from host memory to a device
    double second_alone;
    double first_with_second; // the same two at once
    double second_with_first;
} gb_contention;

// Times mul-mats and copies of chunk_bytes to the device (from pinned memory where it has any), alone and together,
// three times `seconds` in all, or five rounds. This thread alone does it: it queues copies that outlast the mul-mats,
// runs these, and waits. A device that holds up its caller until a copy is done, or nearly, loses nothing.
int gb_link_contention(const gb_mul_mat_params * first, const char * device, int64_t chunk_bytes, double seconds,
                       gb_contention * result);

// The same with the second mul-mats queued instead of copies.
int gb_compute_contention(const gb_mul_mat_params * first, const gb_mul_mat_params * second, double seconds,
                          gb_contention * result);

// Share of a copy of n_bytes under way on one stream of the device that a result of another stream waits for: 0 to 1.
int gb_copy_wait(const char * device, int32_t pinned, int64_t n_bytes, double * share);

//
// memory
//

typedef struct gb_memory_row {
    char    buft[GB_NAME_BYTES];
    char    device[GB_NAME_BYTES]; // plain host memory: the CPU; empty: unknown
    int32_t is_host;
    int64_t model;   // bytes of weights
    int64_t context; // bytes of KV cache and other context memory
    int64_t compute; // bytes of compute buffers
} gb_memory_row;

// breakdown: address of libllama's llama_get_memory_breakdown(const llama_context *); context: llama_context *.
// no_alloc: the context was made with no_alloc, where llama.cpp counts a compute buffer once for each backend that uses
// it, and devices has the names of the n_devices devices that its model was given.
int gb_memory_breakdown(void * breakdown, const void * context, int32_t no_alloc, const char * const * devices,
                        int64_t n_devices, gb_memory_row * rows, int64_t capacity, int64_t * n_rows);

// cdef end

#ifdef __cplusplus
}
#endif
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
