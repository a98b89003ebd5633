// The loaded ggml: what it logs, its types, devices, buffer types and the layouts of the CPU; RPC servers and clients.

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "ggml-rpc.h"
#include "mul_mat.h"
#include "split/abi_check.h"
#include "split/resident_buft.h"
#include "support.h"

namespace bridge {

namespace {

//
// log
//

struct Log {
    std::mutex  mutex;
    std::string partial;    // a line that ggml has not ended yet
    std::string last_error; // the last line of level error
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
        log.partial += text;
        for (size_t end = log.partial.find('\n'); end != std::string::npos; end = log.partial.find('\n')) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                log.last_error = log.partial.substr(0, end);
            }
            log.partial.erase(0, end + 1);
        }
    });
}

// ggml calls this just before abort(); its own default would start a debugger to print a backtrace.
void on_abort(const char * message) {
    std::fprintf(stderr, "ggml aborted: %s\n", message);
    std::fflush(stderr);
}

//
// devices and layouts
//

const char * type_name(ggml_backend_dev_t device) {
    switch (ggml_backend_dev_type(device)) {
        case GGML_BACKEND_DEVICE_TYPE_CPU: return "CPU";
        case GGML_BACKEND_DEVICE_TYPE_GPU: return "GPU";
        case GGML_BACKEND_DEVICE_TYPE_IGPU: return "IGPU";
        case GGML_BACKEND_DEVICE_TYPE_ACCEL: return "ACCEL";
        case GGML_BACKEND_DEVICE_TYPE_META: return "META";
    }
    return "UNKNOWN";
}

// Descriptions may be longer than our array; a cut description still describes.
std::string shortened(const char * text, size_t capacity) {
    return text == nullptr ? std::string() : std::string(text).substr(0, capacity - 1);
}

// ggml checks the file's ggml_backend_init and its API version, and logs what is wrong.
std::string backend_load(const char * path) {
    require(path != nullptr && *path != '\0', "a back end is the path of a library");
    ggml_backend_reg_t reg = ggml_backend_load(path);
    if (reg == nullptr) {
        fail(OALLAMA_INVALID, std::string(path) + " is not a back end for this ggml");
    }
    return ggml_backend_reg_name(reg);
}

std::vector<std::string> rpc_add(const char * endpoint) {
    require(endpoint != nullptr && std::strchr(endpoint, ':') != nullptr, "an RPC endpoint is host:port");
    using add_server_t = decltype(&ggml_backend_rpc_add_server);

    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    const auto add_server  = reg == nullptr ? nullptr : proc_address<add_server_t>(reg, "ggml_backend_rpc_add_server");
    if (add_server == nullptr) {
        throw Error(OALLAMA_UNSUPPORTED, "this llama.cpp was built without RPC; run `oallama setup --refresh`");
    }
    reg = add_server(endpoint);
    if (reg == nullptr) {
        fail(OALLAMA_FAILED, std::string("the RPC server at ") + endpoint + " offers no device");
    }
    ggml_backend_register(reg);
    std::vector<std::string> names;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
        names.emplace_back(ggml_backend_dev_name(ggml_backend_reg_dev_get(reg, i)));
    }
    return names;
}

// Asks as llama.cpp does when it chooses a buffer type: with an empty buffer of that type, and a batch of 512. sound:
// whether only what multiplies_right says yes to counts.
bool layout_takes(const char * layout, const MulMatShape & shape, bool sound) {
    check_shape(shape);
    ggml_backend_dev_t         device = cpu_device();
    ggml_backend_buffer_type_t buft   = find_layout(device, layout);

    ContextPtr    ctx    = new_context(4);
    ggml_tensor * weight = ggml_new_tensor_3d(ctx.get(), shape.type, shape.k, shape.n, shape.e);
    BufferPtr     buffer = alloc_buffer(buft, 0);
    weight->buffer       = buffer.get();

    const ggml_tensor * mul_mat = build_mul_mat(ctx.get(), weight, shape);
    return ggml_backend_dev_supports_op(device, mul_mat) && (!sound || oallama::multiplies_right(buft, mul_mat));
}

} // namespace

void fail(oallama_status status, const std::string & what) {
    Log &                       log = the_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    const std::string           reason = std::exchange(log.last_error, {});
    throw Error(status, reason.empty() ? what : what + " (ggml: " + reason + ")");
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

int gb_open(void) {
    return guarded([] {
        ggml_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
        oallama::check_ggml();
    });
}

int gb_type_count(void) {
    return GGML_TYPE_COUNT;
}

int gb_get_type_info(int number, gb_type_info * info) {
    return guarded([&] {
        require(number >= 0 && number < GGML_TYPE_COUNT, "there is no ggml type of this number");
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

int gb_device_count(void) {
    return static_cast<int>(ggml_backend_dev_count());
}

int gb_get_device_info(int index, int32_t ask_server, gb_device_info * info) {
    return guarded([&] {
        require(index >= 0 && index < gb_device_count(), "there is no device of this index");
        ggml_backend_dev_t device  = ggml_backend_dev_get(static_cast<size_t>(index));
        const char *       backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));

        ggml_backend_dev_props props = {};
        *info                        = {};
        if (ask_server != 0 || std::strcmp(backend, "RPC") != 0) {
            ggml_backend_dev_get_props(device, &props);
            info->takes_residents = oallama::resident_buft(device) != nullptr ? 1 : 0;
        }
        copy_text(ggml_backend_dev_name(device), info->name, sizeof info->name);
        copy_text(shortened(props.description, sizeof info->description), info->description, sizeof info->description);
        copy_text(backend, info->backend, sizeof info->backend);
        copy_text(type_name(device), info->type, sizeof info->type);
        info->memory_total = static_cast<int64_t>(props.memory_total);
        info->memory_free  = static_cast<int64_t>(props.memory_free);
        info->asynchronous = props.caps.async ? 1 : 0;
        info->host_buffer  = props.caps.host_buffer ? 1 : 0;
        info->events       = props.caps.events ? 1 : 0;
        info->pointer      = reinterpret_cast<uintptr_t>(device);
    });
}

int gb_cpu_features(char * text, int64_t capacity) {
    return guarded([&] {
        const auto get_features = proc_address<ggml_backend_get_features_t>(ggml_backend_dev_backend_reg(cpu_device()),
                                                                            "ggml_backend_get_features");
        std::vector<std::string> features;
        if (get_features != nullptr) {
            for (const ggml_backend_feature * f = get_features(ggml_backend_dev_backend_reg(cpu_device()));
                 f->name != nullptr; f++) {
                features.push_back(std::strcmp(f->value, "1") == 0 ? f->name : std::string(f->name) + "=" + f->value);
            }
        }
        copy_text(join_lines(features), text, capacity);
    });
}

int gb_buft(const char * device, const char * layout, void ** buft) {
    return guarded([&] { *buft = find_layout(find_device(device), layout); });
}

int gb_cpu_layouts(char * text, int64_t capacity) {
    return guarded([&] {
        std::vector<std::string> names;
        for (ggml_backend_buffer_type_t buft : cpu_layouts()) {
            names.emplace_back(ggml_backend_buft_name(buft));
        }
        copy_text(join_lines(names), text, capacity);
    });
}

int gb_layout_supports(const char * layout, int32_t type, int64_t k, int64_t n, int64_t e, int64_t n_expert_used,
                       int32_t sound, int32_t * supported) {
    return guarded([&] {
        const MulMatShape shape = {static_cast<ggml_type>(type), k, n, e, n_expert_used, /*n_tokens=*/512};
        *supported              = layout_takes(layout, shape, sound != 0) ? 1 : 0;
    });
}

int gb_backend_load(const char * path, char * name, int64_t capacity) {
    return guarded([&] { copy_text(backend_load(path), name, capacity); });
}

int gb_rpc_add(const char * endpoint, char * names, int64_t capacity) {
    return guarded([&] { copy_text(join_lines(rpc_add(endpoint)), names, capacity); });
}
