// Split weights: their parts, the memory of the parts, and which bytes of the whole tensor each part has.
//
// llama.cpp allocates a split buffer, which takes no memory yet, and each tensor in it becomes a SplitWeight
// (ggml-oallama.cpp). When the first bytes arrive, all weights of the buffer are known: place_weights allocates memory
// for all their parts, and moves cuts if the device has less memory than planned. From then on `set` writes the bytes
// of a whole tensor to its parts, and programs read `part`. The buffer owns all of it; no part moves until it is freed.
//
// Shapes of a part with `count` elements, of a weight [K, N, E]: rows [K, count, E], cols [count, N, E], halves
// [K, 2 * count, E]; hot experts on the device [K, N, n_slots], where a table says which expert is in which slot. Parts
// are contiguous, in the weight's type.

#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "expert_table.h"
#include "plan.h"

namespace oallama {

// Where a part is stored and computed; the first three are in the order of the parts along the axis.
enum Side : int {
    side_host   = 0, // CC: stored and computed on the host
    side_stream = 1, // CG: stored in host memory, copied to the ring, computed on the device
    side_device = 2, // GG: stored and computed on the device
    side_prime  = 3, // CG': the elements of CC, streamed like CG, for the last n_g tokens; experts are fetched from it
};

constexpr int n_sides = 4;

struct Part {
    int64_t       begin  = 0; // elements along the axis
    int64_t       count  = 0;
    ggml_tensor * tensor = nullptr; // where it is stored; NULL if count is 0, or before it is allocated
    bool          plain  = true;    // in ggml's plain layout, not repacked
};

class SplitWeight {
  public:
    // tensor: llama.cpp's; slice: what the plan says of it.
    SplitWeight(const ggml_tensor * tensor, SliceSpec slice);
    ~SplitWeight();

    SplitWeight(const SplitWeight &)             = delete;
    SplitWeight & operator=(const SplitWeight &) = delete;

    // A unique number, as addresses are reused.
    uint64_t id() const { return id_; }

    const SliceSpec & slice() const { return slice_; }

    const Part & part(Side side) const { return parts_[side]; }

    Part & part(Side side) { return parts_[side]; }

    // The whole weight in plain host memory, for operations other than mul-mats. Throws OALLAMA_UNSUPPORTED if it is
    // not there.
    const Part & whole_on_host() const;

    // Shape of a part's tensor, ne[0..2].
    std::array<int64_t, 3> shape(Side side) const;

    ggml_tensor * new_tensor(ggml_context * ctx, Side side) const; // of this shape, without memory

    int64_t part_bytes(Side side) const;

    int64_t host_bytes() const; // of CC in its layout, of CG, and of CC's copy for CG'

    // The table of its hot experts, once its memory is allocated; NULL: no hot experts.
    const std::shared_ptr<ExpertTable> & table() const { return table_; }

    void set_table(std::shared_ptr<ExpertTable> table) { table_ = std::move(table); }

    int64_t n_slots() const { return static_cast<int64_t>(slice_.hot.size()); }

    void set_layout(const std::string & layout) { slice_.layout = layout; }

    // Whether CC can be sent to the device: CC, or a second copy of it, is in the plain layout.
    bool has_prime() const { return parts_[side_prime].tensor != nullptr; }

    // Moves GG and hot experts to the host: `cg` elements along the axis are streamed, all others are CC.
    void leave_device(int64_t cg);

    // Writes the whole tensor's bytes to all parts.
    void set(const char * data) const;

    // Reads bytes [offset, offset + size) of the whole tensor. Throws OALLAMA_UNSUPPORTED where CC is repacked.
    void get(char * data, size_t offset, size_t size) const;

  private:
    template <typename F> void for_runs(Side side, const F & f) const;

    void lay_out();
    bool prime_is_copy() const;
    void write(Side side, const char * data) const;

    uint64_t                     id_;
    SliceSpec                    slice_;
    int64_t                      row_bytes_;
    std::array<Part, n_sides>    parts_;
    std::shared_ptr<ExpertTable> table_;
};

//
// memory
//

struct WeightMemory {
    std::vector<ContextPtr> contexts; // of the parts' tensor headers; freed after the buffers
    std::vector<BufferPtr>  buffers;
    int64_t                 host_bytes   = 0; // as allocated
    int64_t                 device_bytes = 0;
};

// Allocates memory for the parts of all weights: as much of GG as fits on their device, the rest on the host. Moves
// cuts if the device cannot compute a weight or is full, or a layout cannot hold it, and reports each as a problem.
// Throws OALLAMA_NO_MEMORY if host memory is short.
WeightMemory place_weights(const std::vector<std::unique_ptr<SplitWeight>> & all,
                           const std::vector<ggml_backend_dev_t> & devices, const PlanSpec & plan,
                           const std::function<void(const std::string &)> & problem);

//
// tensors in split buffers (ggml-oallama.cpp)
//

bool is_split_buft(ggml_backend_buffer_type_t buft);

// The plan of a tensor in a split buffer; NULL for any other tensor. Views of one are not in it themselves.
LoadedPlan * plan_of(const ggml_tensor * tensor);

// The device on which such a tensor has GG and CG, and its settings in the plan.
ggml_backend_dev_t device_of(const ggml_tensor * tensor);
const DeviceSpec & device_spec_of(const ggml_tensor * tensor);

// The weight behind a tensor in a split buffer; NULL for any other, and before it was allocated.
SplitWeight * weight_of(const ggml_tensor * tensor);

// Allocates the memory of a weight's parts if that has not been done; false if it failed.
bool ensure_placed(const ggml_tensor * tensor);

// Whether a tensor's split buffer was loaded without a failure; true for any other tensor.
bool is_sound(const ggml_tensor * tensor);

} // namespace oallama
