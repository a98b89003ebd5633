// A split buffer gets no memory when llama.cpp allocates it: what a tensor needs where is known only when all of the
// model's tensors are, and then the device may turn out to have less than the plan thought. So memory is taken when
// the first bytes arrive, for all weights at once.

#include "split_buffer.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "memory_plan.h"
#include "stats.h"

namespace oallama {

namespace {

constexpr size_t alignment = 64;

class SplitBuffer {
  public:
    explicit SplitBuffer(std::shared_ptr<LoadedPlan> plan) : plan_(std::move(plan)), load_(plan_->begin_load()) {}

    SplitBuffer(const SplitBuffer &)             = delete;
    SplitBuffer & operator=(const SplitBuffer &) = delete;

    ~SplitBuffer() {
        for (const auto & weight : weights_) {
            logged([&] { plan_->report(*weight, false); });
        }
        if (placed_) {
            counters().host_weights -= memory_.host_bytes;
            counters().device_weights -= memory_.device_bytes;
            counters().n_weights -= static_cast<int64_t>(weights_.size());
        }
        plan_->end_load(load_);
    }

    // Runs a step of the load. False where it failed: then the plan and the log say why.
    template <typename F> bool attempt(F && f) noexcept {
        if (logged(f) == OALLAMA_OK) {
            return true;
        }
        if (!failed_.exchange(true)) { // one sentence is enough
            guarded([this] { plan_->problem(load_, last_error(), false); });
        }
        return false;
    }

    bool failed() const { return failed_; }

    void note(const std::string & sentence) { plan_->problem(load_, "not as planned: " + sentence, true); }

    void add(ggml_tensor * tensor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        require(!tried_, std::string(tensor->name) + " comes too late: what is loaded with it has its memory already");
        weights_.push_back(std::make_unique<SplitWeight>(tensor, plan_->slice_of(tensor)));
        if (plan_->keeps_uses()) {
            weights_.back()->count_uses();
        }
        tensor->extra = weights_.back().get();
    }

    bool place() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (tried_) {
            return placed_;
        }
        tried_  = true;
        placed_ = attempt([this] {
            if (plan_->lacks_residents()) {
                note(std::string("blocks cannot live on ") + ggml_backend_dev_name(plan_->device()) +
                     ", which takes no buffer type but its own: what they read and give crosses through host memory");
            }
            memory_ = place_weights(weights_, plan_->device(), plan_->spec(),
                                    [this](const std::string & sentence) { note(sentence); });
            for (const auto & weight : weights_) {
                plan_->report(*weight, true);
            }
        });
        if (placed_) {
            counters().host_weights += memory_.host_bytes;
            counters().device_weights += memory_.device_bytes;
            counters().n_weights += static_cast<int64_t>(weights_.size());
        }
        return placed_;
    }

    void clear(uint8_t value) {
        if (place()) {
            for (const BufferPtr & buffer : memory_.buffers) {
                ggml_backend_buffer_clear(buffer.get(), value);
            }
        }
    }

  private:
    std::shared_ptr<LoadedPlan>               plan_;
    uint64_t                                  load_;
    std::vector<std::unique_ptr<SplitWeight>> weights_;
    WeightMemory                              memory_;
    std::mutex                                mutex_;
    std::atomic<bool>                         failed_{false};
    bool                                      tried_  = false;
    bool                                      placed_ = false;
};

SplitBuffer & context_of(ggml_backend_buffer_t buffer) {
    return *static_cast<SplitBuffer *>(buffer->context);
}

//
// buffer
//

void split_buffer_free_buffer(ggml_backend_buffer_t buffer) {
    delete static_cast<SplitBuffer *>(buffer->context);
}

// Nothing is ever read there; ggml wants an address to add offsets to.
void * split_buffer_get_base(ggml_backend_buffer_t /*buffer*/) {
    return reinterpret_cast<void *>(uintptr_t{0x1000});
}

ggml_status split_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    SplitBuffer & context = context_of(buffer);
    return context.attempt([&] { context.add(tensor); }) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

// A tensor's weight, and how far into it the tensor begins: views are read and written too.
struct Place {
    SplitWeight * weight;
    size_t        offset;
};

Place place_of(const ggml_tensor * tensor) {
    const ggml_tensor * whole = tensor->view_src == nullptr ? tensor : tensor->view_src;
    return {weight_of(whole), tensor->view_src == nullptr ? 0 : tensor->view_offs};
}

void split_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                             size_t size) {
    const Place   place   = place_of(tensor);
    SplitBuffer & context = context_of(buffer);
    if (place.weight == nullptr || !context.place()) {
        return; // said by plan problems, and by the first graph, which fails
    }
    context.attempt([&] { place.weight->set(data, place.offset + offset, size); });
}

void split_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                                size_t size) {
    if (!context_of(buffer).place()) {
        return;
    }
    std::array<uint8_t, 4096> bytes;
    bytes.fill(value);
    for (size_t at = 0; at < size; at += bytes.size()) {
        split_buffer_set_tensor(buffer, tensor, bytes.data(), offset + at, std::min(size - at, bytes.size()));
    }
}

void split_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                             size_t size) {
    std::memset(data, 0, size);
    const Place   place   = place_of(tensor);
    SplitBuffer & context = context_of(buffer);
    if (place.weight != nullptr && context.place()) {
        context.attempt([&] { place.weight->get(data, place.offset + offset, size); });
    }
}

void split_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    context_of(buffer).clear(value);
}

const ggml_backend_buffer_i split_buffer_i = {
    /* .free_buffer   = */ split_buffer_free_buffer,
    /* .get_base      = */ split_buffer_get_base,
    /* .init_tensor   = */ split_buffer_init_tensor,
    /* .memset_tensor = */ split_buffer_memset_tensor,
    /* .set_tensor    = */ split_buffer_set_tensor,
    /* .get_tensor    = */ split_buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ nullptr,
    /* .clear         = */ split_buffer_clear,
    /* .reset         = */ nullptr,
};

//
// buffer type
//

const char * split_buft_get_name(ggml_backend_buffer_type_t /*buft*/) {
    return "OALLAMA_Split";
}

ggml_backend_buffer_t split_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = nullptr;
    logged([&] {
        auto plan = static_cast<LoadedPlan *>(buft->context)->shared_from_this();
        plan->device(); // where it is missing, the load fails here
        auto context = std::make_unique<SplitBuffer>(std::move(plan));
        buffer       = ggml_backend_buffer_init(buft, split_buffer_i, context.release(), size);
    });
    return buffer;
}

size_t split_buft_get_alignment(ggml_backend_buffer_type_t /*buft*/) {
    return alignment;
}

bool split_buft_is_host(ggml_backend_buffer_type_t /*buft*/) {
    return false;
}

} // namespace

const ggml_backend_buffer_type_i split_buft_i = {
    /* .get_name       = */ split_buft_get_name,
    /* .alloc_buffer   = */ split_buft_alloc_buffer,
    /* .get_alignment  = */ split_buft_get_alignment,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ nullptr,
    /* .is_host        = */ split_buft_is_host,
};

//
// tensors
//

bool is_split_buft(ggml_backend_buffer_type_t buft) {
    return buft != nullptr && buft->iface.get_name == split_buft_get_name;
}

LoadedPlan * plan_of(const ggml_tensor * tensor) {
    if (tensor == nullptr || tensor->view_src != nullptr || tensor->buffer == nullptr ||
        !is_split_buft(tensor->buffer->buft)) {
        return nullptr;
    }
    return static_cast<LoadedPlan *>(tensor->buffer->buft->context);
}

SplitWeight * weight_of(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr ? nullptr : static_cast<SplitWeight *>(tensor->extra);
}

bool is_sound(const ggml_tensor * tensor) {
    return plan_of(tensor) == nullptr || !context_of(tensor->buffer).failed();
}

void note(const ggml_tensor * tensor, const std::string & sentence) {
    context_of(tensor->buffer).note(sentence);
}

bool ensure_placed(const ggml_tensor * tensor) {
    return weight_of(tensor) != nullptr && context_of(tensor->buffer).place();
}

} // namespace oallama
