#include "device.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "backend.h"
#include "resident_buft.h"

namespace oallama {

namespace {

const DeviceContext & context_of(ggml_backend_dev_t dev) {
    return *static_cast<DeviceContext *>(dev->context);
}

ggml_backend_dev_t memory_of(ggml_backend_dev_t dev) {
    return context_of(dev).memory;
}

// memory: memory_of, which may change at any time.
bool computes(ggml_backend_dev_t dev, ggml_backend_dev_t memory) {
    return context_of(dev).named == nullptr && (!context_of(dev).resident || memory != nullptr);
}

// How many loaded plans name each device.
struct Partners {
    std::mutex                        mutex;
    std::map<ggml_backend_dev_t, int> n_plans;
};

Partners & partners() {
    static auto * the_partners = new Partners; // plans may be freed when statics are destroyed
    return *the_partners;
}

// The buffer type of results that llama.cpp finds in host memory.
ggml_backend_buffer_type_t host_buft() {
    Partners &                        known = partners();
    const std::lock_guard<std::mutex> lock(known.mutex);
    ggml_backend_buffer_type_t        pinned =
        known.n_plans.size() == 1 ? ggml_backend_dev_host_buffer_type(known.n_plans.begin()->first) : nullptr;
    return pinned != nullptr ? pinned : ggml_backend_cpu_buffer_type();
}

// The backends of a llama_context are made one after another in a thread, the one for host memory first: what computes
// is the same behind them, with one stream of weights and one memory for activations.
std::shared_ptr<SplitBackend> shared_split(ggml_backend_dev_t dev) {
    thread_local std::weak_ptr<SplitBackend>     last;
    thread_local std::vector<ggml_backend_dev_t> sharing;
    const bool                                   begins = !context_of(dev).resident;
    std::shared_ptr<SplitBackend>                split  = begins ? nullptr : last.lock();
    if (split == nullptr || std::find(sharing.begin(), sharing.end(), dev) != sharing.end()) {
        split = std::make_shared<SplitBackend>();
        last  = split;
        sharing.clear();
    }
    sharing.push_back(dev);
    return split;
}

const char * oallama_device_get_name(ggml_backend_dev_t dev) {
    return context_of(dev).name.c_str();
}

const char * oallama_device_get_description(ggml_backend_dev_t dev) {
    return context_of(dev).description.c_str();
}

void oallama_device_get_memory(ggml_backend_dev_t /*dev*/, size_t * free, size_t * total) {
    *free  = 0; // memory is the CPU's and the partner's, and reported by them
    *total = 0;
}

enum ggml_backend_dev_type oallama_device_get_type(ggml_backend_dev_t /*dev*/) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void oallama_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = oallama_device_get_name(dev);
    props->description = oallama_device_get_description(dev);
    props->type        = oallama_device_get_type(dev);
}

ggml_backend_t oallama_device_init_backend(ggml_backend_dev_t dev, const char * /*params*/) {
    ggml_backend_t backend = nullptr;
    logged([&] {
        ggml_backend_dev_t memory = memory_of(dev);
        backend                   = new_backend(dev, computes(dev, memory) ? shared_split(dev) : nullptr, memory);
    });
    return backend;
}

ggml_backend_buffer_type_t oallama_device_get_buffer_type(ggml_backend_dev_t dev) {
    if (context_of(dev).named != nullptr) {
        return context_of(dev).named;
    }
    if (!context_of(dev).resident) {
        return host_buft();
    }
    ggml_backend_dev_t memory = memory_of(dev);
    return memory != nullptr ? resident_buft(memory) : ggml_backend_cpu_buffer_type();
}

bool oallama_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    bool claimed = false;
    logged([&] {
        ggml_backend_dev_t memory = memory_of(dev);
        claimed                   = computes(dev, memory) && claims(op, memory);
    });
    return claimed;
}

bool oallama_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    // also of a device that computes nothing now: its buffer type is the host's meanwhile
    const bool host = context_of(dev).named == nullptr && ggml_backend_buft_is_host(buft);
    // a plan may come or go between the two calls of ggml_backend_sched_new: what was returned stays supported
    const bool returned = context_of(dev).resident && is_resident_buft(buft);
    if (is_split_buft(buft) || host || returned) {
        return true;
    }
    ggml_backend_dev_t memory = memory_of(dev);
    return memory != nullptr && memory->iface.supports_buft(memory, buft);
}

} // namespace

void add_partner(ggml_backend_dev_t device) {
    const std::lock_guard<std::mutex> lock(partners().mutex);
    partners().n_plans[device]++;
}

void remove_partner(ggml_backend_dev_t device) {
    const std::lock_guard<std::mutex> lock(partners().mutex);
    if (--partners().n_plans.at(device) == 0) {
        partners().n_plans.erase(device);
    }
}

const ggml_backend_device_i oallama_device_i = {
    /* .get_name             = */ oallama_device_get_name,
    /* .get_description      = */ oallama_device_get_description,
    /* .get_memory           = */ oallama_device_get_memory,
    /* .get_type             = */ oallama_device_get_type,
    /* .get_props            = */ oallama_device_get_props,
    /* .init_backend         = */ oallama_device_init_backend,
    /* .get_buffer_type      = */ oallama_device_get_buffer_type,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ oallama_device_supports_op,
    /* .supports_buft        = */ oallama_device_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

} // namespace oallama
