// A plan as text says it: which tensors are cut, along which axis, into how much CC, CG and GG.

#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "error.h"

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
    bool                 takes_n_g = true;  // CC is for the device too, for n_g tokens
    bool                 resident  = false; // inputs and results are in the device's memory, not the host's
    int64_t              chunk     = 0;     // tokens that are computed at the same time at most; 0: all
    std::vector<int32_t> hot;               // experts that the device has whole as well, in the order of its slots

    int64_t extent() const { return axis == Axis::cols ? k : axis == Axis::rows ? n : n / 2; }
};

constexpr int64_t max_slots = 64;

// One entry of the table of n_g: of so many tokens in a batch, the device computes CC for the last n_g (CG').
struct TokenSplit {
    int64_t n_tokens;
    int64_t n_g;
};

// How CG is streamed.
struct StreamSpec {
    int64_t n_slots          = 2;    // of the ring that it is copied to
    int64_t ring             = 0;    // bytes of the ring, more where one block needs more; 0: n_slots of the largest
    bool    ahead            = true; // copies of the next blocks begin while a block is computed
    int64_t piece            = 0;    // bytes that are asked for at once at most; 0: any number
    int64_t link_bytes_per_s = 0;    // 0: not known, no limit to what is asked for ahead
};

struct PlanSpec {
    std::string             model;  // fingerprint, kept for the reader
    std::string             device; // empty: no CG and GG anywhere
    StreamSpec              stream;
    int64_t                 staging   = 0;         // bytes of the device that GG leaves for activations and the ring
    bool                    twice     = false;     // CC in a layout the device cannot read is kept in the plain one too
    int64_t                 sum_bytes = INT64_MAX; // of experts' results: added up if that many need not come back
    std::vector<TokenSplit> tokens;                // ascending; empty: n_g is 0
    std::vector<SliceSpec>  slices;
    // name -> position in slices
    std::unordered_map<std::string, size_t> by_name;
};

// Elements along the axis that a cut must be a multiple of: whole quantisation blocks of a row, and whole groups of
// rows of every host layout (CPU_REPACK interleaves up to 16, AMX takes tiles of 32).
int64_t granularity(ggml_type type, Axis axis);

// Elements along the axis in which cuts are chosen: between tiles of rows of CUDA's mul-mats by quantised weights where
// the weight is quantised, long and made of them, else the granularity. As cut_step of oallama/model/cut.py.
int64_t cut_step(const SliceSpec & slice);

// n_g for a batch: 0 below the first entry, linear between two (rounded, a half up), the same share above the last
// (ScheInfer, Eq. 15); less by up to three at lengths that have no entry, such that the host's tokens come in groups.
int64_t n_g_at(const std::vector<TokenSplit> & tokens, int64_t n_tokens);

// Throws OALLAMA_INVALID naming the line.
PlanSpec parse_plan(const std::string & text);

} // namespace oallama
