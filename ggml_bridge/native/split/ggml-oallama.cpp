// Backend, devices and registration: how ggml sees the split backend.
//
// Two devices are registered. OALLAMA computes; its buffer type is plain host memory, so results lie where llama.cpp's
// CPU backend reads them. OALLAMA_Split computes nothing: it only makes the split buffer type known by name, because
// `-ot` looks among the default buffer types of devices. For a device that blocks live on, one more is registered when
// a plan names it: it computes as OALLAMA does, but its results lie where that device computes what comes next.

#include "ggml-oallama.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "abi_check.h"
#include "resident_buft.h"
#include "split_backend.h"

using namespace oallama;

namespace {

//
// backend interface
//

struct BackendContext {
    std::shared_ptr<SplitBackend> split; // NULL: of the device that computes nothing
};

ggml_backend_dev_t memory_of(ggml_backend_dev_t dev);

SplitBackend & split_of(ggml_backend_t backend) {
    return *static_cast<BackendContext *>(backend->context)->split;
}

const char * oallama_backend_get_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(backend->device);
}

void oallama_backend_free(ggml_backend_t backend) {
    delete static_cast<BackendContext *>(backend->context);
    delete backend;
}

ggml_status oallama_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_status computed = GGML_STATUS_FAILED;
    const int   status   = logged([&] { computed = split_of(backend).compute(graph, memory_of(backend->device)); });
    return status == OALLAMA_OK          ? computed
           : status == OALLAMA_NO_MEMORY ? GGML_STATUS_ALLOC_FAILED
                                         : GGML_STATUS_FAILED;
}

// llama.cpp makes the copy, which waits for the device. Until then the link is free.
bool oallama_backend_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst,
                                      const ggml_tensor * /*src*/, ggml_tensor * /*dst*/) {
    try {
        if (backend_src != backend_dst && static_cast<BackendContext *>(backend_dst->context)->split) {
            split_of(backend_dst).device_computes();
        }
    } catch (const std::exception & error) {
        log_error(error.what());
    }
    return false;
}

void oallama_backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph,
                                    ggml_backend_graph_optimize_params * params) {
    // graph_compute meets the same, and can say so
    guarded([&] { split_of(backend).prepare(graph, memory_of(backend->device), params); });
}

const ggml_backend_i oallama_backend_i = {
    /* .get_name            = */ oallama_backend_get_name,
    /* .free                = */ oallama_backend_free,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ oallama_backend_cpy_tensor_async,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ oallama_backend_graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ oallama_backend_graph_optimize,
};

ggml_guid_t oallama_backend_guid() {
    static ggml_guid guid = {0x6f, 0x61, 0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x2d,
                             0x73, 0x70, 0x6c, 0x69, 0x74, 0x2d, 0x30, 0x31};
    return &guid;
}

void oallama_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    if (static_cast<BackendContext *>(backend->context)->split) {
        logged([&] { split_of(backend).host().set_n_threads(n_threads); });
    }
}

void oallama_backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    if (static_cast<BackendContext *>(backend->context)->split) {
        split_of(backend).host().set_abort_callback(callback, data);
    }
}

//
// device interface
//

enum DeviceIndex { device_compute = 0, device_split = 1, n_devices = 2 };

struct DeviceContext {
    std::string        name;
    std::string        description;
    ggml_backend_dev_t memory = nullptr; // whose memory its results are in; NULL: the host's
};

ggml_backend_dev_t device_at(size_t index);

// The device whose memory its results are in, while a plan is loaded that names it: devices come and go. NULL: none.
ggml_backend_dev_t memory_in_use(ggml_backend_dev_t dev);

bool computes(ggml_backend_dev_t dev) {
    return dev != device_at(device_split);
}

// What `-ot` finds by name: the plan of OALLAMA_PLAN, or an empty one.
std::shared_ptr<LoadedPlan> & default_plan() {
    static std::shared_ptr<LoadedPlan> plan;
    return plan;
}

const DeviceContext & context_of(ggml_backend_dev_t dev) {
    return *static_cast<DeviceContext *>(dev->context);
}

ggml_backend_dev_t memory_of(ggml_backend_dev_t dev) {
    return context_of(dev).memory;
}

// The backends of a llama_context are made one after another in a thread, the one for host memory first: what computes
// is the same behind them, with one stream of weights and one memory for activations.
std::shared_ptr<SplitBackend> shared_split(ggml_backend_dev_t dev) {
    thread_local std::weak_ptr<SplitBackend>     last;
    thread_local std::vector<ggml_backend_dev_t> sharing;
    const bool                                   begins = memory_of(dev) == nullptr;
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
        auto context = std::make_unique<BackendContext>();
        if (computes(dev)) {
            context->split = shared_split(dev);
        }
        backend          = new ggml_backend{oallama_backend_guid(), oallama_backend_i, dev, nullptr};
        backend->context = context.release();
    });
    return backend;
}

ggml_backend_buffer_type_t oallama_device_get_buffer_type(ggml_backend_dev_t dev) {
    if (!computes(dev)) {
        return default_plan()->buft();
    }
    ggml_backend_dev_t memory = memory_in_use(dev);
    return memory != nullptr ? resident_buft(memory) : ggml_backend_cpu_buffer_type();
}

bool oallama_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    bool claimed = false;
    logged([&] { claimed = computes(dev) && claims(op, memory_of(dev)); });
    return claimed;
}

bool oallama_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    if (is_split_buft(buft) || (computes(dev) && ggml_backend_buft_is_host(buft))) {
        return true;
    }
    ggml_backend_dev_t memory = memory_in_use(dev);
    return memory != nullptr && memory->iface.supports_buft(memory, buft);
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

//
// registration interface
//

const char * oallama_reg_get_name(ggml_backend_reg_t /*reg*/) {
    return "OALLAMA";
}

size_t oallama_reg_get_device_count(ggml_backend_reg_t /*reg*/) {
    return n_devices;
}

ggml_backend_dev_t oallama_reg_get_device(ggml_backend_reg_t /*reg*/, size_t index) {
    return index < n_devices ? device_at(index) : nullptr;
}

void * oallama_reg_get_proc_address(ggml_backend_reg_t /*reg*/, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(oallama_backend_set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(oallama_backend_set_abort_callback);
    }
    return nullptr;
}

ggml_backend_reg the_reg = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */
    {
        /* .get_name         = */ oallama_reg_get_name,
        /* .get_device_count = */ oallama_reg_get_device_count,
        /* .get_device       = */ oallama_reg_get_device,
        /* .get_proc_address = */ oallama_reg_get_proc_address,
    },
    /* .context     = */ nullptr,
};

DeviceContext device_contexts[n_devices] = {
    {"OALLAMA", "CPU and a partner device computing one operator together", nullptr},
    {"OALLAMA_Split", "names the split buffer type; computes nothing", nullptr},
};

ggml_backend_device devices[n_devices] = {
    {oallama_device_i, &the_reg, &device_contexts[device_compute]},
    {oallama_device_i, &the_reg, &device_contexts[device_split]},
};

ggml_backend_dev_t device_at(size_t index) {
    return &devices[index];
}

std::string read_file(const char * path) {
    const std::ifstream file(path, std::ios::binary);
    std::ostringstream  text;
    text << file.rdbuf();
    require(file.good() && text.good(), std::string("OALLAMA_PLAN names ") + path + ", which cannot be read");
    return text.str();
}

std::mutex registering;
bool       registered = false;

// What both ways in do first.
void start(const char * plan_path) {
    check_ggml();
    if (default_plan() == nullptr) {
        PlanSpec spec  = plan_path == nullptr || plan_path[0] == '\0' ? PlanSpec{} : parse_plan(read_file(plan_path));
        default_plan() = LoadedPlan::make(std::move(spec), device_at(device_split));
    }
}

} // namespace

//
// blocks that live on a device
//

namespace {

// A device of ours for another's memory. Backends that llama.cpp made of it may outlive the plans that it is
// registered for.
struct ResidentDevice {
    DeviceContext       context;
    ggml_backend_reg    reg;
    ggml_backend_device device;
    std::atomic<int>    n_plans{0}; // in use; read while others are loaded and freed
};

ResidentDevice & resident_of(ggml_backend_reg_t reg) {
    return *static_cast<ResidentDevice *>(reg->context);
}

ggml_backend_dev_t memory_in_use(ggml_backend_dev_t dev) {
    return memory_of(dev) != nullptr && resident_of(dev->reg).n_plans > 0 ? memory_of(dev) : nullptr;
}

const ggml_backend_reg_i resident_reg_i = {
    /* .get_name         = */ [](ggml_backend_reg_t reg) { return resident_of(reg).context.name.c_str(); },
    /* .get_device_count = */ [](ggml_backend_reg_t) { return size_t{1}; },
    /* .get_device       = */ [](ggml_backend_reg_t reg, size_t) { return &resident_of(reg).device; },
    /* .get_proc_address = */ oallama_reg_get_proc_address,
};

struct ResidentDevices {
    std::mutex                                                    mutex;
    std::map<ggml_backend_dev_t, std::unique_ptr<ResidentDevice>> by_memory;
};

ResidentDevices & residents() {
    static auto * the_residents = new ResidentDevices; // as long as ggml's registry, which is gone last
    return *the_residents;
}

} // namespace

// llama.cpp makes a backend of every device for every context, and can have sixteen: so it is taken out again.
bool oallama::add_resident_device(ggml_backend_dev_t device) {
    const std::lock_guard<std::mutex> lock(residents().mutex);
    if (resident_buft(device) == nullptr) {
        return false;
    }
    std::unique_ptr<ResidentDevice> & known = residents().by_memory[device];
    if (known == nullptr) {
        const std::string name = ggml_backend_dev_name(device);
        known                  = std::make_unique<ResidentDevice>();
        known->context = {"OALLAMA_" + name, "the same, with inputs and results in the memory of " + name, device};
        known->reg     = {GGML_BACKEND_API_VERSION, resident_reg_i, known.get()};
        known->device  = {oallama_device_i, &known->reg, &known->context};
    }
    if (known->n_plans++ == 0) {
        ggml_backend_register(&known->reg);
    }
    return true;
}

void oallama::remove_resident_device(ggml_backend_dev_t device) {
    const std::lock_guard<std::mutex> lock(residents().mutex);
    ResidentDevice &                  known = *residents().by_memory.at(device);
    if (--known.n_plans == 0) {
        ggml_backend_unload(&known.reg);
    }
}

ggml_backend_dev_t oallama::owner_of_plans() {
    const std::lock_guard<std::mutex> lock(registering);
    require(registered, "the backend is not registered yet; call oallama_register first");
    return device_at(device_split);
}

//
// C interface
//

void * ggml_backend_init(void) {
    void *    reg    = nullptr;
    const int status = guarded([&] {
        const std::lock_guard<std::mutex> lock(registering);
        require(!registered, "this process has registered the back end already; it is not added a second time");
        start(std::getenv("OALLAMA_PLAN"));
        if (const char * path = std::getenv("OALLAMA_USES"); path != nullptr) {
            default_plan()->keep_uses(path);
        }
        registered = true; // ggml adds what is returned
        reg        = &the_reg;
    });
    if (status != OALLAMA_OK) {
        std::fprintf(stderr, "oallama: %s\n", last_error());
    }
    return reg;
}

int oallama_abi(void) {
    return OALLAMA_ABI;
}

const char * oallama_last_error(void) {
    return last_error();
}

int oallama_check(void) {
    return guarded(check_ggml);
}

int oallama_register(void) {
    return guarded([] {
        const std::lock_guard<std::mutex> lock(registering);
        if (registered) {
            return;
        }
        start(nullptr);
        ggml_backend_register(&the_reg);
        registered = true;
    });
}
