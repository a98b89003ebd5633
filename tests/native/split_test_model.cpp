// Weights of a block: random data, a plan, and loading them as llama.cpp does.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "split_test.h"
#include "support.h"

namespace split_test {

//
// data
//

// Few rows are made, because quantising is slow; a random one of them follows another, so that a row in the wrong
// place shows.
Data make_data(const Block & block, uint64_t seed) {
    Data           data;
    bridge::Random random(seed);
    for (const Weight & weight : block.weights) {
        const bridge::Tile     tile      = bridge::make_tile(weight.type, weight.k, 31);
        const size_t           row_bytes = ggml_row_size(weight.type, weight.k);
        std::vector<uint8_t> & bytes     = data[weight.name];
        bytes.resize(row_bytes * static_cast<size_t>(weight.n * weight.e));
        for (size_t at = 0; at < bytes.size(); at += row_bytes) {
            const auto row = static_cast<size_t>(random.below(tile.rows));
            std::memcpy(bytes.data() + at, tile.blocks.data() + row * row_bytes, row_bytes);
        }
    }
    for (const Extra & extra : block.extras) {
        const int64_t            n = std::accumulate(extra.ne.begin(), extra.ne.end(), int64_t{1}, std::multiplies<>());
        const std::vector<float> values = bridge::random_normal(n, 1.0F, random.next());
        data[extra.name].resize(values.size() * sizeof(float));
        std::memcpy(data[extra.name].data(), values.data(), data[extra.name].size());
    }
    return data;
}

//
// plan
//

Streamed streamed = Streamed::none;
bool     late     = false;
bool     resident = false;
int      n_slots  = 2;

std::string cut_name(Cut cut) {
    const char * names[] = {"r = 0", "r = one granule", "r = 0.5", "r = all but one granule", "r = 1"};
    return names[static_cast<int>(cut)];
}

namespace {

int64_t cc_of(Cut cut, int64_t extent, int64_t granule) {
    switch (cut) {
        case Cut::none: return extent;
        case Cut::one: return (extent - 1) / granule * granule;
        case Cut::half: return (extent / 2 + granule - 1) / granule * granule;
        case Cut::most: return granule;
        case Cut::all: return 0;
    }
    return 0;
}

// Of what is not CC: how much is streamed.
int64_t cg_of(int64_t rest, int64_t granule) {
    switch (streamed) {
        case Streamed::none: return 0;
        case Streamed::half: return rest / 2 / granule * granule;
        case Streamed::all: return rest;
    }
    return 0;
}

} // namespace

std::string tensor_line(const Weight & weight, int64_t cc, int64_t cg, const std::string & layout) {
    const char * axis  = weight.axis == OALLAMA_ROWS ? "rows" : weight.axis == OALLAMA_COLS ? "cols" : "halves";
    Weight       slice = weight;
    (weight.axis == OALLAMA_COLS ? slice.k : slice.n) = weight.axis == OALLAMA_HALVES ? 2 * cc : cc;
    const bool holds                                  = cc > 0 && layout_holds(find_layout(layout), slice);
    return "tensor " + weight.name + " " + type_name(weight.type) + " " + std::to_string(weight.k) + "x" +
           std::to_string(weight.n) + "x" + std::to_string(weight.e) + " " + axis + " " + std::to_string(cc) + " " +
           std::to_string(cg) + " " + std::to_string(weight.extent() - cc - cg) + " " +
           (cc == 0 ? "-"
            : holds ? layout
                    : "CPU") +
           (weight.input_f32 ? " input=F32" : "");
}

std::string plan_text(const std::vector<const Block *> & blocks, Cut cut, const std::string & lines,
                      const std::string & device, const std::string & layout) {
    std::string text = "oallama-plan 1\nmodel test\nslots " + std::to_string(n_slots) + "\n" + lines;
    if (!device.empty()) {
        text += "device " + device + "\n" + (streamed == Streamed::half ? "piece 8192\n" : "") +
                (late ? "tokens 1 0\ntokens 512 256\ntwice 1\n" : "");
    }
    const bool lives = resident && device == async_device::device_name;
    for (const Block * block : blocks) {
        for (const Weight & weight : block->weights) {
            const int64_t granule = block->together ? granularity(*block) : granularity(weight.type, weight.axis);
            const int64_t cc      = cc_of(cut, weight.extent(), granule);
            const int64_t cg      = cg_of(weight.extent() - cc, granule);
            text += tensor_line(weight, cc, cg, layout) + (lives ? " resident" : "") +
                    (weight.chunk > 0 && !lives ? " chunk=" + std::to_string(weight.chunk) : "") + "\n";
        }
    }
    return text;
}

PlanPtr new_plan(const std::string & text) {
    oallama_plan * plan = nullptr;
    check_ok(oallama_plan_new(text.c_str(), &plan), "a plan is accepted:\n" + text);
    if (plan == nullptr) {
        std::exit(1);
    }
    return PlanPtr(plan);
}

PlanPtr plan_of(const Block & block, Cut cut, const std::string & lines, const std::string & device,
                const std::string & layout) {
    return new_plan(plan_text({&block}, cut, lines, device, layout));
}

ggml_backend_buffer_type_t buft_of(oallama_plan * plan) {
    void * buft = nullptr;
    check_ok(oallama_plan_buft(plan, &buft), "the plan has a buffer type");
    return static_cast<ggml_backend_buffer_type_t>(buft);
}

Told told(const oallama_plan * plan) {
    Told    all;
    char    lines[4096] = "";
    int32_t usable      = 0;
    int64_t n_slices    = 0;
    check_ok(oallama_plan_problems(plan, &usable, lines, sizeof lines), "problems are told");
    check_ok(oallama_plan_count(plan, &n_slices), "slices are counted");
    for (int64_t i = 0; i < n_slices; i++) {
        oallama_slice slice = {};
        check_ok(oallama_plan_slice(plan, i, &slice), "a slice is told");
        all.gg += slice.gg;
        all.device_bytes += slice.device_bytes;
    }
    all.usable   = usable != 0;
    all.problems = lines;
    return all;
}

//
// layouts
//

std::vector<ggml_backend_buffer_type_t> host_layouts() {
    ggml_backend_dev_t                      cpu   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::vector<ggml_backend_buffer_type_t> bufts = {ggml_backend_dev_buffer_type(cpu)};
    const auto                              extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * buft = extra == nullptr ? nullptr : extra(cpu);
         buft != nullptr && *buft != nullptr; buft++) {
        bufts.push_back(*buft);
    }
    return bufts;
}

ggml_backend_buffer_type_t find_layout(const std::string & name) {
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        if (name == ggml_backend_buft_name(buft)) {
            return buft;
        }
    }
    check(false, "the CPU has the layout " + name);
    return host_layouts().front();
}

bool layout_holds(ggml_backend_buffer_type_t buft, const Weight & weight) {
    if (ggml_backend_buft_is_host(buft)) {
        return true;
    }
    const ContextPtr ctx(ggml_init({8 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_tensor *    w    = ggml_new_tensor_3d(ctx.get(), weight.type, weight.k, weight.n, weight.e);
    ggml_tensor *    src1 = nullptr;
    ggml_tensor *    op   = nullptr;
    if (weight.is_routed()) {
        src1 = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, weight.k, 2, 3);
        op   = ggml_mul_mat_id(ctx.get(), w, src1, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 2, 3));
    } else {
        src1 = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, weight.k, 3, weight.e);
        op   = ggml_mul_mat(ctx.get(), w, src1);
    }
    const BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, 0));
    w->buffer = buffer.get();
    return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}

//
// model
//

namespace {

ContextPtr header_context(size_t n_tensors) {
    return ContextPtr(ggml_init({n_tensors * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
}

ggml_tensor * new_weight(ggml_context * ctx, const Weight & weight) {
    ggml_tensor * tensor = weight.e > 1 ? ggml_new_tensor_3d(ctx, weight.type, weight.k, weight.n, weight.e)
                                        : ggml_new_tensor_2d(ctx, weight.type, weight.k, weight.n);
    return ggml_set_name(tensor, weight.name.c_str());
}

} // namespace

Model::Model(const Block & block, const Data & data, ggml_backend_buffer_type_t layout) : block_(block), data_(data) {
    new_extras();
    for (const Weight & weight : block.weights) {
        contexts_.push_back(header_context(1));
        tensors_[weight.name] = new_weight(contexts_.back().get(), weight);
        place(contexts_.back().get(), layout_holds(layout, weight) ? layout : host_layouts().front());
    }
    load();
}

Model::Model(const Block & block, const Data & data, oallama_plan * plan) : block_(block), data_(data) {
    new_extras();
    contexts_.push_back(header_context(block.weights.size()));
    for (const Weight & weight : block.weights) {
        tensors_[weight.name] = new_weight(contexts_.back().get(), weight);
    }
    place(contexts_.back().get(), buft_of(plan));
    load();
}

void Model::new_extras() {
    if (block_.extras.empty()) {
        return;
    }
    contexts_.push_back(header_context(block_.extras.size()));
    for (const Extra & extra : block_.extras) {
        ggml_tensor * tensor =
            ggml_new_tensor(contexts_.back().get(), GGML_TYPE_F32, static_cast<int>(extra.ne.size()), extra.ne.data());
        tensors_[extra.name] = ggml_set_name(tensor, extra.name.c_str());
    }
    place(contexts_.back().get(), host_layouts().front());
}

void Model::place(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    BufferPtr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (buffer == nullptr) {
        loaded_ = false;
        return;
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers_.push_back(std::move(buffer));
}

void Model::load() {
    for (const auto & [name, tensor] : tensors_) {
        if (loaded_) {
            ggml_backend_tensor_set(tensor, data_.at(name).data(), 0, ggml_nbytes(tensor));
        }
    }
}

} // namespace split_test
