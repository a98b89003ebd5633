// ggml's headers for a back end (third_party/ggml), and the one structure of ggml-impl.h that back ends read.

#pragma once

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

extern "C" {

struct ggml_hash_set {
    size_t         size;
    uint32_t *     used; // one bit per key
    ggml_tensor ** keys;
};

struct ggml_cgraph {
    int            size;
    int            n_nodes;
    int            n_leafs;
    ggml_tensor ** nodes;
    ggml_tensor ** grads;
    ggml_tensor ** grad_accs;
    ggml_tensor ** leafs;
    int32_t *      use_counts; // by slot of the hash set
    ggml_hash_set  visited_hash_set;
    int32_t        order;
    uint64_t       uid;
};

} // extern "C"

// found through ggml_backend_reg_get_proc_address
using ggml_threadpool_new_t             = decltype(&ggml_threadpool_new);
using ggml_threadpool_free_t            = decltype(&ggml_threadpool_free);
using ggml_backend_cpu_set_threadpool_t = decltype(&ggml_backend_cpu_set_threadpool);
