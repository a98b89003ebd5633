// Mul-mats over a set of weights that is larger than the caches.

#pragma once

#include "session.h"

namespace bridge {

// A weight-bearing mul-mat: weight [K, N, E] of a type, for n_tokens tokens; n_expert_used > 0: MUL_MAT_ID.
struct MulMatShape {
    ggml_type type;
    int64_t   k;
    int64_t   n;
    int64_t   e;
    int64_t   n_expert_used;
    int64_t   n_tokens;
    bool      input_f32 = false; // the device must read the input in F32

    bool routed() const { return n_expert_used > 0; }
};

// Throws OALLAMA_INVALID unless ggml can build this mul-mat, OALLAMA_UNSUPPORTED if the CPU has no kernel for the type.
void check_shape(const MulMatShape & shape);

// Adds the mul-mat with fresh inputs to the context: at most 3 tensors.
ggml_tensor * build_mul_mat(ggml_context * ctx, ggml_tensor * weight, const MulMatShape & shape);

class MulMat : public gb_timer {
  public:
    explicit MulMat(const gb_mul_mat_params & params);

    double          run_once() override;
    gb_mul_mat_info info() const;
    void            read(gb_mul_mat_part part, void * data, int64_t n_bytes);

    // One pass over the set of weights, in the halves of Session::compute, and the weight bytes that it reads.
    void   begin_pass() { session_.begin(); }
    void   finish_passes() { session_.finish(); }
    double pass_bytes() const { return touched_bytes_ * static_cast<double>(nodes_.size()); }

  private:
    void make_weights(ggml_backend_buffer_type_t buft);
    void make_inputs();
    void make_graph(int64_t n_nodes);

    MulMatShape                shape_;
    ggml_backend_dev_t         device_;
    int64_t                    working_set_bytes_;
    int64_t                    copy_bytes_;
    double                     touched_bytes_; // weight bytes that one mul-mat reads, on average
    Tile                       tile_;          // the rows that the weight repeats
    double                     launch_seconds_;
    ContextPtr                 weight_ctx_;
    ContextPtr                 input_ctx_;
    ContextPtr                 ids_ctx_;
    ContextPtr                 graph_ctx_;
    BufferPtr                  weight_buffer_;
    BufferPtr                  input_buffer_;
    BufferPtr                  ids_buffer_;
    BufferPtr                  dst_buffer_; // one for all results: a mul-mat must not run beside its neighbour
    std::vector<ggml_tensor *> weights_;
    ggml_tensor *              src1_ = nullptr;
    std::vector<ggml_tensor *> nodes_;
    Session                    session_; // declared last: its scheduler goes before the tensors
};

} // namespace bridge
