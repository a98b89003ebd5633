#include "abi_check.h"

#include <dlfcn.h>

#include <cstring>

#include "util.h"

namespace oallama {

int api_version = GGML_BACKEND_API_VERSION;

BufferType::BufferType(const ggml_backend_buffer_type & as_api3) : api3_(as_api3) {
    if (api_version != GGML_BACKEND_API_VERSION) {
        const ggml_backend_buffer_type_i & iface = as_api3.iface;
        const BufferTypeApi2 api2 = {iface.get_name,       iface.alloc_buffer, iface.get_alignment, iface.get_max_size,
                                     iface.get_alloc_size, iface.is_host,      as_api3.device,      as_api3.context};
        std::memcpy(&api3_, &api2, sizeof api2);
    }
}

ggml_backend_buffer_type as_api3(ggml_backend_buffer_type_t buft) {
    if (api_version == GGML_BACKEND_API_VERSION) {
        return *buft;
    }
    const auto & found = *reinterpret_cast<const BufferTypeApi2 *>(buft);
    return {{found.get_name, found.alloc_buffer, nullptr, found.get_alignment, found.get_max_size, found.get_alloc_size,
             nullptr, found.is_host},
            found.device,
            found.context};
}

namespace {

struct Named {
    int          number;
    const char * name;
};

#define OP(name) {GGML_OP_##name, #name}

constexpr Named ops_used[] = {
    OP(NONE),     OP(ADD),        OP(ADD_ID),         OP(SUB),       OP(MUL),
    OP(DIV),      OP(SQR),        OP(RMS_NORM),       OP(SCALE),     OP(MUL_MAT),
    OP(SET_ROWS), OP(MUL_MAT_ID), OP(FLASH_ATTN_EXT), OP(SOFT_MAX),  OP(ROPE),
    OP(CLAMP),    OP(RESHAPE),    OP(VIEW),           OP(PERMUTE),   OP(TRANSPOSE),
    OP(UNARY),    OP(GLU),        OP(GET_ROWS),       OP(ROPE_BACK), OP(ARGSORT),
    OP(TOP_K),
};

#undef OP

constexpr Named types_used[] = {
    {GGML_TYPE_F32, "f32"},         {GGML_TYPE_F16, "f16"},       {GGML_TYPE_BF16, "bf16"},
    {GGML_TYPE_IQ2_XXS, "iq2_xxs"}, {GGML_TYPE_IQ2_XS, "iq2_xs"}, {GGML_TYPE_IQ1_S, "iq1_s"},
    {GGML_TYPE_IQ2_S, "iq2_s"},     {GGML_TYPE_IQ1_M, "iq1_m"},   {GGML_TYPE_I8, "i8"},
    {GGML_TYPE_I32, "i32"},         {GGML_TYPE_I64, "i64"},
};

void expect(bool condition, const std::string & what) {
    if (!condition) {
        throw Error(OALLAMA_MISMATCH, std::string("the loaded ggml ") + ggml_version() + " (" + ggml_commit() +
                                          ") differs in " + what + " from the llama.cpp that this was built for, " +
                                          "release b11549");
    }
}

void check_numbers() {
    for (const Named & op : ops_used) {
        expect(std::strcmp(ggml_op_name(static_cast<ggml_op>(op.number)), op.name) == 0, "the number of an operation");
    }
    for (const Named & type : types_used) {
        expect(std::strcmp(ggml_type_name(static_cast<ggml_type>(type.number)), type.name) == 0,
               "the number of a type");
    }
    const ggml_type_traits * f16 = ggml_get_type_traits(GGML_TYPE_F16);
    expect(f16->type_size == 2 && f16->blck_size == 1 && !f16->is_quantized && f16->to_float != nullptr,
           "struct ggml_type_traits");
}

void check_tensors_and_graphs() {
    // struct ggml_object, which precedes each tensor in a context, is 32 bytes
    expect(ggml_tensor_overhead() == sizeof(ggml_tensor) + 32, "the size of a tensor");
    const ContextPtr ctx = new_context(8, 1, 8);
    ggml_tensor *    a   = ggml_set_name(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 6, 5, 3), "probe");
    ggml_tensor *    x   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 6, 7, 3);
    ggml_tensor *    y   = ggml_mul_mat(ctx.get(), a, x);
    ggml_tensor *    z   = ggml_add(ctx.get(), y, y);
    expect(a->type == GGML_TYPE_F16 && std::strcmp(a->name, "probe") == 0 && a->ne[1] == 5 && a->ne[3] == 1 &&
               a->nb[2] == 60 && a->buffer == nullptr && a->data == nullptr && a->view_src == nullptr &&
               a->extra == nullptr && y->op == GGML_OP_MUL_MAT && y->src[0] == a && y->src[1] == x,
           "struct ggml_tensor");
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 8, false);
    ggml_build_forward_expand(graph, z);
    const ggml_hash_set & set    = graph->visited_hash_set;
    bool                  y_uses = false;
    for (size_t slot = 0; slot < set.size; slot++) {
        y_uses = y_uses || ((set.used[slot / 32] >> (slot % 32) & 1U) != 0 && set.keys[slot] == y &&
                            graph->use_counts[slot] == 2);
    }
    expect(graph->n_nodes == 2 && graph->n_leafs == 2 && graph->nodes[0] == y && graph->nodes[1] == z &&
               graph->uid == 0 && y_uses,
           "struct ggml_cgraph");
}

// Proves the number of slots of each vtable by the member that follows it in its structure.
void check_vtables(ggml_backend_dev_t cpu) {
    ggml_backend_reg_t         reg   = ggml_backend_dev_backend_reg(cpu);
    ggml_backend_buffer_type_t buft  = ggml_backend_dev_buffer_type(cpu);
    ggml_backend_dev_props     props = {};
    ggml_backend_dev_get_props(cpu, &props);
    expect(props.name != nullptr && std::strcmp(props.name, ggml_backend_dev_name(cpu)) == 0 &&
               props.type == GGML_BACKEND_DEVICE_TYPE_CPU && props.memory_total > 0 && !props.caps.async &&
               props.caps.buffer_from_host_ptr && props.caps.mmap_support,
           "struct ggml_backend_dev_props");
    expect(std::strcmp(reg->iface.get_name(reg), ggml_backend_reg_name(reg)) == 0 &&
               reg->iface.get_proc_address(reg, "ggml_backend_set_n_threads") != nullptr,
           "struct ggml_backend_reg");
    expect(cpu->reg == reg && std::strcmp(cpu->iface.get_name(cpu), ggml_backend_dev_name(cpu)) == 0 &&
               cpu->iface.get_type(cpu) == GGML_BACKEND_DEVICE_TYPE_CPU && cpu->iface.supports_buft(cpu, buft) &&
               cpu->iface.get_buffer_type(cpu) == buft && cpu->iface.event_synchronize == nullptr,
           "struct ggml_backend_device");
    const ggml_backend_buffer_type plain = as_api3(buft);
    // the CPU's has no optional slot but is_host, and names no device
    expect(plain.device == ggml_backend_buft_get_device(buft) && plain.iface.alloc_buffer_n == nullptr &&
               plain.iface.get_max_size == nullptr && plain.iface.get_alloc_size == nullptr &&
               plain.iface.get_alloc_size_n == nullptr && plain.iface.get_alignment != nullptr &&
               plain.iface.is_host != nullptr &&
               std::strcmp(plain.iface.get_name(buft), ggml_backend_buft_name(buft)) == 0 &&
               plain.iface.get_alignment(buft) == ggml_backend_buft_get_alignment(buft) && plain.iface.is_host(buft),
           "struct ggml_backend_buffer_type");
    const BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, 256));
    expect(buffer != nullptr && buffer->buft == buft && buffer->size >= 256 && buffer->iface.reset == nullptr &&
               buffer->iface.get_base(buffer.get()) == ggml_backend_buffer_get_base(buffer.get()),
           "struct ggml_backend_buffer");
}

thread_local const void * frame;         // of what has ggml call on_graph_optimize
thread_local bool         told_as_meant; // by that call

// Before ggml 0.25, under the same API version, graph_optimize had no third argument: any address may be there then.
// ggml keeps its parameters in the frame of a function that was called from `frame`, and its functions in one library.
void on_graph_optimize(ggml_backend_t /*backend*/, ggml_cgraph * /*graph*/,
                       ggml_backend_graph_optimize_params * params) {
    constexpr uintptr_t most_bytes = 64 << 10;
    Dl_info             base       = {};
    Dl_info             found      = {};
    told_as_meant = reinterpret_cast<uintptr_t>(frame) - reinterpret_cast<uintptr_t>(params) < most_bytes &&
                    ::dladdr(reinterpret_cast<void *>(ggml_backend_cpu_buffer_type()->iface.get_name), &base) != 0 &&
                    ::dladdr(reinterpret_cast<void *>(params->add_alloc_dep), &found) != 0 &&
                    found.dli_fbase == base.dli_fbase;
}

void check_backends(ggml_backend_dev_t cpu) {
    const BackendPtr owner(ggml_backend_dev_init(cpu, nullptr));
    ggml_backend_t   backend = owner.get();
    expect(backend != nullptr && backend->device == cpu && backend->iface.set_tensor_async == nullptr &&
               backend->iface.graph_compute != nullptr && backend->iface.graph_plan_compute != nullptr &&
               backend->iface.event_record == nullptr && backend->iface.graph_optimize == nullptr &&
               std::strcmp(backend->iface.get_name(backend), "CPU") == 0,
           "struct ggml_backend");

    backend->iface.graph_optimize = on_graph_optimize; // the last slot; this instance is ours
    frame                         = __builtin_frame_address(0);
    told_as_meant                 = false;
    const ContextPtr ctx          = new_context(2, 1, 8);
    ggml_cgraph *    graph        = ggml_new_graph_custom(ctx.get(), 8, false);
    ggml_build_forward_expand(graph, ggml_sqr(ctx.get(), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 8)));
    const SchedPtr sched(ggml_backend_sched_new(&backend, nullptr, 1, 8, /*parallel=*/false, /*op_offload=*/false));
    expect(ggml_backend_sched_alloc_graph(sched.get(), graph) && told_as_meant, "what graph_optimize is called with");
}

thread_local std::string noted; // in turn: a, b: a back end was given a graph; A, B: it was waited for; >: what is
                                // given was sent an input

template <char C> ggml_status note_graph(ggml_backend_t backend, ggml_cgraph * graph) {
    noted += is_sent_input(backend, graph) ? ">" : "";
    noted += C;
    return GGML_STATUS_SUCCESS;
}

template <char C> void note_wait(ggml_backend_t /*backend*/) {
    noted += C;
}

thread_local ggml_backend_buffer_type_t not_of_b; // a buffer type that b cannot read

bool can_b_read(ggml_backend_dev_t /*device*/, ggml_backend_buffer_type_t buft) {
    return buft != not_of_b;
}

} // namespace

bool is_sent_input(ggml_backend_t backend, const ggml_cgraph * graph) {
    const std::string ours = std::string(ggml_backend_name(backend)) + "#";
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            if (src != nullptr && src->op == GGML_OP_NONE && std::strncmp(src->name, ours.c_str(), ours.size()) == 0) {
                return true;
            }
        }
    }
    return false;
}

// Blocks that live on a device compute on a stream of their own with what llama.cpp's computes there, and the other way
// round. Nothing but ggml's scheduler orders the two: before it has a back end compute what another one did not send,
// it waits for the one before.
void check_order(decltype(&ggml_backend_sched_graph_compute_async) compute) {
    ggml_backend_dev_t  cpu               = cpu_device();
    BufferType          of_a              = BufferType(as_api3(ggml_backend_dev_buffer_type(cpu)));
    ggml_backend_device of_b              = *cpu;
    of_b.iface.supports_buft              = can_b_read;
    const BackendPtr a                    = BackendPtr(ggml_backend_dev_init(cpu, nullptr));
    const BackendPtr b                    = BackendPtr(ggml_backend_dev_init(cpu, nullptr));
    a->iface.graph_compute                = note_graph<'a'>;
    a->iface.synchronize                  = note_wait<'A'>;
    b->iface.graph_compute                = note_graph<'b'>;
    b->iface.synchronize                  = note_wait<'B'>;
    b->device                             = &of_b;
    ggml_backend_t             backends[] = {a.get(), b.get()};
    ggml_backend_buffer_type_t bufts[]    = {of_a.get(), ggml_backend_dev_buffer_type(cpu)};
    for (const bool reads : {true, false}) { // b reads what a computes where it is, or is sent it
        not_of_b               = reads ? nullptr : of_a.get();
        const ContextPtr ctx   = new_context(4, 1, 8);
        ggml_cgraph *    graph = ggml_new_graph_custom(ctx.get(), 8, false);
        ggml_tensor *    first = ggml_sqr(ctx.get(), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 8));
        ggml_tensor *    last  = ggml_sqr(ctx.get(), first);
        ggml_build_forward_expand(graph, last);
        const SchedPtr sched(ggml_backend_sched_new(backends, bufts, 2, 8, /*parallel=*/false, /*op_offload=*/false));
        ggml_backend_sched_set_tensor_backend(sched.get(), first, a.get());
        ggml_backend_sched_set_tensor_backend(sched.get(), last, b.get());
        const bool allocated = ggml_backend_sched_alloc_graph(sched.get(), graph);
        noted.clear();
        expect(allocated && compute(sched.get(), graph) == GGML_STATUS_SUCCESS, "computing splits");
        const size_t waited = noted.find('A', noted.find('a'));
        const size_t next   = noted.find('b');
        expect(waited < next && next != std::string::npos, "waiting for a back end before the next one computes");
        expect((noted[next - 1] == '>') == !reads, "what inputs that are sent are called");
    }
}

void check_ggml() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    expect(cpu != nullptr, "having a CPU device");
    const int found = ggml_backend_dev_backend_reg(cpu)->api_version; // first of its structure in every version
    if (found != GGML_BACKEND_API_VERSION && found != GGML_BACKEND_API_VERSION - 1) {
        throw Error(OALLAMA_MISMATCH, std::string("the loaded ggml ") + ggml_version() + " has version " +
                                          std::to_string(found) +
                                          " of the API of back ends, and only 2 and 3 are known; use llama.cpp b11549");
    }
    api_version = found;
    check_numbers();
    check_tensors_and_graphs();
    check_vtables(cpu);
    check_backends(cpu);
    check_order();
}

} // namespace oallama
