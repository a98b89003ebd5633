#include "host.h"

#include <algorithm>
#include <cstring>

namespace oallama {

namespace {

// Smallest amount of memory that all threads work on: for less, waking them takes longer than the work.
constexpr size_t min_shared_bytes = size_t{512} << 10;

int64_t size_of(const Scratch & scratch) {
    return scratch.buffer ? static_cast<int64_t>(ggml_backend_buffer_get_size(scratch.buffer.get())) : 0;
}

} // namespace

Host::Host() : ctx_(new_context(1, 1, 1)) {
    const auto compute = [](ggml_tensor *, int ith, int nth, void * userdata) {
        const Host & host = *static_cast<Host *>(userdata);
        (*host.work_)(host.n_items_ * ith / nth, host.n_items_ * (ith + 1) / nth);
    };
    graph_ = ggml_new_graph_custom(ctx_.get(), 1, false);
    ggml_build_forward_expand(
        graph_, ggml_custom_4d(ctx_.get(), GGML_TYPE_I8, 1, 1, 1, 1, nullptr, 0, compute, GGML_N_TASKS_MAX, this));
}

Host::~Host() {
    for (const Scratch & scratch : scratches_) {
        counters().host_compute -= size_of(scratch);
    }
}

// llama.cpp calls this before each of its graphs.
void Host::set_n_threads(int n_threads) {
    n_threads_ = n_threads;
    cpu_.set_n_threads(n_threads);
}

void Host::share(int64_t n, size_t bytes, const Share & work) {
    if (n_threads_ < 2 || n < 2 || bytes < min_shared_bytes) {
        work(0, n);
        return;
    }
    n_items_ = n;
    work_    = &work;
    ggml_backend_graph_compute(cpu_.get(), graph_); // an abort comes too late to stop its only node
}

void Host::spread(char * data, int64_t n, size_t bytes_each, const std::function<size_t(int64_t item)> & place) {
    for (int64_t i = n; i-- > 0;) {
        std::memmove(data + place(i), data + static_cast<size_t>(i) * bytes_each, bytes_each);
    }
}

void Host::reserve(Program & program) {
    if (program.host_bytes == 0) {
        return;
    }
    const auto   shared  = std::find_if(scratches_.begin(), scratches_.end(), [&](const Scratch & scratch) {
        return program.device == nullptr || scratch.pinned_for == nullptr ||
               ggml_backend_dev_host_buffer_type(scratch.pinned_for) ==
                   ggml_backend_dev_host_buffer_type(program.device);
    });
    Scratch &    scratch = shared != scratches_.end() ? *shared : scratches_.emplace_back();
    const bool   moves   = program.device != nullptr && scratch.pinned_for == nullptr;
    const auto   held    = static_cast<size_t>(size_of(scratch));
    const size_t bytes   = std::max(program.host_bytes, held);
    program.scratch      = &scratch;
    if (program.host_bytes <= held && !moves) {
        return;
    }
    scratch.pinned_for = moves ? program.device : scratch.pinned_for;
    BufferPtr larger(scratch.pinned_for == nullptr ? nullptr : new_pinned(scratch.pinned_for, bytes));
    if (!larger) {
        larger.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes));
    }
    if (!larger) {
        throw std::bad_alloc();
    }
    scratch.buffer = std::move(larger);
    counters().host_compute += size_of(scratch) - static_cast<int64_t>(held);
}

char * Host::scratch() const {
    return static_cast<char *>(ggml_backend_buffer_get_base(scratch_->buffer.get()));
}

bool Host::is_pinned(ggml_backend_dev_t device) const {
    return scratch_ != nullptr && oallama::is_pinned(scratch_->buffer.get(), device);
}

void Host::place(const Program & program) {
    scratch_ = program.scratch;
    for (const Staged & staged : program.staged) {
        staged.tensor->data   = scratch() + staged.at;
        staged.tensor->buffer = scratch_->buffer.get();
    }
}

size_t offset_of(const ggml_tensor * tensor, int64_t row) {
    const auto i1 = static_cast<size_t>(row % tensor->ne[1]);
    const auto i2 = static_cast<size_t>(row / tensor->ne[1] % tensor->ne[2]);
    const auto i3 = static_cast<size_t>(row / tensor->ne[1] / tensor->ne[2]);
    return i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
}

const char * host_data(const ggml_tensor * tensor) {
    const SplitWeight * weight = weight_of(tensor);
    return static_cast<const char *>(weight == nullptr ? tensor->data : weight->whole_on_host().tensor->data);
}

int64_t n_rows(const ggml_tensor * tensor) {
    return tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}

void gather(const ggml_tensor * src, int64_t begin, int64_t count, Rows rows, char * out) {
    const char * data  = host_data(src) + static_cast<size_t>(begin) * src->nb[0];
    const size_t bytes = static_cast<size_t>(count) * src->nb[0];
    if (count == src->ne[0] && ggml_is_contiguous(src)) { // routing weights are rows of one number
        std::memcpy(out, data + static_cast<size_t>(rows.first) * bytes, static_cast<size_t>(rows.count) * bytes);
        return;
    }
    for (int64_t row = 0; row < rows.count; row++) {
        std::memcpy(out + static_cast<size_t>(row) * bytes, data + offset_of(src, rows.first + row), bytes);
    }
}

} // namespace oallama
