#include "device_side.h"

#include <algorithm>

namespace oallama {

void CopyState::forget_copies() {
    small_copies.forget();
    last_segment = nullptr;
}

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
    for (const auto & biases : slot_biases_) {
        count_compute(device_, -static_cast<int64_t>(ggml_backend_buffer_get_size(biases->buffer.get())));
    }
    count_compute(device_, -static_cast<int64_t>(n_activation_bytes_));
}

bool DeviceSide::allocate(Program & program, size_t slot) {
    place_biases(program);
    place_streamed(program, slot);
    open_fetching(program);
    const bool   reserved = ggml_gallocr_reserve(activations_.get(), program.device_graph);
    const size_t bytes    = ggml_gallocr_get_buffer_size(activations_.get(), 0);
    const bool   moved    = bytes != n_activation_bytes_; // to a larger buffer, or, when there was no room, to none
    count_compute(device_, static_cast<int64_t>(bytes) - static_cast<int64_t>(n_activation_bytes_));
    n_activation_bytes_ = bytes;
    if (!reserved || !ggml_gallocr_alloc_graph(activations_.get(), program.device_graph)) {
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + name() +
                                           " has no memory left for activations; use a smaller micro-batch (-ub)");
    }
    if (program.exchange != ExchangeMode::off && !exchange_) {
        exchange_ = std::make_unique<Exchange>(stream(program.stream), program.exchange == ExchangeMode::eager);
    }
    return moved;
}

// Biases of experts in slots have memory of their own, the same for all programs: a token finds there what those before
// it were sent.
void DeviceSide::place_biases(Program & program) {
    for (Segment & segment : program.segments) {
        for (Upload & upload : segment.uploads) {
            if (upload.what != Upload::What::biases) {
                continue;
            }
            const auto & table = segment.routings[static_cast<size_t>(upload.routed)].weights.front()->table();
            const auto   known = std::find_if(slot_biases_.begin(), slot_biases_.end(), [&](const auto & held) {
                return held->biases == upload.biases && held->table == table;
            });
            if (known != slot_biases_.end()) {
                upload.slots = known->get();
            } else {
                slot_biases_.push_back(new_biases(upload, table));
                upload.slots = slot_biases_.back().get();
            }
            upload.tensor->buffer = upload.slots->buffer.get();
            upload.tensor->data   = ggml_backend_buffer_get_base(upload.tensor->buffer);
        }
    }
}

std::unique_ptr<SlotBiases> DeviceSide::new_biases(const Upload & upload, const std::shared_ptr<ExpertTable> & table) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device_);
    BufferPtr buffer(ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alloc_size(buft, upload.tensor)));
    if (!buffer) {
        throw Error(OALLAMA_NO_MEMORY, std::string("device ") + name() + " has no memory left for biases of experts");
    }
    ggml_backend_buffer_clear(buffer.get(), 0);
    count_compute(device_, static_cast<int64_t>(ggml_backend_buffer_get_size(buffer.get())));
    return std::make_unique<SlotBiases>(
        SlotBiases{upload.biases, table, std::move(buffer), std::vector<int32_t>(table->expert_in().size(), -1)});
}

// A place in the ring for what every segment streams; its tensors are in a slot before activations get the rest of the
// memory.
void DeviceSide::place_streamed(Program & program, size_t slot) {
    for (Segment & segment : program.segments) {
        if (segment.streamed.empty()) {
            continue;
        }
        std::vector<StreamedPart> parts;
        for (const Streamed & streamed : segment.streamed) {
            parts.push_back(streamed.part);
        }
        segment.block = stream(program.stream).block(parts, segment.n_used);
    }
    for (const Segment & segment : program.segments) { // the ring may have moved while it grew
        for (size_t i = 0; i < segment.streamed.size(); i++) {
            stream_->bind(segment.streamed[i].tensor, *segment.block, slot, segment.block->offsets[i]);
        }
        slot = segment.block != nullptr ? stream_->slot_after(slot) : slot;
    }
}

void DeviceSide::open_fetching(const Program & program) {
    const bool downloads = std::any_of(program.segments.begin(), program.segments.end(),
                                       [](const Segment & segment) { return !segment.inputs.empty(); });
    if (downloads && has_events() && !downloading_) {
        downloading_.reset(ggml_backend_dev_init(device_, nullptr));
    }
}

void DeviceSide::finish() const {
    synchronize();
    ggml_backend_synchronize(downloading());
}

bool DeviceSide::mark() {
    if (has_events()) {
        ggml_backend_event_record(mark_.get(), downloading());
    }
    return has_events();
}

void DeviceSide::ask_ahead(Time until, int64_t n_tokens) {
    if (streams() && n_tokens == copy_state.streamed) {
        stream_->prefetch(copy_state.slot, n_tokens, until);
    }
    if (exchange_) {
        exchange_->go_on(until);
    }
}

// The device has been given what it computes between two segments: until it has done that, nothing is sent to it.
void DeviceSide::computes_input(int64_t n_tokens) {
    SmallCopies & copies = copy_state.small_copies;
    Segment *     last   = copy_state.last_segment;
    if (last == nullptr || last->pacing.feeds_device || copies.is_last(last->pacing.results_sent)) {
        return; // no new input was sent
    }
    copies.forget(); // the first interval also has llama.cpp's own copy of the result
    last->pacing.feeds_device = true;
    copies.copied(&last->pacing.fed);
    ask_ahead(copies.due(), n_tokens);
}

Stream & DeviceSide::stream(const StreamSpec & spec) {
    if (!stream_) {
        stream_ = std::make_unique<Stream>(device_, spec);
    }
    return *stream_;
}

} // namespace oallama
