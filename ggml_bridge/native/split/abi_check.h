// Finds the loaded ggml's API of back ends, proves its layout, and makes buffer types in that layout.
//
// API 3 (October 2026) is that of ggml's headers in third_party/. API 2 lacks two optional slots in the middle of the
// vtable of buffer types, and is API 3 in all else. The version that ggml calls itself decides nothing: its API
// changed twice under one version.

#pragma once

#include "ggml_backend_abi.h"

namespace oallama {

extern int api_version; // of the loaded ggml: 2 or 3, once check_ggml has found it

// Throws OALLAMA_MISMATCH: the loaded ggml has an API that is not known, other numbers of operations or types, other
// structures, or another order of splits.
void check_ggml();

// The part of check_ggml that is about the order of splits. compute: ggml's, or a test's.
void check_order(decltype(&ggml_backend_sched_graph_compute_async) compute = ggml_backend_sched_graph_compute_async);

// Whether ggml's scheduler sends the graph an input: then a source is a copy, called by the back end and what it is of.
bool is_sent_input(ggml_backend_t backend, const ggml_cgraph * graph);

struct BufferTypeApi2 {
    decltype(ggml_backend_buffer_type_i::get_name)       get_name;
    decltype(ggml_backend_buffer_type_i::alloc_buffer)   alloc_buffer;
    decltype(ggml_backend_buffer_type_i::get_alignment)  get_alignment;
    decltype(ggml_backend_buffer_type_i::get_max_size)   get_max_size;
    decltype(ggml_backend_buffer_type_i::get_alloc_size) get_alloc_size;
    decltype(ggml_backend_buffer_type_i::is_host)        is_host;
    ggml_backend_dev_t                                   device;
    void *                                               context;
};

// A buffer type of ours, as the loaded ggml reads it. get_name and alloc_buffer are in the same place in both APIs.
class BufferType {
  public:
    explicit BufferType(const ggml_backend_buffer_type & as_api3);

    ggml_backend_buffer_type_t get() { return &api3_; }

  private:
    ggml_backend_buffer_type api3_ = {}; // or API 2 in its place
};

// The buffer type at this address in the layout of API 3. Slots that API 2 lacks are empty.
ggml_backend_buffer_type as_api3(ggml_backend_buffer_type_t buft);

inline void * buffer_type_context(ggml_backend_buffer_type_t buft) {
    return api_version == GGML_BACKEND_API_VERSION ? buft->context : reinterpret_cast<BufferTypeApi2 *>(buft)->context;
}

} // namespace oallama
