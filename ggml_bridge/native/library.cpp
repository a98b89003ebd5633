// The loaded ggml library: is it the one this bridge was written for, what are its types, and what does it log.

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>

#include "support.h"

namespace bridge {

namespace {

//
// log
//

constexpr size_t max_log_lines = 64;

struct Log {
    std::mutex              mutex;
    std::deque<std::string> lines;
    std::string             partial;    // a line that ggml has not ended yet
    std::string             last_error; // the last line of level error
    bool                    to_stderr = false;
};

// Never destroyed: ggml may log from its own threads while the process ends.
Log & the_log() {
    static Log * log = new Log;
    return *log;
}

void on_log(ggml_log_level level, const char * text, void * /*user_data*/) {
    guarded([&] { // ggml is C: a line that there is no memory for is lost
        Log &                       log = the_log();
        std::lock_guard<std::mutex> lock(log.mutex);
        if (log.to_stderr) {
            std::fputs(text, stderr);
        }
        log.partial += text;
        for (size_t end = log.partial.find('\n'); end != std::string::npos; end = log.partial.find('\n')) {
            std::string line = log.partial.substr(0, end);
            log.partial.erase(0, end + 1);
            if (level == GGML_LOG_LEVEL_ERROR) {
                log.last_error = line;
            }
            log.lines.push_back(std::move(line));
            if (log.lines.size() > max_log_lines) {
                log.lines.pop_front();
            }
        }
    });
}

// ggml calls this just before abort(); its own default would start a debugger to print a backtrace.
void on_abort(const char * message) {
    std::fprintf(stderr, "ggml aborted: %s\n", message);
    std::fflush(stderr);
}

//
// check
//

struct NamedOp {
    ggml_op      op;
    const char * name;
};

constexpr NamedOp ops_used[] = {
    {GGML_OP_NONE, "NONE"},
    {GGML_OP_ADD, "ADD"},
    {GGML_OP_RMS_NORM, "RMS_NORM"},
    {GGML_OP_MUL_MAT, "MUL_MAT"},
    {GGML_OP_MUL_MAT_ID, "MUL_MAT_ID"},
    {GGML_OP_SCALE, "SCALE"},
    {GGML_OP_RESHAPE, "RESHAPE"},
    {GGML_OP_VIEW, "VIEW"},
    {GGML_OP_PERMUTE, "PERMUTE"},
    {GGML_OP_SET_ROWS, "SET_ROWS"},
    {GGML_OP_SOFT_MAX, "SOFT_MAX"},
    {GGML_OP_ROPE, "ROPE"},
    {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"},
    {GGML_OP_GLU, "GLU"},
};

struct NamedType {
    ggml_type    type;
    const char * name;
};

constexpr NamedType types_used[] = {
    {GGML_TYPE_F32, "f32"},       {GGML_TYPE_F16, "f16"},     {GGML_TYPE_IQ2_XXS, "iq2_xxs"},
    {GGML_TYPE_IQ2_XS, "iq2_xs"}, {GGML_TYPE_IQ1_S, "iq1_s"}, {GGML_TYPE_IQ2_S, "iq2_s"},
    {GGML_TYPE_I8, "i8"},         {GGML_TYPE_I32, "i32"},     {GGML_TYPE_I64, "i64"},
    {GGML_TYPE_IQ1_M, "iq1_m"},   {GGML_TYPE_BF16, "bf16"},
};

void expect(bool condition, const char * what) {
    if (!condition) {
        throw Error(GB_MISMATCH, std::string("the loaded ggml ") + ggml_version() + " differs from " +
                                     GGML_ABI_VERSION_STRING + " in " + what);
    }
}

void check_tensor_layout() {
    // struct ggml_object, which precedes each tensor in a context, is 32 bytes
    expect(ggml_tensor_overhead() == sizeof(ggml_tensor) + 32, "the size of a tensor");

    ContextPtr    ctx = new_context(4);
    ggml_tensor * a   = ggml_set_name(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 6, 5, 3), "probe");
    ggml_tensor * b   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 6, 5);
    ggml_tensor * c   = ggml_mul_mat(ctx.get(), a, ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 6, 7, 3));

    expect(a->type == GGML_TYPE_F16 && a->op == GGML_OP_NONE && std::strcmp(a->name, "probe") == 0,
           "struct ggml_tensor");
    expect(a->ne[0] == 6 && a->ne[1] == 5 && a->ne[2] == 3 && a->ne[3] == 1, "the shape of a tensor");
    expect(a->nb[0] == 2 && a->nb[1] == 12 && a->nb[2] == 60, "the strides of a tensor");
    expect(a->buffer == nullptr && a->data == nullptr && a->view_src == nullptr && a->extra == nullptr,
           "the pointers of a tensor");
    expect(b->ne[1] == 5 && c->op == GGML_OP_MUL_MAT && c->src[0] == a && c->ne[0] == 5 && c->ne[1] == 7,
           "the sources of a tensor");
}

void check_device_layout() {
    ggml_backend_dev_t     device = cpu_device();
    ggml_backend_dev_props props  = {};
    ggml_backend_dev_get_props(device, &props);
    expect(props.name != nullptr && std::strcmp(props.name, ggml_backend_dev_name(device)) == 0 &&
               props.type == GGML_BACKEND_DEVICE_TYPE_CPU && props.memory_total > 0 && !props.caps.async &&
               props.caps.buffer_from_host_ptr && props.caps.mmap_support,
           "struct ggml_backend_dev_props");
}

void check_library() {
    if (std::strcmp(ggml_version(), GGML_ABI_VERSION_STRING) != 0) {
        throw Error(GB_MISMATCH, std::string("ggml ") + ggml_version() +
                                     " is loaded, but this program works only with ggml " + GGML_ABI_VERSION_STRING +
                                     "; install llama-cpp-python==0.3.36");
    }
    for (const NamedOp & used : ops_used) {
        expect(std::strcmp(ggml_op_name(used.op), used.name) == 0, "the number of an operation");
    }
    for (const NamedType & used : types_used) {
        expect(std::strcmp(ggml_type_name(used.type), used.name) == 0, "the number of a type");
    }
    check_tensor_layout();
    const ggml_type_traits * f16 = ggml_get_type_traits(GGML_TYPE_F16);
    expect(f16->type_size == 2 && f16->blck_size == 1 && !f16->is_quantized && f16->to_float != nullptr,
           "struct ggml_type_traits");
    check_device_layout();
}

} // namespace

std::string ggml_reason() {
    Log &                       log = the_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    std::string                 reason;
    if (!log.last_error.empty()) {
        reason = " (ggml: " + log.last_error + ")";
        log.last_error.clear();
    }
    return reason;
}

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_abi(void) {
    return GB_ABI;
}

const char * gb_ggml_version(void) {
    return ggml_version();
}

const char * gb_ggml_commit(void) {
    return ggml_commit();
}

int gb_check(void) {
    return guarded(check_library);
}

int gb_log_capture(int to_stderr) {
    return guarded([&] {
        {
            std::lock_guard<std::mutex> lock(the_log().mutex);
            the_log().to_stderr = to_stderr != 0;
        }
        ggml_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
    });
}

int gb_log_tail(char * text, int64_t capacity) {
    return guarded([&] {
        Log &                       log = the_log();
        std::lock_guard<std::mutex> lock(log.mutex);
        std::string                 tail = join_lines({log.lines.begin(), log.lines.end()});
        const size_t                room = static_cast<size_t>(std::max<int64_t>(capacity - 1, 0));
        copy_text(tail.size() > room ? tail.substr(tail.size() - room) : tail, text, capacity);
    });
}

int gb_type_count(void) {
    return GGML_TYPE_COUNT;
}

int gb_get_type_info(int number, gb_type_info * info) {
    return guarded([&] {
        require(info != nullptr && number >= 0 && number < GGML_TYPE_COUNT, "there is no ggml type of this number");
        const auto type = static_cast<ggml_type>(number);
        *info           = {};
        info->number    = number;
        if (ggml_type_size(type) == 0 || ggml_blck_size(type) == 0) {
            return; // removed from ggml
        }
        std::string name = ggml_type_name(type);
        std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
        copy_text(name, info->name, GB_NAME_BYTES);
        info->block_elements = ggml_blck_size(type);
        info->block_bytes    = static_cast<int64_t>(ggml_type_size(type));
        info->quantized      = ggml_is_quantized(type) ? 1 : 0;
        info->mul_mat        = has_cpu_kernel(type) ? 1 : 0;
    });
}
