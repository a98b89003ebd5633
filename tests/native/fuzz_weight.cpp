// A weight that is cut: bytes of the whole tensor, set in any pieces and any order, are found again, and never fall
// beside the parts. The input says the plan's line and the pieces.

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>

#include "fuzz.h"
#include "weights.h"

namespace fuzz {

const std::vector<std::string> & seeds() {
    static const std::vector<std::string> texts = {
        std::string(64, '\1'),
        std::string("\0\1\2\3\4\5\6\7\10\11\12\13\14\15\16\17\20\21\22\23\24\25\26\27\30\31\32\33\34\35\36\37", 32),
        "some text that says a shape, an axis, two cuts and the pieces in which bytes come, one after another",
    };
    return texts;
}

const std::vector<std::string> & words() {
    static const std::vector<std::string> known = {std::string(2, '\0'), "\377\377", "\1", "\200", "abcdefgh"};
    return known;
}

} // namespace fuzz

namespace {

using namespace oallama;

constexpr size_t most_bytes = 1 << 16;

// Numbers out of the input; zeros behind its end.
class Choices {
  public:
    Choices(const uint8_t * data, size_t size) : data_(data), size_(size) {}

    int64_t below(int64_t n) {
        uint32_t value = 0;
        for (int i = 0; i < 2; i++) {
            value = value << 8 | (at_ < size_ ? data_[at_] : 0U);
            at_++;
        }
        return n <= 1 ? 0 : static_cast<int64_t>(value) % n;
    }

    bool more() const { return at_ < size_; }

  private:
    const uint8_t * data_;
    size_t          size_;
    size_t          at_ = 0;
};

bool never(ggml_backend_buffer_type_t /*buft*/) {
    return false;
}

// Host memory that says it is a device's, so that bytes are gathered before they are handed over.
ggml_backend_buffer_type_t device_like() {
    static ggml_backend_buffer_type buft = [] {
        ggml_backend_buffer_type made = *ggml_backend_cpu_buffer_type();
        made.iface.is_host            = never;
        return made;
    }();
    return &buft;
}

struct Memory {
    ContextPtr host_ctx   = new_context(3);
    ContextPtr device_ctx = new_context(1);
    BufferPtr  host;
    BufferPtr  device;
};

ggml_tensor * new_part(ggml_context * ctx, const SplitWeight & weight, Side side) {
    const std::array<int64_t, 3> ne = weight.shape(side);
    return ggml_new_tensor_3d(ctx, weight.slice().type, ne[0], ne[1], ne[2]);
}

std::string line_of(Choices & choices) {
    const std::array<const char *, 7> types = {"F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"};
    const std::array<const char *, 3> axes  = {"rows", "cols", "halves"};

    const int64_t     kind  = choices.below(static_cast<int64_t>(types.size()));
    const int64_t     block = kind < 2 ? 1 : kind < 4 ? 32 : 256;
    const std::string axis  = axes[static_cast<size_t>(choices.below(3))];
    const int64_t     step  = axis == "cols" ? std::lcm<int64_t>(block, 32) : 32;
    const int64_t     k     = block * (1 + choices.below(block == 1 ? 200 : 4));
    const int64_t     some  = 1 + choices.below(150);
    const int64_t     n     = axis == "halves" ? 2 * some : some;
    const int64_t     e     = 1 + choices.below(3);
    const int64_t     all   = axis == "cols" ? k : axis == "rows" ? n : n / 2;
    const auto        cut   = [&](int64_t from) {
        const int64_t at = from + step * choices.below((all - from) / step + 2);
        return std::min(at, all);
    };
    const int64_t     first  = cut(0);
    const int64_t     second = cut(first);
    const std::string counts = std::to_string(first) + " " + std::to_string(second - first) + " " +
                               std::to_string(all - second) + (first > 0 ? " CPU" : " -");
    return std::string("tensor w ") + types[static_cast<size_t>(kind)] + " " + std::to_string(k) + "x" +
           std::to_string(n) + "x" + std::to_string(e) + " " + axis + " " + counts;
}

// Memory for the parts: the device's side gathers, and the host's may take the whole part only, as repacked layouts do.
void place(SplitWeight & weight, Memory & memory, Choices & choices) {
    const bool repacked = choices.below(2) == 1;
    const bool copied   = choices.below(2) == 1;
    for (const Side side : {side_host, side_stream, side_device}) {
        if (weight.part(side).count > 0) {
            ggml_context * ctx       = side == side_device ? memory.device_ctx.get() : memory.host_ctx.get();
            weight.part(side).tensor = new_part(ctx, weight, side);
        }
    }
    if (weight.part(side_host).count > 0) {
        weight.part(side_host).pieces = !repacked;
        if (copied) {
            weight.part(side_prime).tensor = new_part(memory.host_ctx.get(), weight, side_prime);
        } else if (!repacked) {
            weight.part(side_prime).tensor = weight.part(side_host).tensor;
        }
    }
    memory.host.reset(ggml_backend_alloc_ctx_tensors_from_buft(memory.host_ctx.get(), ggml_backend_cpu_buffer_type()));
    memory.device.reset(ggml_backend_alloc_ctx_tensors_from_buft(memory.device_ctx.get(), device_like()));
}

std::vector<uint8_t> read(const ggml_tensor * tensor, size_t size) {
    std::vector<uint8_t> bytes(size);
    ggml_backend_tensor_get(tensor, bytes.data(), 0, size);
    return bytes;
}

// Sets all bytes, in pieces of sizes and in an order that the input says.
void set_all(SplitWeight & weight, const std::vector<uint8_t> & bytes, Choices & choices) {
    std::vector<std::pair<size_t, size_t>> pieces;
    const int64_t                          most = 1 + choices.below(static_cast<int64_t>(bytes.size()) + 1);
    for (size_t at = 0; at < bytes.size();) {
        const size_t size = std::min(bytes.size() - at, static_cast<size_t>(1 + choices.below(most)));
        pieces.emplace_back(at, size);
        at += size;
        if (!choices.more() || pieces.size() > 200) { // the rest in one go
            pieces.emplace_back(at, bytes.size() - at);
            break;
        }
    }
    for (size_t i = pieces.size(); i > 1; i--) {
        std::swap(pieces[i - 1], pieces[static_cast<size_t>(choices.below(static_cast<int64_t>(i)))]);
    }
    for (const auto & [at, size] : pieces) {
        const std::vector<uint8_t> own(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                                       bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
        weight.set(own.data(), at, size);
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Choices           choices(data, size);
    const std::string line = line_of(choices);
    PlanSpec          plan;
    if (guarded([&] { plan = parse_plan("oallama-plan 1\ndevice TEST0\n" + line + "\n"); }) != OALLAMA_OK) {
        fuzz::must(false, last_error());
    }
    const SliceSpec & slice = plan.slices.at(0);
    const ContextPtr  ctx   = new_context(1);
    ggml_tensor *     whole = ggml_new_tensor_3d(ctx.get(), slice.type, slice.k, slice.n, slice.e);
    const size_t      n     = ggml_nbytes(whole);
    if (n > most_bytes) {
        return 0;
    }
    SplitWeight weight(whole, slice);
    Memory      memory;
    place(weight, memory, choices);
    int64_t total = 0;
    for (const Side side : {side_host, side_stream, side_device}) {
        const Part & part = weight.part(side);
        total += weight.part_bytes(side);
        fuzz::must(part.count == 0 || ggml_nbytes(part.tensor) == static_cast<size_t>(weight.part_bytes(side)),
                   "a part has the bytes that it says");
    }
    fuzz::must(total == static_cast<int64_t>(n), "the parts have all bytes, each once");

    std::vector<uint8_t> bytes(n);
    for (size_t i = 0; i < n; i++) {
        bytes[i] = static_cast<uint8_t>(i * 131 + i / 251 + 1);
    }
    set_all(weight, bytes, choices);
    if (weight.has_prime() && weight.part(side_prime).tensor != weight.part(side_host).tensor) {
        const auto held = static_cast<size_t>(weight.part_bytes(side_host));
        fuzz::must(read(weight.part(side_prime).tensor, held) == read(weight.part(side_host).tensor, held),
                   "CC is there twice alike");
    }
    const size_t         from = static_cast<size_t>(choices.below(static_cast<int64_t>(n)));
    const size_t         some = 1 + static_cast<size_t>(choices.below(static_cast<int64_t>(n - from)));
    std::vector<uint8_t> back(some);
    const int            status = guarded([&] { weight.get(back.data(), from, some); });
    const bool           plain  = weight.part(side_host).pieces;
    fuzz::must(status == OALLAMA_OK || (!plain && status == OALLAMA_UNSUPPORTED), "what is in pieces is read back");
    fuzz::must(status != OALLAMA_OK ||
                   std::equal(back.begin(), back.end(), bytes.begin() + static_cast<std::ptrdiff_t>(from)),
               "bytes are where they were set");
    if (!plain) { // as if it could be read: the bytes that were collected for it
        weight.part(side_host).pieces = true;
        back.resize(n);
        weight.get(back.data(), 0, n);
        fuzz::must(back == bytes, "a part that is handed over whole has every byte");
    }
    return 0;
}
