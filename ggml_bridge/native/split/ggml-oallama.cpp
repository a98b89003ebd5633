// The interface to ggml: the split buffer type, backends, devices and their registration; and the C interface.
//
// These devices are registered, once and for good, as ggml's registry has no lock:
//
//     OALLAMA           computes; its buffer type is plain host memory, so results lie where llama.cpp's CPU backend
//                       reads them
//     OALLAMA_Split     computes nothing: makes the split buffer type known by name, because `-ot` looks among the
//                       default buffer types of devices
//     OALLAMA_Resident, OALLAMA_Resident1, …
//                       compute as OALLAMA does while a plan has blocks that live on a device, but their results lie
//                       where that device computes what comes next; there is one for each device that plans have such
//                       blocks on, and those left over compute nothing
//     OALLAMA_CPU_REPACK, OALLAMA_AMX, …, OALLAMA_CPU
//                       compute nothing: make the CPU's layouts known by name, which are CPU_REPACK, AMX, … and, for
//                       plain memory, OALLAMA_CPU: by `CPU` llama.cpp means whichever layout the CPU prefers
//
// A llama_context makes a backend of each device of type ACCEL. Devices that never compute are of type CPU, of which
// llama.cpp takes the first alone, ggml's own: so they cost a context nothing. So are OALLAMA_Resident1 and those
// behind it while they compute nothing. The backends of a context share one
// SplitBackend (run.h), which does all the work.
// A plan has a buffer type of its own, so that two models with two plans can be loaded at once; it and its buffers are
// owned as plan.h says. ggml calls the vtables below from the thread that loads a model or computes its graphs.

#include "ggml-oallama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "abi_check.h"
#include "report.h"
#include "resident_buft.h"
#include "run.h"

namespace oallama {

namespace {

//
// split buffer
//
// It gets no memory when llama.cpp allocates it: what a tensor needs where is known only when all of the model's
// tensors are, and then the device may turn out to have less than the plan thought. So memory is taken when the first
// bytes arrive, for all weights at once.
//

class SplitBuffer {
  public:
    explicit SplitBuffer(std::shared_ptr<LoadedPlan> plan) : plan_(std::move(plan)) { plan_->begin_load(); }

    SplitBuffer(const SplitBuffer &)             = delete;
    SplitBuffer & operator=(const SplitBuffer &) = delete;

    ~SplitBuffer() {
        write_report(/*always=*/false);
        for (const auto & weight : weights_) {
            logged([&] { plan_->report(*weight, false); });
        }
        if (placed_) {
            count(-1);
        }
        plan_->end_load();
    }

    // Runs a step of the load. False where it failed: then the plan and the log say why.
    template <typename F> bool attempt(F && f) noexcept {
        if (logged(f) == OALLAMA_OK) {
            return true;
        }
        if (!failed_.exchange(true)) { // one sentence is enough
            guarded([this] { plan_->problem(last_error(), false); });
        }
        return false;
    }

    bool failed() const { return failed_; }

    void note(const std::string & sentence) { plan_->problem("not as planned: " + sentence, true); }

    void add(ggml_tensor * tensor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        require(!tried_, std::string(tensor->name) + " comes too late: what is loaded with it has its memory already");
        weights_.push_back(std::make_unique<SplitWeight>(tensor, plan_->slice_of(tensor)));
        tensor->extra = weights_.back().get();
    }

    bool place() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (tried_) {
            return placed_;
        }
        tried_  = true;
        placed_ = attempt([this] {
            std::vector<ggml_backend_dev_t> devices;
            for (size_t number = 0; number < plan_->spec().devices.size(); number++) {
                devices.push_back(plan_->device(number));
                if (plan_->lacks_residents(number)) {
                    note(std::string("blocks cannot live on ") + ggml_backend_dev_name(devices.back()) +
                         ", which takes no buffer type but its own: what they read and give crosses through host "
                         "memory");
                }
            }
            memory_ = place_weights(weights_, devices, plan_->spec(),
                                    [this](const std::string & sentence) { note(sentence); });
            for (const auto & weight : weights_) {
                plan_->report(*weight, true);
            }
        });
        if (placed_) {
            count(1);
        }
        return placed_;
    }

    void clear(uint8_t value) {
        if (place()) {
            for (const BufferPtr & buffer : memory_.buffers) {
                ggml_backend_buffer_clear(buffer.get(), value);
            }
        }
    }

  private:
    void count(int64_t sign) const {
        counters().host_weights += sign * memory_.host_bytes;
        counters().device_weights += sign * memory_.device_bytes;
        counters().n_weights += sign * static_cast<int64_t>(weights_.size());
    }

    std::shared_ptr<LoadedPlan>               plan_;
    std::vector<std::unique_ptr<SplitWeight>> weights_;
    WeightMemory                              memory_;
    std::mutex                                mutex_;
    std::atomic<bool>                         failed_{false};
    bool                                      tried_  = false;
    bool                                      placed_ = false;
};

SplitBuffer & context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<SplitBuffer *>(buffer->context);
}

void ggml_backend_oallama_split_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    delete &context_of(buffer);
}

// Nothing is ever read there; ggml wants an address to add offsets to.
void * ggml_backend_oallama_split_buffer_get_base(ggml_backend_buffer_t /*buffer*/) {
    return reinterpret_cast<void *>(uintptr_t{0x1000});
}

ggml_status ggml_backend_oallama_split_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    SplitBuffer & context = context_of(buffer);
    return context.attempt([&] { context.add(tensor); }) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void ggml_backend_oallama_split_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data,
                                                  size_t offset, size_t size) {
    const SplitWeight * weight  = weight_of(tensor);
    SplitBuffer &       context = context_of(buffer);
    if (!context.place() || context.failed()) {
        return; // said by plan problems, and by the first graph, which fails
    }
    context.attempt([&] {
        require(weight != nullptr && offset == 0 && size == ggml_nbytes(tensor),
                std::string(tensor->name) + " is written in pieces; a weight of a plan is written whole");
        weight->set(static_cast<const char *>(data));
    });
}

// Views are read too.
void ggml_backend_oallama_split_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data,
                                                  size_t offset, size_t size) {
    std::memset(data, 0, size);
    const ggml_tensor * whole   = tensor->view_src == nullptr ? tensor : tensor->view_src;
    const SplitWeight * weight  = weight_of(whole);
    SplitBuffer &       context = context_of(buffer);
    if (weight != nullptr && context.place()) {
        const size_t begin = tensor->view_src == nullptr ? 0 : tensor->view_offs;
        context.attempt([&] { weight->get(static_cast<char *>(data), begin + offset, size); });
    }
}

void ggml_backend_oallama_split_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    context_of(buffer).clear(value);
}

const ggml_backend_buffer_i ggml_backend_oallama_split_buffer_i = {
    /* .free_buffer   = */ ggml_backend_oallama_split_buffer_free_buffer,
    /* .get_base      = */ ggml_backend_oallama_split_buffer_get_base,
    /* .init_tensor   = */ ggml_backend_oallama_split_buffer_init_tensor,
    /* .memset_tensor = */ nullptr,
    /* .set_tensor    = */ ggml_backend_oallama_split_buffer_set_tensor,
    /* .get_tensor    = */ ggml_backend_oallama_split_buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ ggml_backend_oallama_split_buffer_clear,
    /* .reset         = */ nullptr,
};

//
// split buffer type
//

const char * ggml_backend_oallama_split_buffer_type_get_name(ggml_backend_buffer_type_t /*buft*/) {
    return "OALLAMA_Split";
}

ggml_backend_buffer_t ggml_backend_oallama_split_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft,
                                                                          size_t                     size) {
    ggml_backend_buffer_t buffer = nullptr;
    logged([&] {
        auto plan = static_cast<LoadedPlan *>(buffer_type_context(buft))->shared_from_this();
        plan->find_devices(); // where one is missing, the load fails here
        auto context = std::make_unique<SplitBuffer>(std::move(plan));
        buffer       = ggml_backend_buffer_init(buft, ggml_backend_oallama_split_buffer_i, context.release(), size);
    });
    return buffer;
}

size_t ggml_backend_oallama_split_buffer_type_get_alignment(ggml_backend_buffer_type_t /*buft*/) {
    return 64;
}

bool ggml_backend_oallama_split_buffer_type_is_host(ggml_backend_buffer_type_t /*buft*/) {
    return false;
}

} // namespace

const ggml_backend_buffer_type_i ggml_backend_oallama_split_buffer_type_i = {
    /* .get_name         = */ ggml_backend_oallama_split_buffer_type_get_name,
    /* .alloc_buffer     = */ ggml_backend_oallama_split_buffer_type_alloc_buffer,
    /* .alloc_buffer_n   = */ nullptr,
    /* .get_alignment    = */ ggml_backend_oallama_split_buffer_type_get_alignment,
    /* .get_max_size     = */ nullptr,
    /* .get_alloc_size   = */ nullptr,
    /* .get_alloc_size_n = */ nullptr,
    /* .is_host          = */ ggml_backend_oallama_split_buffer_type_is_host,
};

bool is_split_buft(ggml_backend_buffer_type_t buft) {
    return buft != nullptr && buft->iface.get_name == ggml_backend_oallama_split_buffer_type_get_name;
}

LoadedPlan * plan_of(const ggml_tensor * tensor) {
    if (tensor == nullptr || tensor->view_src != nullptr || tensor->buffer == nullptr ||
        !is_split_buft(tensor->buffer->buft)) {
        return nullptr;
    }
    return static_cast<LoadedPlan *>(buffer_type_context(tensor->buffer->buft));
}

ggml_backend_dev_t device_of(const ggml_tensor * tensor) {
    return plan_of(tensor)->device(weight_of(tensor)->slice().device);
}

const DeviceSpec & device_spec_of(const ggml_tensor * tensor) {
    return plan_of(tensor)->spec().device_of(weight_of(tensor)->slice());
}

SplitWeight * weight_of(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr ? nullptr : static_cast<SplitWeight *>(tensor->extra);
}

bool ensure_placed(const ggml_tensor * tensor) {
    return weight_of(tensor) != nullptr && context_of(tensor->buffer).place();
}

bool is_sound(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr || !context_of(tensor->buffer).failed();
}

namespace {

//
// plain buffer type: the CPU's plain memory by a name of its own
//

const char * ggml_backend_oallama_plain_buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    return ggml_backend_dev_name(ggml_backend_buft_get_device(buft));
}

ggml_backend_buffer_t ggml_backend_oallama_plain_buffer_type_alloc_buffer(ggml_backend_buffer_type_t /*buft*/,
                                                                          size_t size) {
    return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
}

bool is_plain_buft(ggml_backend_buffer_type_t buft) {
    return buft != nullptr && buft->iface.get_name == ggml_backend_oallama_plain_buffer_type_get_name;
}

// The buffer type of the device that makes it known, of which there is one.
ggml_backend_buffer_type_t plain_buft(ggml_backend_dev_t device) {
    ggml_backend_buffer_type plain = as_api3(ggml_backend_cpu_buffer_type());
    plain.iface.get_name           = ggml_backend_oallama_plain_buffer_type_get_name;
    plain.iface.alloc_buffer       = ggml_backend_oallama_plain_buffer_type_alloc_buffer;
    plain.device                   = device;
    static BufferType buft(plain);
    return buft.get();
}

//
// backend interface
//

struct BackendContext {
    std::shared_ptr<SplitBackend> split;  // NULL: the device computed nothing when this was made
    ggml_backend_dev_t            memory; // whose memory results are in; NULL: the host's
};

BackendContext & context_of(ggml_backend_t backend) {
    return *static_cast<BackendContext *>(backend->context);
}

// Throws OALLAMA_FAILED for a backend that was made while its device computed nothing: llama.cpp has given its results
// memory of the wrong kind.
SplitBackend & split_of(ggml_backend_t backend) {
    if (context_of(backend).split == nullptr) {
        throw Error(OALLAMA_FAILED,
                    "this context was made before the plan that puts blocks on a device was loaded; make it anew");
    }
    return *context_of(backend).split;
}

const char * ggml_backend_oallama_get_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(backend->device);
}

void ggml_backend_oallama_free(ggml_backend_t backend) {
    write_report(/*always=*/true);
    delete &context_of(backend);
    delete backend;
}

// llama.cpp makes the copy, which waits for the device. Until then the link is free.
bool ggml_backend_oallama_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst,
                                           const ggml_tensor * /*src*/, ggml_tensor * /*dst*/) {
    if (backend_src != backend_dst && context_of(backend_dst).split) {
        logged([&] { context_of(backend_dst).split->computes_input(backend_src->device); });
    }
    return false;
}

// Before a graph that is sent an input, ggml's scheduler waits for the back end that this comes from, and for no other:
// what llama.cpp's back end has computed before where blocks live may not be done. Only a third device sends. A plan
// that makes such a block is unusable as soon as llama.cpp reserves memory for its graphs, which is when it is loaded.
void check_sent(ggml_backend_t backend, const ggml_cgraph * graph) {
    ggml_backend_dev_t memory = context_of(backend).memory;
    if (memory == nullptr || !is_sent_input(backend, graph)) {
        return;
    }
    const std::string sentence = std::string("a block that lives on ") + ggml_backend_dev_name(memory) +
                                 " reads what another device computes: give llama.cpp no other device";
    for (int i = 0; i < graph->n_nodes; i++) {
        if (LoadedPlan * plan = plan_of(graph->nodes[i]->src[0]); plan != nullptr) {
            plan->problem(sentence, false);
        }
    }
    throw Error(OALLAMA_UNSUPPORTED, sentence);
}

ggml_status ggml_backend_oallama_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_status computed = GGML_STATUS_FAILED;
    const int   status   = logged([&] {
        check_sent(backend, graph);
        computed = split_of(backend).compute(graph, context_of(backend).memory);
    });
    return status == OALLAMA_OK          ? computed
           : status == OALLAMA_NO_MEMORY ? GGML_STATUS_ALLOC_FAILED
                                         : GGML_STATUS_FAILED;
}

void ggml_backend_oallama_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph,
                                         ggml_backend_graph_optimize_params * params) {
    // graph_compute meets the same, and can say so
    guarded([&] {
        check_sent(backend, graph);
        split_of(backend).prepare(graph, context_of(backend).memory, params);
    });
}

const ggml_backend_i ggml_backend_oallama_i = {
    /* .get_name            = */ ggml_backend_oallama_get_name,
    /* .free                = */ ggml_backend_oallama_free,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ ggml_backend_oallama_cpy_tensor_async,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ ggml_backend_oallama_graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ ggml_backend_oallama_graph_optimize,
};

ggml_guid_t ggml_backend_oallama_guid() {
    static ggml_guid guid = {0x6f, 0x61, 0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x2d,
                             0x73, 0x70, 0x6c, 0x69, 0x74, 0x2d, 0x30, 0x31};
    return &guid;
}

void ggml_backend_oallama_set_n_threads(ggml_backend_t backend, int n_threads) {
    if (context_of(backend).split) {
        logged([&] { context_of(backend).split->host().set_n_threads(n_threads); });
    }
}

void ggml_backend_oallama_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    if (context_of(backend).split) {
        context_of(backend).split->host().set_abort_callback(callback, data);
    }
}

//
// device interface
//

struct DeviceContext {
    const char *               name;
    const char *               description;
    bool                       resident = false;   // its results are in a device's memory, not the host's
    bool                       spare    = false;   // it is for a second device
    ggml_backend_buffer_type_t named    = nullptr; // it computes nothing, but makes this known by name

    // The device whose memory a resident device uses. NULL: no plan has blocks there, and it computes nothing. Other
    // threads read it while plans are loaded and freed.
    std::atomic<ggml_backend_dev_t> memory{nullptr};

    // memory_now: `memory`, which may change at any time.
    bool computes(ggml_backend_dev_t memory_now) const {
        return named == nullptr && (!resident || memory_now != nullptr);
    }
};

DeviceContext & context_of(ggml_backend_dev_t dev) {
    return *static_cast<DeviceContext *>(dev->context);
}

// The devices that loaded plans name.
struct PlanDevices {
    std::mutex                        mutex;
    std::map<ggml_backend_dev_t, int> n_plans;
    std::map<ggml_backend_dev_t, int> n_resident; // plans that have blocks in its memory
};

PlanDevices & plan_devices() {
    static auto * the_devices = new PlanDevices; // plans may be freed when statics are destroyed
    return *the_devices;
}

// The buffer type of results that llama.cpp finds in host memory.
ggml_backend_buffer_type_t host_buft() {
    PlanDevices &                        known = plan_devices();
    const std::lock_guard<std::mutex>    lock(known.mutex);
    std::set<ggml_backend_buffer_type_t> pinned;
    for (const auto & [device, n_plans] : known.n_plans) {
        pinned.insert(ggml_backend_dev_host_buffer_type(device));
    }
    return pinned.size() == 1 && *pinned.begin() != nullptr ? *pinned.begin() : ggml_backend_cpu_buffer_type();
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

const char * ggml_backend_oallama_device_get_name(ggml_backend_dev_t dev) {
    return context_of(dev).name;
}

const char * ggml_backend_oallama_device_get_description(ggml_backend_dev_t dev) {
    return context_of(dev).description;
}

void ggml_backend_oallama_device_get_memory(ggml_backend_dev_t /*dev*/, size_t * free, size_t * total) {
    *free  = 0; // memory is the CPU's and the other device's, and reported by them
    *total = 0;
}

enum ggml_backend_dev_type ggml_backend_oallama_device_get_type(ggml_backend_dev_t dev) {
    const DeviceContext & context = context_of(dev);
    const bool            idle    = context.named != nullptr || (context.spare && context.memory == nullptr);
    return idle ? GGML_BACKEND_DEVICE_TYPE_CPU : GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void ggml_backend_oallama_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = ggml_backend_oallama_device_get_name(dev);
    props->description = ggml_backend_oallama_device_get_description(dev);
    props->type        = ggml_backend_oallama_device_get_type(dev);

    props->caps.buffer_from_host_ptr = is_plain_buft(context_of(dev).named);
}

ggml_backend_t ggml_backend_oallama_device_init_backend(ggml_backend_dev_t dev, const char * /*params*/) {
    ggml_backend_t backend = nullptr;
    logged([&] {
        ggml_backend_dev_t memory  = context_of(dev).memory;
        auto               context = std::make_unique<BackendContext>(
            BackendContext{context_of(dev).computes(memory) ? shared_split(dev) : nullptr, memory});
        backend          = new ggml_backend{ggml_backend_oallama_guid(), ggml_backend_oallama_i, dev, nullptr};
        backend->context = context.release();
    });
    return backend;
}

ggml_backend_buffer_type_t ggml_backend_oallama_device_get_buffer_type(ggml_backend_dev_t dev) {
    if (context_of(dev).named != nullptr) {
        return context_of(dev).named;
    }
    if (!context_of(dev).resident) {
        return host_buft();
    }
    ggml_backend_dev_t memory = context_of(dev).memory;
    return memory != nullptr ? resident_buft(memory) : ggml_backend_cpu_buffer_type();
}

// A mapped model file, for weights in plain memory.
ggml_backend_buffer_t ggml_backend_oallama_device_buffer_from_host_ptr(ggml_backend_dev_t /*dev*/, void * ptr,
                                                                       size_t size, size_t /*max_tensor_size*/) {
    return ggml_backend_cpu_buffer_from_ptr(ptr, size);
}

bool ggml_backend_oallama_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    bool claimed = false;
    logged([&] {
        ggml_backend_dev_t memory = context_of(dev).memory;
        claimed                   = context_of(dev).computes(memory) && claims(op, memory);
    });
    return claimed;
}

bool ggml_backend_oallama_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    if (context_of(dev).named != nullptr) {
        return buft == context_of(dev).named;
    }
    // also of a device that computes nothing now: its buffer type is the host's meanwhile
    const bool host = ggml_backend_buft_is_host(buft);
    // a plan may come or go between the two calls of ggml_backend_sched_new: what was returned stays supported
    const bool returned = context_of(dev).resident && is_resident_buft(buft);
    if (is_split_buft(buft) || host || returned) {
        return true;
    }
    ggml_backend_dev_t memory = context_of(dev).memory;
    return memory != nullptr && memory->iface.supports_buft(memory, buft);
}

const ggml_backend_device_i ggml_backend_oallama_device_i = {
    /* .get_name             = */ ggml_backend_oallama_device_get_name,
    /* .get_description      = */ ggml_backend_oallama_device_get_description,
    /* .get_memory           = */ ggml_backend_oallama_device_get_memory,
    /* .get_type             = */ ggml_backend_oallama_device_get_type,
    /* .get_props            = */ ggml_backend_oallama_device_get_props,
    /* .init_backend         = */ ggml_backend_oallama_device_init_backend,
    /* .get_buffer_type      = */ ggml_backend_oallama_device_get_buffer_type,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ ggml_backend_oallama_device_buffer_from_host_ptr,
    /* .supports_op          = */ ggml_backend_oallama_device_supports_op,
    /* .supports_buft        = */ ggml_backend_oallama_device_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

//
// registration interface
//

enum DeviceIndex { device_compute = 0, device_split = 1, device_resident = 2, n_devices = 8 };

constexpr const char * resident_description = "the same as OALLAMA, with inputs and results in a device's memory";

// One of ggml's schedulers has 16 back ends at most: beside eight cards, the CPU's and OALLAMA's there is room for six.
DeviceContext device_contexts[n_devices] = {
    {"OALLAMA", "CPU and a device computing one operator together"},
    {"OALLAMA_Split", "names the split buffer type; computes nothing"},
    {"OALLAMA_Resident", resident_description, /*resident=*/true},
    {"OALLAMA_Resident1", resident_description, /*resident=*/true, /*spare=*/true},
    {"OALLAMA_Resident2", resident_description, /*resident=*/true, /*spare=*/true},
    {"OALLAMA_Resident3", resident_description, /*resident=*/true, /*spare=*/true},
    {"OALLAMA_Resident4", resident_description, /*resident=*/true, /*spare=*/true},
    {"OALLAMA_Resident5", resident_description, /*resident=*/true, /*spare=*/true},
};

extern ggml_backend_device devices[n_devices];

// A layout of the CPU, and the device that makes it known by name.
struct Layout {
    std::string         device_name;
    DeviceContext       context;
    ggml_backend_device device;
};

// In the CPU's order, best first; found once, and never freed: ggml keeps the addresses.
std::deque<Layout> & layouts() {
    static auto * the_layouts = new std::deque<Layout>;
    return *the_layouts;
}

const char * ggml_backend_oallama_reg_get_name(ggml_backend_reg_t /*reg*/) {
    return "OALLAMA";
}

size_t ggml_backend_oallama_reg_get_device_count(ggml_backend_reg_t /*reg*/) {
    return n_devices + layouts().size();
}

ggml_backend_dev_t ggml_backend_oallama_reg_get_device(ggml_backend_reg_t /*reg*/, size_t index) {
    return index < n_devices                      ? &devices[index]
           : index < n_devices + layouts().size() ? &layouts()[index - n_devices].device
                                                  : nullptr;
}

void * ggml_backend_oallama_reg_get_proc_address(ggml_backend_reg_t /*reg*/, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(ggml_backend_oallama_set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(ggml_backend_oallama_set_abort_callback);
    }
    return nullptr;
}

ggml_backend_reg ggml_backend_oallama_reg = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */
    {
        /* .get_name         = */ ggml_backend_oallama_reg_get_name,
        /* .get_device_count = */ ggml_backend_oallama_reg_get_device_count,
        /* .get_device       = */ ggml_backend_oallama_reg_get_device,
        /* .get_proc_address = */ ggml_backend_oallama_reg_get_proc_address,
    },
    /* .context     = */ nullptr,
};

ggml_backend_device devices[n_devices];

void find_layouts() {
    for (ggml_backend_buffer_type_t buft : cpu_layouts()) {
        const bool plain           = buft == ggml_backend_cpu_buffer_type();
        Layout &   layout          = layouts().emplace_back();
        layout.device_name         = std::string("OALLAMA_") + ggml_backend_buft_name(buft);
        layout.device              = {ggml_backend_oallama_device_i, &ggml_backend_oallama_reg, &layout.context};
        layout.context.name        = layout.device_name.c_str();
        layout.context.description = "names a layout of the CPU; computes nothing";
        layout.context.named       = plain ? plain_buft(&layout.device) : buft;
    }
}

// The resident device that computes in this memory, or, NULL, the first that computes nothing; NULL: there is none.
DeviceContext * resident_of(ggml_backend_dev_t memory) {
    const auto * end   = std::end(device_contexts);
    auto *       found = std::find_if(std::begin(device_contexts) + device_resident, std::end(device_contexts),
                                      [&](const DeviceContext & context) { return context.memory == memory; });
    return found == end ? nullptr : found;
}

// ggml-cuda's pool of temporary memory, where it was built without virtual memory, frees all that it keeps when there
// is no more, and graphs that were captured go on using it (ggml-cuda.cu, ggml_cuda_pool_leg). Then none is captured.
// It asks for the variable when it computes its first graph.
void turn_graphs_off(ggml_backend_dev_t device) {
    if (has_feature(ggml_backend_dev_backend_reg(device), "NO_VMM")) {
        ::setenv("GGML_CUDA_DISABLE_GRAPHS", "1", /*overwrite=*/1);
    }
}

} // namespace

bool add_device(ggml_backend_dev_t device, bool resident) {
    turn_graphs_off(device);
    PlanDevices &                     known = plan_devices();
    const std::lock_guard<std::mutex> lock(known.mutex);
    known.n_plans[device]++;
    if (!resident || resident_buft(device) == nullptr) {
        return false;
    }
    DeviceContext * context = resident_of(known.n_resident.count(device) > 0 ? device : nullptr);
    if (context == nullptr) {
        return false;
    }
    known.n_resident[device]++;
    context->memory = device;
    return true;
}

void remove_device(ggml_backend_dev_t device, bool resident) {
    PlanDevices &                     known = plan_devices();
    const std::lock_guard<std::mutex> lock(known.mutex);
    if (--known.n_plans.at(device) == 0) {
        known.n_plans.erase(device);
    }
    if (resident && --known.n_resident.at(device) == 0) {
        known.n_resident.erase(device);
        resident_of(device)->memory = nullptr;
    }
}

} // namespace oallama

//
// C interface: the library
//

using namespace oallama;

namespace {

std::mutex registering;
bool       registered = false;

// The plan of OALLAMA_PLAN, or an empty one: `-ot` finds its buffer type by name.
std::shared_ptr<LoadedPlan> & default_plan() {
    static std::shared_ptr<LoadedPlan> plan;
    return plan;
}

// Checks ggml and makes the default plan: the first step of ggml_backend_init and of oallama_register.
void start(const char * plan_path) {
    check_ggml();
    ggml_backend_oallama_reg.api_version = api_version;
    for (size_t i = 0; i < n_devices; i++) {
        devices[i] = {ggml_backend_oallama_device_i, &ggml_backend_oallama_reg, &device_contexts[i]};
    }
    if (layouts().empty()) {
        find_layouts();
    }
    if (default_plan() == nullptr) {
        PlanSpec spec = plan_path == nullptr || plan_path[0] == '\0' ? PlanSpec{}
                                                                     : parse_plan(read_file("OALLAMA_PLAN", plan_path));
        default_plan() = std::make_shared<LoadedPlan>(std::move(spec), &devices[device_split]);

        device_contexts[device_split].named = default_plan()->buft();
    }
}

// Loads the back ends that are wanted beside this one, as GGML_BACKEND_PATH takes one library; returns the last. NULL:
// none is wanted.
ggml_backend_reg_t load_beside(const char * paths) {
    ggml_backend_reg_t reg = nullptr;
    std::istringstream list(paths == nullptr ? "" : paths);
    for (std::string path; std::getline(list, path, ':');) {
        reg = ggml_backend_load(path.c_str());
        require(reg != nullptr, "OALLAMA_EXTRA_BACKENDS names " + path + ", which is not a back end for this ggml");
    }
    return reg;
}

} // namespace

void * ggml_backend_init(void) {
    static std::atomic<bool> first{true};
    static std::atomic<bool> failed{false}; // once and for all: programs ask for each of their options
    void *                   reg = nullptr;
    if (failed) {
        return reg;
    }
    const int status = guarded([&] {
        const bool         is_first = first.exchange(false); // not where the second back end is this one
        ggml_backend_reg_t beside   = is_first ? load_beside(std::getenv("OALLAMA_EXTRA_BACKENDS")) : nullptr;
        {
            const std::lock_guard<std::mutex> lock(registering);
            if (!registered) {
                start(std::getenv("OALLAMA_PLAN"));
            }
            registered = true; // ggml adds what is returned, once
        }
        const char * path = std::getenv("OALLAMA_REPORT");
        if (is_first && path != nullptr) {
            keep_report(path, default_plan(), beside);
        }
        reg = &ggml_backend_oallama_reg;
    });
    if (status != OALLAMA_OK) {
        failed = true;
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
        if (!registered) {
            start(nullptr);
            ggml_backend_register(&ggml_backend_oallama_reg);
            registered = true;
        }
    });
}

//
// C interface: plans
//

struct oallama_plan {
    std::shared_ptr<LoadedPlan> loaded;
};

namespace {

LoadedPlan & loaded_of(const oallama_plan * plan) {
    require(plan != nullptr && plan->loaded != nullptr, "a plan is needed");
    return *plan->loaded;
}

void require_room(bool given) {
    require(given, "room for the result is needed");
}

} // namespace

int oallama_plan_new(const char * text, oallama_plan ** plan) {
    return guarded([&] {
        require(text != nullptr && plan != nullptr, "a plan text and room for the plan are needed");
        {
            const std::lock_guard<std::mutex> lock(registering);
            require(registered, "the backend is not registered yet; call oallama_register first");
        }
        auto result    = std::make_unique<oallama_plan>();
        result->loaded = std::make_shared<LoadedPlan>(parse_plan(text), &devices[device_split]);
        result->loaded->find_devices(); // a missing one is an error now, not when a model is loaded
        *plan = result.release();
    });
}

void oallama_plan_free(oallama_plan * plan) {
    delete plan;
}

int oallama_plan_buft(oallama_plan * plan, void ** buft) {
    return guarded([&] {
        require_room(buft != nullptr);
        *buft = loaded_of(plan).buft();
    });
}

int oallama_plan_count(const oallama_plan * plan, int64_t * n_slices) {
    return guarded([&] {
        require_room(n_slices != nullptr);
        *n_slices = static_cast<int64_t>(loaded_of(plan).spec().slices.size());
    });
}

int oallama_plan_slice(const oallama_plan * plan, int64_t index, oallama_slice * slice) {
    return guarded([&] {
        require_room(slice != nullptr);
        require(index >= 0 && index < static_cast<int64_t>(loaded_of(plan).spec().slices.size()),
                "the plan has no slice of this number");
        *slice = loaded_of(plan).placed(static_cast<size_t>(index));
    });
}

int oallama_plan_problems(const oallama_plan * plan, int32_t * usable, char * text, int64_t capacity) {
    return guarded([&] {
        require_room(usable != nullptr && text != nullptr && capacity > 0);
        bool        is_usable = true;
        std::string lines;
        for (const std::string & problem : loaded_of(plan).problems(&is_usable)) {
            lines += (lines.empty() ? "" : "\n") + problem;
        }
        *usable = is_usable ? 1 : 0;
        std::snprintf(text, static_cast<size_t>(capacity), "%s", lines.c_str());
    });
}

//
// C interface: what is held and what was done
//

int oallama_get_memory(oallama_memory * memory) {
    return guarded([&] {
        require_room(memory != nullptr);
        const Counters & held = counters();
        *memory               = {held.host_weights,   held.device_weights, held.host_compute,
                                 held.device_compute, held.n_weights,      held.n_programs};
    });
}

int oallama_get_device_compute(const char * device, int64_t * bytes) {
    return guarded([&] {
        require_room(device != nullptr && bytes != nullptr);
        ggml_backend_dev_t known = ggml_backend_dev_by_name(device);
        require(known != nullptr, std::string("unknown device ") + device);
        *bytes = compute_on(known);
    });
}

static int get_stats(oallama_stats * out, std::initializer_list<BatchKind> counted) {
    return guarded([&] {
        require_room(out != nullptr);
        const auto sum = [&](std::atomic<int64_t> Stats::* counter) {
            int64_t total = 0;
            for (BatchKind kind : counted) {
                total += (stats(kind).*counter).load();
            }
            return total;
        };
        const auto seconds = [&](std::atomic<int64_t> Stats::* counter) {
            return static_cast<double>(sum(counter)) * 1e-9;
        };
        *out = {sum(&Stats::n_graphs),       sum(&Stats::n_segments),     sum(&Stats::n_built),
                seconds(&Stats::launch_ns),  seconds(&Stats::host_ns),    seconds(&Stats::wait_ns),
                seconds(&Stats::join_ns),    seconds(&Stats::total_ns),   sum(&Stats::bytes_in),
                sum(&Stats::bytes_out),      sum(&Stats::bytes_streamed), sum(&Stats::n_uses),
                sum(&Stats::n_hits),         sum(&Stats::n_fetched),      sum(&Stats::n_exchanged),
                sum(&Stats::bytes_exchanged)};
    });
}

int oallama_get_stats(oallama_stats * out) {
    return get_stats(out, {SEVERAL, SINGLE});
}

int oallama_get_single_stats(oallama_stats * out) {
    return get_stats(out, {SINGLE});
}

int oallama_reset_stats(void) {
    return guarded([] {
        for (BatchKind kind : {SEVERAL, SINGLE}) {
            Stats & done = stats(kind);
            for (std::atomic<int64_t> * counter :
                 {&done.n_graphs, &done.n_segments, &done.n_built, &done.launch_ns, &done.host_ns, &done.wait_ns,
                  &done.join_ns, &done.total_ns, &done.bytes_in, &done.bytes_out, &done.bytes_streamed, &done.n_uses,
                  &done.n_hits, &done.n_fetched, &done.n_exchanged, &done.bytes_exchanged}) {
                *counter = 0;
            }
        }
    });
}
