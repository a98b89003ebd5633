#include "support.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace bridge {

//
// sizes and strings
//

int64_t mul(int64_t a, int64_t b) {
    int64_t product = 0;
    require(!__builtin_mul_overflow(a, b, &product), "a size does not fit in 64 bits");
    return product;
}

int64_t add(int64_t a, int64_t b) {
    int64_t sum = 0;
    require(!__builtin_add_overflow(a, b, &sum), "a size does not fit in 64 bits");
    return sum;
}

int64_t ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b != 0 ? 1 : 0);
}

double seconds_now() noexcept {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

void copy_text(const std::string & text, char * out, int64_t capacity) {
    require(out != nullptr && static_cast<int64_t>(text.size()) < capacity, "a text does not fit into its array");
    std::memcpy(out, text.c_str(), text.size() + 1);
}

std::string join_lines(const std::vector<std::string> & lines) {
    std::string text;
    for (const std::string & line : lines) {
        if (!text.empty()) {
            text += '\n';
        }
        text += line;
    }
    return text;
}

//
// tensors and graphs
//

ContextPtr new_context(int64_t n_tensors, int64_t n_nodes) {
    mul(n_tensors, static_cast<int64_t>(ggml_tensor_overhead())); // must fit
    return oallama::new_context(n_tensors, n_nodes > 0 ? 1 : 0, static_cast<int64_t>(graph_capacity(n_nodes)));
}

size_t graph_capacity(int64_t n_nodes) {
    return static_cast<size_t>(add(mul(n_nodes, 4), 64));
}

ggml_cgraph * new_graph(ggml_context * ctx, int64_t n_nodes) {
    return ggml_new_graph_custom(ctx, graph_capacity(n_nodes), /*grads=*/false);
}

BufferPtr alloc_tensors(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    BufferPtr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!buffer) {
        fail(OALLAMA_NO_MEMORY, std::string("not enough memory of type ") + ggml_backend_buft_name(buft));
    }
    return buffer;
}

BufferPtr alloc_buffer(ggml_backend_buffer_type_t buft, int64_t n_bytes) {
    BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, static_cast<size_t>(n_bytes)));
    if (!buffer) {
        fail(OALLAMA_NO_MEMORY,
             "could not allocate " + std::to_string(n_bytes) + " bytes of type " + ggml_backend_buft_name(buft));
    }
    return buffer;
}

//
// devices
//

ggml_backend_dev_t find_device(const char * name) {
    require(name != nullptr, "no device named");
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
    if (device == nullptr) {
        std::string known;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            known += (i == 0 ? "" : ", ") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
        }
        throw Error(OALLAMA_INVALID, "no ggml device is called " + std::string(name) + "; there are: " + known);
    }
    return device;
}

bool is_cpu(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

bool has_cpu_kernel(ggml_type type) {
    return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

namespace {

// The type of the buffers that ggml makes of memory that is there already, "CPU_Mapped". Plain memory as well.
ggml_backend_buffer_type_t mapped_buft() {
    alignas(64) static char memory[64];
    const BufferPtr         buffer(ggml_backend_cpu_buffer_from_ptr(memory, sizeof memory));
    return ggml_backend_buffer_get_type(buffer.get());
}

} // namespace

ggml_backend_buffer_type_t find_layout(ggml_backend_dev_t device, const char * layout) {
    ggml_backend_buffer_type_t device_buft = ggml_backend_dev_buffer_type(device);
    if (layout == nullptr || std::strcmp(layout, ggml_backend_buft_name(device_buft)) == 0) {
        return device_buft;
    }
    require(is_cpu(device), std::string("device ") + ggml_backend_dev_name(device) + " has no layout " + layout);
    std::string known;
    for (ggml_backend_buffer_type_t buft : cpu_layouts()) {
        if (std::strcmp(layout, ggml_backend_buft_name(buft)) == 0) {
            return buft;
        }
        known += (known.empty() ? "" : ", ") + std::string(ggml_backend_buft_name(buft));
    }
    if (ggml_backend_buffer_type_t mapped = mapped_buft(); std::strcmp(layout, ggml_backend_buft_name(mapped)) == 0) {
        return mapped;
    }
    throw Error(OALLAMA_INVALID, "the CPU has no layout " + std::string(layout) + "; it has: " + known);
}

//
// values
//

uint64_t Random::next() {
    state_ += 0x9E3779B97F4A7C15U;
    uint64_t z = state_;
    z          = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z          = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
}

int64_t Random::below(int64_t n) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(n));
}

float Random::normal() {
    // four uniforms in [0, 1): mean 2, variance 4/12
    constexpr float unit = 1.0F / 65536.0F;
    const uint64_t  bits = next();
    const float     sum =
        static_cast<float>((bits & 0xFFFFU) + ((bits >> 16U) & 0xFFFFU) + ((bits >> 32U) & 0xFFFFU) + (bits >> 48U)) *
        unit;
    return (sum - 2.0F) * 1.7320508F;
}

std::vector<float> random_normal(int64_t n, float scale, uint64_t seed) {
    Random             random(seed);
    std::vector<float> values(static_cast<size_t>(n));
    for (float & value : values) {
        value = scale * random.normal();
    }
    return values;
}

void set_normal(ggml_tensor * tensor, uint64_t seed) {
    set_values(tensor, random_normal(static_cast<int64_t>(ggml_nbytes(tensor) / sizeof(float)), 1.0F, seed));
}

//
// tiles
//

namespace {

constexpr uint16_t one_f16 = 0x3C00;

// The rows are odd in number, so that a kernel that mixes up the 4, 8 or 16 rows it interleaves gives a wrong result;
// and few, because quantising is slow.
int64_t choose_rows(int64_t k, int64_t max_rows) {
    constexpr int64_t max_elements = 65536;
    for (int64_t rows : {31, 13, 7}) {
        if (rows <= max_rows && rows * k <= max_elements) {
            return rows;
        }
    }
    return std::min<int64_t>(3, max_rows);
}

// ggml builds search tables for these types before it quantises, which takes seconds; but any bits are valid blocks of
// them if the scale is.
bool has_slow_tables(ggml_type type) {
    switch (type) {
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S: return true;
        default: return false;
    }
}

// Writes the F16 scale of a block: the first two bytes, but in IQ1_M the top four bits of each of its last four words.
void set_scale(ggml_type type, uint8_t * block, uint16_t scale) {
    if (type != GGML_TYPE_IQ1_M) {
        std::memcpy(block, &scale, sizeof scale);
        return;
    }
    uint8_t * words = block + ggml_type_size(type) - 4 * sizeof(uint16_t);
    for (unsigned i = 0; i < 4; i++) {
        const unsigned nibble = (scale >> (4 * i)) & 0xFU;
        words[2 * i + 1]      = static_cast<uint8_t>((words[2 * i + 1] & 0x0FU) | (nibble << 4U));
    }
}

std::vector<float> dequantise(ggml_type type, const std::vector<uint8_t> & blocks, int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    if (type == GGML_TYPE_F32) {
        std::memcpy(values.data(), blocks.data(), blocks.size());
    } else {
        ggml_get_type_traits(type)->to_float(blocks.data(), values.data(), n);
    }
    return values;
}

float root_mean_square(const std::vector<float> & values) {
    double sum = 0.0;
    for (float value : values) {
        sum += static_cast<double>(value) * static_cast<double>(value);
    }
    return static_cast<float>(std::sqrt(sum / static_cast<double>(values.size())));
}

std::vector<uint8_t> random_blocks(ggml_type type, int64_t k, int64_t rows) {
    Random               random(1);
    std::vector<uint8_t> blocks(ggml_row_size(type, k) * static_cast<size_t>(rows));
    for (uint8_t & byte : blocks) {
        byte = static_cast<uint8_t>(random.next());
    }
    const auto set_scales = [&](uint16_t scale) {
        for (size_t at = 0; at < blocks.size(); at += ggml_type_size(type)) {
            set_scale(type, blocks.data() + at, scale);
        }
    };
    set_scales(one_f16);
    const float rms = root_mean_square(dequantise(type, blocks, k * rows));
    set_scales(ggml_fp32_to_fp16(1.0F / (rms * std::sqrt(static_cast<float>(k)))));
    return blocks;
}

std::vector<uint8_t> quantise_random(ggml_type type, int64_t k, int64_t rows) {
    const std::vector<float> values = random_normal(k * rows, 1.0F / std::sqrt(static_cast<float>(k)), /*seed=*/1);
    const std::vector<float> importance(static_cast<size_t>(k), 1.0F);
    std::vector<uint8_t>     blocks(ggml_row_size(type, k) * static_cast<size_t>(rows));
    ggml_quantize_chunk(type, values.data(), blocks.data(), 0, rows, k,
                        ggml_quantize_requires_imatrix(type) ? importance.data() : nullptr);
    return blocks;
}

} // namespace

Tile make_tile(ggml_type type, int64_t k, int64_t max_rows) {
    Tile tile;
    tile.rows   = choose_rows(k, max_rows);
    tile.blocks = has_slow_tables(type) ? random_blocks(type, k, tile.rows) : quantise_random(type, k, tile.rows);
    tile.values = dequantise(type, tile.blocks, k * tile.rows);
    return tile;
}

} // namespace bridge

//
// C interface
//

const char * gb_last_error(void) {
    return oallama::last_error();
}

int gb_timer_run(gb_timer * timer, int64_t n, double * seconds) {
    return bridge::guarded([&] {
        for (int64_t i = 0; i < n; i++) {
            seconds[i] = timer->run_once();
        }
    });
}

void gb_timer_free(gb_timer * timer) {
    delete timer;
}
