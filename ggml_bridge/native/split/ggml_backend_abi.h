// The part of ggml's private backend interface that a backend fills or reads: the vtables of buffer types, buffers,
// backends, devices and registrations, and the graph structure. Declared by hand for exactly ggml 0.25.3, like
// ggml_abi.h; abi_check.cpp compares what can be compared with the loaded library. ggml's own version number of this
// interface stayed 2 while slots were inserted in the middle of two of these structs, so it says nothing.
//
// Order: graphs, buffer types, buffers, backends, devices, registrations, allocation.

#pragma once

#include "../ggml_abi.h"

#define GGML_BACKEND_API_VERSION 2

extern "C" {

//
// graphs
//

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

//
// buffer types
//

struct ggml_backend_buffer_type_i {
    const char * (*get_name)(ggml_backend_buffer_type_t buft);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t buft);
    size_t (*get_max_size)(ggml_backend_buffer_type_t buft);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor);
    bool (*is_host)(ggml_backend_buffer_type_t buft);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t         device;
    void *                     context;
};

//
// buffers
//

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t buffer);
    void * (*get_base)(ggml_backend_buffer_t buffer);
    ggml_status (*init_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor);
    void (*memset_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                          size_t size);
    void (*set_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size);
    void (*get_tensor)(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                       size_t size);
    void (*set_tensor_2d)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    void (*get_tensor_2d)(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    bool (*cpy_tensor)(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst);
    void (*clear)(ggml_backend_buffer_t buffer, uint8_t value);
    void (*reset)(ggml_backend_buffer_t buffer);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i      iface;
    ggml_backend_buffer_type_t buft;
    void *                     context;
    size_t                     size;
    ggml_backend_buffer_usage  usage;
};

ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t buft, ggml_backend_buffer_i iface,
                                               void * context, size_t size);

//
// backends
//

typedef uint8_t     ggml_guid[16];
typedef ggml_guid * ggml_guid_t;
struct ggml_backend_event;
typedef ggml_backend_event * ggml_backend_event_t;
typedef void *               ggml_backend_graph_plan_t;

struct ggml_backend_graph_optimize_params {
    void (*add_alloc_dep)(void * user_data, ggml_tensor * tensor, ggml_tensor * until);
    void * user_data;
};

struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t backend);
    void (*free)(ggml_backend_t backend);
    void (*set_tensor_async)(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset,
                             size_t size);
    void (*get_tensor_async)(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset,
                             size_t size);
    void (*set_tensor_2d_async)(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset,
                                size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    void (*get_tensor_2d_async)(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset,
                                size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    bool (*cpy_tensor_async)(ggml_backend_t backend_src, ggml_backend_t backend_dst, const ggml_tensor * src,
                             ggml_tensor * dst);
    void (*synchronize)(ggml_backend_t backend);
    ggml_backend_graph_plan_t (*graph_plan_create)(ggml_backend_t backend, const ggml_cgraph * cgraph);
    void (*graph_plan_free)(ggml_backend_t backend, ggml_backend_graph_plan_t plan);
    void (*graph_plan_update)(ggml_backend_t backend, ggml_backend_graph_plan_t plan, const ggml_cgraph * cgraph);
    ggml_status (*graph_plan_compute)(ggml_backend_t backend, ggml_backend_graph_plan_t plan);
    ggml_status (*graph_compute)(ggml_backend_t backend, ggml_cgraph * cgraph);
    void (*event_record)(ggml_backend_t backend, ggml_backend_event_t event);
    void (*event_wait)(ggml_backend_t backend, ggml_backend_event_t event);
    void (*graph_optimize)(ggml_backend_t backend, ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params);
};

struct ggml_backend {
    ggml_guid_t        guid;
    ggml_backend_i     iface;
    ggml_backend_dev_t device;
    void *             context;
};

struct ggml_backend_event {
    ggml_backend_dev_t device;
    void *             context;
};

ggml_backend_dev_t   ggml_backend_get_device(ggml_backend_t backend);
ggml_backend_event_t ggml_backend_event_new(ggml_backend_dev_t device);
void                 ggml_backend_event_free(ggml_backend_event_t event);
void                 ggml_backend_event_record(ggml_backend_event_t event, ggml_backend_t backend);
void                 ggml_backend_event_synchronize(ggml_backend_event_t event);
void                 ggml_backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event);

ggml_status ggml_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph);
size_t      ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t buft);
bool        ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer);

//
// devices
//

struct ggml_backend_device_i {
    const char * (*get_name)(ggml_backend_dev_t dev);
    const char * (*get_description)(ggml_backend_dev_t dev);
    void (*get_memory)(ggml_backend_dev_t dev, size_t * free, size_t * total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t dev);
    void (*get_props)(ggml_backend_dev_t dev, ggml_backend_dev_props * props);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t dev, const char * params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t dev);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t dev);
    ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t dev, void * ptr, size_t size,
                                                  size_t max_tensor_size);
    bool (*supports_op)(ggml_backend_dev_t dev, const ggml_tensor * op);
    bool (*supports_buft)(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);
    bool (*offload_op)(ggml_backend_dev_t dev, const ggml_tensor * op);
    ggml_backend_event_t (*event_new)(ggml_backend_dev_t dev);
    void (*event_free)(ggml_backend_dev_t dev, ggml_backend_event_t event);
    void (*event_synchronize)(ggml_backend_dev_t dev, ggml_backend_event_t event);
};

struct ggml_backend_device {
    ggml_backend_device_i iface;
    ggml_backend_reg_t    reg;
    void *                context;
};

//
// registrations
//

struct ggml_backend_reg_i {
    const char * (*get_name)(ggml_backend_reg_t reg);
    size_t (*get_device_count)(ggml_backend_reg_t reg);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t reg, size_t index);
    void * (*get_proc_address)(ggml_backend_reg_t reg, const char * name);
};

struct ggml_backend_reg {
    int                api_version; // GGML_BACKEND_API_VERSION
    ggml_backend_reg_i iface;
    void *             context;
};

typedef bool (*ggml_abort_callback)(void * data);
typedef void (*ggml_backend_set_abort_callback_t)(ggml_backend_t backend, ggml_abort_callback callback, void * data);

//
// allocation
//

struct ggml_gallocr;
typedef ggml_gallocr * ggml_gallocr_t;

ggml_gallocr_t ggml_gallocr_new(ggml_backend_buffer_type_t buft);
void           ggml_gallocr_free(ggml_gallocr_t galloc);
bool           ggml_gallocr_reserve(ggml_gallocr_t galloc, ggml_cgraph * graph);
bool           ggml_gallocr_alloc_graph(ggml_gallocr_t galloc, ggml_cgraph * graph);
size_t         ggml_gallocr_get_buffer_size(ggml_gallocr_t galloc, int buffer_id);

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);

} // extern "C"
