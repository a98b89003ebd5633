// Everything of a Llama block that is not a weight mul-mat: norms, rope, KV write, attention, activation, residuals.

#include <algorithm>
#include <cmath>

#include "session.h"

namespace bridge {

namespace {

constexpr int64_t max_layers      = 64;
constexpr int64_t max_layer_nodes = 40; // views included
constexpr int64_t kv_padding      = 256;

// llama.cpp's attention sees the cache in steps of so many positions; what lies beyond n_kv is masked.
int64_t padded(int64_t n_kv) {
    return (n_kv + kv_padding - 1) / kv_padding * kv_padding;
}

void check_cache_type(int32_t type, int64_t width) {
    require(type >= 0 && type < GGML_TYPE_COUNT && ggml_type_size(static_cast<ggml_type>(type)) > 0,
            "the KV cache has no such type");
    require(width % ggml_blck_size(static_cast<ggml_type>(type)) == 0,
            "the width of a KV head must be a multiple of the block size of its type");
}

void check_params(const gb_layer_rest_params & p) {
    require(p.n_tokens > 0 && p.n_embd > 0 && p.n_head > 0 && p.n_head_kv > 0 && p.head_dim_k > 0 && p.head_dim_v > 0,
            "tokens, widths and heads must be positive");
    require(p.n_ff >= 0 && p.n_layers > 0 && p.n_layers <= max_layers, "the number of layers must be 1 to 64");
    require(p.n_head % p.n_head_kv == 0, "the number of heads must be a multiple of the number of KV heads");
    require(p.head_dim_k % 2 == 0, "rope needs an even head width");
    require(p.n_kv >= p.n_tokens, "the KV cache must hold the tokens of the batch");
    constexpr int64_t limit = int64_t{1} << 40;
    require(p.n_kv < limit &&
                mul(mul(padded(p.n_kv), std::max(p.n_tokens, p.head_dim_k + p.head_dim_v)), p.n_head) < limit &&
                mul(std::max({p.n_embd, p.n_ff, mul(p.n_head, p.head_dim_k)}), p.n_tokens) < limit,
            "the attention is larger than a tebielement");
    check_cache_type(p.type_k, p.head_dim_k);
    check_cache_type(p.type_v, p.head_dim_v);
    require(p.flash_attn != 0 || !ggml_is_quantized(static_cast<ggml_type>(p.type_v)),
            "a quantised V cache needs flash attention");
}

// The results of the block's mul-mats, which are not computed here, and the graph's inputs: one set for all layers.
struct Inputs {
    ggml_tensor * hidden;   // F32 [n_embd, n_tokens]
    ggml_tensor * norm;     // F32 [n_embd]
    ggml_tensor * q;        // F32 [head_dim_k, n_head, n_tokens]
    ggml_tensor * k;        // F32 [head_dim_k, n_head_kv, n_tokens]
    ggml_tensor * v;        // F32 [head_dim_v, n_head_kv, n_tokens]
    ggml_tensor * attn_out; // F32 [n_embd, n_tokens]
    ggml_tensor * gate;     // F32 [n_ff, n_tokens]
    ggml_tensor * up;       // F32 [n_ff, n_tokens]
    ggml_tensor * ffn_out;  // F32 [n_embd, n_tokens]
    ggml_tensor * pos;      // I32 [n_tokens]
    ggml_tensor * k_idxs;   // I64 [n_tokens]: rows of the K cache to write
    ggml_tensor * v_idxs;   // I64 [n_tokens], or of each element of a transposed V cache
    ggml_tensor * mask;     // F16 with flash attention, else F32 [n_cells, n_tokens]
};

struct Cache {
    ggml_tensor * k; // type_k [head_dim_k * n_head_kv, n_cells]
    ggml_tensor * v; // type_v [head_dim_v * n_head_kv, n_cells], transposed without flash attention
};

class LayerRest : public GraphTimer {
  public:
    explicit LayerRest(const gb_layer_rest_params & params)
        : GraphTimer(find_device(params.device), params.n_threads), p_(params), device_(find_device(params.device)) {
        check_params(p_);
        n_cells_        = padded(p_.n_kv);
        launch_seconds_ = launch_seconds(*new_launch(device_, p_.n_threads));
        make_leafs();
        fill_leafs();

        const int64_t n_nodes = p_.n_layers * max_layer_nodes;
        graph_ctx             = new_context(n_nodes, n_nodes);
        graph_                = new_graph(graph_ctx.get(), n_nodes);
        ggml_tensor * hidden  = in_.hidden;
        for (const Cache & cache : caches_) {
            hidden = build_layer(hidden, cache);
        }
        check_supported();
        session.set_graph(graph_);
        session.compute();
    }

    double run_once() override { return session.compute_each(p_.n_layers, launch_seconds_); }

    std::vector<std::string> ops() const {
        std::vector<std::string> names;
        for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
            const ggml_op op = ggml_graph_node(graph_, i)->op;
            if (op != GGML_OP_RESHAPE && op != GGML_OP_VIEW && op != GGML_OP_PERMUTE) {
                names.emplace_back(ggml_op_name(op));
            }
        }
        return names;
    }

  private:
    void make_leafs() {
        leaf_ctx           = new_context(13 + 2 * p_.n_layers);
        ggml_context * ctx = leaf_ctx.get();

        const auto f32_2d = [&](int64_t ne0, int64_t ne1) { return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1); };
        const auto f32_3d = [&](int64_t ne0, int64_t ne1) {
            return ggml_new_tensor_3d(ctx, GGML_TYPE_F32, ne0, ne1, p_.n_tokens);
        };
        in_.hidden   = f32_2d(p_.n_embd, p_.n_tokens);
        in_.norm     = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, p_.n_embd);
        in_.q        = f32_3d(p_.head_dim_k, p_.n_head);
        in_.k        = f32_3d(p_.head_dim_k, p_.n_head_kv);
        in_.v        = f32_3d(p_.head_dim_v, p_.n_head_kv);
        in_.attn_out = f32_2d(p_.n_embd, p_.n_tokens);
        in_.ffn_out  = f32_2d(p_.n_embd, p_.n_tokens);
        if (p_.n_ff > 0) {
            in_.gate = f32_2d(p_.n_ff, p_.n_tokens);
            in_.up   = f32_2d(p_.n_ff, p_.n_tokens);
        }
        in_.pos    = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, p_.n_tokens);
        in_.k_idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, p_.n_tokens);
        in_.v_idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64,
                                        p_.flash_attn != 0 ? p_.n_tokens : p_.n_tokens * p_.n_head_kv * p_.head_dim_v);
        in_.mask   = ggml_new_tensor_2d(ctx, p_.flash_attn != 0 ? GGML_TYPE_F16 : GGML_TYPE_F32, n_cells_, p_.n_tokens);
        for (int64_t i = 0; i < p_.n_layers; i++) {
            caches_.push_back({ggml_new_tensor_2d(ctx, type_k(), p_.head_dim_k * p_.n_head_kv, n_cells_),
                               ggml_new_tensor_2d(ctx, type_v(), p_.head_dim_v * p_.n_head_kv, n_cells_)});
        }
        leaf_buffer = alloc_tensors(ctx, ggml_backend_dev_buffer_type(device_));
        ggml_backend_buffer_clear(leaf_buffer.get(), 0); // the cache: zeros cost as much as any other values
    }

    void fill_leafs() {
        uint64_t seed = 10;
        for (ggml_tensor * tensor :
             {in_.hidden, in_.norm, in_.q, in_.k, in_.v, in_.attn_out, in_.gate, in_.up, in_.ffn_out}) {
            if (tensor != nullptr) {
                set_normal(tensor, seed);
            }
            seed++;
        }

        // the batch is the last n_tokens of the n_kv positions
        const int64_t        first = p_.n_kv - p_.n_tokens;
        std::vector<int32_t> pos;
        std::vector<int64_t> k_idxs;
        std::vector<int64_t> v_idxs;
        for (int64_t token = 0; token < p_.n_tokens; token++) {
            pos.push_back(static_cast<int32_t>(first + token));
            k_idxs.push_back(first + token);
            if (p_.flash_attn != 0) {
                v_idxs.push_back(first + token);
            } else {
                for (int64_t row = 0; row < p_.n_head_kv * p_.head_dim_v; row++) {
                    v_idxs.push_back(row * n_cells_ + first + token);
                }
            }
        }
        set_values(in_.pos, pos);
        set_values(in_.k_idxs, k_idxs);
        set_values(in_.v_idxs, v_idxs);

        // causal: a token sees itself and what is before it
        const auto fill_mask = [&](auto seen, auto hidden) {
            std::vector<decltype(seen)> mask(static_cast<size_t>(n_cells_ * p_.n_tokens), seen);
            for (int64_t token = 0; token < p_.n_tokens; token++) {
                for (int64_t position = first + token + 1; position < n_cells_; position++) {
                    mask[static_cast<size_t>(token * n_cells_ + position)] = hidden;
                }
            }
            set_values(in_.mask, mask);
        };
        if (p_.flash_attn != 0) {
            fill_mask(uint16_t{0}, uint16_t{0xFC00}); // F16 minus infinity
        } else {
            fill_mask(0.0F, -INFINITY);
        }
    }

    ggml_tensor * add(ggml_tensor * node) {
        ggml_build_forward_expand(graph_, node);
        return node;
    }

    ggml_tensor * build_norm(ggml_tensor * x) {
        return ggml_mul(graph_ctx.get(), ggml_rms_norm(graph_ctx.get(), x, 1e-5F), in_.norm);
    }

    ggml_tensor * build_layer(ggml_tensor * hidden, const Cache & cache) {
        ggml_context * ctx = graph_ctx.get();

        add(build_norm(hidden));
        ggml_tensor * q = add(rope(in_.q));
        ggml_tensor * k = add(rope(in_.k));
        build_kv_write(k, cache);
        build_attention(q, cache);

        ggml_tensor * ffn_in = ggml_add(ctx, in_.attn_out, hidden);
        add(build_norm(ffn_in));
        if (p_.n_ff > 0) {
            add(ggml_swiglu_split(ctx, in_.gate, in_.up));
        }
        return add(ggml_add(ctx, in_.ffn_out, ffn_in));
    }

    void build_kv_write(ggml_tensor * k, const Cache & cache) {
        ggml_context * ctx = graph_ctx.get();
        add(ggml_set_rows(ctx, cache.k, ggml_view_2d(ctx, k, p_.head_dim_k * p_.n_head_kv, p_.n_tokens, k->nb[2], 0),
                          in_.k_idxs));
        if (p_.flash_attn != 0) {
            ggml_tensor * v = ggml_view_2d(ctx, in_.v, p_.head_dim_v * p_.n_head_kv, p_.n_tokens, in_.v->nb[2], 0);
            add(ggml_set_rows(ctx, cache.v, v, in_.v_idxs));
        } else {
            // each row of the transposed cache holds one element of all positions, so that each element is a row to set
            const int64_t n_written = p_.head_dim_v * p_.n_head_kv * p_.n_tokens;
            ggml_tensor * to        = ggml_reshape_2d(ctx, cache.v, 1, p_.head_dim_v * p_.n_head_kv * n_cells_);
            add(ggml_set_rows(ctx, to, ggml_reshape_2d(ctx, in_.v, 1, n_written), in_.v_idxs));
        }
    }

    void build_attention(ggml_tensor * q, const Cache & cache) {
        ggml_context * ctx   = graph_ctx.get();
        const float    scale = 1.0F / std::sqrt(static_cast<float>(p_.head_dim_k));
        const auto     row_k = [&](int64_t n) { return ggml_row_size(type_k(), n); };
        const auto     row_v = [&](int64_t n) { return ggml_row_size(type_v(), n); };

        q               = ggml_permute(ctx, q, 0, 2, 1, 3);
        ggml_tensor * k = ggml_view_3d(ctx, cache.k, p_.head_dim_k, p_.n_head_kv, n_cells_, row_k(p_.head_dim_k),
                                       row_k(p_.head_dim_k * p_.n_head_kv), 0);
        k               = ggml_permute(ctx, k, 0, 2, 1, 3);
        if (p_.flash_attn != 0) {
            ggml_tensor * v   = ggml_view_3d(ctx, cache.v, p_.head_dim_v, p_.n_head_kv, n_cells_, row_v(p_.head_dim_v),
                                             row_v(p_.head_dim_v * p_.n_head_kv), 0);
            v                 = ggml_permute(ctx, v, 0, 2, 1, 3);
            ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k, v, in_.mask, scale, 0.0F, 0.0F);
            ggml_prec_set_acc(out, GGML_PREC_F32);
            add(out);
            return;
        }
        ggml_tensor * kq = ggml_mul_mat(ctx, k, q);
        ggml_prec_set_acc(kq, GGML_PREC_F32);
        kq                = ggml_soft_max_ext(ctx, kq, in_.mask, scale, 0.0F);
        ggml_tensor * v   = ggml_view_3d(ctx, cache.v, n_cells_, p_.n_head_kv, p_.head_dim_v,
                                         row_v(n_cells_ * p_.head_dim_v), row_v(n_cells_), 0);
        v                 = ggml_permute(ctx, v, 0, 2, 1, 3);
        ggml_tensor * kqv = ggml_permute(ctx, ggml_mul_mat(ctx, v, kq), 0, 2, 1, 3);
        add(ggml_cont_2d(ctx, kqv, p_.head_dim_v * p_.n_head, p_.n_tokens));
    }

    void check_supported() {
        for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
            const ggml_tensor * node = ggml_graph_node(graph_, i);
            if (!ggml_backend_dev_supports_op(device_, node)) {
                throw Error(OALLAMA_UNSUPPORTED, std::string("device ") + ggml_backend_dev_name(device_) +
                                                     " cannot compute " + ggml_op_name(node->op) + " of this block");
            }
        }
    }

    ggml_tensor * rope(ggml_tensor * x) {
        return ggml_rope_ext(graph_ctx.get(), x, in_.pos, nullptr, static_cast<int>(p_.head_dim_k), /*mode=*/0,
                             /*n_ctx_orig=*/4096, /*freq_base=*/10000.0F, /*freq_scale=*/1.0F, /*ext_factor=*/0.0F,
                             /*attn_factor=*/1.0F, /*beta_fast=*/32.0F, /*beta_slow=*/1.0F);
    }

    ggml_type type_k() const { return static_cast<ggml_type>(p_.type_k); }
    ggml_type type_v() const { return static_cast<ggml_type>(p_.type_v); }

    gb_layer_rest_params p_;
    ggml_backend_dev_t   device_;
    int64_t              n_cells_        = 0; // rows of the KV cache that attention goes through
    double               launch_seconds_ = 0.0;
    Inputs               in_             = {};
    std::vector<Cache>   caches_;
    ggml_cgraph *        graph_ = nullptr;
};

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_layer_rest_new(const gb_layer_rest_params * params, char * ops, int64_t capacity, gb_timer ** timer) {
    return guarded([&] {
        auto made = std::make_unique<LayerRest>(*params);
        copy_text(join_lines(made->ops()), ops, capacity);
        *timer = made.release();
    });
}
