// The part of ggml's public C interface that this project calls, declared by hand so that building needs no llama.cpp
// sources. Valid for exactly ggml 0.25.3 as shipped in llama-cpp-python 0.3.36; check.cpp compares layouts and numbers
// with the loaded library and refuses anything else. Symbols resolve at load time from libggml*.so.0.
//
// Order: types and numbers, tensors and contexts, operations, graphs, quantisation, backends, scheduler, CPU.

#pragma once

#include <cstddef>
#include <cstdint>

#define GGML_ABI_VERSION_STRING "0.25.3"

extern "C" {

//
// types and numbers
//

struct ggml_context;
struct ggml_cgraph;
struct ggml_backend;
struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_backend_device;
struct ggml_backend_reg;
struct ggml_backend_sched;
struct ggml_threadpool;

typedef ggml_backend *             ggml_backend_t;
typedef ggml_backend_buffer *      ggml_backend_buffer_t;
typedef ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef ggml_backend_device *      ggml_backend_dev_t;
typedef ggml_backend_reg *         ggml_backend_reg_t;
typedef ggml_backend_sched *       ggml_backend_sched_t;

constexpr int GGML_MAX_DIMS      = 4;
constexpr int GGML_MAX_SRC       = 10;
constexpr int GGML_MAX_OP_PARAMS = 64;
constexpr int GGML_MAX_NAME      = 64;
constexpr int GGML_MAX_N_THREADS = 512;

enum ggml_type : int32_t {
    GGML_TYPE_F32     = 0,
    GGML_TYPE_F16     = 1,
    GGML_TYPE_IQ2_XXS = 16,
    GGML_TYPE_IQ2_XS  = 17,
    GGML_TYPE_IQ1_S   = 19,
    GGML_TYPE_IQ2_S   = 22,
    GGML_TYPE_I8      = 24,
    GGML_TYPE_I32     = 26,
    GGML_TYPE_I64     = 27,
    GGML_TYPE_IQ1_M   = 29,
    GGML_TYPE_BF16    = 30,
    GGML_TYPE_COUNT   = 43,
};

enum ggml_op : int32_t {
    GGML_OP_NONE           = 0,
    GGML_OP_ADD            = 2,
    GGML_OP_ADD_ID         = 3,
    GGML_OP_SUB            = 6,
    GGML_OP_MUL            = 7,
    GGML_OP_DIV            = 8,
    GGML_OP_SQR            = 9,
    GGML_OP_RMS_NORM       = 25,
    GGML_OP_MUL_MAT        = 29,
    GGML_OP_MUL_MAT_ID     = 30,
    GGML_OP_SCALE          = 32,
    GGML_OP_RESHAPE        = 36,
    GGML_OP_VIEW           = 37,
    GGML_OP_PERMUTE        = 38,
    GGML_OP_TRANSPOSE      = 39,
    GGML_OP_SET_ROWS       = 42,
    GGML_OP_SOFT_MAX       = 46,
    GGML_OP_ROPE           = 48,
    GGML_OP_CLAMP          = 50,
    GGML_OP_FLASH_ATTN_EXT = 74,
    GGML_OP_UNARY          = 91,
    GGML_OP_GLU            = 100,
};

enum ggml_prec : int32_t { GGML_PREC_F32 = 10 };

enum ggml_status : int32_t {
    GGML_STATUS_ALLOC_FAILED = -2,
    GGML_STATUS_FAILED       = -1,
    GGML_STATUS_SUCCESS      = 0,
    GGML_STATUS_ABORTED      = 1,
};

enum ggml_log_level : int32_t { GGML_LOG_LEVEL_ERROR = 4 };

enum ggml_tensor_flag : int32_t {
    GGML_TENSOR_FLAG_INPUT  = 1,
    GGML_TENSOR_FLAG_OUTPUT = 2,
};

//
// tensors and contexts
//

struct ggml_tensor {
    ggml_type             type;
    ggml_backend_buffer * buffer;
    int64_t               ne[GGML_MAX_DIMS]; // elements
    size_t                nb[GGML_MAX_DIMS]; // strides, bytes
    ggml_op               op;
    int32_t               op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)];
    int32_t               flags;
    ggml_tensor *         src[GGML_MAX_SRC];
    ggml_tensor *         view_src;
    size_t                view_offs;
    void *                data;
    char                  name[GGML_MAX_NAME];
    void *                extra;
    char                  padding[8];
};

struct ggml_init_params {
    size_t mem_size; // bytes
    void * mem_buffer;
    bool   no_alloc;
};

typedef void (*ggml_to_float_t)(const void * x, float * y, int64_t k);
typedef void (*ggml_from_float_t)(const float * x, void * y, int64_t k);

struct ggml_type_traits {
    const char *      type_name;
    int64_t           blck_size;            // elements
    int64_t           blck_size_interleave; // elements
    size_t            type_size;            // bytes of a block
    bool              is_quantized;
    ggml_to_float_t   to_float;
    ggml_from_float_t from_float_ref;
};

typedef void (*ggml_log_callback)(ggml_log_level level, const char * text, void * user_data);
typedef void (*ggml_abort_callback_t)(const char * message);

const char *             ggml_version(void);
const char *             ggml_commit(void);
const char *             ggml_op_name(ggml_op op);
const char *             ggml_type_name(ggml_type type);
const ggml_type_traits * ggml_get_type_traits(ggml_type type);
int64_t                  ggml_blck_size(ggml_type type);
size_t                   ggml_type_size(ggml_type type);
size_t                   ggml_row_size(ggml_type type, int64_t ne);
bool                     ggml_is_quantized(ggml_type type);
size_t                   ggml_nbytes(const ggml_tensor * tensor);
size_t                   ggml_tensor_overhead(void);
void                     ggml_log_set(ggml_log_callback callback, void * user_data);
void                     ggml_log_get(ggml_log_callback * callback, void ** user_data);
ggml_abort_callback_t    ggml_set_abort_callback(ggml_abort_callback_t callback);

ggml_context * ggml_init(ggml_init_params params);
void           ggml_free(ggml_context * ctx);
size_t         ggml_get_mem_size(const ggml_context * ctx);
ggml_tensor *  ggml_new_tensor(ggml_context * ctx, ggml_type type, int n_dims, const int64_t * ne);
ggml_tensor *  ggml_new_tensor_1d(ggml_context * ctx, ggml_type type, int64_t ne0);
ggml_tensor *  ggml_new_tensor_2d(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1);
ggml_tensor *  ggml_new_tensor_3d(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2);
ggml_tensor *  ggml_set_name(ggml_tensor * tensor, const char * name);
void           ggml_set_input(ggml_tensor * tensor);
void           ggml_set_output(ggml_tensor * tensor);
ggml_tensor *  ggml_get_first_tensor(const ggml_context * ctx);
ggml_tensor *  ggml_get_next_tensor(const ggml_context * ctx, ggml_tensor * tensor);
bool           ggml_is_contiguous(const ggml_tensor * tensor);

//
// operations
//

ggml_tensor * ggml_add(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_add_inplace(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_mul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_scale(ggml_context * ctx, ggml_tensor * a, float s);
ggml_tensor * ggml_rms_norm(ggml_context * ctx, ggml_tensor * a, float eps);
ggml_tensor * ggml_swiglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_mul_mat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_get_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_mul_mat_id(ggml_context * ctx, ggml_tensor * as, ggml_tensor * b, ggml_tensor * ids);
ggml_tensor * ggml_soft_max_ext(ggml_context * ctx, ggml_tensor * a, ggml_tensor * mask, float scale, float max_bias);
ggml_tensor * ggml_flash_attn_ext(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                  ggml_tensor * mask, float scale, float max_bias, float logit_softcap);
ggml_tensor * ggml_rope_ext(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c, int n_dims, int mode,
                            int n_ctx_orig, float freq_base, float freq_scale, float ext_factor, float attn_factor,
                            float beta_fast, float beta_slow);
ggml_tensor * ggml_set_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c);
ggml_tensor * ggml_cont_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_reshape_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_reshape_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2);
ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
ggml_tensor * ggml_view_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1,
                           size_t nb2, size_t offset);
ggml_tensor * ggml_view_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                           size_t nb1, size_t nb2, size_t nb3, size_t offset);
ggml_tensor * ggml_cast(ggml_context * ctx, ggml_tensor * a, ggml_type type);
ggml_tensor * ggml_cont(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_cpy(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_permute(ggml_context * ctx, ggml_tensor * a, int axis0, int axis1, int axis2, int axis3);
bool          ggml_prec_set_acc(ggml_tensor * a, ggml_prec prec);

// Called by each of nth threads; ith: its number.
typedef void (*ggml_custom_op_t)(ggml_tensor * dst, int ith, int nth, void * userdata);

constexpr int GGML_N_TASKS_MAX = -1; // all

ggml_tensor * ggml_custom_4d(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                             ggml_tensor ** args, int n_args, ggml_custom_op_t fun, int n_tasks, void * userdata);

//
// graphs
//

ggml_cgraph * ggml_new_graph_custom(ggml_context * ctx, size_t size, bool grads);
void          ggml_build_forward_expand(ggml_cgraph * graph, ggml_tensor * tensor);
size_t        ggml_graph_overhead_custom(size_t size, bool grads);
int           ggml_graph_n_nodes(ggml_cgraph * graph);
ggml_tensor * ggml_graph_node(ggml_cgraph * graph, int i);

//
// quantisation
//

uint16_t ggml_fp32_to_fp16(float value);
bool     ggml_quantize_requires_imatrix(ggml_type type);
size_t   ggml_quantize_chunk(ggml_type type, const float * src, void * dst, int64_t start, int64_t nrows,
                             int64_t n_per_row, const float * imatrix);

//
// backends
//

enum ggml_backend_dev_type : int32_t {
    GGML_BACKEND_DEVICE_TYPE_CPU,
    GGML_BACKEND_DEVICE_TYPE_GPU,
    GGML_BACKEND_DEVICE_TYPE_IGPU,
    GGML_BACKEND_DEVICE_TYPE_ACCEL,
    GGML_BACKEND_DEVICE_TYPE_META,
};

enum ggml_backend_buffer_usage : int32_t { GGML_BACKEND_BUFFER_USAGE_WEIGHTS = 1 };

struct ggml_backend_dev_caps {
    bool async;
    bool host_buffer;
    bool buffer_from_host_ptr;
    bool events;
    bool mmap_support;
};

struct ggml_backend_dev_props {
    const char *          name;
    const char *          description;
    size_t                memory_free;  // bytes
    size_t                memory_total; // bytes
    ggml_backend_dev_type type;
    const char *          device_id;
    ggml_backend_dev_caps caps;
};

struct ggml_backend_feature {
    const char * name;
    const char * value;
};

// found through ggml_backend_reg_get_proc_address
typedef void (*ggml_backend_set_n_threads_t)(ggml_backend_t backend, int n_threads);
typedef ggml_backend_buffer_type_t * (*ggml_backend_dev_get_extra_bufts_t)(ggml_backend_dev_t device);
typedef ggml_backend_feature * (*ggml_backend_get_features_t)(ggml_backend_reg_t reg);
typedef ggml_backend_reg_t (*ggml_backend_rpc_add_server_t)(const char * endpoint);
typedef void (*ggml_backend_rpc_start_server_t)(const char * endpoint, const char * cache_dir, size_t n_threads,
                                                size_t n_devices, ggml_backend_dev_t * devices);

const char *               ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
ggml_backend_buffer_t      ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);
size_t                     ggml_backend_buft_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * t);
bool                       ggml_backend_buft_is_host(ggml_backend_buffer_type_t buft);
ggml_backend_dev_t         ggml_backend_buft_get_device(ggml_backend_buffer_type_t buft);
void                       ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t buffer);
void *                     ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
size_t                     ggml_backend_buffer_get_size(ggml_backend_buffer_t buffer);
void                       ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);
ggml_backend_buffer_usage  ggml_backend_buffer_get_usage(ggml_backend_buffer_t buffer);
void                       ggml_backend_buffer_set_usage(ggml_backend_buffer_t buffer, ggml_backend_buffer_usage usage);
ggml_backend_buffer_t      ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx, ggml_backend_buffer_type_t b);
ggml_status                ggml_backend_tensor_alloc(ggml_backend_buffer_t buffer, ggml_tensor * t, void * addr);
void                       ggml_backend_tensor_copy(const ggml_tensor * src, ggml_tensor * dst);
void                       ggml_backend_tensor_set(ggml_tensor * t, const void * data, size_t offset, size_t size);
void                       ggml_backend_tensor_get(const ggml_tensor * t, void * data, size_t offset, size_t size);
void         ggml_backend_tensor_set_async(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset,
                                           size_t size);
void         ggml_backend_tensor_get_async(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset,
                                           size_t size);
ggml_status  ggml_backend_graph_compute_async(ggml_backend_t backend, ggml_cgraph * graph);
void         ggml_backend_synchronize(ggml_backend_t backend);
void         ggml_backend_free(ggml_backend_t backend);
const char * ggml_backend_dev_name(ggml_backend_dev_t device);
ggml_backend_dev_type      ggml_backend_dev_type(ggml_backend_dev_t device);
void                       ggml_backend_dev_get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props);
ggml_backend_reg_t         ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
ggml_backend_t             ggml_backend_dev_init(ggml_backend_dev_t device, const char * params);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t device);
bool                       ggml_backend_dev_supports_op(ggml_backend_dev_t device, const ggml_tensor * op);
const char *               ggml_backend_reg_name(ggml_backend_reg_t reg);
size_t                     ggml_backend_reg_dev_count(ggml_backend_reg_t reg);
ggml_backend_dev_t         ggml_backend_reg_dev_get(ggml_backend_reg_t reg, size_t index);
void *                     ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
void                       ggml_backend_register(ggml_backend_reg_t reg);
ggml_backend_reg_t         ggml_backend_load(const char * path);
void                       ggml_backend_unload(ggml_backend_reg_t reg);
ggml_backend_reg_t         ggml_backend_reg_by_name(const char * name);
size_t                     ggml_backend_dev_count(void);
ggml_backend_dev_t         ggml_backend_dev_get(size_t index);
ggml_backend_dev_t         ggml_backend_dev_by_name(const char * name);
ggml_backend_dev_t         ggml_backend_dev_by_type(enum ggml_backend_dev_type type);

//
// scheduler
//

ggml_backend_sched_t ggml_backend_sched_new(ggml_backend_t * backends, ggml_backend_buffer_type_t * bufts,
                                            int n_backends, size_t graph_size, bool parallel, bool op_offload);
void                 ggml_backend_sched_free(ggml_backend_sched_t sched);
void ggml_backend_sched_set_tensor_backend(ggml_backend_sched_t sched, ggml_tensor * node, ggml_backend_t backend);
ggml_backend_t ggml_backend_sched_get_tensor_backend(ggml_backend_sched_t sched, ggml_tensor * node);
bool           ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * graph);
ggml_status    ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph * graph);
void           ggml_backend_sched_synchronize(ggml_backend_sched_t sched);
int            ggml_backend_sched_get_n_splits(ggml_backend_sched_t sched);

//
// CPU
//

struct ggml_threadpool_params {
    bool     cpumask[GGML_MAX_N_THREADS];
    int      n_threads;
    int32_t  prio;
    uint32_t poll;
    bool     strict_cpu;
    bool     paused;
};

typedef ggml_threadpool * (*ggml_threadpool_new_t)(ggml_threadpool_params * params);
typedef void (*ggml_threadpool_free_t)(ggml_threadpool * threadpool);
typedef void (*ggml_backend_cpu_set_threadpool_t)(ggml_backend_t backend, ggml_threadpool * threadpool);

ggml_threadpool_params ggml_threadpool_params_default(int n_threads);

} // extern "C"
