#include "device.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace emulated {

namespace {

constexpr size_t noise_bytes   = 1 << 20; // after which it is the same again
constexpr size_t noise_spare   = 1 << 16; // where it may begin
constexpr float  largest_noise = 1.0f;
constexpr size_t staged_bytes  = 64 << 10; // CUDA keeps so much of a copy from pageable memory when the call returns

uint64_t mixed(uint64_t seed) {
    uint64_t z = seed + 0x9E3779B97F4A7C15ULL;
    z          = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z          = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
}

bool is_whole_number(ggml_type type) {
    return type == GGML_TYPE_I8 || type == GGML_TYPE_I32 || type == GGML_TYPE_I64;
}

[[noreturn]] void stop(const char * what, const ggml_tensor * tensor) {
    std::fprintf(stderr, "emulated device: %s: %s %s\n", what, ggml_op_name(tensor->op), tensor->name);
    std::abort();
}

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

// The range of device memory that a tensor's buffer has.
const DeviceRange & range_of(const ggml_tensor * tensor) {
    return *static_cast<const DeviceRange *>(buffer_of(tensor)->context);
}

// "ffn_moe_argsort-12" is of layer 12.
int layer_of(const char * name) {
    const char * dash = std::strrchr(name, '-');
    return dash == nullptr || dash[1] < '0' || dash[1] > '9' ? -1 : std::atoi(dash + 1);
}

// llama.cpp's names of what a layer's router reads.
bool is_router_input(const char * name) {
    constexpr std::array<const char *, 3> names = {"ffn_norm-", "attn_post_norm-", "post_attn_norm-"};
    return std::any_of(names.begin(), names.end(),
                       [&](const char * begin) { return std::strncmp(name, begin, std::strlen(begin)) == 0; });
}

// Whether host memory is pinned, which it then is for every device, as with CUDA.
bool pins(const void * data, size_t size) {
    const auto & all = the_emulated()->all;
    return std::any_of(all.begin(), all.end(),
                       [&](const auto & device) { return device->pinned.contains(data, size); });
}

} // namespace

Device::Device(Parameters given, size_t at, Timekeeper & keeper)
    : parameters(std::move(given)), host_name(parameters.name + "_Host"), number(at), time(keeper),
      pinned(static_cast<size_t>(std::max<int64_t>(parameters.pinned_bytes, 0))), noise_f32_(noise_bytes + noise_spare),
      noise_f16_(noise_bytes + noise_spare) {
    for (size_t i = 0; i < noise_f16_.size() / sizeof(uint16_t); i++) { // evenly over -1 to 1: no NaN, no denormals
        const float value = static_cast<float>(static_cast<double>(mixed(parameters.seed + i) >> 11U) * 0x1p-52 - 1.0);
        const uint16_t half = ggml_fp32_to_fp16(value);
        std::memcpy(&noise_f16_[i * sizeof half], &half, sizeof half);
        if (i < noise_f32_.size() / sizeof(float)) {
            std::memcpy(&noise_f32_[i * sizeof value], &value, sizeof value);
        }
    }
}

Devices::Devices(std::vector<Parameters> given)
    : time(given.front().cpu, given.size()), n_shared_before(time.n_shared()) {
    for (Parameters & parameters : given) {
        all.push_back(std::make_unique<Device>(std::move(parameters), all.size(), time));
    }
}

bool Devices::in_use() const {
    return std::any_of(all.begin(), all.end(), [](const auto & device) { return device->in_use(); });
}

bool Device::has(const ggml_tensor * tensor) const {
    const ggml_backend_buffer_t buffer = buffer_of(tensor);
    return buffer != nullptr && ggml_backend_buft_get_device(buffer->buft) == &the_devices[number] &&
           !ggml_backend_buft_is_host(buffer->buft);
}

char * Device::memory_of(const ggml_tensor * tensor, size_t offset, size_t size) const {
    if (!has(tensor)) {
        stop("was given memory that is not its own", tensor);
    }
    char * const memory = range_of(tensor).behind(static_cast<char *>(tensor->data) + offset, size);
    if (memory == nullptr) {
        stop("access beyond a buffer", tensor);
    }
    return memory;
}

//
// copies
//

void Device::upload(const StreamPtr & stream, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                    bool wait) {
    const Nanoseconds begin = now();
    char * const      to    = memory_of(tensor, offset, size);
    const bool        write = parameters.real_values || is_whole_number(tensor->type);
    // a model is loaded: nobody times that
    if (buffer_of(tensor)->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && range_of(tensor).born() == n_graphs_ever) {
        if (write) {
            std::memcpy(to, data, size);
        }
        return;
    }
    const bool   is_pinned = pins(data, size);
    const Line & line      = parameters.copy(/*out=*/false, is_pinned);
    Nanoseconds  back      = begin + nanoseconds(parameters.copy_issue_s);

    Item item;
    item.engine   = engine_in;
    item.duration = nanoseconds(line.b * static_cast<double>(size));
    item.latency  = nanoseconds(line.a);
    item.copy     = {to, data, size, 0, write};
    if (!is_pinned && size <= staged_bytes) {
        back += item.duration; // copied to where the device can read it
        item.copy.src = nullptr;
        if (write) {
            item.staged.assign(static_cast<const char *>(data), static_cast<const char *>(data) + size);
            item.copy.src = item.staged.data();
        } else {
            item.copy.size = 0;
        }
        item.duration = nanoseconds(parameters.copy(false, true).b * static_cast<double>(size));
    }
    item.submitted = back;
    bytes_in += static_cast<int64_t>(size);
    time.submit(stream, std::move(item));
    if (wait || (!is_pinned && size > staged_bytes)) {
        time.finish(*stream);
    }
    spin_until(back);
}

void Device::download(const StreamPtr & stream, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                      bool wait) {
    const Nanoseconds begin     = now();
    const char *      from      = memory_of(tensor, offset, size);
    const bool        drawn     = !parameters.real_values && !is_whole_number(tensor->type);
    const bool        is_pinned = pins(data, size);
    const Line &      line      = parameters.copy(/*out=*/true, is_pinned);
    const Nanoseconds back      = begin + nanoseconds(parameters.copy_issue_s);

    Item item;
    item.engine    = engine_out;
    item.submitted = back;
    item.duration  = nanoseconds(line.b * static_cast<double>(size));
    item.latency   = nanoseconds(line.a);
    item.copy      = {data, drawn ? noise(tensor->type) : from, size, drawn ? noise_bytes : 0, true};
    bytes_out += static_cast<int64_t>(size);
    time.submit(stream, std::move(item));
    if (drawn && !parameters.routing.empty() && tensor->type == GGML_TYPE_F32 && is_router_input(tensor->name)) {
        send_routing(stream, tensor, data, offset, size);
    }
    if (wait || !is_pinned) {
        time.finish(*stream);
    }
    spin_until(back);
}

void Device::copy_within(const StreamPtr & stream, const ggml_tensor * src, ggml_tensor * dst) {
    const size_t size = ggml_nbytes(src);
    Item         item;
    item.submitted = now() + nanoseconds(parameters.copy_issue_s);
    item.duration  = nanoseconds(2.0 * static_cast<double>(size) / parameters.bytes_per_s + parameters.kernel_s);
    if (parameters.real_values || is_whole_number(src->type)) {
        item.run = [to = memory_of(dst, 0, size), from = memory_of(src, 0, size), size] {
            std::memmove(to, from, size);
        };
    }
    const Nanoseconds back = item.submitted;
    time.submit(stream, std::move(item));
    spin_until(back);
}

// Random values where the host will read a result: memory as it was has NaN and denormals, which CPUs are slow with.
const void * Device::noise(ggml_type type) {
    const std::vector<char> & values = type == GGML_TYPE_F32 ? noise_f32_ : noise_f16_;
    const uint64_t            begin  = mixed(parameters.seed ^ ++n_drawn_) % (noise_spare / sizeof(float));
    return values.data() + begin * sizeof(float);
}

//
// graphs
//

// Whether a mul-mat by experts has the ids of a router, or of the host. What else computes ids computes nothing where
// values are drawn; where they are real, times mean nothing, and a graph's ids are there when all of it is.
bool Device::has_real_ids(const ggml_tensor * node) const {
    if (parameters.real_values || node->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    const ggml_tensor * ids = node->src[2]->view_src != nullptr ? node->src[2]->view_src : node->src[2];
    return ids->op == GGML_OP_NONE || is_routing(ids);
}

ggml_status Device::launch(const StreamPtr & stream, Captures & captures, const ggml_cgraph * graph,
                           ggml_backend_t cpu) {
    const Nanoseconds begin    = now();
    const int64_t     n_before = n_graphs_ever++;
    if (parameters.lost_after >= 0 && n_before >= parameters.lost_after) {
        oallama::log_error("the emulated device is lost, as its parameters say");
        return GGML_STATUS_FAILED;
    }
    n_graphs++;
    const bool captured = captures.launch(graph);
    n_captured += captured ? 1 : 0;
    double                   seconds   = 0.0;
    int64_t                  n_kernels = 0;
    std::vector<RoutingStep> steps;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (!has_kernel(node)) {
            continue;
        }
        char * const result = memory_of(node, 0, ggml_nbytes(node));
        n_kernels++;
        if (has_real_ids(node)) {
            const ggml_tensor * ids = node->src[2];
            steps.emplace_back(RoutedMulMat(node, memory_of(ids, 0, ggml_nbytes(ids))));
        } else {
            seconds += kernel_seconds(parameters, node);
        }
        if (!parameters.real_values && !parameters.routing.empty() && is_router_input(node->name)) {
            const std::lock_guard<std::mutex> lock(sent_mutex_);
            SentLines &                       sent = sent_[layer_of(node->name)];
            sent = {sent.first + static_cast<size_t>(sent.n_rows), node->ne[1] * node->ne[2] * node->ne[3]};
        }
        if (!parameters.real_values && is_routing(node)) {
            steps.emplace_back(Routing{reinterpret_cast<int32_t *>(result), node->ne[0],
                                       node->ne[1] * node->ne[2] * node->ne[3], layer_of(node->name)});
        }
    }
    Item item;
    item.submitted            = begin + nanoseconds(parameters.launch_s);
    const double launch_node  = parameters.launch_node_s + (captured ? 0.0 : parameters.uncaptured_node_s);
    const double launch_nodes = launch_node * static_cast<double>(n_kernels);
    item.duration             = nanoseconds(std::max(seconds, launch_nodes));
    if (!steps.empty()) {
        item.lasts = [this, seconds, launch_nodes, steps = std::move(steps)] {
            return nanoseconds(std::max(seconds + route(steps), launch_nodes));
        };
    }
    if (parameters.real_values && n_kernels > 0) {
        const auto launch = std::make_shared<Launch>(
            graph, [this](const ggml_tensor * tensor) { return memory_of(tensor, 0, ggml_nbytes(tensor)); });
        item.run = [launch, cpu] {
            if (launch->run(cpu) != GGML_STATUS_SUCCESS) {
                std::fprintf(stderr, "emulated device: ggml's CPU back end failed to compute a graph\n");
                std::abort();
            }
        };
    }
    const Nanoseconds back = item.submitted + nanoseconds(launch_nodes);
    time.submit(stream, std::move(item));
    spin_until(back);
    return GGML_STATUS_SUCCESS;
}

// Makes the features of a token's experts its largest, for a router whose expert e reads feature e. Takes no time.
void Device::send_routing(const StreamPtr & stream, const ggml_tensor * tensor, void * data, size_t offset,
                          size_t size) {
    const int  layer    = layer_of(tensor->name);
    const auto recorded = parameters.routing.find(layer);
    if (recorded == parameters.routing.end()) {
        return;
    }
    size_t first_line = 0;
    {
        const std::lock_guard<std::mutex> lock(sent_mutex_);
        first_line = sent_[layer].first;
    }
    Item item;
    item.engine    = engine_out;
    item.submitted = now();
    item.run       = [&lines = recorded->second, first_line, data, offset, size, row_bytes = tensor->nb[1]] {
        for (size_t row = (offset + row_bytes - 1) / row_bytes; (row + 1) * row_bytes <= offset + size; row++) {
            auto *       features = reinterpret_cast<float *>(static_cast<char *>(data) + row * row_bytes - offset);
            const auto & line     = lines[(first_line + row) % lines.size()];
            for (size_t i = 0; i < line.size(); i++) {
                if (static_cast<size_t>(line[i]) < row_bytes / sizeof(float)) {
                    features[line[i]] = largest_noise + static_cast<float>(line.size() - i);
                }
            }
        }
    };
    time.submit(stream, std::move(item));
}

// Draws what the graph's routers choose, and returns the seconds of its mul-mats by experts, in their order: a later
// layer's ids may lie where an earlier one's did.
double Device::route(const std::vector<RoutingStep> & steps) {
    double               seconds    = 0.0;
    int64_t              n_distinct = 0;
    const RoutedMulMat * last       = nullptr; // by ids that have not changed since
    for (const RoutingStep & step : steps) {
        if (const auto * routing = std::get_if<Routing>(&step)) {
            draw_routing(*routing);
            last = nullptr;
            continue;
        }
        const auto & mul_mat = std::get<RoutedMulMat>(step);
        if (last == nullptr || !mul_mat.has_ids_of(*last)) {
            n_distinct = mul_mat.n_distinct();
        }
        last = &mul_mat;
        seconds += mul_mat.seconds(parameters, n_distinct);
    }
    return seconds;
}

// Rows of distinct experts: those that were recorded, the others behind them; or all at random.
void Device::draw_routing(const Routing & routing) {
    const auto n        = static_cast<size_t>(routing.n_experts);
    const auto recorded = parameters.routing.find(routing.layer);
    for (int64_t row = 0; row < routing.n_rows; row++) {
        int32_t * ids = routing.rows + row * routing.n_experts;
        std::iota(ids, ids + n, 0);
        size_t n_fixed = 0;
        if (recorded != parameters.routing.end()) {
            const auto & rows = recorded->second;
            for (const int32_t id : rows[next_row_[routing.layer]++ % rows.size()]) {
                if (n_fixed < n && id < routing.n_experts) {
                    std::swap(ids[n_fixed], *std::find(ids + n_fixed, ids + n, id));
                    n_fixed++;
                }
            }
        }
        const uint64_t   bits     = mixed(parameters.seed + ++n_drawn_);
        constexpr size_t n_chosen = 16; // no model routes a token to more
        for (size_t i = n_fixed; i < std::min(n, n_chosen); i++) {
            std::swap(ids[i], ids[i + mixed(bits + i) % (n - i)]);
        }
    }
}

} // namespace emulated
