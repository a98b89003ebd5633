// One weight, cut: where its parts are, and how bytes of the whole tensor find their part.

#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "expert_uses.h"
#include "split_plan.h"

namespace oallama {

// Where a part is stored and computed; the first three in the order of the parts along the axis.
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
    bool          pieces = true;    // takes any range of bytes; a repacked layout takes the whole part only
};

class SplitWeight {
  public:
    // tensor: llama.cpp's; slice: what the plan says of it.
    SplitWeight(const ggml_tensor * tensor, SliceSpec slice);

    // Of this weight alone, even when it is gone: an address is soon another's.
    uint64_t id() const { return id_; }

    const SliceSpec & slice() const { return slice_; }

    const Part & part(Side side) const { return parts_[side]; }

    Part & part(Side side) { return parts_[side]; }

    // All of it in plain host memory, for what is no mul-mat. Throws OALLAMA_UNSUPPORTED where it is not there.
    const Part & whole_on_host() const;

    // Shape of a part's tensor, ne[0..2].
    std::array<int64_t, 3> shape(Side side) const;

    int64_t part_bytes(Side side) const;

    int64_t host_bytes() const; // of CC, CG, and of CC's copy for CG'

    // Where the device has each expert; -1: nowhere. Empty: it has no hot ones.
    const std::vector<int32_t> & slot_of() const { return slot_of_; }

    int64_t n_slots() const { return static_cast<int64_t>(slice_.hot.size()); }

    int64_t expert_bytes() const { return row_bytes_ * slice_.n; }

    // Chooses the hot experts, in the order of their slots.
    void set_hot(std::vector<int32_t> hot);

    // From here on counts how often each expert is used, where it has hot ones.
    void count_uses();

    // Tokens that were routed by these ids have been computed with it.
    void count(const std::vector<int32_t> & ids, int64_t n_tokens) const;
    void append_uses(const std::string & path) const; // see expert_uses.h

    void set_layout(const std::string & layout) { slice_.layout = layout; }

    // Whether the device can be sent CC: it lies in the plain layout, as CC does or as a second copy.
    bool has_prime() const { return parts_[side_prime].tensor != nullptr; }

    // Moves the cuts: so many elements along the axis streamed and on the device, the others on the host. All of an
    // expert's are on the device where it is hot.
    void move_cuts(int64_t cg, int64_t gg);

    // Bytes [offset, offset + size) of the whole tensor, in any order and any pieces.
    void set(const void * data, size_t offset, size_t size);

    // Throws OALLAMA_UNSUPPORTED for a part that is in a repacked layout.
    void get(void * data, size_t offset, size_t size) const;

  private:
    struct Segment {
        Side    side;
        int64_t offset; // bytes in the part
        int64_t size;
    };

    // Where the whole tensor's byte at offset is, and how many bytes follow it there; at most size.
    Segment segment(int64_t offset, int64_t size) const;

    bool prime_is_copy() const;
    void write(Side side, const char * data, int64_t offset, int64_t size);
    void write_hot(const char * data, int64_t offset, int64_t size);
    void flush(Side side);

    uint64_t                  id_;
    SliceSpec                 slice_;
    int64_t                   row_bytes_;
    std::array<Part, n_sides> parts_;
    std::vector<int32_t>      slot_of_;

    std::unique_ptr<ExpertUses> uses_; // NULL: not counted

    // bytes collected for a part before they are handed over in one go
    struct Pending {
        std::vector<char>          bytes;
        int64_t                    offset = 0; // of bytes[0] in the part
        int64_t                    filled = 0;
        std::map<int64_t, int64_t> ranges; // of a part that is handed over whole: [begin, end) of what is there
    };

    std::array<Pending, n_sides> pending_;
};

} // namespace oallama
