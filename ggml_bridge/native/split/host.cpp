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

// Smallest amount of memory that all threads work on: for less, waking them takes longer than the work.
constexpr size_t min_shared_bytes = size_t{512} << 10;

} // namespace

Host::Host() : ctx_(new_context(1, 1, 1)) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu != nullptr) {
        backend_.reset(ggml_backend_dev_init(cpu, nullptr));
        reg_ = ggml_backend_dev_backend_reg(cpu);
    }
    if (!backend_) {
        throw Error(OALLAMA_FAILED, "ggml has no CPU backend");
    }
    const auto compute = [](ggml_tensor *, int ith, int nth, void * userdata) {
        const Host & host = *static_cast<Host *>(userdata);
        (*host.work_)(host.n_items_ * ith / nth, host.n_items_ * (ith + 1) / nth);
    };
    graph_ = ggml_new_graph_custom(ctx_.get(), 1, false);
    ggml_build_forward_expand(
        graph_, ggml_custom_4d(ctx_.get(), GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, compute, GGML_N_TASKS_MAX, this));
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

// llama.cpp calls this before each of its graphs. Its own pool gives this thread the cores and the priority that the
// user wants, possibly after ours was made: then ours is made anew.
void Host::set_n_threads(int n_threads) {
    const ThreadSettings settings = pool_ == nullptr ? settings_ : ThreadSettings::of_this_thread();
    if (n_threads == n_threads_ && settings == settings_) {
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
    settings_                     = ThreadSettings::of_this_thread();
    ggml_threadpool_params params = settings_.pool_params(n_threads);
    ggml_threadpool *      pool   = new_pool(&params);
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

void Host::share(int64_t n, size_t bytes, const Share & work) {
    if (n_threads_ < 2 || n < 2 || bytes < min_shared_bytes) {
        work(0, n);
        return;
    }
    n_items_ = n;
    work_    = &work;
    ggml_backend_graph_compute(backend_.get(), graph_); // an abort comes too late to stop its only node
}

// Moves ranges of items, the last range first. Within a range, all new places lie behind all packed items, so threads
// can move them in any order. A range too small to share is moved with all items before it, from the last item on.
void Host::spread(char * data, int64_t n, size_t bytes_each, const std::function<size_t(int64_t item)> & place) {
    const auto move = [&](int64_t begin, int64_t end) {
        for (int64_t i = end; i-- > begin;) {
            std::memmove(data + place(i), data + static_cast<size_t>(i) * bytes_each, bytes_each);
        }
    };
    for (int64_t end = n; end > 0;) {
        int64_t begin = 0;
        for (int64_t stays = end; begin < stays;) { // first item whose place is behind all packed ones
            const int64_t middle = (begin + stays) / 2;
            if (place(middle) >= static_cast<size_t>(end) * bytes_each) {
                stays = middle;
            } else {
                begin = middle + 1;
            }
        }
        const size_t bytes = static_cast<size_t>(end - begin) * bytes_each;
        if (bytes < min_shared_bytes) {
            move(0, end);
            return;
        }
        share(end - begin, bytes, [&](int64_t first, int64_t last) { move(begin + first, begin + last); });
        end = begin;
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
