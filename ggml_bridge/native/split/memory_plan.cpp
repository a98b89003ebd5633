#include "memory_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "pinned.h"

namespace oallama {

namespace {

constexpr int64_t pinned_piece = int64_t{1} << 30; // bytes taken at once: one allocation of many GiB may fail
constexpr int64_t shrink_steps = 64;               // parts of the planned GG that are tried when the whole does not fit

using Weights = std::vector<std::unique_ptr<SplitWeight>>;
using Problem = std::function<void(const std::string &)>;

ggml_backend_buffer_type_t find_layout(const std::string & name) {
    ggml_backend_dev_t cpu             = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto               get_extra_bufts = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    if (get_extra_bufts != nullptr) {
        for (ggml_backend_buffer_type_t * buft = get_extra_bufts(cpu); buft != nullptr && *buft != nullptr; buft++) {
            if (name == ggml_backend_buft_name(*buft)) {
                return *buft;
            }
        }
    }
    return nullptr;
}

// ffn_up_exps, ffn_up_chexps and their like.
bool is_expert_weight(const SliceSpec & slice) {
    return slice.name.find("exps") != std::string::npos;
}

// Whether the device has a mul-mat by this part of a weight; buffer: an empty one of the buffer type to ask about, or
// NULL for the device's own. Three dimensions are experts (MUL_MAT_ID), or the heads of MLA (MUL_MAT over all of them).
bool can_multiply(ggml_backend_dev_t device, const SplitWeight & weight, Side side, ggml_backend_buffer_t buffer) {
    const std::array<int64_t, 3> ne      = weight.shape(side);
    const bool                   experts = weight.slice().e > 1 && is_expert_weight(weight.slice());

    ContextPtr    ctx = new_context(8);
    ggml_tensor * w   = ggml_new_tensor_3d(ctx.get(), weight.slice().type, ne[0], ne[1], ne[2]);
    ggml_tensor * x   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, ne[0], 1, experts ? 1 : ne[2]);
    w->buffer         = buffer;
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    return ggml_backend_dev_supports_op(device, experts ? ggml_mul_mat_id(ctx.get(), w, x, ids)
                                                        : ggml_mul_mat(ctx.get(), w, x));
}

// CG and GG of weights the device cannot multiply go back to the host.
void refuse_unsupported(const Weights & weights, ggml_backend_dev_t device, const Problem & problem) {
    for (const auto & weight : weights) {
        const SliceSpec & slice = weight->slice();
        if (slice.gg == 0 && slice.cg == 0 && slice.hot.empty()) {
            continue;
        }
        const Side side = slice.cg > 0 && slice.gg == 0 ? side_stream : side_device;
        if (device == nullptr || !can_multiply(device, *weight, side, nullptr)) {
            problem(std::string(device == nullptr ? "no device" : ggml_backend_dev_name(device)) +
                    " cannot multiply by " + weight->slice().name + " (" + ggml_type_name(weight->slice().type) +
                    "): it stays on the host");
            weight->set_hot({});
            weight->move_cuts(0, 0);
        }
    }
}

// The tensors of one side that share a buffer type, in buffers of that type. False: no memory, or of another type.
bool allocate(const std::vector<SplitWeight *> & weights, Side side, ggml_backend_buffer_type_t buft,
              WeightMemory & memory) {
    ContextPtr ctx = new_context(static_cast<int64_t>(weights.size()));
    for (SplitWeight * weight : weights) {
        const std::array<int64_t, 3> ne   = weight->shape(side);
        Part &                       part = weight->part(side);
        const ggml_type              type = weight->slice().type;
        part.tensor                       = ne[2] > 1 ? ggml_new_tensor_3d(ctx.get(), type, ne[0], ne[1], ne[2])
                                                      : ggml_new_tensor_2d(ctx.get(), type, ne[0], ne[1]);
        ggml_set_name(part.tensor, weight->slice().name.c_str());
    }
    BufferPtr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    if (!buffer || buffer->buft != buft) {
        for (SplitWeight * weight : weights) {
            weight->part(side).tensor = nullptr;
        }
        return false;
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    (side == side_device ? memory.device_bytes : memory.host_bytes) +=
        static_cast<int64_t>(ggml_backend_buffer_get_size(buffer.get()));
    memory.buffers.push_back(std::move(buffer));
    memory.contexts.push_back(std::move(ctx));
    return true;
}

std::vector<SplitWeight *> with_part(const Weights & weights, Side side) {
    std::vector<SplitWeight *> chosen;
    for (const auto & weight : weights) {
        if (weight->part(side).count > 0) {
            chosen.push_back(weight.get());
        }
    }
    return chosen;
}

// What was planned for the device: elements of GG, and hot experts.
struct Planned {
    int64_t              gg;
    std::vector<int32_t> hot;
};

// Makes every GG smaller alike, to part / shrink_steps of what was planned, and every set of hot experts. GG gives up
// whole steps from its front, the same for all types, so that gate, up and down still end at one cut.
int64_t shrink(const std::map<SplitWeight *, Planned> & planned, int64_t part) {
    int64_t step = 1;
    for (const auto & [weight, whole] : planned) {
        step = std::lcm(step, cut_step(weight->slice()));
    }
    int64_t bytes = 0;
    for (const auto & [weight, whole] : planned) {
        const int64_t lost =
            (whole.gg * (shrink_steps - part) + shrink_steps * step - 1) / (shrink_steps * step) * step;
        weight->set_hot(
            {whole.hot.begin(), whole.hot.begin() + static_cast<int64_t>(whole.hot.size()) * part / shrink_steps});
        weight->move_cuts(weight->slice().cg, part == 0 ? 0 : std::max<int64_t>(0, whole.gg - lost));
        bytes += weight->part_bytes(side_device);
    }
    return bytes;
}

// Takes device memory for every GG; when there is too little, for as much of it as fits.
void place_on_device(const Weights & weights, ggml_backend_dev_t device, WeightMemory & memory,
                     const Problem & problem) {
    std::map<SplitWeight *, Planned> planned;
    int64_t                          wanted_bytes = 0;
    for (SplitWeight * weight : with_part(weights, side_device)) {
        planned[weight] = {weight->slice().gg, weight->slice().hot};
        wanted_bytes += weight->part_bytes(side_device);
    }
    if (planned.empty()) {
        return;
    }
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device);
    if (allocate(with_part(weights, side_device), side_device, buft, memory)) {
        return;
    }
    int64_t fits = 0; // parts that the device has room for
    for (int64_t fails = shrink_steps; fails - fits > 1;) {
        const int64_t part = (fits + fails) / 2;
        shrink(planned, part);
        const std::vector<SplitWeight *> left = with_part(weights, side_device);
        WeightMemory                     tried;
        (left.empty() || allocate(left, side_device, buft, tried) ? fits : fails) = part;
    }
    for (; fits >= 0; fits--) { // somebody else may have taken the room since
        const int64_t                    bytes = shrink(planned, fits);
        const std::vector<SplitWeight *> left  = with_part(weights, side_device);
        if (left.empty() || allocate(left, side_device, buft, memory)) {
            problem(std::string(ggml_backend_dev_name(device)) + " has no room for " + std::to_string(wanted_bytes) +
                    " bytes of weights: " + std::to_string(bytes) + " bytes are there, the rest is on the host");
            return;
        }
    }
}

// The layout the plan names, where the CPU has it and can multiply by it; else plain memory.
ggml_backend_buffer_type_t host_buft(SplitWeight & weight, const Problem & problem) {
    const std::string & layout = weight.slice().layout;
    if (layout == plain_layout || layout == "-") {
        return ggml_backend_cpu_buffer_type();
    }
    ggml_backend_buffer_type_t buft = find_layout(layout);
    if (buft != nullptr) {
        const BufferPtr empty(ggml_backend_buft_alloc_buffer(buft, 0));
        if (empty &&
            can_multiply(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), weight, side_host, empty.get())) {
            return buft;
        }
    }
    problem("the CPU cannot keep " + weight.slice().name + " in the layout " + layout + ": plain memory is used");
    return ggml_backend_cpu_buffer_type();
}

int64_t bytes_of(const std::vector<SplitWeight *> & weights, Side side) {
    int64_t bytes = 0;
    for (const SplitWeight * weight : weights) {
        bytes += weight->part_bytes(side);
    }
    return bytes;
}

// Runs of weights of at most pinned_piece bytes each, or of one weight.
std::vector<std::vector<SplitWeight *>> pieces_of(const std::vector<SplitWeight *> & weights, Side side) {
    std::vector<std::vector<SplitWeight *>> pieces;
    int64_t                                 bytes = 0;
    for (SplitWeight * weight : weights) {
        bytes += weight->part_bytes(side);
        if (pieces.empty() || bytes > pinned_piece) {
            pieces.emplace_back();
            bytes = weight->part_bytes(side);
        }
        pieces.back().push_back(weight);
    }
    return pieces;
}

// In pinned memory, as far as the device has such; the rest in plain memory.
void place_streamable(const std::vector<SplitWeight *> & chosen, Side side, ggml_backend_dev_t device,
                      WeightMemory & memory, const Problem & problem) {
    ggml_backend_buffer_type_t pinned = chosen.empty() ? nullptr : ggml_backend_dev_host_buffer_type(device);
    std::vector<SplitWeight *> plain;
    for (const std::vector<SplitWeight *> & piece : pieces_of(chosen, side)) {
        if (pinned == nullptr || !allocate(piece, side, pinned, memory)) {
            plain.insert(plain.end(), piece.begin(), piece.end());
        }
    }
    if (pinned != nullptr && !plain.empty()) {
        problem("no pinned host memory is left for " + std::to_string(bytes_of(plain, side)) + " of " +
                std::to_string(bytes_of(chosen, side)) +
                " bytes of weights that are streamed: copies from plain "
                "memory hold up the CPU");
    }
    if (!plain.empty() && !allocate(plain, side, ggml_backend_cpu_buffer_type(), memory)) {
        throw Error(OALLAMA_NO_MEMORY, "host memory has no room for the weights that are streamed");
    }
}

// Weights whose CC the plan has the device compute for some tokens of a batch (CG').
std::set<SplitWeight *> wanted_primes(const Weights & weights, ggml_backend_dev_t device, const PlanSpec & plan) {
    std::set<SplitWeight *> wanted;
    for (SplitWeight * weight : with_part(weights, side_host)) {
        const bool named   = plan.by_name.count(weight->slice().name) > 0;
        const bool planned = !plan.tokens.empty() && named && weight->slice().takes_n_g;
        if (planned && device != nullptr && can_multiply(device, *weight, side_prime, nullptr)) {
            wanted.insert(weight);
        }
    }
    return wanted;
}

// CC in its layout; where the device is to be sent it too, plain CC in memory that can be streamed, and a plain copy of
// any other if the plan has room for that.
void place_on_host(const Weights & weights, ggml_backend_dev_t device, const PlanSpec & plan, WeightMemory & memory,
                   const Problem & problem) {
    const std::set<SplitWeight *> primes = wanted_primes(weights, device, plan);

    std::map<ggml_backend_buffer_type_t, std::vector<SplitWeight *>> by_buft;
    std::vector<SplitWeight *>                                       shared;
    std::vector<SplitWeight *>                                       copied;
    for (SplitWeight * weight : with_part(weights, side_host)) {
        ggml_backend_buffer_type_t buft = host_buft(*weight, problem);
        weight->part(side_host).pieces  = buft == ggml_backend_cpu_buffer_type();
        weight->set_layout(ggml_backend_buft_name(buft));
        if (primes.count(weight) > 0 && weight->part(side_host).pieces) {
            shared.push_back(weight);
            continue;
        }
        by_buft[buft].push_back(weight);
        if (primes.count(weight) > 0 && plan.twice) {
            copied.push_back(weight);
        }
    }
    place_streamable(shared, side_host, device, memory, problem);
    for (SplitWeight * weight : shared) {
        weight->part(side_prime).tensor = weight->part(side_host).tensor;
    }
    place_streamable(copied, side_prime, device, memory, problem);
    for (const auto & [buft, chosen] : by_buft) {
        if (!allocate(chosen, side_host, buft, memory)) {
            throw Error(OALLAMA_NO_MEMORY, "host memory has no room for " +
                                               std::to_string(bytes_of(chosen, side_host)) + " bytes of weights");
        }
    }
}

} // namespace

WeightMemory place_weights(const Weights & weights, ggml_backend_dev_t device, const PlanSpec & plan,
                           const Problem & problem) {
    WeightMemory memory;
    refuse_unsupported(weights, device, problem);
    {
        // held only while weights are placed, so that they do not take this room
        const BufferPtr left(plan.staging > 0 && device != nullptr
                                 ? ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device),
                                                                  static_cast<size_t>(plan.staging))
                                 : nullptr);
        place_on_device(weights, device, memory, problem);
    }
    place_streamable(with_part(weights, side_stream), side_stream, device, memory, problem);
    place_on_host(weights, device, plan, memory, problem);
    return memory;
}

} // namespace oallama
