#include "host.h"

#include <algorithm>
#include <cstring>

#include "pinned.h"
#include "stats.h"

namespace oallama {

namespace {

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

} // namespace

Host::Host() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu != nullptr) {
        backend_.reset(ggml_backend_dev_init(cpu, nullptr));
        reg_ = ggml_backend_dev_backend_reg(cpu);
    }
    if (!backend_) {
        throw Error(OALLAMA_FAILED, "ggml has no CPU backend");
    }
}

Host::~Host() {
    if (made_) {
        counters().host_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(made_.get()));
    }
    backend_.reset();
    if (pool_ != nullptr) {
        proc_address<ggml_threadpool_free_t>(reg_, "ggml_threadpool_free")(pool_);
    }
}

void Host::set_n_threads(int n_threads) {
    if (n_threads == n_threads_) {
        return;
    }
    proc_address<ggml_backend_set_n_threads_t>(reg_, "ggml_backend_set_n_threads")(backend_.get(), n_threads);
    n_threads_ = n_threads;
    if (has_feature(reg_, "OPENMP")) {
        return;
    }
    auto new_pool  = proc_address<ggml_threadpool_new_t>(reg_, "ggml_threadpool_new");
    auto free_pool = proc_address<ggml_threadpool_free_t>(reg_, "ggml_threadpool_free");
    auto set_pool  = proc_address<ggml_backend_cpu_set_threadpool_t>(reg_, "ggml_backend_cpu_set_threadpool");
    if (new_pool == nullptr || free_pool == nullptr || set_pool == nullptr) {
        return; // ggml then makes threads for every graph
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = 0; // llama.cpp's own pool spins; ours sleeps while that one works
    ggml_threadpool * pool        = new_pool(&params);
    set_pool(backend_.get(), pool);
    if (pool_ != nullptr) {
        free_pool(pool_);
    }
    pool_ = pool;
}

void Host::set_abort_callback(ggml_abort_callback callback, void * data) {
    auto set = proc_address<ggml_backend_set_abort_callback_t>(reg_, "ggml_backend_set_abort_callback");
    if (set != nullptr) {
        set(backend_.get(), callback, data);
    }
}

void Host::reserve(const Program & program) {
    const size_t held  = made_ ? ggml_backend_buffer_get_size(made_.get()) : 0;
    const size_t bytes = std::max(program.host_bytes, held);
    const bool   moves = program.resident && pinned_for_ != program.device;
    if (program.host_bytes == 0 || (program.host_bytes <= held && !moves)) {
        return;
    }
    pinned_for_ = program.resident ? program.device : pinned_for_;
    BufferPtr larger(pinned_for_ == nullptr ? nullptr : new_pinned(pinned_for_, bytes));
    if (!larger) {
        larger.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes));
    }
    if (!larger) {
        throw std::bad_alloc();
    }
    made_ = std::move(larger);
    counters().host_compute +=
        static_cast<int64_t>(ggml_backend_buffer_get_size(made_.get())) - static_cast<int64_t>(held);
}

bool Host::is_pinned(ggml_backend_dev_t device) const {
    return oallama::is_pinned(made_.get(), device);
}

void Host::place(const Program & program) const {
    for (const Staged & staged : program.host_staged) {
        staged.tensor->data   = static_cast<char *>(ggml_backend_buffer_get_base(made_.get())) + staged.at;
        staged.tensor->buffer = made_.get();
    }
}

} // namespace oallama
