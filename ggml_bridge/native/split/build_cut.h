// The builder of values of which each side has a part: cut along ne[0], or partial.

#pragma once

#include "build_resident.h"

namespace oallama {

class CutBuilder {
  public:
    CutBuilder(Build & build, ResidentBuilder & resident) : build_(build), resident_(resident) {}

    // A node of which each side computes its part.
    void emit_sides(int i);

    void emit_view(int i); // a half of a fused gate_up's elements, or one rank of experts' partial results

  private:
    ggml_tensor * mul_mat(int i, Side side);

    // x as the host's kernel takes it. Kernels of repacked layouts take columns without gaps between rows, and F32
    // only; the others take F32 or the weight's own type.
    ggml_tensor * for_kernel_of(const SliceSpec & slice, ggml_tensor * x, bool x_is_cut);

    // An element-wise operation on an axis_0 value, or experts' partial results times the routing weights, or two of
    // them added.
    ggml_tensor * elementwise(int i, Side side);

    // The host's part of a sum over experts: its rows of all ranks, weighted and added up.
    ggml_tensor * weighted_sum();

    // A weight's CG or CG' in a slot of the ring, which its data pointer is set to when its turn has come.
    ggml_tensor * slot_of(int i, const SplitWeight & weight, Side side);

    // Whether only the experts that are used are to be copied: where all that the segment streams is chosen from by the
    // same ids, and not all of it, as in llama.cpp's warm-up.
    void note_choice(int i, int64_t n_expert);

    // Joins both sides' parts of a value. The device has all of a partial value's last n_g tokens; the host has a part
    // of the first tokens too, unless there is no CC.
    void join(int i);

    // On the device; either may be missing.
    ggml_tensor * add(ggml_tensor * a, ggml_tensor * b, std::vector<ggml_tensor *> & nodes);

    void download(int i, ggml_tensor * tensor, Download::Join how, int64_t begin, int64_t count, Tokens tokens);

    Build &           build_;
    ResidentBuilder & resident_;
    int               weighting_ = -1; // of the sum over experts at hand
    int               sum_       = -1; // its last node; all nodes between are its steps
};

} // namespace oallama
