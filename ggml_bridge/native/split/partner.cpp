#include "partner.h"

#include <algorithm>

#include "pinned.h"
#include "stats.h"

namespace oallama {

Partner::Partner(ggml_backend_dev_t device)
    : device_(device), backend_(ggml_backend_dev_init(device, nullptr)),
      compute_(ggml_gallocr_new(ggml_backend_dev_buffer_type(device))) {
    if (!backend_ || !compute_) {
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(device) + " cannot be started");
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(device, &props);
    mark_.reset(props.caps.events ? ggml_backend_event_new(device) : nullptr);
}

Partner::~Partner() {
    counters().device_compute -= static_cast<int64_t>(compute_bytes_);
    if (staging_) {
        counters().host_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(staging_.get()));
    }
}

// A place in the ring for what every phase streams; its tensors are in a slot before activations get the rest of the
// memory.
void Partner::place_streamed(Program & program, size_t slot) {
    for (Phase & phase : program.phases) {
        if (phase.streamed.empty()) {
            continue;
        }
        if (!stream_) {
            stream_ = std::make_unique<Stream>(device_, program.stream);
        }
        std::vector<StreamedPart> parts;
        for (const Streamed & streamed : phase.streamed) {
            parts.push_back(streamed.part);
        }
        phase.block = stream_->block(parts);
    }
    for (const Phase & phase : program.phases) { // the ring may have moved while it grew
        for (size_t i = 0; i < phase.streamed.size(); i++) {
            stream_->bind(phase.streamed[i].tensor, *phase.block, i, slot);
        }
        slot = phase.block != nullptr ? stream_->slot_after(slot) : slot;
    }
}

bool Partner::allocate(Program & program, size_t slot) {
    place_streamed(program, slot);
    const bool   reserved = ggml_gallocr_reserve(compute_.get(), program.device_graph);
    const size_t bytes    = ggml_gallocr_get_buffer_size(compute_.get(), 0);
    const bool   moved    = bytes != compute_bytes_; // to a larger buffer, or, when there was no room, to none
    counters().device_compute += static_cast<int64_t>(bytes) - static_cast<int64_t>(compute_bytes_);
    compute_bytes_ = bytes;
    if (!reserved || !ggml_gallocr_alloc_graph(compute_.get(), program.device_graph)) {
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + ggml_backend_dev_name(device_) +
                                           " has no memory left for activations; use a smaller micro-batch (-ub)");
    }
    if (const ggml_tensor * node = find_overwriting(program.device_graph); node != nullptr) {
        throw Error(OALLAMA_FAILED, std::string("the memory of what is sent to ") + ggml_backend_dev_name(device_) +
                                        " was given to " + ggml_op_name(node->op) + " as well; please report this");
    }
    grow_staging(program.staging_bytes);
    return moved;
}

bool Partner::mark() {
    if (mark_ == nullptr) {
        return false;
    }
    ggml_backend_event_record(mark_.get(), backend_.get());
    return true;
}

void Partner::await_mark() const {
    ggml_backend_event_synchronize(mark_.get());
}

bool Partner::is_pinned(const ggml_tensor * tensor) const {
    const ggml_tensor * whole = tensor->view_src == nullptr ? tensor : tensor->view_src;
    return oallama::is_pinned(whole->buffer, device_);
}

void Partner::grow_staging(size_t size) {
    if (staging_ && size <= ggml_backend_buffer_get_size(staging_.get())) {
        return;
    }
    if (staging_) {
        counters().host_compute -= static_cast<int64_t>(ggml_backend_buffer_get_size(staging_.get()));
        staging_.reset();
    }
    staging_ = new_pinned(device_, size);
    pinned_  = staging_ != nullptr;
    if (!staging_) {
        staging_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), std::max<size_t>(size, 64)));
    }
    if (!staging_) {
        throw std::bad_alloc();
    }
    staging_base_ = static_cast<char *>(ggml_backend_buffer_get_base(staging_.get()));
    counters().host_compute += static_cast<int64_t>(ggml_backend_buffer_get_size(staging_.get()));
}

} // namespace oallama
