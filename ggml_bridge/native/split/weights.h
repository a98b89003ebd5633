// Weights: where the parts of each one are, which bytes of the whole tensor each part has, and memory for all of them.
//
// llama.cpp allocates a split buffer, which takes no memory, and makes a SplitWeight of each tensor in it
// (ggml-oallama.cpp). When the first bytes arrive all weights of the buffer are known: place_weights takes memory for
// all parts of all of them, and moves cuts where the device has less than the plan thought. From then on `set` writes
// a tensor's bytes, which llama.cpp loads whole, where they belong; programs read `part`, and nothing moves until the
// buffer is freed, which owns all of it.
//
// Shapes, of a weight [K, N, E] with a part of `count` elements: rows [K, count, E], cols [count, N, E], halves
// [K, 2 * count, E]; of hot experts, on the device, [K, N, n_slots], where a table says which of them
// lies in which slot. Parts are contiguous, in the weight's own type.

#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "expert_table.h"
#include "plan.h"

namespace oallama {

// The place where a part is stored and computed; the first three in the order of the parts along the axis.
enum Side : int {
    side_host   = 0, // CC: stored and computed on the host
    side_stream = 1, // CG: stored in host memory, copied to the device when its turn comes, computed there
    side_device = 2, // GG: stored and computed on the device
    side_prime  = 3, // CG': CC once more, streamed like CG, for the last n_g tokens of a batch
};

constexpr int n_sides = 4;

struct Part {
    int64_t       begin  = 0; // elements along the axis
    int64_t       count  = 0;
    ggml_tensor * tensor = nullptr; // where it is stored; NULL where count is 0, or not allocated yet
    bool          plain  = true;    // in ggml's own layout, not a repacked one
};

class SplitWeight {
  public:
    // tensor: llama.cpp's; slice: what the plan says of it.
    SplitWeight(const ggml_tensor * tensor, SliceSpec slice);
    ~SplitWeight();

    SplitWeight(const SplitWeight &)             = delete;
    SplitWeight & operator=(const SplitWeight &) = delete;

    // A number that no other weight ever has, as an address is soon another's.
    uint64_t id() const { return id_; }

    const SliceSpec & slice() const { return slice_; }

    const Part & part(Side side) const { return parts_[side]; }

    Part & part(Side side) { return parts_[side]; }

    // All of it in plain host memory, for what is no mul-mat. Throws OALLAMA_UNSUPPORTED where it is not there.
    const Part & whole_on_host() const;

    // Shape of a part's tensor, ne[0..2].
    std::array<int64_t, 3> shape(Side side) const;

    ggml_tensor * new_tensor(ggml_context * ctx, Side side) const; // of this shape, without memory

    int64_t part_bytes(Side side) const;

    int64_t host_bytes() const; // of CC in its layout, of CG, and of CC's copy for CG'

    // Where its hot experts are, once it has its memory; NULL: it has none.
    const std::shared_ptr<ExpertTable> & table() const { return table_; }

    void set_table(std::shared_ptr<ExpertTable> table) { table_ = std::move(table); }

    int64_t n_slots() const { return static_cast<int64_t>(slice_.hot.size()); }

    void set_layout(const std::string & layout) { slice_.layout = layout; }

    // Whether the device can be sent CC: it lies in the plain layout, as CC does or as a second copy.
    bool has_prime() const { return parts_[side_prime].tensor != nullptr; }

    // Gives up the device's part: of the elements along the axis so many are streamed, the others are on the host.
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

// Takes memory for the parts of all weights: as much of GG as their device has room for, the rest on the host. Moves
// cuts where the device cannot compute a weight, has no room, or a layout cannot hold it, and says so. Throws
// OALLAMA_NO_MEMORY when host memory is short.
WeightMemory place_weights(const std::vector<std::unique_ptr<SplitWeight>> & all,
                           const std::vector<ggml_backend_dev_t> & devices, const PlanSpec & plan,
                           const std::function<void(const std::string &)> & problem);

//
// tensors in split buffers (ggml-oallama.cpp)
//

bool is_split_buft(ggml_backend_buffer_type_t buft);

// The plan of a tensor in a split buffer; NULL for any other tensor. Views of one are not in it themselves.
LoadedPlan * plan_of(const ggml_tensor * tensor);

// The device beside which such a tensor is, and what its plan says of it.
ggml_backend_dev_t device_of(const ggml_tensor * tensor);
const DeviceSpec & device_spec_of(const ggml_tensor * tensor);

// The weight behind a tensor in a split buffer; NULL for any other, and before it was allocated.
SplitWeight * weight_of(const ggml_tensor * tensor);

// Gives a weight's parts their memory if that has not been done; false where that failed.
bool ensure_placed(const ggml_tensor * tensor);

// Whether nothing has gone wrong with what a tensor's buffer holds; true for any other tensor.
bool is_sound(const ggml_tensor * tensor);

} // namespace oallama
