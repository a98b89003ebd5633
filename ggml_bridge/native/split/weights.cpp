#include "weights.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <tuple>

namespace oallama {

namespace {

constexpr int64_t gather_bytes = int64_t{4} << 20; // strided rows go to the device in pieces of this size

int64_t row_size(ggml_type type, int64_t n) {
    return static_cast<int64_t>(ggml_row_size(type, n));
}

uint64_t next_id() {
    static std::atomic<uint64_t> n_weights{0};
    return ++n_weights;
}

} // namespace

SplitWeight::SplitWeight(const ggml_tensor * tensor, SliceSpec slice)
    : id_(next_id()), slice_(std::move(slice)), row_bytes_(row_size(tensor->type, tensor->ne[0])) {
    lay_out();
}

SplitWeight::~SplitWeight() {
    if (table_) {
        table_->close();
    }
}

void SplitWeight::leave_device(int64_t cg) {
    slice_.hot.clear();
    slice_.cg = cg;
    slice_.gg = 0;
    slice_.cc = slice_.extent() - cg;
    lay_out();
}

// All of an expert's elements are on the device where it is hot.
void SplitWeight::lay_out() {
    parts_[side_host]   = Part{0, slice_.cc};
    parts_[side_stream] = Part{slice_.cc, slice_.cg};
    parts_[side_device] = slice_.hot.empty() ? Part{slice_.cc + slice_.cg, slice_.gg} : parts_[side_host];
    parts_[side_prime]  = parts_[side_host];
}

std::array<int64_t, 3> SplitWeight::shape(Side side) const {
    const int64_t count = parts_[side].count;
    if (side == side_device && !slice_.hot.empty()) {
        return {slice_.k, slice_.n, n_slots()};
    }
    switch (slice_.axis) {
        case Axis::cols: return {count, slice_.n, slice_.e};
        case Axis::halves: return {slice_.k, 2 * count, slice_.e};
        case Axis::rows: break;
    }
    return {slice_.k, count, slice_.e};
}

ggml_tensor * SplitWeight::new_tensor(ggml_context * ctx, Side side) const {
    const std::array<int64_t, 3> ne = shape(side);
    return ggml_new_tensor_3d(ctx, slice_.type, ne[0], ne[1], ne[2]);
}

int64_t SplitWeight::part_bytes(Side side) const {
    const std::array<int64_t, 3> ne = shape(side);
    return row_size(slice_.type, ne[0]) * ne[1] * ne[2];
}

const Part & SplitWeight::whole_on_host() const {
    const Part & part = parts_[side_host];
    if (slice_.cg > 0 || slice_.gg > 0 || !part.plain) {
        throw Error(OALLAMA_UNSUPPORTED, slice_.name + " is read by something that is no mul-mat");
    }
    return part;
}

// Calls with each run of bytes that lies in one piece, both in the whole tensor and in a part: where it begins in each,
// and its length, which is the same for all runs of a part.
template <typename F> void SplitWeight::for_runs(Side side, const F & f) const {
    const bool hot      = side == side_device && !slice_.hot.empty();
    const auto bytes_of = [this](int64_t elements) {
        return slice_.axis == Axis::cols ? row_size(slice_.type, elements) : elements * row_bytes_;
    };
    const int64_t whole = part_bytes(side);
    const int64_t step  = hot ? row_bytes_ * slice_.n : bytes_of(slice_.extent());
    const int64_t bytes = hot ? step : bytes_of(parts_[side].count);
    const int64_t begin = hot ? 0 : bytes_of(parts_[side].begin);
    for (int64_t i = 0; i * bytes < whole; i++) {
        const int64_t number = hot ? slice_.hot[static_cast<size_t>(i)] : i; // of the expert, matrix, half or row
        f(number * step + begin, i * bytes, bytes);
    }
}

void SplitWeight::set(const char * data) const {
    for (const Side side : {side_host, side_stream, side_device, side_prime}) {
        if (parts_[side].tensor != nullptr && (side != side_prime || prime_is_copy())) {
            write(side, data);
        }
    }
}

void SplitWeight::get(char * data, size_t offset, size_t size) const {
    if (parts_[side_host].count > 0 && !parts_[side_host].plain) {
        throw Error(OALLAMA_UNSUPPORTED,
                    slice_.name + " is kept in the layout " + slice_.layout + ", which cannot be read back");
    }
    const auto first = static_cast<int64_t>(offset);
    const auto end   = first + static_cast<int64_t>(size);
    for (const Side side : {side_host, side_stream, side_device}) {
        if (side == side_device && !slice_.hot.empty()) {
            continue; // the host has all experts
        }
        for_runs(side, [&](int64_t from, int64_t at, int64_t bytes) {
            const int64_t begin = std::max(from, first);
            const int64_t n     = std::min(from + bytes, end) - begin;
            if (n > 0) {
                ggml_backend_tensor_get(parts_[side].tensor, data + (begin - first),
                                        static_cast<size_t>(at + begin - from), static_cast<size_t>(n));
            }
        });
    }
}

int64_t SplitWeight::host_bytes() const {
    const ggml_tensor * cc    = parts_[side_host].tensor;
    const int64_t       bytes = cc == nullptr || cc->buffer == nullptr
                                    ? part_bytes(side_host)
                                    : static_cast<int64_t>(ggml_backend_buft_get_alloc_size(cc->buffer->buft, cc));
    return bytes + part_bytes(side_stream) + (prime_is_copy() ? part_bytes(side_prime) : 0);
}

// True where CG' has memory of its own.
bool SplitWeight::prime_is_copy() const {
    return has_prime() && parts_[side_prime].tensor != parts_[side_host].tensor;
}

// data: the whole tensor. A repacked part is converted in one go; short runs go to a device together.
void SplitWeight::write(Side side, const char * data) const {
    const Part &      part    = parts_[side];
    const int64_t     whole   = part_bytes(side);
    const bool        on_host = part.plain && ggml_backend_buffer_is_host(part.tensor->buffer);
    std::vector<char> gathered;
    const auto        hand_over = [&](const char * from, int64_t end, size_t bytes) {
        ggml_backend_tensor_set(part.tensor, from, static_cast<size_t>(end) - bytes, bytes);
    };
    for_runs(side, [&](int64_t from, int64_t at, int64_t bytes) {
        if (on_host) {
            std::memcpy(static_cast<char *>(part.tensor->data) + at, data + from, static_cast<size_t>(bytes));
        } else if (bytes == whole || (part.plain && bytes >= gather_bytes)) {
            hand_over(data + from, at + bytes, static_cast<size_t>(bytes));
        } else {
            gathered.insert(gathered.end(), data + from, data + from + bytes);
            if (at + bytes == whole || (part.plain && gathered.size() >= gather_bytes)) {
                hand_over(gathered.data(), at + bytes, gathered.size());
                gathered.clear();
            }
        }
    });
}

//
// memory
//

namespace {

constexpr int64_t pinned_piece = int64_t{1} << 30; // bytes taken at once: one allocation of many GiB may fail
constexpr size_t  max_attempts = 64;               // to find how many weights the device has room for

using Weights = std::vector<SplitWeight *>; // of one device
using Problem = std::function<void(const std::string &)>;

// Whether the device has a mul-mat by this part of a weight; buffer: an empty one of the buffer type to ask about, or
// NULL for the device's own. Three dimensions are experts (MUL_MAT_ID), or the heads of MLA (MUL_MAT over all of them).
bool can_multiply(ggml_backend_dev_t device, const SplitWeight & weight, Side side, ggml_backend_buffer_t buffer) {
    // ffn_up_exps, ffn_up_chexps and their like
    const bool    experts = weight.slice().e > 1 && weight.slice().name.find("exps") != std::string::npos;
    ContextPtr    ctx     = new_context(8);
    ggml_tensor * w       = weight.new_tensor(ctx.get(), side);
    ggml_tensor * x       = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w->ne[0], 1, experts ? 1 : w->ne[2]);
    ggml_tensor * ids     = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    w->buffer             = buffer;
    ggml_tensor * product = experts ? ggml_mul_mat_id(ctx.get(), w, x, ids) : ggml_mul_mat(ctx.get(), w, x);
    if (weight.slice().input_f32) {
        ggml_prec_set_src(product, GGML_PREC_F32, 1);
    }
    return ggml_backend_dev_supports_op(device, product) &&
           (buffer == nullptr || multiplies_right(buffer->buft, product));
}

// CG and GG of weights the device cannot multiply go back to the host.
void refuse_unsupported(const Weights & weights, ggml_backend_dev_t device, const Problem & problem) {
    for (SplitWeight * weight : weights) {
        const SliceSpec & slice = weight->slice();
        if (slice.gg == 0 && slice.cg == 0 && slice.hot.empty()) {
            continue;
        }
        const Side side = slice.cg > 0 && slice.gg == 0 ? side_stream : side_device;
        if (device == nullptr || !can_multiply(device, *weight, side, nullptr)) {
            problem(std::string(device == nullptr ? "no device" : ggml_backend_dev_name(device)) +
                    " cannot multiply by " + weight->slice().name + " (" + ggml_type_name(weight->slice().type) +
                    "): it stays on the host");
            weight->leave_device(0);
        }
    }
}

// The tensors of one side that share a buffer type, in buffers of that type. False: no memory, or of another type.
bool allocate(const Weights & weights, Side side, ggml_backend_buffer_type_t buft, WeightMemory & memory) {
    ContextPtr ctx = new_context(static_cast<int64_t>(weights.size()));
    for (SplitWeight * weight : weights) {
        weight->part(side).tensor = weight->new_tensor(ctx.get(), side);
        ggml_set_name(weight->part(side).tensor, weight->slice().name.c_str());
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

Weights with_part(const Weights & weights, Side side) {
    Weights chosen;
    std::copy_if(weights.begin(), weights.end(), std::back_inserter(chosen),
                 [&](const SplitWeight * weight) { return weight->part(side).count > 0; });
    return chosen;
}

int64_t bytes_of(const Weights & weights, Side side) {
    int64_t bytes = 0;
    for (const SplitWeight * weight : weights) {
        bytes += weight->part_bytes(side);
    }
    return bytes;
}

// Takes device memory for every GG, and all hot experts; when there is too little, for those of the first weights.
void place_on_device(const Weights & weights, ggml_backend_dev_t device, WeightMemory & memory,
                     const Problem & problem) {
    Weights       chosen = with_part(weights, side_device);
    const int64_t wanted = bytes_of(chosen, side_device);
    const size_t  step   = chosen.size() / max_attempts + 1;
    while (!chosen.empty() && !allocate(chosen, side_device, ggml_backend_dev_buffer_type(device), memory)) {
        for (size_t i = 0; i < step && !chosen.empty(); i++) {
            chosen.back()->leave_device(chosen.back()->slice().cg);
            chosen.pop_back();
        }
    }
    const int64_t bytes = bytes_of(chosen, side_device);
    if (bytes < wanted) {
        problem(std::string(ggml_backend_dev_name(device)) + " has no room for " + std::to_string(wanted) +
                " bytes of weights: " + std::to_string(bytes) + " bytes are there, the rest is on the host");
    }
}

// The layout the plan names, where the CPU has it and can multiply by it; else plain memory.
ggml_backend_buffer_type_t layout_of(SplitWeight & weight, const Problem & problem) {
    const std::string & layout = weight.slice().layout;
    if (layout == plain_layout || layout == "-") {
        return ggml_backend_cpu_buffer_type();
    }
    for (ggml_backend_buffer_type_t buft : cpu_layouts()) {
        const BufferPtr empty(layout == ggml_backend_buft_name(buft) ? ggml_backend_buft_alloc_buffer(buft, 0)
                                                                     : nullptr);
        if (empty && can_multiply(cpu_device(), weight, side_host, empty.get())) {
            return buft;
        }
    }
    problem("the CPU cannot keep " + weight.slice().name + " in the layout " + layout + ": plain memory is used");
    return ggml_backend_cpu_buffer_type();
}

// Runs of weights of at most pinned_piece bytes each, or of one weight.
std::vector<Weights> pieces_of(const Weights & weights, Side side) {
    std::vector<Weights> pieces;
    int64_t              bytes = 0;
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
void place_streamable(const Weights & chosen, Side side, ggml_backend_dev_t device, WeightMemory & memory,
                      const Problem & problem) {
    ggml_backend_buffer_type_t pinned = chosen.empty() ? nullptr : ggml_backend_dev_host_buffer_type(device);
    Weights                    plain;
    for (const Weights & piece : pieces_of(chosen, side)) {
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

// Whether the device is sent a weight's CC: the plan has it compute that for some tokens of a batch (CG'), or its hot
// experts are exchanged.
bool wants_prime(const SplitWeight & weight, ggml_backend_dev_t device, const PlanSpec & plan) {
    const SliceSpec &  slice      = weight.slice();
    const DeviceSpec & on         = plan.device_of(slice);
    const bool         for_tokens = !on.tokens.empty() && slice.takes_n_g && plan.find(slice.name) != nullptr;
    const bool         for_slots  = on.exchange != ExchangeMode::off && !slice.hot.empty();
    return (for_tokens || for_slots) && device != nullptr && can_multiply(device, weight, side_prime, nullptr);
}

// CC in its layout; where the device is to be sent it too, plain CC in memory that can be streamed, and a plain copy of
// any other if the plan has room for that.
void place_on_host(const Weights & weights, ggml_backend_dev_t device, const PlanSpec & plan, WeightMemory & memory,
                   const Problem & problem) {
    std::map<ggml_backend_buffer_type_t, Weights> by_buft;
    Weights                                       shared;
    Weights                                       copied;
    for (SplitWeight * weight : with_part(weights, side_host)) {
        ggml_backend_buffer_type_t buft  = layout_of(*weight, problem);
        const bool                 plain = buft == ggml_backend_cpu_buffer_type();
        const bool                 prime = wants_prime(*weight, device, plan);
        weight->part(side_host).plain    = plain;
        weight->set_layout(ggml_backend_buft_name(buft));
        (prime && plain ? shared : by_buft[buft]).push_back(weight);
        if (prime && !plain && plan.device_of(weight->slice()).twice) {
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

// "blk.12." of "blk.12.ffn_up_exps.weight"; empty where a name has no number.
std::string block_of(const std::string & name) {
    const size_t number = name.find_first_of("0123456789");
    return name.substr(0, number == std::string::npos ? 0 : name.find('.', number));
}

// Gives the weights of each block that have the same hot experts a table together. Experts may move where the device
// can be sent any of them without holding up the CPU, and some slot is left while another one is filled.
void make_tables(const Weights & weights, ggml_backend_dev_t device) {
    using Key = std::tuple<std::string, int64_t, std::vector<int32_t>>;
    std::map<Key, Weights> blocks;
    for (SplitWeight * weight : weights) {
        const SliceSpec & slice = weight->slice();
        if (!slice.hot.empty()) {
            blocks[{block_of(slice.name), slice.e, slice.hot}].push_back(weight);
        }
    }
    for (const auto & [key, block] : blocks) {
        const bool movable =
            block.front()->n_slots() > 1 && std::all_of(block.begin(), block.end(), [&](SplitWeight * weight) {
                return weight->has_prime() && is_pinned(weight->part(side_prime).tensor->buffer, device);
            });
        const auto table =
            std::make_shared<ExpertTable>(std::get<std::vector<int32_t>>(key), std::get<int64_t>(key),
                                          movable ? std::vector<const SplitWeight *>(block.begin(), block.end())
                                                  : std::vector<const SplitWeight *>());
        for (SplitWeight * weight : block) {
            weight->set_table(table);
        }
    }
}

} // namespace

WeightMemory place_weights(const std::vector<std::unique_ptr<SplitWeight>> & all,
                           const std::vector<ggml_backend_dev_t> & devices, const PlanSpec & plan,
                           const Problem & problem) {
    WeightMemory memory;
    for (size_t number = 0; number < devices.size(); number++) {
        ggml_backend_dev_t device  = devices[number];
        const int64_t      staging = plan.devices[number].staging;
        Weights            weights;
        for (const auto & weight : all) {
            if (weight->slice().device == number) {
                weights.push_back(weight.get());
            }
        }
        refuse_unsupported(weights, device, problem);
        {
            // held only while weights are placed, so that they do not take this room
            const BufferPtr left(
                staging > 0 && device != nullptr
                    ? ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), static_cast<size_t>(staging))
                    : nullptr);
            place_on_device(weights, device, memory, problem);
        }
        place_streamable(with_part(weights, side_stream), side_stream, device, memory, problem);
        place_on_host(weights, device, plan, memory, problem);
        make_tables(weights, device);
    }
    return memory;
}

} // namespace oallama
