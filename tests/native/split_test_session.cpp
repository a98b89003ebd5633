// What a llama_context does with a graph: ggml's scheduler over the backends of all devices.

#include <cmath>
#include <cstdio>
#include <cstring>

#include "split_test.h"
#include "support.h"

namespace split_test {

namespace {

constexpr size_t max_nodes = 256;

enum ggml_backend_dev_type type_of(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device);
}

void set_threads(ggml_backend_t backend) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto         set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set != nullptr) {
        set(backend, n_threads);
    }
}

ContextPtr new_context() {
    return ContextPtr(ggml_init({max_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes, false),
                                 nullptr, /*no_alloc=*/true}));
}

// The block's graph; its input has no data yet.
Graph new_graph(ggml_context * ctx, const Model & model, int64_t n_tokens) {
    Graph graph;
    graph.ctx      = ctx;
    graph.gf       = ggml_new_graph_custom(ctx, max_nodes, false);
    graph.n_tokens = n_tokens;
    graph.tensors  = model.tensors();
    graph.x        = ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, model.block().n_embd, n_tokens), "x");
    ggml_set_input(graph.x);
    model.block().build(graph);
    return graph;
}

void draw_input(const Graph & graph, uint64_t seed) {
    const std::vector<float> x = bridge::random_normal(ggml_nelements(graph.x), 1.0F, seed);
    ggml_backend_tensor_set(graph.x, x.data(), 0, x.size() * sizeof(float));
}

Outputs outputs_of(const Graph & graph) {
    Outputs outputs;
    for (const ggml_tensor * tensor : graph.outputs) {
        outputs.emplace_back(static_cast<size_t>(ggml_nelements(tensor)));
        ggml_backend_tensor_get(tensor, outputs.back().data(), 0, ggml_nbytes(tensor));
    }
    return outputs;
}

// Whether a device of ours computes the node.
bool is_ours(const ggml_tensor * node) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (type_of(device) == GGML_BACKEND_DEVICE_TYPE_ACCEL && ggml_backend_dev_supports_op(device, node)) {
            return true;
        }
    }
    return false;
}

} // namespace

Session::Session(const SessionOptions & options) : reuse_(options.reuse) {
    std::vector<ggml_backend_t>             backends;
    std::vector<ggml_backend_buffer_type_t> bufts;

    ggml_backend_dev_t gpu = ggml_backend_dev_by_name(async_device::device_name);
    const auto         add = [&](ggml_backend_dev_t device) {
        ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
        if (backend == nullptr) {
            check(false, std::string(ggml_backend_dev_name(device)) + " makes a backend");
            return;
        }
        const bool is_cpu = type_of(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        backends_.emplace_back(backend);
        backends.push_back(backend);
        bufts.push_back(is_cpu && gpu_ != nullptr ? ggml_backend_dev_host_buffer_type(gpu)
                                                  : ggml_backend_get_default_buffer_type(backend));
        gpu_ = device == gpu ? backend : gpu_;
        set_threads(backend);
    };
    if (options.gpu || (resident && options.split)) {
        add(gpu);
    }
    for (size_t i = 0; options.split && i < ggml_backend_dev_count(); i++) {
        if (type_of(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            add(ggml_backend_dev_get(i));
        }
    }
    add(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    sched_.reset(ggml_backend_sched_new(backends.data(), bufts.data(), static_cast<int>(backends.size()), max_nodes,
                                        /*parallel=*/false, /*op_offload=*/true));
}

LonePass::LonePass(const Model & model, int64_t n_tokens)
    : backend_(ggml_backend_dev_init(ggml_backend_dev_by_name("OALLAMA"), nullptr)), ctx_(new_context()),
      graph_(new_graph(ctx_.get(), model, n_tokens)),
      buffer_(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), host_layouts().front())) {
    draw_input(graph_, 1);
}

ggml_status LonePass::compute(const std::function<bool()> & on_host_node) const {
    ggml_backend_reg_t    reg  = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_.get()));
    std::function<bool()> each = on_host_node;
    const auto            set  = reinterpret_cast<ggml_backend_set_abort_callback_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback"));
    set(backend_.get(), [](void * data) { return (*static_cast<std::function<bool()> *>(data))(); }, &each);
    set_threads(backend_.get());
    return ggml_backend_graph_compute(backend_.get(), graph_.gf);
}

Outputs LonePass::outputs() const {
    return outputs_of(graph_);
}

Outputs Session::compute(const Model & model, int64_t n_tokens, uint64_t seed) {
    const ContextPtr ctx   = new_context();
    const Graph      graph = new_graph(ctx.get(), model, n_tokens);

    ggml_backend_sched_reset(sched_.get());
    for (int i = 0; resident && gpu_ != nullptr && i < ggml_graph_n_nodes(graph.gf); i++) {
        if (!is_ours(ggml_graph_node(graph.gf, i))) {
            ggml_backend_sched_set_tensor_backend(sched_.get(), ggml_graph_node(graph.gf, i), gpu_);
        }
    }
    status_ = GGML_STATUS_ALLOC_FAILED;
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph.gf)) {
        return {};
    }
    ggml_backend_sched_set_eval_callback(sched_.get(), wants_ ? on_node : nullptr, this);
    for (uint64_t input : reuse_ ? std::vector<uint64_t>{seed + 1, seed} : std::vector<uint64_t>{seed}) {
        draw_input(graph, input);
        status_ = ggml_backend_sched_graph_compute(sched_.get(), graph.gf);
    }
    if (status_ != GGML_STATUS_SUCCESS) {
        return {};
    }
    return outputs_of(graph);
}

void Session::watch(std::function<bool(const ggml_tensor *)> wants, std::function<void(const ggml_tensor *)> gets) {
    wants_ = std::move(wants);
    gets_  = std::move(gets);
}

bool Session::on_node(ggml_tensor * tensor, bool ask, void * self) {
    auto * session = static_cast<Session *>(self);
    if (ask) {
        return session->wants_(tensor);
    }
    session->gets_(tensor);
    return true;
}

Outputs on_cpu(const Model & model, int64_t n_tokens, uint64_t seed) {
    return Session({/*split=*/false, /*gpu=*/false})
        .compute(Model(model.block(), model.data(), host_layouts().front()), n_tokens, seed);
}

//
// comparisons
//

double nmse(const Outputs & reference, const Outputs & result) {
    if (reference.empty() || reference.size() != result.size()) {
        return HUGE_VAL;
    }
    double worst = 0.0;
    for (size_t i = 0; i < reference.size(); i++) {
        if (reference[i].size() != result[i].size()) {
            return HUGE_VAL;
        }
        double error = 0.0;
        double power = 0.0;
        for (size_t j = 0; j < reference[i].size(); j++) {
            const double expected = static_cast<double>(reference[i][j]);
            const double wrong    = static_cast<double>(result[i][j]) - expected;
            error += wrong * wrong;
            power += expected * expected;
        }
        const double ratio = error / power;
        worst              = std::isfinite(ratio) ? std::max(worst, ratio) : HUGE_VAL;
    }
    return worst;
}

std::string text(double number) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.1e", number);
    return digits;
}

bool is_right(Session & session, const Model & model, int64_t n_tokens, uint64_t seed) {
    return nmse(on_cpu(model, n_tokens, seed), session.compute(model, n_tokens, seed)) <= summation_bound;
}

void check_right(Session & session, const Model & model, int64_t n_tokens, const std::string & when, uint64_t seed) {
    const double error = nmse(on_cpu(model, n_tokens, seed), session.compute(model, n_tokens, seed));
    check(error <= summation_bound,
          model.block().name + ", " + std::to_string(n_tokens) + " tokens " + when + ": NMSE " + text(error));
}

//
// what the library says of itself
//

oallama_memory memory() {
    oallama_memory now = {};
    check_ok(oallama_get_memory(&now), "the library tells its memory");
    return now;
}

oallama_stats stats() {
    oallama_stats now = {};
    check_ok(oallama_get_stats(&now), "the library tells its statistics");
    return now;
}

void reset_stats() {
    check_ok(oallama_reset_stats(), "statistics are reset");
}

oallama_stats stats_of_known(const Model & model, int64_t n_tokens) {
    Session session;
    session.compute(model, n_tokens);
    session.compute(model, n_tokens);
    reset_stats();
    session.compute(model, n_tokens);
    return stats();
}

void check_nothing_held(const std::string & when) {
    const oallama_memory         now    = memory();
    const async_device::Counters device = async_device::counters();
    check(now.host_weights == 0 && now.device_weights == 0 && now.n_weights == 0, "no weights are held " + when);
    check(now.host_compute == 0 && now.device_compute == 0 && now.n_programs == 0, "no programs are held " + when);
    check(device.device_bytes == 0 && device.pinned_bytes == 0, "the device's memory is free " + when);
    check(device.n_streams == 0 && device.n_events == 0, "no streams or events are held " + when);
}

} // namespace split_test
