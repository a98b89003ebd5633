// A split buffer gets no memory when llama.cpp allocates it: what a tensor needs where is known only when all of the
// model's tensors are, and then the device may turn out to have less than the plan thought. So memory is taken when
// the first bytes arrive, for all weights at once.

#include "split_buffer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "memory_plan.h"

namespace oallama {

namespace {

constexpr size_t alignment = 64;

class SplitBuffer {
  public:
    explicit SplitBuffer(std::shared_ptr<LoadedPlan> plan) : plan_(std::move(plan)), load_(plan_->begin_load()) {}

    SplitBuffer(const SplitBuffer &)             = delete;
    SplitBuffer & operator=(const SplitBuffer &) = delete;

    ~SplitBuffer() {
        for (const auto & weight : weights_) {
            logged([&] { plan_->report(*weight, false); });
        }
        if (placed_) {
            counters().host_weights -= memory_.host_bytes;
            counters().device_weights -= memory_.device_bytes;
            counters().n_weights -= static_cast<int64_t>(weights_.size());
        }
        plan_->end_load(load_);
    }

    // Runs a step of the load. False where it failed: then the plan and the log say why.
    template <typename F> bool attempt(F && f) noexcept {
        if (logged(f) == OALLAMA_OK) {
            return true;
        }
        if (!failed_.exchange(true)) { // one sentence is enough
            guarded([this] { plan_->problem(load_, last_error(), false); });
        }
        return false;
    }

    bool failed() const { return failed_; }

    void note(const std::string & sentence) { plan_->problem(load_, sentence, true); }

    void add(ggml_tensor * tensor) {
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
            memory_ = place_weights(weights_, plan_->device(), plan_->spec(),
                                    [this](const std::string & sentence) { note(sentence); });
            for (const auto & weight : weights_) {
                plan_->report(*weight, true);
            }
        });
        if (placed_) {
            counters().host_weights += memory_.host_bytes;
            counters().device_weights += memory_.device_bytes;
            counters().n_weights += static_cast<int64_t>(weights_.size());
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
    std::shared_ptr<LoadedPlan>               plan_;
    uint64_t                                  load_;
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

// With all of its cuts.
SplitWeight * whole_weight_of(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr ? nullptr : static_cast<SplitWeight *>(tensor->extra);
}

std::atomic<uint64_t> cuts_moved{0};

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
    SplitBuffer & context = context_of(buffer);
    return context.attempt([&] { context.add(tensor); }) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

// A tensor's weight, and how far into it the tensor begins: views are read and written too.
struct Place {
    SplitWeight * weight;
    size_t        offset;
};

Place place_of(const ggml_tensor * tensor) {
    const ggml_tensor * whole = tensor->view_src == nullptr ? tensor : tensor->view_src;
    return {whole_weight_of(whole), tensor->view_src == nullptr ? 0 : tensor->view_offs};
}

void split_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                             size_t size) {
    const Place   place   = place_of(tensor);
    SplitBuffer & context = context_of(buffer);
    if (place.weight == nullptr || !context.place()) {
        return; // said by plan problems, and by the first graph, which fails
    }
    context.attempt([&] { place.weight->set(data, place.offset + offset, size); });
}

void split_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                                size_t size) {
    if (!context_of(buffer).place()) {
        return;
    }
    std::array<uint8_t, 4096> bytes;
    bytes.fill(value);
    for (size_t at = 0; at < size; at += bytes.size()) {
        split_buffer_set_tensor(buffer, tensor, bytes.data(), offset + at, std::min(size - at, bytes.size()));
    }
}

void split_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                             size_t size) {
    std::memset(data, 0, size);
    const Place   place   = place_of(tensor);
    SplitBuffer & context = context_of(buffer);
    if (place.weight != nullptr && context.place()) {
        context.attempt([&] { place.weight->get(data, place.offset + offset, size); });
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
    ggml_backend_buffer_t buffer = nullptr;
    logged([&] {
        auto plan = static_cast<LoadedPlan *>(buft->context)->shared_from_this();
        plan->device(); // where it is missing, the load fails here
        auto context = std::make_unique<SplitBuffer>(std::move(plan));
        buffer       = ggml_backend_buffer_init(buft, split_buffer_i, context.release(), size);
    });
    return buffer;
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
    out.n_hot      = static_cast<int64_t>(slice.hot.size());
    out.n_cuts     = static_cast<int64_t>(1 + slice.other_cc.size());
    out.cuts[0]    = slice.cc;
    std::copy(slice.other_cc.begin(), slice.other_cc.end(), out.cuts + 1);
    return out;
}

// What of it follows from the cut that is computed with.
void tell_cut(const SplitWeight & weight, oallama_slice & out) {
    const SplitWeight & active = weight.active();
    out.cc                     = active.slice().cc;
    out.cg                     = active.slice().cg;
    out.gg                     = active.slice().gg;
    out.twice_bytes            = out.host_bytes - active.host_bytes();
    std::snprintf(out.layout, sizeof out.layout, "%s", active.slice().layout.c_str());
}

void tell_loaded(const SplitWeight & weight, oallama_slice & out) {
    out.loaded       = 1;
    out.host_bytes   = weight.host_bytes_of_all();
    out.device_bytes = weight.part_bytes(side_device);
    out.n_hot        = weight.n_slots();
    out.n_cuts       = static_cast<int64_t>(weight.n_cuts());
    for (size_t i = 0; i < weight.n_cuts(); i++) {
        out.cuts[i] = weight.cut(i).slice().cc;
    }
    tell_cut(weight, out);
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
        device_              = device;
        const bool residents = std::any_of(spec_.slices.begin(), spec_.slices.end(),
                                           [](const SliceSpec & slice) { return slice.resident; });
        resident_            = residents && add_resident_device(device) ? device : nullptr;
    }
    return device_;
}

ggml_backend_dev_t LoadedPlan::memory_of(const SliceSpec & slice) const {
    return slice.resident && device() != nullptr ? resident_ : nullptr;
}

LoadedPlan::LoadedPlan(PlanSpec spec, ggml_backend_dev_t owner)
    : spec_(std::move(spec)), buft_{split_buft_i, owner, this} {
    held_.resize(spec_.slices.size());
    placed_.reserve(spec_.slices.size());
    for (const SliceSpec & slice : spec_.slices) {
        placed_.push_back(as_planned(slice));
    }
}

LoadedPlan::~LoadedPlan() {
    if (resident_ != nullptr) {
        remove_resident_device(resident_);
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

uint64_t LoadedPlan::begin_load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    problems_.erase(std::remove_if(problems_.begin(), problems_.end(),
                                   [this](const Problem & problem) { return loads_.count(problem.load) == 0; }),
                    problems_.end());
    loads_.insert(++n_loads_);
    return n_loads_;
}

void LoadedPlan::end_load(uint64_t load) {
    const std::lock_guard<std::mutex> lock(mutex_);
    loads_.erase(load);
}

void LoadedPlan::report(SplitWeight & weight, bool loaded) {
    const auto found = spec_.by_name.find(weight.slice().name);
    if (found == spec_.by_name.end()) {
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<SplitWeight *> &      held   = held_[found->second];
    oallama_slice &                   placed = placed_[found->second];
    held.erase(std::remove(held.begin(), held.end(), &weight), held.end());
    if (loaded) {
        held.push_back(&weight);
    }
    placed = as_planned(spec_.slices[found->second]);
    if (!held.empty()) { // of the model that was loaded last, of those that are left
        tell_loaded(*held.back(), placed);
    }
    if (!loaded && !uses_path_.empty()) {
        weight.append_uses(uses_path_);
    }
}

void LoadedPlan::move_cut(const std::string & name, int64_t cc) {
    const auto found = spec_.by_name.find(name);
    require(found != spec_.by_name.end(), "the plan has no tensor " + name);
    const std::lock_guard<std::mutex>  lock(mutex_);
    const std::vector<SplitWeight *> & held = held_[found->second];
    require(!held.empty(), "no model with " + name + " is loaded, so its cut cannot be moved");
    std::vector<size_t> chosen;
    for (const SplitWeight * weight : held) {
        std::string kept;
        size_t      at = weight->n_cuts();
        for (size_t i = 0; i < weight->n_cuts(); i++) {
            kept += (i == 0 ? "" : ", ") + std::to_string(weight->cut(i).slice().cc);
            at = weight->cut(i).slice().cc == cc ? i : at;
        }
        chosen.push_back(at);
        if (at == weight->n_cuts()) {
            throw Error(OALLAMA_UNSUPPORTED, "CC of " + name + " cannot end at " + std::to_string(cc) +
                                                 ": it was loaded so that it may end at " + kept +
                                                 "; what lies between other cuts is not kept in both layouts");
        }
    }
    for (size_t i = 0; i < held.size(); i++) {
        held[i]->use_cut(chosen[i]);
    }
    tell_cut(*held.back(), placed_[found->second]);
    cuts_moved++;
}

void LoadedPlan::problem(uint64_t load, const std::string & sentence, bool usable) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool said = std::any_of(problems_.begin(), problems_.end(), [&](const Problem & problem) {
        return problem.load == load && problem.sentence == sentence;
    });
    if (!said) {
        problems_.push_back({load, sentence, usable});
    }
}

SplitWeight & LoadedPlan::weight(const std::string & name) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        found = spec_.by_name.find(name);
    const bool                        held  = found != spec_.by_name.end() && !held_[found->second].empty();
    require(held, "no model that was loaded with the plan has the tensor " + name);
    return *held_[found->second].back();
}

oallama_slice LoadedPlan::placed(size_t index) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return placed_.at(index);
}

std::vector<std::string> LoadedPlan::problems(bool * usable) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string>          sentences;
    *usable = true;
    for (const Problem & problem : problems_) {
        sentences.push_back(problem.sentence);
        *usable = *usable && problem.usable;
    }
    return sentences;
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
    SplitWeight * weight = whole_weight_of(tensor);
    return weight == nullptr ? nullptr : &weight->active();
}

uint64_t n_cuts_moved() {
    return cuts_moved.load(std::memory_order_relaxed);
}

bool is_sound(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr || !context_of(tensor->buffer).failed();
}

void note(const ggml_tensor * tensor, const std::string & sentence) {
    context_of(tensor->buffer).note(sentence);
}

bool ensure_placed(const ggml_tensor * tensor) {
    return weight_of(tensor) != nullptr && context_of(tensor->buffer).place();
}

} // namespace oallama
