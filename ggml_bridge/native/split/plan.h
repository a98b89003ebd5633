// A plan: as its text says (PlanSpec), and as it was loaded (LoadedPlan).
//
// A weight [K, N, E] is cut along an axis into CC, CG and GG, in this order: rows cuts N, cols cuts K, halves cuts both
// halves of N alike. Counts are elements along the axis; CC + CG + GG is its extent.
//
// A PlanSpec never changes. A LoadedPlan belongs to its oallama_plan and to each buffer of weights that was loaded by
// it, whichever lives longest; its functions may be called by any thread.

#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi_check.h"
#include "times.h"
#include "uses.h"
#include "util.h"

namespace oallama {

constexpr const char * plain_layout = "CPU"; // ggml's plain host buffer type

enum class Axis : int32_t { rows = OALLAMA_ROWS, cols = OALLAMA_COLS, halves = OALLAMA_HALVES };

struct SliceSpec {
    std::string          name;
    ggml_type            type = GGML_TYPE_F32;
    int64_t              k    = 0; // weight [K, N, E]
    int64_t              n    = 0;
    int64_t              e    = 0;
    Axis                 axis = Axis::rows;
    int64_t              cc   = 0; // elements along the axis
    int64_t              cg   = 0;
    int64_t              gg   = 0;
    std::string          layout;            // host buffer type of CC
    bool                 takes_n_g = true;  // the device may compute CC for n_g tokens
    bool                 resident  = false; // inputs and results are in the device's memory, not the host's
    int64_t              chunk     = 0;     // most tokens that are computed at a time; 0: all
    bool                 input_f32 = false; // llama.cpp requires an F32 input
    std::vector<int32_t> hot;               // experts that the device also holds after the load, by slot
    size_t               device = 0;        // which of the plan's

    int64_t extent() const { return axis == Axis::cols ? k : axis == Axis::rows ? n : n / 2; }
};

constexpr int64_t max_slots = 64;

// One entry of the table of n_g: in a batch of this many tokens, the device computes CC for the last n_g (CG').
struct TokenSplit {
    int64_t n_tokens;
    int64_t n_g;
};

// Settings of the stream of CG.
struct StreamSpec {
    int64_t n_slots          = 2;    // of the ring
    int64_t ring             = 0;    // bytes of the ring, more if one block needs more; 0: n_slots largest blocks
    bool    ahead            = true; // copies of the next blocks begin while a block is computed
    int64_t piece            = 0;    // most bytes of a request; 0: no limit
    int64_t link_bytes_per_s = 0;    // 0: not known, so requests ahead have no limit
};

// Whether hot experts are exchanged for others while a model runs.
enum class ExchangeMode {
    off,   // the experts of the load stay
    idle,  // while the link is idle
    eager, // also while the link is busy
};

// Settings of a plan for one of its devices.
struct DeviceSpec {
    std::string             name; // empty: no CG and GG anywhere
    StreamSpec              stream;
    ExchangeMode            exchange = ExchangeMode::off;
    int64_t                 staging  = 0;     // bytes of the device that GG leaves for activations and the ring
    bool                    twice    = false; // CC in a repacked layout is kept in the plain one, too
    std::vector<TokenSplit> tokens;           // ascending; empty: n_g is 0
};

struct PlanSpec {
    std::vector<DeviceSpec> devices{1};            // at least one
    bool                    counts    = false;     // how often tokens use each expert of its tensors
    int64_t                 sum_bytes = INT64_MAX; // least bytes saved by adding up experts' results
    std::vector<SliceSpec>  slices;

    std::unordered_map<std::string, size_t> by_name; // positions in slices

    // The slice of a tensor; NULL: the plan does not name it.
    const SliceSpec * find(const std::string & name) const {
        const auto found = by_name.find(name);
        return found == by_name.end() ? nullptr : &slices[found->second];
    }

    // The device of a slice's GG and CG.
    const DeviceSpec & device_of(const SliceSpec & slice) const { return devices[slice.device]; }
};

// Elements along the axis that a cut must be a multiple of: whole quantisation blocks of a row, and whole groups of
// rows of every host layout (CPU_REPACK interleaves up to 16, AMX takes tiles of 32).
int64_t granularity(ggml_type type, Axis axis);

// n_g for a batch: 0 below the first entry, linear between two (rounded, a half up), the same share above the last
// (ScheInfer, Eq. 15); less by up to three at lengths that have no entry, such that the host's tokens come in groups.
int64_t n_g_at(const std::vector<TokenSplit> & tokens, int64_t n_tokens);

// Throws OALLAMA_INVALID naming the line.
PlanSpec parse_plan(const std::string & text);

//
// plans in use
//

class SplitWeight;

class LoadedPlan : public std::enable_shared_from_this<LoadedPlan> {
  public:
    // owner: the inert device that the buffer type belongs to. Create it with make_shared.
    LoadedPlan(PlanSpec spec, ggml_backend_dev_t owner);

    ~LoadedPlan();

    LoadedPlan(const LoadedPlan &)             = delete;
    LoadedPlan & operator=(const LoadedPlan &) = delete;

    const PlanSpec & spec() const { return spec_; }

    ggml_backend_buffer_type_t buft() { return buft_.get(); }

    // The device of this number, which holds GG of its slices; NULL without a device. Looked up when it is first
    // needed: stock programs load plugins before they connect to RPC servers. Throws OALLAMA_INVALID if it is missing.
    ggml_backend_dev_t device(size_t number) const;

    // Looks all devices up. Throws as device().
    void find_devices() const;

    // The device in whose memory the input and the result of a mul-mat by this weight are; NULL: host memory. Throws as
    // device().
    ggml_backend_dev_t memory_of(const SliceSpec & slice) const;

    // Whether the plan has blocks live on a device, which has memory of its own but takes no other buffer type.
    bool lacks_residents(size_t number) const;

    // The plan's slice of a tensor; a tensor it does not name is kept whole on the host.
    SliceSpec slice_of(const ggml_tensor * tensor) const; // throws OALLAMA_INVALID for another type or shape

    // Called by a buffer for its load, which lasts until the buffer is freed. When a load begins and no other one
    // exists, earlier problems are forgotten.
    void begin_load();
    void end_load();
    void report(const SplitWeight & weight, bool loaded); // when it is loaded, and, false, when it is freed
    void problem(const std::string & sentence, bool usable);

    // The uses of a tensor's experts; NULL: the plan does not count them.
    ExpertUses * uses_of(const SliceSpec & slice);

    std::vector<std::pair<std::string, ExpertUses::Totals>> uses() const; // so far, by tensor

    BlockTimes & times() { return times_; } // of its blocks

    oallama_slice            placed(size_t index) const; // of the model that was loaded last, of those that are left
    std::vector<std::string> problems(bool * usable) const;

  private:
    struct Problem {
        std::string sentence;
        bool        usable;
    };

    struct Found {
        ggml_backend_dev_t device   = nullptr;
        ggml_backend_dev_t resident = nullptr; // the device where blocks can live there
    };

    bool has_residents(size_t number) const;

    const PlanSpec             spec_;
    BlockTimes                 times_;
    BufferType                 buft_;
    mutable std::mutex         mutex_;
    mutable std::vector<Found> found_; // by number

    std::map<std::string, ExpertUses>             uses_;
    std::vector<std::vector<const SplitWeight *>> held_; // of each slice, the weights that are loaded
    std::vector<Problem>                          problems_;
    int                                           n_loads_ = 0; // that have not ended
};

// Vtable of the buffer types of plans, whose context is a LoadedPlan (ggml-oallama.cpp).
extern const ggml_backend_buffer_type_i ggml_backend_oallama_split_buffer_type_i;

// Says that a plan names a device, until remove_device was called as often (ggml-oallama.cpp). While all plans name
// devices with the same pinned memory, results in host memory are by default there, as those of ggml's CPU device are
// in llama.cpp. resident: the plan has blocks that live there. Returns whether they can: each resident device computes
// in the memory of one device at a time. remove_device takes what this returned.
bool add_device(ggml_backend_dev_t device, bool resident);
void remove_device(ggml_backend_dev_t device, bool resident);

} // namespace oallama
