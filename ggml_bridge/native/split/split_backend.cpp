#include "split_backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace oallama {

namespace {

constexpr size_t max_programs = 1024; // of a few kilobytes each

class Stopwatch {
  public:
    // Adds the time since the last call to a counter.
    void lap(std::atomic<int64_t> & counter) {
        const auto now = std::chrono::steady_clock::now();
        counter.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count(),
                          std::memory_order_relaxed);
        last_ = now;
    }

  private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

template <typename F> F proc_address(ggml_backend_reg_t reg, const char * name) {
    return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(reg, name));
}

bool has_feature(ggml_backend_reg_t reg, const char * name) {
    auto get_features = proc_address<ggml_backend_get_features_t>(reg, "ggml_backend_get_features");
    if (get_features == nullptr) {
        return false;
    }
    for (ggml_backend_feature * feature = get_features(reg); feature->name != nullptr; feature++) {
        if (std::strcmp(feature->name, name) == 0) {
            return true;
        }
    }
    return false;
}

uint64_t hash_of(const Signature & signature) {
    uint64_t hash = 0xCBF29CE484222325U;
    for (const uint64_t word : signature) { // FNV-1a, eight bytes at a time, folded so that high bits count
        hash = (hash ^ word) * 0x100000001B3U;
        hash ^= hash >> 29U;
    }
    return hash;
}

// Where a full value's bytes are on the host.
const char * host_data(const ggml_tensor * tensor) {
    const SplitWeight * weight = weight_of(tensor);
    return static_cast<const char *>(weight == nullptr ? tensor->data : weight->part(side_host).tensor->data);
}

// Calls f(row, offset in the original) for every row, in order or backwards.
template <typename F> void for_rows(const ggml_tensor * tensor, bool backwards, F && f) {
    const int64_t n = tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = backwards ? n - 1 - i : i;
        const auto    i1  = static_cast<size_t>(row % tensor->ne[1]);
        const auto    i2  = static_cast<size_t>(row / tensor->ne[1] % tensor->ne[2]);
        const auto    i3  = static_cast<size_t>(row / tensor->ne[1] / tensor->ne[2]);
        f(row, i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3]);
    }
}

// Elements [begin, begin + count) of each row, one row after the other.
void gather(const ggml_tensor * src, int64_t begin, int64_t count, char * out) {
    const char * data  = host_data(src) + static_cast<size_t>(begin) * src->nb[0];
    const size_t bytes = static_cast<size_t>(count) * src->nb[0];
    for_rows(src, false, [&](int64_t row, size_t offset) {
        std::memcpy(out + static_cast<size_t>(row) * bytes, data + offset, bytes);
    });
}

// Moves the host's elements of each row (or of each half of one) from where they lie packed to where they belong. From
// the end, because every run moves to a higher address or stays.
void spread(const Download & download, const ggml_tensor * node) {
    char *       data  = static_cast<char *>(node->data);
    const size_t cc    = static_cast<size_t>(download.cc) * node->nb[0];
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    const size_t n_run = static_cast<size_t>(node->ne[0] / download.extent);
    for_rows(node, true, [&](int64_t row, size_t offset) {
        for (size_t r = n_run; r-- > 0;) {
            std::memmove(data + offset + r * run, data + (static_cast<size_t>(row) * n_run + r) * cc, cc);
        }
    });
}

// The device's elements into the gaps.
void scatter(const Download & download, const ggml_tensor * node, const char * from) {
    char *       data  = static_cast<char *>(node->data);
    const size_t cc    = static_cast<size_t>(download.cc) * node->nb[0];
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    const size_t n_run = static_cast<size_t>(node->ne[0] / download.extent);
    for_rows(node, false, [&](int64_t row, size_t offset) {
        for (size_t r = 0; r < n_run; r++) {
            std::memcpy(data + offset + r * run + cc, from + (static_cast<size_t>(row) * n_run + r) * (run - cc),
                        run - cc);
        }
    });
}

void add(const ggml_tensor * node, const char * from) {
    auto *        sum = static_cast<float *>(node->data);
    const auto *  b   = reinterpret_cast<const float *>(from);
    const int64_t n   = node->ne[0] * node->ne[1] * node->ne[2] * node->ne[3];
    for (int64_t i = 0; i < n; i++) {
        sum[i] += b[i];
    }
}

} // namespace

Stats & stats() {
    static Stats the_stats;
    return the_stats;
}

//
// partner
//

Partner::Partner(ggml_backend_dev_t device)
    : device_(device), backend_(ggml_backend_dev_init(device, nullptr)),
      compute_(ggml_gallocr_new(ggml_backend_dev_buffer_type(device))) {
    if (!backend_ || !compute_) {
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(device) + " cannot be started");
    }
}

Partner::~Partner() {
    counters().device_compute -= static_cast<int64_t>(compute_bytes_);
    if (staging_) {
        counters().host_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(staging_.get()));
    }
}

bool Partner::allocate(Program & program) {
    if (!ggml_gallocr_reserve(compute_.get(), program.device_graph)) {
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + ggml_backend_dev_name(device_) +
                                           " has no memory left for activations; use a smaller micro-batch (-ub)");
    }
    const size_t bytes = ggml_gallocr_get_buffer_size(compute_.get(), 0);
    const bool   grown = bytes != compute_bytes_;
    counters().device_compute += static_cast<int64_t>(bytes) - static_cast<int64_t>(compute_bytes_);
    compute_bytes_ = bytes;
    if (!ggml_gallocr_alloc_graph(compute_.get(), program.device_graph)) {
        throw Error(OALLAMA_NO_MEMORY, "the device side of a sub-graph cannot be allocated");
    }
    grow_staging(program.staging_bytes);
    return grown;
}

void Partner::grow_staging(size_t size) {
    if (staging_ && size <= ggml_backend_buffer_get_size(staging_.get())) {
        return;
    }
    if (staging_) {
        counters().host_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(staging_.get()));
        staging_.reset();
    }
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device_);
    if (pinned != nullptr) {
        staging_.reset(ggml_backend_buft_alloc_buffer(pinned, size));
    }
    pinned_ = staging_ != nullptr;
    if (!staging_) {
        staging_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), std::max<size_t>(size, 64)));
    }
    if (!staging_) {
        throw std::bad_alloc();
    }
    staging_base_ = static_cast<char *>(ggml_backend_buffer_get_base(staging_.get()));
    counters().host_compute += static_cast<int64_t>(ggml_backend_buffer_get_size(staging_.get()));
}

//
// programs
//

SplitBackend::SplitBackend() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu != nullptr) {
        cpu_.reset(ggml_backend_dev_init(cpu, nullptr));
        cpu_reg_ = ggml_backend_dev_backend_reg(cpu);
    }
    if (!cpu_) {
        throw Error(OALLAMA_FAILED, "ggml has no CPU backend");
    }
}

SplitBackend::~SplitBackend() {
    counters().n_programs -= static_cast<int64_t>(n_programs_);
    cpu_.reset();
    if (pool_ != nullptr) {
        proc_address<ggml_threadpool_free_t>(cpu_reg_, "ggml_threadpool_free")(pool_);
    }
}

void SplitBackend::set_n_threads(int n_threads) {
    if (n_threads == n_threads_) {
        return;
    }
    proc_address<ggml_backend_set_n_threads_t>(cpu_reg_, "ggml_backend_set_n_threads")(cpu_.get(), n_threads);
    n_threads_ = n_threads;
    if (has_feature(cpu_reg_, "OPENMP")) {
        return;
    }
    auto new_pool  = proc_address<ggml_threadpool_new_t>(cpu_reg_, "ggml_threadpool_new");
    auto free_pool = proc_address<ggml_threadpool_free_t>(cpu_reg_, "ggml_threadpool_free");
    auto set_pool  = proc_address<ggml_backend_cpu_set_threadpool_t>(cpu_reg_, "ggml_backend_cpu_set_threadpool");
    if (new_pool == nullptr || free_pool == nullptr || set_pool == nullptr) {
        return; // ggml then makes threads for every graph
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = 0; // llama.cpp's own pool spins; ours sleeps while that one works
    ggml_threadpool * pool        = new_pool(&params);
    set_pool(cpu_.get(), pool);
    if (pool_ != nullptr) {
        free_pool(pool_);
    }
    pool_ = pool;
}

void SplitBackend::set_abort_callback(ggml_abort_callback callback, void * data) {
    auto set = proc_address<ggml_backend_set_abort_callback_t>(cpu_reg_, "ggml_backend_set_abort_callback");
    if (set != nullptr) {
        set(cpu_.get(), callback, data);
    }
}

Program & SplitBackend::find(const ggml_cgraph * graph) {
    make_signature(graph, scratch_);
    const uint64_t key   = hash_of(scratch_);
    const auto     found = programs_.find(key);
    if (found != programs_.end()) {
        for (const std::unique_ptr<Program> & program : found->second) {
            if (program->signature == scratch_) {
                program->last_used = ++clock_;
                return *program;
            }
        }
    }
    return build(graph, key);
}

Program & SplitBackend::build(const ggml_cgraph * graph, uint64_t key) {
    std::unique_ptr<Program> program = build_program(graph, scratch_);
    stats().n_built++;
    if (program->device != nullptr) {
        if (!partner_ || partner_->device() != program->device) {
            if (partner_) {
                throw Error(OALLAMA_UNSUPPORTED, "one context has weights on two devices");
            }
            partner_ = std::make_unique<Partner>(program->device);
        }
        if (partner_->allocate(*program)) {
            counters().n_programs -= static_cast<int64_t>(n_programs_);
            n_programs_ = 0;
            programs_.clear();
        }
    }
    if (n_programs_ >= max_programs) {
        evict();
    }
    program->last_used = ++clock_;
    n_programs_++;
    counters().n_programs++;
    std::vector<std::unique_ptr<Program>> & slot = programs_[key];
    slot.push_back(std::move(program));
    return *slot.back();
}

// Drops the half that was not used for longest.
void SplitBackend::evict() {
    std::vector<uint64_t> used;
    for (const auto & [key, slot] : programs_) {
        for (const auto & program : slot) {
            used.push_back(program->last_used);
        }
    }
    std::nth_element(used.begin(), used.begin() + static_cast<int64_t>(used.size() / 2), used.end());
    const uint64_t oldest_kept = used[used.size() / 2];
    for (auto slot = programs_.begin(); slot != programs_.end();) {
        auto & programs = slot->second;
        programs.erase(std::remove_if(programs.begin(), programs.end(),
                                      [&](const auto & program) { return program->last_used < oldest_kept; }),
                       programs.end());
        slot = programs.empty() ? programs_.erase(slot) : std::next(slot);
    }
    size_t left = 0;
    for (const auto & [key, slot] : programs_) {
        left += slot.size();
    }
    counters().n_programs -= static_cast<int64_t>(n_programs_ - left);
    n_programs_ = left;
}

void SplitBackend::prepare(ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    const Program & program = find(graph);
    if (params == nullptr || params->add_alloc_dep == nullptr || program.device == nullptr) {
        return;
    }
    ggml_tensor * last = graph->nodes[graph->n_nodes - 1];
    for (const Phase & phase : program.phases) {
        for (const Upload & upload : phase.uploads) {
            ggml_tensor * source = upload.origin.src < 0 ? graph->nodes[upload.origin.node]
                                                         : graph->nodes[upload.origin.node]->src[upload.origin.src];
            if (upload.packed && weight_of(source) == nullptr) {
                params->add_alloc_dep(params->user_data, source, last);
            }
        }
    }
}

//
// running
//

ggml_status SplitBackend::compute(ggml_cgraph * graph) {
    Stopwatch total;
    stats().n_graphs++;
    const ggml_status status = run(find(graph), graph);
    total.lap(stats().total_ns);
    return status;
}

ggml_status SplitBackend::run(Program & program, ggml_cgraph * graph) {
    for (const Binding & binding : program.bindings) {
        const ggml_tensor * origin = binding.origin.of(graph);
        binding.tensor->data       = origin->data;
        binding.tensor->buffer     = origin->buffer;
    }
    for (ggml_tensor * view : program.host_views) {
        view->data   = static_cast<char *>(view->view_src->data) + view->view_offs;
        view->buffer = view->view_src->buffer;
    }
    Stopwatch watch;
    for (const Phase & phase : program.phases) {
        stats().n_phases++;
        const bool on_device = phase.device_end > phase.device_begin;
        if (on_device) {
            launch(program, phase, graph);
            watch.lap(stats().launch_ns);
        }
        ggml_status status = GGML_STATUS_SUCCESS;
        if (phase.host_end > phase.host_begin) {
            ggml_cgraph range = graph_range(program.host_graph, phase.host_begin, phase.host_end);
            status            = ggml_backend_graph_compute(cpu_.get(), &range);
            watch.lap(stats().host_ns);
        }
        if (on_device) {
            ggml_backend_synchronize(partner_->backend()); // whatever became of the host side: the device must be idle
            watch.lap(stats().wait_ns);
            if (status == GGML_STATUS_SUCCESS) {
                join(phase, graph);
            }
            watch.lap(stats().join_ns);
        }
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
    return GGML_STATUS_SUCCESS;
}

void SplitBackend::launch(Program & program, const Phase & phase, const ggml_cgraph * graph) {
    ggml_backend_t device = partner_->backend();
    for (const Upload & upload : phase.uploads) {
        const ggml_tensor * source = upload.origin.of(graph);
        const size_t        bytes  = ggml_nbytes(upload.tensor);
        const char *        data   = host_data(source);
        if (!upload.packed) {
            char * packed = partner_->staging() + upload.staging;
            gather(source, upload.begin, upload.count, packed);
            data = packed;
        }
        ggml_backend_tensor_set_async(device, upload.tensor, data, 0, bytes);
        stats().bytes_in.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    }
    ggml_cgraph       range  = graph_range(program.device_graph, phase.device_begin, phase.device_end);
    const ggml_status status = ggml_backend_graph_compute_async(device, &range);
    if (status != GGML_STATUS_SUCCESS) {
        ggml_backend_synchronize(device);
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(partner_->device()) +
                                        " could not compute its side (ggml status " + std::to_string(status) + ")");
    }
    fetch(phase, graph);
}

// Queued behind the computation. Through pinned memory where the device has some, so that the call does not wait.
void SplitBackend::fetch(const Phase & phase, const ggml_cgraph * graph) {
    for (const Download & download : phase.downloads) {
        const ggml_tensor * node  = graph->nodes[download.node];
        const size_t        bytes = ggml_nbytes(download.tensor);
        const bool          place = download.direct && !partner_->pinned();
        char *              to =
            place ? static_cast<char *>(node->data) +
                        (download.join == Download::Join::copy ? 0 : static_cast<size_t>(download.cc) * node->nb[0])
                  : partner_->staging() + download.staging;
        ggml_backend_tensor_get_async(partner_->backend(), download.tensor, to, 0, bytes);
        stats().bytes_out.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    }
}

void SplitBackend::join(const Phase & phase, const ggml_cgraph * graph) {
    for (const Download & download : phase.downloads) {
        const ggml_tensor * node = graph->nodes[download.node];
        const char *        from = partner_->staging() + download.staging;
        if (download.direct && !partner_->pinned()) {
            continue;
        }
        switch (download.join) {
            case Download::Join::copy: std::memcpy(node->data, from, ggml_nbytes(download.tensor)); break;
            case Download::Join::add: add(node, from); break;
            case Download::Join::scatter:
                if (download.spread) {
                    spread(download, node);
                }
                scatter(download, node, from);
                break;
        }
    }
}

} // namespace oallama
