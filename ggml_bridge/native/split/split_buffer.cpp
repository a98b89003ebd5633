// A split buffer gets no memory when llama.cpp allocates it: what a tensor needs where is known only when all of the
// model's tensors are, and then the device may turn out to have less than the plan thought. So memory is taken when
// the first bytes arrive, for all weights at once.

#include "split_buffer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "memory_plan.h"

namespace oallama {

namespace {

constexpr size_t alignment = 64;

class SplitBuffer {
  public:
    SplitBuffer(std::shared_ptr<LoadedPlan> plan, size_t size) : plan_(std::move(plan)), size_(size) {}

    SplitBuffer(const SplitBuffer &)             = delete;
    SplitBuffer & operator=(const SplitBuffer &) = delete;

    ~SplitBuffer() {
        for (const auto & weight : weights_) {
            plan_->report(*weight, false);
        }
        if (placed_) {
            counters().host_weights -= memory_.host_bytes;
            counters().device_weights -= memory_.device_bytes;
            counters().n_weights -= static_cast<int64_t>(weights_.size());
        }
    }

    void add(ggml_tensor * tensor) {
        weights_.push_back(std::make_unique<SplitWeight>(tensor, plan_->slice_of(tensor)));
        tensor->extra = weights_.back().get();
    }

    bool place() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (tried_) {
            return placed_;
        }
        tried_ = true;
        try {
            memory_ = place_weights(weights_, plan_->device(), plan_->spec(),
                                    [this](const std::string & sentence) { plan_->problem(sentence, true); });
        } catch (const std::exception & error) {
            plan_->problem(error.what(), false);
            log_error(error.what());
            return false;
        }
        placed_ = true;
        counters().host_weights += memory_.host_bytes;
        counters().device_weights += memory_.device_bytes;
        counters().n_weights += static_cast<int64_t>(weights_.size());
        for (const auto & weight : weights_) {
            plan_->report(*weight, true);
        }
        return true;
    }

    void clear(uint8_t value) {
        if (place()) {
            for (const BufferPtr & buffer : memory_.buffers) {
                ggml_backend_buffer_clear(buffer.get(), value);
            }
        }
    }

    size_t size() const { return size_; }

    LoadedPlan * plan() { return plan_.get(); }

  private:
    std::shared_ptr<LoadedPlan>               plan_;
    size_t                                    size_;
    std::vector<std::unique_ptr<SplitWeight>> weights_;
    WeightMemory                              memory_;
    std::mutex                                mutex_;
    bool                                      tried_  = false;
    bool                                      placed_ = false;
};

SplitBuffer & context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<SplitBuffer *>(buffer->context);
}

//
// buffer
//

void split_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    delete static_cast<SplitBuffer *>(buffer->context);
}

// Nothing is ever read there; ggml wants an address to add offsets to.
void * split_buffer_get_base(ggml_backend_buffer_t /*buffer*/) {
    return reinterpret_cast<void *>(uintptr_t{0x1000});
}

ggml_status split_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    try {
        context_of(buffer).add(tensor);
    } catch (const std::exception & error) {
        context_of(buffer).plan()->problem(error.what(), false);
        log_error(error.what());
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

void split_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                             size_t size) {
    SplitWeight * weight = weight_of(tensor);
    if (weight == nullptr || !context_of(buffer).place()) {
        return; // said by plan problems, and by the first graph, which fails
    }
    try {
        weight->set(data, offset, size);
    } catch (const std::exception & error) {
        context_of(buffer).plan()->problem(error.what(), false);
        log_error(error.what());
    }
}

void split_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                                size_t size) {
    const std::vector<uint8_t> bytes(size, value);
    split_buffer_set_tensor(buffer, tensor, bytes.data(), offset, size);
}

void split_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                             size_t size) {
    std::memset(data, 0, size);
    const SplitWeight * weight = weight_of(tensor);
    if (weight == nullptr || !context_of(buffer).place()) {
        return;
    }
    try {
        weight->get(data, offset, size);
    } catch (const std::exception & error) {
        log_error(error.what());
    }
}

void split_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    context_of(buffer).clear(value);
}

const ggml_backend_buffer_i split_buffer_i = {
    /* .free_buffer   = */ split_buffer_free_buffer,
    /* .get_base      = */ split_buffer_get_base,
    /* .init_tensor   = */ split_buffer_init_tensor,
    /* .memset_tensor = */ split_buffer_memset_tensor,
    /* .set_tensor    = */ split_buffer_set_tensor,
    /* .get_tensor    = */ split_buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ split_buffer_clear,
    /* .reset         = */ nullptr,
};

//
// buffer type
//

const char * split_buft_get_name(ggml_backend_buffer_type_t /*buft*/) {
    return "OALLAMA_Split";
}

ggml_backend_buffer_t split_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    try {
        auto plan = static_cast<LoadedPlan *>(buft->context)->shared_from_this();
        plan->device(); // where it is missing, the load fails here
        auto context = std::make_unique<SplitBuffer>(std::move(plan), size);
        return ggml_backend_buffer_init(buft, split_buffer_i, context.release(), size);
    } catch (const std::exception & error) {
        log_error(error.what());
        return nullptr;
    }
}

size_t split_buft_get_alignment(ggml_backend_buffer_type_t /*buft*/) {
    return alignment;
}

bool split_buft_is_host(ggml_backend_buffer_type_t /*buft*/) {
    return false;
}

const ggml_backend_buffer_type_i split_buft_i = {
    /* .get_name       = */ split_buft_get_name,
    /* .alloc_buffer   = */ split_buft_alloc_buffer,
    /* .get_alignment  = */ split_buft_get_alignment,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ nullptr,
    /* .is_host        = */ split_buft_is_host,
};

oallama_slice as_planned(const SliceSpec & slice) {
    oallama_slice out = {};
    std::snprintf(out.name, sizeof out.name, "%s", slice.name.c_str());
    std::snprintf(out.layout, sizeof out.layout, "%s", slice.layout.c_str());
    out.axis       = static_cast<int32_t>(slice.axis);
    out.cc         = slice.cc;
    out.cg         = slice.cg;
    out.gg         = slice.gg;
    out.cc_planned = slice.cc;
    out.gg_planned = slice.gg;
    return out;
}

} // namespace

Counters & counters() {
    static Counters the_counters;
    return the_counters;
}

//
// plan
//

std::shared_ptr<LoadedPlan> LoadedPlan::make(PlanSpec spec, ggml_backend_dev_t owner) {
    return std::shared_ptr<LoadedPlan>(new LoadedPlan(std::move(spec), owner));
}

ggml_backend_dev_t LoadedPlan::device() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (device_ == nullptr && !spec_.device.empty()) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(spec_.device.c_str());
        if (device == nullptr) {
            std::string known;
            for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
                known += (known.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
            }
            throw Error(OALLAMA_INVALID, "the plan's device " + spec_.device + " is not here; devices are " + known);
        }
        require(device->iface.get_name != buft_.device->iface.get_name,
                "the plan's device " + spec_.device + " is the split backend itself; name a GPU");
        device_ = device;
    }
    return device_;
}

LoadedPlan::LoadedPlan(PlanSpec spec, ggml_backend_dev_t owner)
    : spec_(std::move(spec)), buft_{split_buft_i, owner, this} {
    placed_.reserve(spec_.slices.size());
    for (const SliceSpec & slice : spec_.slices) {
        placed_.push_back(as_planned(slice));
    }
}

SliceSpec LoadedPlan::slice_of(const ggml_tensor * tensor) const {
    const auto found = spec_.by_name.find(tensor->name);
    if (found == spec_.by_name.end()) {
        SliceSpec whole;
        whole.name   = tensor->name;
        whole.type   = tensor->type;
        whole.k      = tensor->ne[0];
        whole.n      = tensor->ne[1];
        whole.e      = tensor->ne[2] * tensor->ne[3];
        whole.cc     = whole.n;
        whole.layout = plain_layout;
        return whole;
    }
    const SliceSpec & slice = spec_.slices[found->second];
    require(tensor->type == slice.type && tensor->ne[0] == slice.k && tensor->ne[1] == slice.n &&
                tensor->ne[2] == slice.e && tensor->ne[3] == 1,
            std::string("the plan is for another model: ") + tensor->name + " is " + ggml_type_name(tensor->type) +
                " " + std::to_string(tensor->ne[0]) + "x" + std::to_string(tensor->ne[1]) + "x" +
                std::to_string(tensor->ne[2]) + ", the plan says " + ggml_type_name(slice.type) + " " +
                std::to_string(slice.k) + "x" + std::to_string(slice.n) + "x" + std::to_string(slice.e));
    return slice;
}

void LoadedPlan::report(const SplitWeight & weight, bool loaded) {
    const auto found = spec_.by_name.find(weight.slice().name);
    if (found == spec_.by_name.end()) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    oallama_slice &                   placed = placed_[found->second];
    placed.loaded                            = loaded ? 1 : 0;
    placed.host_bytes                        = loaded ? weight.host_bytes() : 0;
    placed.device_bytes                      = loaded ? weight.part_bytes(side_device) : 0;
    if (loaded) {
        placed.cc = weight.slice().cc;
        placed.cg = weight.slice().cg;
        placed.gg = weight.slice().gg;
        std::snprintf(placed.layout, sizeof placed.layout, "%s", weight.slice().layout.c_str());
    }
}

void LoadedPlan::problem(const std::string & sentence, bool usable) {
    const std::lock_guard<std::mutex> lock(mutex_);
    problems_.push_back(sentence);
    usable_ = usable_ && usable;
}

oallama_slice LoadedPlan::placed(size_t index) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return placed_.at(index);
}

std::vector<std::string> LoadedPlan::problems(bool * usable) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    *usable = usable_;
    return problems_;
}

//
// tensors
//

bool is_split_buft(ggml_backend_buffer_type_t buft) {
    return buft != nullptr && buft->iface.get_name == split_buft_get_name;
}

LoadedPlan * plan_of(const ggml_tensor * tensor) {
    if (tensor == nullptr || tensor->view_src != nullptr || tensor->buffer == nullptr ||
        !is_split_buft(tensor->buffer->buft)) {
        return nullptr;
    }
    return static_cast<LoadedPlan *>(tensor->buffer->buft->context);
}

SplitWeight * weight_of(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr ? nullptr : static_cast<SplitWeight *>(tensor->extra);
}

bool ensure_placed(const ggml_tensor * tensor) {
    return weight_of(tensor) != nullptr && context_of(tensor->buffer).place();
}

} // namespace oallama
