// What the native tests call of ggml beyond the library's own declarations: the operations that llama.cpp's FFN and
// expert graphs are made of, and the rest of the scheduler. For exactly ggml 0.25.3.

#pragma once

#include "split/ggml_backend_abi.h"

extern "C" {

enum ggml_sort_order : int32_t { GGML_SORT_ORDER_DESC = 1 };

//
// tensors
//

int64_t       ggml_nelements(const ggml_tensor * tensor);
bool          ggml_is_contiguous(const ggml_tensor * tensor);
void          ggml_set_output(ggml_tensor * tensor);
ggml_tensor * ggml_get_first_tensor(const ggml_context * ctx);
ggml_tensor * ggml_get_next_tensor(const ggml_context * ctx, ggml_tensor * tensor);
void          ggml_fp16_to_fp32_row(const uint16_t * x, float * y, int64_t n);

//
// operations
//

ggml_tensor * ggml_add_id(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * ids);
ggml_tensor * ggml_argsort_top_k(ggml_context * ctx, ggml_tensor * a, int k);
ggml_tensor * ggml_clamp(ggml_context * ctx, ggml_tensor * a, float min, float max);
ggml_tensor * ggml_cont(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_div(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_get_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_gelu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_relu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_repeat_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
ggml_tensor * ggml_silu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_soft_max(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_sqr(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_geglu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_reglu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_swiglu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_geglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_reglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_swiglu_clamp(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, float limit);
ggml_tensor * ggml_swiglu_oai(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, float alpha, float limit);

//
// backends
//

size_t                     ggml_backend_buffer_get_size(ggml_backend_buffer_t buffer);
size_t                     ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t buft);
void                       ggml_backend_tensor_memset(ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
ggml_backend_buffer_type_t ggml_backend_get_default_buffer_type(ggml_backend_t backend);
ggml_backend_dev_t         ggml_backend_get_device(ggml_backend_t backend);
const char *               ggml_backend_name(ggml_backend_t backend);
ggml_backend_event_t       ggml_backend_event_new(ggml_backend_dev_t device);
void                       ggml_backend_event_free(ggml_backend_event_t event);
void                       ggml_backend_event_record(ggml_backend_event_t event, ggml_backend_t backend);
void                       ggml_backend_event_synchronize(ggml_backend_event_t event);
void                       ggml_backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event);

//
// scheduler
//

typedef bool (*ggml_backend_sched_eval_callback)(ggml_tensor * tensor, bool ask, void * user_data);

bool        ggml_backend_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph * measure_graph);
void        ggml_backend_sched_reset(ggml_backend_sched_t sched);
ggml_status ggml_backend_sched_graph_compute(ggml_backend_sched_t sched, ggml_cgraph * graph);
void        ggml_backend_sched_set_eval_callback(ggml_backend_sched_t sched, ggml_backend_sched_eval_callback callback,
                                                 void * user_data);

} // extern "C"
