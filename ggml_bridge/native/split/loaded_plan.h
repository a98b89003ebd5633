// A plan in use: what loading made of it, and its buffer type.

#pragma once

#include <memory>
#include <mutex>
#include <set>

#include "block_times.h"
#include "split_weight.h"

namespace oallama {

// A plan in use: its buffer type, and what loading made of it. Buffers share it, so it outlives its oallama_plan.
class LoadedPlan : public std::enable_shared_from_this<LoadedPlan> {
  public:
    // owner: the inert device that the buffer type belongs to.
    static std::shared_ptr<LoadedPlan> make(PlanSpec spec, ggml_backend_dev_t owner);

    ~LoadedPlan();

    LoadedPlan(const LoadedPlan &)             = delete;
    LoadedPlan & operator=(const LoadedPlan &) = delete;

    const PlanSpec & spec() const { return spec_; }

    ggml_backend_buffer_type_t buft() { return &buft_; }

    // The device that holds GG; NULL without any. Looked up when it is first needed: stock programs load their plugins
    // before they connect to RPC servers. Throws OALLAMA_INVALID where it is missing.
    ggml_backend_dev_t device() const;

    // The device whose memory has what a mul-mat by this weight reads and gives; NULL: it is in host memory. Throws as
    // device().
    ggml_backend_dev_t memory_of(const SliceSpec & slice) const;

    // Whether the plan has blocks live on the device, which has memory of its own but takes no other buffer type.
    bool lacks_residents() const;

    // What the plan says of a tensor; a tensor it does not name is kept whole on the host.
    SliceSpec slice_of(const ggml_tensor * tensor) const; // throws OALLAMA_INVALID for another type or shape

    // How a buffer reports what it did. A load is a buffer's life; when one begins, the problems of loads that have
    // ended are forgotten.
    uint64_t begin_load();
    void     end_load(uint64_t load);
    void     report(const SplitWeight & weight, bool loaded); // when it is loaded, and loaded = false when freed
    void     problem(uint64_t load, const std::string & sentence, bool usable); // once

    // Counts uses of experts in weights that are loaded from here on, and adds them to this file when these are freed.
    void keep_uses(const std::string & path) { uses_path_ = path; }

    bool keeps_uses() const { return !uses_path_.empty(); }

    const std::shared_ptr<BlockTimes> & times() { return times_; }

    oallama_slice            placed(size_t index) const;
    std::vector<std::string> problems(bool * usable) const;

  private:
    const std::shared_ptr<BlockTimes> times_ = std::make_shared<BlockTimes>();

    struct Problem {
        uint64_t    load;
        std::string sentence;
        bool        usable;
    };

    LoadedPlan(PlanSpec spec, ggml_backend_dev_t owner);

    PlanSpec                   spec_;
    std::string                uses_path_;
    ggml_backend_buffer_type   buft_;
    mutable std::mutex         mutex_;
    mutable ggml_backend_dev_t device_   = nullptr;
    mutable ggml_backend_dev_t resident_ = nullptr; // the device where blocks can live there
    std::vector<oallama_slice> placed_;

    std::vector<std::vector<const SplitWeight *>> held_; // of each slice, the weights that are loaded
    std::vector<Problem>                          problems_;
    std::set<uint64_t>                            loads_; // that have not ended
    uint64_t                                      n_loads_ = 0;
};

// The inert device that the buffer types of plans belong to (ggml-oallama.cpp). Throws OALLAMA_INVALID before the back
// end is registered.
ggml_backend_dev_t owner_of_plans();

// Lets OALLAMA_Resident compute in this device's memory, until it has been left as often (ggml-oallama.cpp); false
// where it cannot, or computes in another's.
bool use_resident_device(ggml_backend_dev_t memory);
void leave_resident_device();

} // namespace oallama
