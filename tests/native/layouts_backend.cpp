// Other layouts for the stock CPU device than this CPU has: a "back end" of no device, which GGML_BACKEND_PATH loads
// into a stock program and into every process of ours. OALLAMA_TEST_LAYOUTS says which:
//
// none: none but the plain one.
//
// amx: AMX's too, on CPUs without AMX. As ggml-cpu/amx of ggml 0.25.3 and 0.26.0 it says yes to weights of three
// dimensions, no to activations that are not contiguous, takes a weight in one piece only, gives nothing back, and
// multiplies F16 by F32. Where AMX's kernels write past a product, of several matrices at once, this one ends the
// process. Products of quantised weights are the plain layout's, as AMX quantises activations in the same blocks.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "abi_check.h"
#include "util.h"

// libggml-cpu's list of extra buffer types, which it exports to C++; classes of these virtual functions are their
// contexts.
std::vector<ggml_backend_buffer_type_t> & ggml_backend_cpu_get_extra_buffer_types();

namespace {

constexpr int64_t tile_n = 16;
constexpr int64_t tile_k = 32;

ggml_backend_buffer_type_t amx_buft();

[[noreturn]] void die(const char * what, const ggml_tensor * tensor) {
    std::fprintf(stderr, "AMX: %s: %s\n", what, tensor->name);
    std::abort();
}

// K of a weight must be a multiple of this; 0: AMX has no kernel for the type.
int64_t alignment_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q8_0: return tile_k;
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ4_XS: return 256;
        case GGML_TYPE_F16: return 16;
        default: return 0;
    }
}

//
// kernels
//

struct ComputeParams { // the first members of ggml_compute_params
    int ith;
    int nth;
};

float dot(const ggml_fp16_t * weight, const float * x, int64_t n) {
    float sum = 0.0F;
    for (int64_t i = 0; i < n; i++) {
        sum += ggml_fp16_to_fp32(weight[i]) * x[i];
    }
    return sum;
}

void multiply_f16(const ComputeParams & params, const ggml_tensor * product) {
    const ggml_tensor * weight = product->src[0];
    const ggml_tensor * x      = product->src[1];
    for (int64_t row = params.ith; row < weight->ne[1]; row += params.nth) {
        const char * weights = static_cast<const char *>(weight->data) + static_cast<size_t>(row) * weight->nb[1];
        for (int64_t token = 0; token < x->ne[1]; token++) {
            const char * inputs = static_cast<const char *>(x->data) + static_cast<size_t>(token) * x->nb[1];
            char *       to     = static_cast<char *>(product->data) + static_cast<size_t>(token) * product->nb[1];
            reinterpret_cast<float *>(to)[row] = dot(reinterpret_cast<const ggml_fp16_t *>(weights),
                                                     reinterpret_cast<const float *>(inputs), weight->ne[0]);
        }
    }
}

class Kernels { // ggml::cpu::tensor_traits
  public:
    virtual ~Kernels() = default;

    virtual bool work_size(int /*n_threads*/, const ggml_tensor * /*op*/, size_t & /*size*/) { return false; }

    virtual bool compute_forward(ComputeParams * params, ggml_tensor * op) {
        if (op->op != GGML_OP_MUL_MAT) {
            return false;
        }
        if (op->ne[2] * op->ne[3] > 1) {
            die("a product of several matrices is written past its end", op);
        }
        if (op->src[0]->type != GGML_TYPE_F16) {
            return false; // the plain kernel
        }
        multiply_f16(*params, op);
        return true;
    }
};

class Layout { // ggml::cpu::extra_buffer_type
  public:
    virtual ~Layout() = default;

    virtual bool supports_op(ggml_backend_dev_t /*device*/, const ggml_tensor * op) {
        if (op->op != GGML_OP_MUL_MAT) {
            return false;
        }
        const ggml_tensor * weight    = op->src[0];
        const ggml_tensor * x         = op->src[1];
        const int64_t       alignment = alignment_of(weight->type);
        return ggml_is_contiguous(weight) && ggml_is_contiguous(x) && weight->buffer != nullptr &&
               ggml_backend_buffer_get_type(weight->buffer) == amx_buft() &&
               (x->buffer == nullptr || ggml_backend_buffer_is_host(x->buffer)) && op->ne[0] % (2 * tile_n) == 0 &&
               alignment > 0 && weight->ne[0] % alignment == 0 && x->type == GGML_TYPE_F32;
    }

    virtual Kernels * get_tensor_traits(const ggml_tensor * op) {
        const bool ours = op->op == GGML_OP_MUL_MAT && op->src[0]->buffer != nullptr &&
                          ggml_backend_buffer_get_type(op->src[0]->buffer) == amx_buft();
        return ours ? &kernels_ : nullptr;
    }

  private:
    Kernels kernels_;
};

//
// buffers
//

void set_tensor(ggml_backend_buffer_t /*buffer*/, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (offset != 0 || size != ggml_nbytes(tensor)) {
        die("a weight comes in pieces", tensor);
    }
    std::memcpy(tensor->data, data, size);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    constexpr size_t      page   = 64;
    void *                memory = std::aligned_alloc(page, (size / page + 1) * page);
    ggml_backend_buffer_i to     = {};
    to.free_buffer               = [](ggml_backend_buffer_t buffer) { std::free(buffer->context); };
    to.get_base                  = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    to.set_tensor                = set_tensor;
    to.clear = [](ggml_backend_buffer_t buffer, uint8_t value) { std::memset(buffer->context, value, buffer->size); };
    return memory == nullptr ? nullptr : ggml_backend_buffer_init(buft, to, memory, size);
}

// What AMX keeps beside the weights of a block: a sum for Q8_0, scales and minima unpacked for others.
size_t alloc_size(ggml_backend_buffer_type_t /*buft*/, const ggml_tensor * tensor) {
    const size_t n_blocks = static_cast<size_t>(ggml_nelements(tensor) / ggml_blck_size(tensor->type));
    switch (tensor->type) {
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K: return ggml_nbytes(tensor) + 4 * n_blocks;
        case GGML_TYPE_IQ4_XS: return ggml_nbytes(tensor) + 2 * n_blocks;
        default: return ggml_nbytes(tensor);
    }
}

ggml_backend_buffer_type_t amx_buft() {
    static oallama::BufferType buft([] {
        ggml_backend_buffer_type made = {};
        made.iface.get_name           = [](ggml_backend_buffer_type_t) { return "AMX"; };
        made.iface.alloc_buffer       = alloc_buffer;
        made.iface.get_alignment      = [](ggml_backend_buffer_type_t) { return size_t{64}; };
        made.iface.get_alloc_size     = alloc_size;
        made.device                   = oallama::cpu_device();
        made.context                  = new Layout;
        return made;
    }());
    return buft.get();
}

} // namespace

extern "C" {

__attribute__((visibility("default"))) void * ggml_backend_init(void);

void * ggml_backend_init(void) {
    static ggml_backend_reg reg = {};

    oallama::api_version = reg.api_version = ggml_backend_dev_backend_reg(oallama::cpu_device())->api_version;

    reg.iface.get_name         = [](ggml_backend_reg_t) { return "LAYOUTS"; };
    reg.iface.get_device_count = [](ggml_backend_reg_t) { return size_t{0}; };
    reg.iface.get_device       = [](ggml_backend_reg_t, size_t) -> ggml_backend_dev_t { return nullptr; };

    const char * wanted  = std::getenv("OALLAMA_TEST_LAYOUTS");
    auto &       layouts = ggml_backend_cpu_get_extra_buffer_types(); // ggml copies it when it is first asked
    if (wanted != nullptr && std::strcmp(wanted, "none") == 0) {
        layouts.clear();
    } else if (wanted != nullptr && std::strcmp(wanted, "amx") == 0) {
        layouts.insert(layouts.begin(), amx_buft());
    } else {
        return nullptr;
    }
    return &reg;
}

} // extern "C"
