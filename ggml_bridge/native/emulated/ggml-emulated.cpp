// Backend, device and registration: how ggml sees emulated devices.

#include "ggml-emulated.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "../split/abi_check.h"
#include "device.h"

using namespace emulated;
using oallama::guarded;
using oallama::logged;
using oallama::require;

namespace {

//
// backend interface: one stream
//

struct BackendContext {
    StreamPtr                     stream;
    Captures                      captures;
    std::unique_ptr<oallama::Cpu> cpu; // computes where values are real
};

BackendContext & context_of(ggml_backend_t backend) {
    return *static_cast<BackendContext *>(backend->context);
}

Device & owner_of(ggml_backend_t backend) {
    return device_of(backend->device);
}

const char * emulated_backend_get_name(ggml_backend_t backend) {
    return owner_of(backend).parameters.name.c_str();
}

void emulated_backend_free(ggml_backend_t backend) {
    Device & device = owner_of(backend);
    device.time.finish(*context_of(backend).stream);
    delete static_cast<BackendContext *>(backend->context);
    delete backend;
    device.n_streams--;
}

void emulated_backend_set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset,
                                       size_t size) {
    Device & device = owner_of(backend);
    attempt(device, [&] { device.upload(context_of(backend).stream, tensor, data, offset, size, /*wait=*/false); });
}

void emulated_backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset,
                                       size_t size) {
    Device & device = owner_of(backend);
    attempt(device, [&] { device.download(context_of(backend).stream, tensor, data, offset, size, /*wait=*/false); });
}

bool emulated_backend_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst, const ggml_tensor * src,
                                       ggml_tensor * dst) {
    Device & device = owner_of(backend_dst);
    if (backend_src != backend_dst || !device.has(src) || !device.has(dst)) {
        return false; // ggml waits, and copies by the buffers
    }
    attempt(device, [&] { device.copy_within(context_of(backend_dst).stream, src, dst); });
    return true;
}

void emulated_backend_synchronize(ggml_backend_t backend) {
    Device & device = owner_of(backend);
    device.time.finish(*context_of(backend).stream);
    spin_until(now() + nanoseconds(device.parameters.synchronize_s));
}

ggml_status emulated_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_status started = GGML_STATUS_ALLOC_FAILED;
    Device &    device  = owner_of(backend);
    attempt(device, [&] {
        BackendContext & context = context_of(backend);
        if (!device.failed) {
            started =
                device.launch(context.stream, context.captures, graph, context.cpu ? context.cpu->get() : nullptr);
        }
    });
    return started;
}

// An event is the last point that was recorded: ggml's threads may record and wait at once.
PointPtr & point_of(ggml_backend_event_t event) {
    return *static_cast<PointPtr *>(event->context);
}

void emulated_backend_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    Device & device = owner_of(backend);
    attempt(device, [&] {
        Item item;
        item.kind            = Item::record;
        item.submitted       = now();
        item.point           = std::make_shared<Point>();
        const PointPtr point = item.point;
        device.time.submit(context_of(backend).stream, std::move(item));
        std::atomic_store(&point_of(event), point); // of what is queued: nobody waits for anything else
    });
}

void emulated_backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    Device & device = owner_of(backend);
    attempt(device, [&] {
        Item item;
        item.kind  = Item::wait;
        item.point = std::atomic_load(&point_of(event));
        if (item.point) {
            device.time.submit(context_of(backend).stream, std::move(item));
        }
    });
}

const ggml_backend_i emulated_backend_i = {
    /* .get_name            = */ emulated_backend_get_name,
    /* .free                = */ emulated_backend_free,
    /* .set_tensor_async    = */ emulated_backend_set_tensor_async,
    /* .get_tensor_async    = */ emulated_backend_get_tensor_async,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ emulated_backend_cpy_tensor_async,
    /* .synchronize         = */ emulated_backend_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ emulated_backend_graph_compute,
    /* .event_record        = */ emulated_backend_event_record,
    /* .event_wait          = */ emulated_backend_event_wait,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t emulated_backend_guid() {
    static ggml_guid guid = {0x6f, 0x61, 0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x2d,
                             0x65, 0x6d, 0x75, 0x6c, 0x61, 0x74, 0x65, 0x64};
    return &guid;
}

//
// device interface
//

const char * emulated_device_get_name(ggml_backend_dev_t dev) {
    return device_of(dev).parameters.name.c_str();
}

const char * emulated_device_get_description(ggml_backend_dev_t dev) {
    return device_of(dev).parameters.description.c_str();
}

void emulated_device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    const Device & device = device_of(dev);
    *total                = static_cast<size_t>(device.parameters.memory_bytes);
    *free                 = *total - std::min(*total, static_cast<size_t>(device.device_bytes.load()));
}

enum ggml_backend_dev_type emulated_device_get_type(ggml_backend_dev_t /*dev*/) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void emulated_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = emulated_device_get_name(dev);
    props->description = emulated_device_get_description(dev);
    props->type        = emulated_device_get_type(dev);
    emulated_device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {/*async=*/true, /*host_buffer=*/true, /*buffer_from_host_ptr=*/false, /*events=*/true,
                   /*mmap_support=*/true};
}

ggml_backend_t emulated_device_init_backend(ggml_backend_dev_t dev, const char * /*params*/) {
    ggml_backend_t backend = nullptr;
    logged([&] {
        Device & device  = device_of(dev);
        auto     context = std::make_unique<BackendContext>();
        context->stream  = device.new_stream();
        if (device.parameters.real_values) {
            context->cpu = std::make_unique<oallama::Cpu>();
            context->cpu->set_n_threads(1); // the device's thread computes
        }
        backend          = new ggml_backend{emulated_backend_guid(), emulated_backend_i, dev, nullptr};
        backend->context = context.release();
        device.n_streams++;
    });
    return backend;
}

ggml_backend_buffer_type_t emulated_device_get_buffer_type(ggml_backend_dev_t dev) {
    return device_buft(dev);
}

ggml_backend_buffer_type_t emulated_device_get_host_buffer_type(ggml_backend_dev_t /*dev*/) {
    return host_buft();
}

bool emulated_device_supports_op(ggml_backend_dev_t /*dev*/, const ggml_tensor * op) {
    return cuda_supports(op) &&
           ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}

bool emulated_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return device_of(dev).parameters.by_address
               ? buft == device_buft(dev)
               : buft->iface.get_name == device_buft(dev)->iface.get_name && // as ggml's own devices know theirs
                     ggml_backend_buft_get_device(buft) == dev;
}

// As ggml-cuda: large batches are worth copying a weight for.
bool emulated_device_offload_op(ggml_backend_dev_t /*dev*/, const ggml_tensor * op) {
    static const int64_t min_batch = [] {
        const char * set = std::getenv("GGML_OP_OFFLOAD_MIN_BATCH");
        return set == nullptr ? int64_t{32} : std::atoll(set);
    }();
    return offload_batch(op) >= min_batch;
}

ggml_backend_event_t emulated_device_event_new(ggml_backend_dev_t dev) {
    ggml_backend_event_t event = nullptr;
    logged([&] {
        auto context   = std::make_unique<PointPtr>();
        event          = new ggml_backend_event{dev, nullptr};
        event->context = context.release();
        device_of(dev).n_events++;
    });
    return event;
}

void emulated_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    device_of(dev).n_events--;
    delete &point_of(event);
    delete event;
}

void emulated_device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    const PointPtr point = std::atomic_load(&point_of(event));
    if (!point) {
        return;
    }
    while (!point->reached.load()) {
        spin_until(now() + 100);
    }
    spin_until(now() + nanoseconds(device_of(dev).parameters.synchronize_s));
}

const ggml_backend_device_i emulated_device_i = {
    /* .get_name             = */ emulated_device_get_name,
    /* .get_description      = */ emulated_device_get_description,
    /* .get_memory           = */ emulated_device_get_memory,
    /* .get_type             = */ emulated_device_get_type,
    /* .get_props            = */ emulated_device_get_props,
    /* .init_backend         = */ emulated_device_init_backend,
    /* .get_buffer_type      = */ emulated_device_get_buffer_type,
    /* .get_host_buffer_type = */ emulated_device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ emulated_device_supports_op,
    /* .supports_buft        = */ emulated_device_supports_buft,
    /* .offload_op           = */ emulated_device_offload_op,
    /* .event_new            = */ emulated_device_event_new,
    /* .event_free           = */ emulated_device_event_free,
    /* .event_synchronize    = */ emulated_device_event_synchronize,
};

//
// registration interface
//

const char * emulated_reg_get_name(ggml_backend_reg_t /*reg*/) {
    return "Emulated";
}

size_t emulated_reg_get_device_count(ggml_backend_reg_t /*reg*/) {
    return the_emulated()->all.size();
}

ggml_backend_dev_t emulated_reg_get_device(ggml_backend_reg_t /*reg*/, size_t index) {
    return index < the_emulated()->all.size() ? &the_devices[index] : nullptr;
}

void * emulated_reg_get_proc_address(ggml_backend_reg_t /*reg*/, const char * name) {
    return std::strcmp(name, "emulated_get_stats") == 0 ? reinterpret_cast<void *>(emulated_get_stats) : nullptr;
}

ggml_backend_reg the_reg = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */
    {
        /* .get_name         = */ emulated_reg_get_name,
        /* .get_device_count = */ emulated_reg_get_device_count,
        /* .get_device       = */ emulated_reg_get_device,
        /* .get_proc_address = */ emulated_reg_get_proc_address,
    },
    /* .context     = */ nullptr,
};

std::mutex registering;
bool       registered = false;

void leave_registry() {
    if (registered) {
        ggml_backend_unload(&the_reg);
        registered = false;
    }
}

// Makes the devices, or gives them other parameters while nobody uses any.
void make_devices(const std::string & text) {
    oallama::check_ggml();
    the_reg.api_version           = oallama::api_version;
    std::vector<Parameters> given = parse_parameters(text);
    if (the_emulated() && the_emulated()->in_use()) {
        throw oallama::Error(OALLAMA_UNSUPPORTED,
                             "the emulated device of this process is in use; close what uses it first");
    }
    if (the_emulated() && the_emulated()->all.size() != given.size()) {
        leave_registry(); // which has noted how many there are
    }
    the_emulated().reset(); // their thread gives up its core before another takes one
    let_others_on();
    try {
        the_emulated() = std::make_unique<Devices>(std::move(given));
    } catch (...) {
        leave_registry(); // nothing is behind it any more
        let_others_on();
        throw;
    }
}

Devices & known_devices() {
    if (the_emulated() == nullptr) {
        throw oallama::Error(OALLAMA_INVALID, "no emulated device is registered; call emulated_register first");
    }
    return *the_emulated();
}

std::array<ggml_backend_device, most_devices> make_ggml_devices() {
    std::array<ggml_backend_device, most_devices> devices;
    devices.fill({emulated_device_i, &the_reg, nullptr});
    return devices;
}

} // namespace

std::array<ggml_backend_device, most_devices> emulated::the_devices = make_ggml_devices();

std::unique_ptr<Devices> & emulated::the_emulated() {
    static auto * devices = new std::unique_ptr<Devices>; // their thread may run when statics are destroyed
    return *devices;
}

//
// C interface
//

int emulated_abi(void) {
    return EMULATED_ABI;
}

const char * emulated_last_error(void) {
    return oallama::last_error();
}

int emulated_register(const char * text) {
    return guarded([&] {
        require(text != nullptr, "parameters are needed");
        const std::lock_guard<std::mutex> lock(registering);
        make_devices(text);
        if (!registered) {
            ggml_backend_register(&the_reg);
            registered = true;
        }
    });
}

void * ggml_backend_init(void) {
    static std::atomic<bool> failed{false}; // once and for all: programs ask for each of their options
    void *                   reg = nullptr;
    if (failed) {
        return reg;
    }
    const int status = guarded([&] {
        const std::lock_guard<std::mutex> lock(registering);
        if (!registered) {
            const char * path = std::getenv("OALLAMA_EMULATED");
            require(path != nullptr, "OALLAMA_EMULATED names no file with an emulated device's parameters");
            make_devices(oallama::read_file("OALLAMA_EMULATED", path));
        }
        registered = true; // ggml adds what is returned, once
        reg        = &the_reg;
    });
    if (status != OALLAMA_OK) {
        failed = true;
        std::fprintf(stderr, "oallama: %s\n", emulated_last_error());
    }
    return reg;
}

int emulated_unregister(void) {
    return guarded([] {
        const std::lock_guard<std::mutex> lock(registering);
        if (registered) {
            if (the_emulated()->in_use()) {
                throw oallama::Error(OALLAMA_UNSUPPORTED, "the emulated device of this process is in use");
            }
            leave_registry();
            the_emulated()->time.rest();
            let_others_on();
        }
    });
}

int emulated_get_stats(emulated_stats * stats) {
    return guarded([&] {
        require(stats != nullptr, "room for the result is needed");
        const Devices & devices = known_devices();
        *stats                  = {};
        stats->late_s           = 1e-9 * static_cast<double>(devices.time.late_ns);
        stats->n_overruns       = devices.time.n_overruns;
        stats->n_shared         = devices.time.n_shared() - devices.n_shared_before;
        for (const auto & device : devices.all) {
            stats->bytes_in += device->bytes_in;
            stats->bytes_out += device->bytes_out;
            stats->n_graphs += device->n_graphs;
            stats->n_captured += device->n_captured;
            stats->device_bytes += device->device_bytes;
            stats->pinned_bytes += static_cast<int64_t>(device->pinned.n_bytes());
            stats->n_allocations += device->n_allocations;
        }
    });
}

int emulated_reset_stats(void) {
    return guarded([] {
        Devices & devices       = known_devices();
        devices.n_shared_before = devices.time.n_shared();
        devices.time.late_ns = devices.time.n_overruns = 0;
        for (const auto & device : devices.all) {
            device->bytes_in = device->bytes_out = device->n_graphs = device->n_captured = 0;
        }
    });
}

int emulated_rest(void) {
    return guarded([] { known_devices().time.rest(); });
}

int emulated_mul_mat_seconds(int32_t type, int64_t k, int64_t n, int64_t e, int64_t n_expert_used, int64_t n_tokens,
                             double * seconds) {
    return guarded([&] {
        require(seconds != nullptr, "room for the result is needed");
        require(type >= 0 && type < GGML_TYPE_COUNT && k > 0 && n > 0 && e > 0 && n_tokens > 0 && n_expert_used >= 0 &&
                    n_expert_used <= e,
                "unknown mul-mat");
        const int64_t block = ggml_blck_size(static_cast<ggml_type>(type)); // 0: a type that ggml has no more
        require(block > 0 && k % block == 0, "the length of a row must be a multiple of the type's block");
        *seconds = mul_mat_seconds(known_devices().all.front()->parameters, static_cast<ggml_type>(type), k, n, e,
                                   n_expert_used, n_tokens);
    });
}
