#include "device_side.h"

#include <algorithm>

namespace oallama {

DeviceSide::DeviceSide(ggml_backend_dev_t device)
    : device_(device), compute_(ggml_backend_dev_init(device, nullptr)),
      activations_(ggml_gallocr_new(ggml_backend_dev_buffer_type(device))) {
    if (!compute_ || !activations_) {
        throw Error(OALLAMA_FAILED, std::string("device ") + name() + " cannot be started");
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(device, &props);
    mark_.reset(props.caps.events ? ggml_backend_event_new(device) : nullptr);
}

DeviceSide::~DeviceSide() {
    counters().device_compute -= static_cast<int64_t>(n_activation_bytes_);
}

bool DeviceSide::allocate(Program & program, size_t slot) {
    place_streamed(program, slot);
    open_fetching(program);
    const bool   reserved = ggml_gallocr_reserve(activations_.get(), program.device_graph);
    const size_t bytes    = ggml_gallocr_get_buffer_size(activations_.get(), 0);
    const bool   moved    = bytes != n_activation_bytes_; // to a larger buffer, or, when there was no room, to none
    counters().device_compute += static_cast<int64_t>(bytes) - static_cast<int64_t>(n_activation_bytes_);
    n_activation_bytes_ = bytes;
    if (!reserved || !ggml_gallocr_alloc_graph(activations_.get(), program.device_graph)) {
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + name() +
                                           " has no memory left for activations; use a smaller micro-batch (-ub)");
    }
    return moved;
}

// A place in the ring for what every phase streams; its tensors are in a slot before activations get the rest of the
// memory.
void DeviceSide::place_streamed(Program & program, size_t slot) {
    for (Phase & phase : program.phases) {
        if (phase.streamed.empty()) {
            continue;
        }
        std::vector<StreamedPart> parts;
        for (const Streamed & streamed : phase.streamed) {
            parts.push_back(streamed.part);
        }
        phase.block = stream(program.stream).block(parts);
    }
    for (const Phase & phase : program.phases) { // the ring may have moved while it grew
        for (size_t i = 0; i < phase.streamed.size(); i++) {
            stream_->bind(phase.streamed[i].tensor, *phase.block, slot, phase.block->offsets[i]);
        }
        slot = phase.block != nullptr ? stream_->slot_after(slot) : slot;
    }
}

void DeviceSide::open_fetching(const Program & program) {
    const bool fetches = std::any_of(program.phases.begin(), program.phases.end(),
                                     [](const Phase & phase) { return !phase.inputs.empty(); });
    if (fetches && has_events() && !fetching_) {
        fetching_.reset(ggml_backend_dev_init(device_, nullptr));
    }
}

void DeviceSide::finish() const {
    synchronize();
    ggml_backend_synchronize(fetching());
}

bool DeviceSide::mark() {
    if (has_events()) {
        ggml_backend_event_record(mark_.get(), fetching());
    }
    return has_events();
}

Stream & DeviceSide::stream(const StreamSpec & spec) {
    if (!stream_) {
        stream_ = std::make_unique<Stream>(device_, spec);
    }
    return *stream_;
}

} // namespace oallama
