#include "tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace bridge {

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
