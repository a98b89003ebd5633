#include "abi_check.h"

#include <cstring>

#include "util.h"

namespace oallama {

namespace {

struct NamedOp {
    ggml_op      op;
    const char * name;
};

constexpr NamedOp ops_used[] = {
    {GGML_OP_NONE, "NONE"},       {GGML_OP_ADD, "ADD"},         {GGML_OP_ADD_ID, "ADD_ID"},
    {GGML_OP_SUB, "SUB"},         {GGML_OP_MUL, "MUL"},         {GGML_OP_DIV, "DIV"},
    {GGML_OP_SQR, "SQR"},         {GGML_OP_MUL_MAT, "MUL_MAT"}, {GGML_OP_MUL_MAT_ID, "MUL_MAT_ID"},
    {GGML_OP_CLAMP, "CLAMP"},     {GGML_OP_RESHAPE, "RESHAPE"}, {GGML_OP_VIEW, "VIEW"},
    {GGML_OP_PERMUTE, "PERMUTE"}, {GGML_OP_UNARY, "UNARY"},     {GGML_OP_TRANSPOSE, "TRANSPOSE"},
    {GGML_OP_GLU, "GLU"},
};

struct NamedType {
    ggml_type    type;
    const char * name;
};

constexpr NamedType types_used[] = {{GGML_TYPE_F32, "f32"}, {GGML_TYPE_F16, "f16"}, {GGML_TYPE_I32, "i32"}};

void expect(bool condition, const char * what) {
    if (!condition) {
        throw Error(OALLAMA_MISMATCH, std::string("the loaded ggml ") + ggml_version() + " differs from " +
                                          GGML_ABI_VERSION_STRING + " in " + what);
    }
}

void check_tensors_and_graphs() {
    expect(ggml_tensor_overhead() == sizeof(ggml_tensor) + 32, "the size of a tensor");
    const ContextPtr ctx = new_context(8, 1, 8);
    ggml_tensor *    a   = ggml_set_name(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 6, 5, 3), "probe");
    ggml_tensor *    x   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 6, 7, 3);
    ggml_tensor *    y   = ggml_mul_mat(ctx.get(), a, x);
    ggml_tensor *    z   = ggml_add(ctx.get(), y, y);
    expect(a->type == GGML_TYPE_F16 && std::strcmp(a->name, "probe") == 0 && a->ne[1] == 5 && a->nb[2] == 60 &&
               a->buffer == nullptr && a->data == nullptr && a->extra == nullptr && y->op == GGML_OP_MUL_MAT &&
               y->src[0] == a && y->src[1] == x,
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

void check_backend_interface() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    expect(cpu != nullptr, "having a CPU device");
    ggml_backend_reg_t         reg  = ggml_backend_dev_backend_reg(cpu);
    ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type();
    expect(reg->api_version == GGML_BACKEND_API_VERSION && cpu->reg == reg &&
               std::strcmp(reg->iface.get_name(reg), ggml_backend_reg_name(reg)) == 0 &&
               std::strcmp(cpu->iface.get_name(cpu), ggml_backend_dev_name(cpu)) == 0 &&
               cpu->iface.get_type(cpu) == GGML_BACKEND_DEVICE_TYPE_CPU && cpu->iface.supports_buft(cpu, buft) &&
               cpu->iface.get_buffer_type(cpu) == buft,
           "the device interface");
    expect(std::strcmp(buft->iface.get_name(buft), ggml_backend_buft_name(buft)) == 0 && buft->iface.is_host(buft) &&
               buft->iface.get_alignment(buft) > 0,
           "the buffer type interface");
    const BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, 256));
    expect(buffer != nullptr && buffer->buft == buft && buffer->size >= 256 &&
               buffer->iface.get_base(buffer.get()) == ggml_backend_buffer_get_base(buffer.get()),
           "the buffer interface");
    const BackendPtr backend(ggml_backend_dev_init(cpu, nullptr));
    expect(backend != nullptr && backend->device == cpu && backend->iface.set_tensor_async == nullptr &&
               backend->iface.graph_compute != nullptr && backend->iface.graph_plan_compute != nullptr &&
               backend->iface.event_record == nullptr &&
               std::strcmp(backend->iface.get_name(backend.get()), "CPU") == 0,
           "the backend interface");
}

} // namespace

void check_ggml() {
    if (std::strcmp(ggml_version(), GGML_ABI_VERSION_STRING) != 0) {
        throw Error(OALLAMA_MISMATCH, std::string("ggml ") + ggml_version() +
                                          " is loaded, but the split backend works only with ggml " +
                                          GGML_ABI_VERSION_STRING + "; use llama.cpp as in llama-cpp-python 0.3.36");
    }
    for (const NamedOp & used : ops_used) {
        expect(std::strcmp(ggml_op_name(used.op), used.name) == 0, "the number of an operation");
    }
    for (const NamedType & used : types_used) {
        expect(std::strcmp(ggml_type_name(used.type), used.name) == 0, "the number of a type");
    }
    check_tensors_and_graphs();
    check_backend_interface();
}

} // namespace oallama
