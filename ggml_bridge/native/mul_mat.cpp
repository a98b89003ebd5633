#include "mul_mat.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace bridge {

namespace {

constexpr int64_t max_copies = 2048;
constexpr int64_t max_nodes  = 2048;

// A graph must take so many times its launch, or the launch would be most of what is measured.
constexpr double min_graph_per_launch = 20.0;

// Distinct experts of n_tokens tokens that each choose u of e at random, on average.
double expected_experts(int64_t e, int64_t u, int64_t n_tokens) {
    const double left_out = 1.0 - static_cast<double>(u) / static_cast<double>(e);
    return static_cast<double>(e) * (1.0 - std::pow(left_out, static_cast<double>(n_tokens)));
}

// Deals distinct experts. The first token of each mul-mat is dealt from a deck that is used up before it is shuffled
// again, so that in decode an expert's weights stay unread as long as possible; the others choose at random.
class Router {
  public:
    Router(int64_t e, int64_t u) : u_(u), deck_(static_cast<size_t>(e)), any_(static_cast<size_t>(e)) {
        std::iota(deck_.begin(), deck_.end(), 0);
        std::iota(any_.begin(), any_.end(), 0);
        shuffle(deck_, static_cast<int64_t>(deck_.size()));
    }

    std::vector<int32_t> route(int64_t n_tokens) {
        std::vector<int32_t> ids;
        if (dealt_ + u_ > static_cast<int64_t>(deck_.size())) {
            shuffle(deck_, static_cast<int64_t>(deck_.size()));
            dealt_ = 0;
        }
        ids.insert(ids.end(), deck_.begin() + dealt_, deck_.begin() + dealt_ + u_);
        dealt_ += u_;
        for (int64_t token = 1; token < n_tokens; token++) {
            shuffle(any_, u_);
            ids.insert(ids.end(), any_.begin(), any_.begin() + u_);
        }
        return ids;
    }

  private:
    // Puts a random choice into the first `count` places.
    void shuffle(std::vector<int32_t> & cards, int64_t count) {
        const int64_t n = static_cast<int64_t>(cards.size());
        for (int64_t i = 0; i < count; i++) {
            std::swap(cards[static_cast<size_t>(i)], cards[static_cast<size_t>(i + random_.below(n - i))]);
        }
    }

    int64_t              u_;
    int64_t              dealt_ = 0;
    Random               random_{2};
    std::vector<int32_t> deck_;
    std::vector<int32_t> any_;
};

MulMatShape shape_of(const gb_mul_mat_params & params) {
    // one expert to choose from is no choice
    const int64_t     n_expert_used = params.e > 1 ? params.n_expert_used : 0;
    const MulMatShape shape         = {static_cast<ggml_type>(params.type),
                                       params.k,
                                       params.n,
                                       params.e,
                                       n_expert_used,
                                       params.n_tokens,
                                       params.input_f32 != 0};
    check_shape(shape);
    return shape;
}

std::string describe(const MulMatShape & shape) {
    return std::string(shape.routed() ? "MUL_MAT_ID" : "MUL_MAT") + " by " + ggml_type_name(shape.type) + " [" +
           std::to_string(shape.k) + ", " + std::to_string(shape.n) + ", " + std::to_string(shape.e) + "]" +
           (shape.input_f32 ? " of an input in F32" : "");
}

ggml_tensor * new_src1(ggml_context * ctx, const MulMatShape & shape) {
    return shape.routed() ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape.k, shape.n_expert_used, shape.n_tokens)
                          : ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape.k, shape.n_tokens, shape.e);
}

// NULL where no expert is chosen.
ggml_tensor * new_ids(ggml_context * ctx, const MulMatShape & shape) {
    return shape.routed() ? ggml_new_tensor_2d(ctx, GGML_TYPE_I32, shape.n_expert_used, shape.n_tokens) : nullptr;
}

ggml_tensor * multiply(ggml_context * ctx, ggml_tensor * weight, ggml_tensor * src1, ggml_tensor * ids,
                       bool input_f32) {
    ggml_tensor * out = ids != nullptr ? ggml_mul_mat_id(ctx, weight, src1, ids) : ggml_mul_mat(ctx, weight, src1);
    if (input_f32) {
        ggml_prec_set_src(out, GGML_PREC_F32, 1);
    }
    return out;
}

} // namespace

void check_shape(const MulMatShape & shape) {
    require(shape.type >= 0 && shape.type < GGML_TYPE_COUNT && ggml_type_size(shape.type) > 0,
            "there is no ggml type of this number");
    require(shape.k > 0 && shape.n > 0 && shape.e > 0 && shape.n_tokens > 0 && shape.n_expert_used >= 0,
            "K, N, E and the number of tokens must be positive");
    require(shape.n_expert_used <= shape.e, "a token cannot use more experts than there are");
    require(shape.k % ggml_blck_size(shape.type) == 0,
            "K must be a multiple of the type's block of " + std::to_string(ggml_blck_size(shape.type)) + " elements");
    // ggml's own sizes are products of these
    mul(mul(mul(shape.k, shape.n), shape.e), static_cast<int64_t>(ggml_type_size(shape.type)));
    mul(mul(mul(std::max(shape.k, shape.n), shape.n_tokens), shape.e), static_cast<int64_t>(sizeof(float)));
    if (!has_cpu_kernel(shape.type)) {
        throw Error(OALLAMA_UNSUPPORTED,
                    std::string("ggml cannot multiply by a weight of type ") + ggml_type_name(shape.type));
    }
}

ggml_tensor * build_mul_mat(ggml_context * ctx, ggml_tensor * weight, const MulMatShape & shape) {
    return multiply(ctx, weight, new_src1(ctx, shape), new_ids(ctx, shape), shape.input_f32);
}

//
// MulMat
//

MulMat::MulMat(const gb_mul_mat_params & params)
    : shape_(shape_of(params)), device_(find_device(params.device)), working_set_bytes_(params.working_set_bytes),
      session_(device_, params.n_threads) {
    require(working_set_bytes_ >= 0, "the working set cannot be negative");
    launch_seconds_ = launch_seconds(*new_launch(device_, params.n_threads));

    make_weights(find_layout(device_, params.layout));
    make_inputs();

    const int64_t n_copies = static_cast<int64_t>(weights_.size());
    const auto    to_touch = static_cast<int64_t>(std::ceil(static_cast<double>(working_set_bytes_) / touched_bytes_));
    int64_t       n_nodes  = std::clamp(to_touch, n_copies, max_nodes);
    make_graph(n_nodes);

    session_.compute(); // pays for page faults, and for what a device compiles or caches
    const double seconds = session_.compute();
    const double wanted  = min_graph_per_launch * launch_seconds_;
    if (seconds < wanted && n_nodes < max_nodes) {
        const double factor = wanted / std::max(seconds, 1e-9);
        make_graph(static_cast<int64_t>(
            std::min(std::ceil(static_cast<double>(n_nodes) * factor), static_cast<double>(max_nodes))));
        session_.compute();
    }
}

void MulMat::make_weights(ggml_backend_buffer_type_t buft) {
    const int64_t row_bytes    = static_cast<int64_t>(ggml_row_size(shape_.type, shape_.k));
    const int64_t n_rows       = mul(shape_.n, shape_.e);
    const int64_t expert_bytes = mul(row_bytes, shape_.n);

    copy_bytes_    = mul(row_bytes, n_rows);
    touched_bytes_ = shape_.routed() ? static_cast<double>(expert_bytes) *
                                           expected_experts(shape_.e, shape_.n_expert_used, shape_.n_tokens)
                                     : static_cast<double>(copy_bytes_);

    const int64_t n_copies = std::clamp<int64_t>(ceil_div(working_set_bytes_, copy_bytes_), 1, max_copies);
    weight_ctx_            = new_context(n_copies);
    for (int64_t i = 0; i < n_copies; i++) {
        weights_.push_back(ggml_new_tensor_3d(weight_ctx_.get(), shape_.type, shape_.k, shape_.n, shape_.e));
    }
    weight_buffer_ = alloc_tensors(weight_ctx_.get(), buft);

    ContextPtr    probe_ctx = new_context(3);
    ggml_tensor * probe     = build_mul_mat(probe_ctx.get(), weights_[0], shape_);
    if (!ggml_backend_dev_supports_op(device_, probe)) {
        throw Error(OALLAMA_UNSUPPORTED, std::string("device ") + ggml_backend_dev_name(device_) + " cannot compute " +
                                             describe(shape_) + " with the weight in " + ggml_backend_buft_name(buft));
    }

    tile_ = make_tile(shape_.type, shape_.k, n_rows);
    std::vector<uint8_t> weight(static_cast<size_t>(copy_bytes_));
    for (size_t filled = 0; filled < weight.size(); filled += tile_.blocks.size()) {
        std::memcpy(weight.data() + filled, tile_.blocks.data(), std::min(tile_.blocks.size(), weight.size() - filled));
    }

    // other layouts are made by set; a device copies by itself what it has received once
    const bool in_host_memory = is_cpu(device_);
    for (ggml_tensor * copy : weights_) {
        if (in_host_memory || copy == weights_[0]) {
            ggml_backend_tensor_set(copy, weight.data(), 0, weight.size());
        } else {
            ggml_backend_tensor_copy(weights_[0], copy);
        }
    }
    // only now: RPC would hash and offer to cache what goes into a weight buffer
    ggml_backend_buffer_set_usage(weight_buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
}

void MulMat::make_inputs() {
    input_ctx_    = new_context(1);
    src1_         = new_src1(input_ctx_.get(), shape_);
    input_buffer_ = alloc_tensors(input_ctx_.get(), ggml_backend_dev_buffer_type(device_));
    set_normal(src1_, /*seed=*/3);
}

void MulMat::make_graph(int64_t n_nodes) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device_);

    std::vector<ggml_tensor *> ids(static_cast<size_t>(n_nodes));
    if (shape_.routed()) {
        ids_ctx_ = new_context(n_nodes);
        for (ggml_tensor *& each : ids) {
            each = new_ids(ids_ctx_.get(), shape_);
        }
        ids_buffer_ = alloc_tensors(ids_ctx_.get(), buft);
        Router router(shape_.e, shape_.n_expert_used);
        for (ggml_tensor * each : ids) {
            set_values(each, router.route(shape_.n_tokens));
        }
    }

    graph_ctx_          = new_context(n_nodes, n_nodes);
    ggml_cgraph * graph = new_graph(graph_ctx_.get(), n_nodes);
    nodes_.clear();
    for (int64_t i = 0; i < n_nodes; i++) {
        ggml_tensor * weight = weights_[static_cast<size_t>(i) % weights_.size()];
        ggml_tensor * id     = ids[static_cast<size_t>(i)];
        ggml_tensor * node   = multiply(graph_ctx_.get(), weight, src1_, id, shape_.input_f32);
        if (i == 0) {
            dst_buffer_ = alloc_buffer(buft, static_cast<int64_t>(ggml_backend_buft_get_alloc_size(buft, node)));
        }
        if (ggml_backend_tensor_alloc(dst_buffer_.get(), node, ggml_backend_buffer_get_base(dst_buffer_.get())) !=
            GGML_STATUS_SUCCESS) {
            fail(OALLAMA_FAILED, "ggml could not place the result of a mul-mat");
        }
        ggml_build_forward_expand(graph, node);
        nodes_.push_back(node);
    }
    session_.set_graph(graph);
}

double MulMat::run_once() {
    return session_.compute_each(static_cast<int64_t>(nodes_.size()), launch_seconds_);
}

gb_mul_mat_info MulMat::info() const {
    return {static_cast<int64_t>(weights_.size()), static_cast<int64_t>(nodes_.size()), copy_bytes_, tile_.rows,
            launch_seconds_};
}

void MulMat::read(gb_mul_mat_part part, void * data, int64_t n_bytes) {
    const auto read_tensor = [&](const ggml_tensor * tensor) {
        require(tensor != nullptr && n_bytes == static_cast<int64_t>(ggml_nbytes(tensor)),
                "the array has not the size of the tensor");
        ggml_backend_tensor_get(tensor, data, 0, static_cast<size_t>(n_bytes));
    };
    switch (part) {
        case GB_MUL_MAT_TILE:
            require(n_bytes == static_cast<int64_t>(tile_.values.size() * sizeof(float)),
                    "the array has not the size of the tile");
            std::memcpy(data, tile_.values.data(), static_cast<size_t>(n_bytes));
            return;
        case GB_MUL_MAT_SRC1: read_tensor(src1_); return;
        case GB_MUL_MAT_IDS: read_tensor(nodes_.back()->src[2]); return;
        case GB_MUL_MAT_DST: read_tensor(nodes_.back()); return;
    }
    throw Error(OALLAMA_INVALID, "a mul-mat has no such part");
}

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_mul_mat_new(const gb_mul_mat_params * params, gb_mul_mat_info * info, gb_timer ** timer) {
    return guarded([&] {
        auto made = std::make_unique<MulMat>(*params);
        *info     = made->info();
        *timer    = made.release();
    });
}

int gb_mul_mat_read(gb_timer * timer, gb_mul_mat_part part, void * data, int64_t n_bytes) {
    return guarded([&] { timer_of<MulMat>(timer).read(part, data, n_bytes); });
}
