#include "loaded_plan.h"

#include <algorithm>
#include <cstdio>

#include "device.h"
#include "split_buffer.h"

namespace oallama {

namespace {

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
    return out;
}

void tell_loaded(const SplitWeight & weight, oallama_slice & out) {
    const SliceSpec & slice = weight.slice();
    out.loaded              = 1;
    out.cc                  = slice.cc;
    out.cg                  = slice.cg;
    out.gg                  = slice.gg;
    out.host_bytes          = weight.host_bytes();
    out.device_bytes        = weight.part_bytes(side_device);
    out.n_hot               = weight.n_slots();
    std::snprintf(out.layout, sizeof out.layout, "%s", slice.layout.c_str());
}

bool has_residents(const PlanSpec & spec) {
    return std::any_of(spec.slices.begin(), spec.slices.end(), [](const SliceSpec & slice) { return slice.resident; });
}

} // namespace

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
        add_partner(device);
        device_   = device;
        resident_ = has_residents(spec_) && use_resident_device(device) ? device : nullptr;
    }
    return device_;
}

ggml_backend_dev_t LoadedPlan::memory_of(const SliceSpec & slice) const {
    return slice.resident && device() != nullptr ? resident_ : nullptr;
}

bool LoadedPlan::lacks_residents() const {
    return has_residents(spec_) && device() != nullptr && resident_ == nullptr &&
           !ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(device()));
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
    if (device_ != nullptr) {
        remove_partner(device_);
    }
    if (resident_ != nullptr) {
        leave_resident_device();
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

void LoadedPlan::report(const SplitWeight & weight, bool loaded) {
    const auto found = spec_.by_name.find(weight.slice().name);
    if (found == spec_.by_name.end()) {
        return;
    }
    const std::lock_guard<std::mutex>  lock(mutex_);
    std::vector<const SplitWeight *> & held   = held_[found->second];
    oallama_slice &                    placed = placed_[found->second];
    held.erase(std::remove(held.begin(), held.end(), &weight), held.end());
    if (loaded) {
        held.push_back(&weight);
    }
    placed = as_planned(spec_.slices[found->second]);
    if (!held.empty()) { // of the model that was loaded last, of those that are left
        tell_loaded(*held.back(), placed);
    }
    if (!loaded && keeps_uses()) {
        weight.append_uses(uses_path_);
    }
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

} // namespace oallama
