#include "split_backend.h"

#include <algorithm>
#include <utility>

#include "split_chunk.h"
#include "split_resident.h"
#include "stats.h"

namespace oallama {

//
// programs
//

// A sub-graph has a program for each slot that its first streamed block comes to lie in, such as both of two where an
// odd number of blocks takes turns: so no device graph's tensors move, and CUDA can capture it.
Program & SplitBackend::find(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot) {
    make_signature(graph, memory, scratch_);
    const bool streams = may_stream(graph);
    if (streams) {
        scratch_.push_back(slot);
    }
    Program * known = programs_.find(scratch_);
    if (known == nullptr && streams) {
        known           = find_held();
        scratch_.back() = slot;
    }
    return known != nullptr ? *known : build(graph, memory, slot);
}

// The program for another slot, where its first streamed block lies in that slot already; NULL: there is none.
Program * SplitBackend::find_held() {
    const size_t n_slots = partner_ && partner_->streams() ? partner_->stream().n_slots() : 0;
    for (size_t slot = 0; slot < n_slots; slot++) {
        scratch_.back() = slot;
        Program * known = programs_.find(scratch_);
        for (size_t i = 0; known != nullptr && i < known->phases.size(); i++) {
            const StreamBlock * block = known->phases[i].block;
            if (block != nullptr && partner_->stream().is_in(slot, *block)) {
                return known;
            }
            if (block != nullptr) {
                break;
            }
        }
    }
    return nullptr;
}

// The slot of the ring that the next streamed block takes.
size_t SplitBackend::next_slot() const {
    return partner_ && partner_->streams() ? partner_->stream().next_slot() : 0;
}

Program & SplitBackend::build(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot) {
    std::unique_ptr<Program> program = build_program(graph, memory, scratch_);
    stats().n_built++;
    host_.reserve(*program);
    if (program->device != nullptr) {
        if (!partner_ || partner_->device() != program->device) {
            if (partner_) {
                throw Error(OALLAMA_UNSUPPORTED, "one context has weights on two devices");
            }
            partner_ = std::make_unique<Partner>(program->device);
        }
        bool moved = true;
        try {
            moved = partner_->allocate(*program, slot);
        } catch (...) {
            forget();
            throw;
        }
        if (moved) {
            forget();
        }
        note_pageable(graph, *program);
    }
    if (programs_.make_room(program->bytes)) {
        forget_turns();
    }
    return programs_.add(std::move(program));
}

// Where the device has pinned memory, and there was none left for what this program sends and receives.
void SplitBackend::note_pageable(const ggml_cgraph * graph, const Program & program) const {
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(program.device);
    const bool                 own    = program.host_bytes == 0 || !program.resident || host_.is_pinned(program.device);
    if (pinned == nullptr || (partner_->pinned() && own)) {
        return;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        if (plan_of(graph->nodes[i]->src[0]) != nullptr) {
            note(graph->nodes[i]->src[0], "no pinned host memory is left for activations: copies from and to plain "
                                          "memory hold up the CPU");
            return;
        }
    }
}

void SplitBackend::forget() {
    forget_turns();
    programs_.clear();
}

void SplitBackend::prepare(ggml_cgraph * graph, ggml_backend_dev_t memory,
                           ggml_backend_graph_optimize_params * params) {
    if (computes_nothing(*graph)) {
        return;
    }
    if (const int64_t n_tokens = chunk_of(graph); n_tokens > 0) {
        for_chunks(graph, n_tokens, [&](ggml_cgraph * chunk) {
            prepare(chunk, memory, nullptr);
            return GGML_STATUS_SUCCESS;
        });
        return; // its one node is the last to read what is sent
    }
    foreseen_               = preparing_ ? foreseen_ : next_slot();
    const bool failed       = std::exchange(preparing_, true) && !prepared_; // for a sub-graph before
    prepared_               = false;                                         // where this fails
    const Program & program = find(graph, memory, foreseen_);
    prepared_               = !failed;
    for (const Phase & phase : program.phases) {
        foreseen_ = phase.block == nullptr ? foreseen_ : partner_->stream().slot_after(foreseen_);
    }
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
// small copies, between which copies of weights may be asked for
//

void SplitBackend::forget_turns() {
    turns_.forget();
    last_ = nullptr;
}

// All of a phase is computed.
void SplitBackend::end(Phase & phase) {
    if (phase.pace.feeds_device) {
        turns_.made(nullptr);
    }
    phase.pace.feeds_device = false;
    last_                   = &phase;
    slot_                   = no_slot;
}

// As far as the link comes before the next small copy is due. Not while a batch of another size is computed than that
// which streamed last: decode may stream nothing, and needs no weights of a prompt.
void SplitBackend::ask_ahead() {
    if (partner_->streams() && n_tokens_ == streamed_) {
        partner_->stream().prefetch(slot_, turns_.due());
    }
}

// The device has been given what it computes between two phases: until it has done that, nothing is sent to it.
void SplitBackend::device_computes() {
    if (last_ == nullptr || last_->pace.feeds_device || turns_.is_last(last_->pace.lifted)) {
        return; // or computes with what was there already
    }
    turns_.forget(); // the first time: it has gone on for longer, until llama.cpp had sent the result
    last_->pace.feeds_device = true;
    turns_.made(&last_->pace.fed);
    ask_ahead();
}

//
// running
//

ggml_status SplitBackend::compute(ggml_cgraph * graph, ggml_backend_dev_t memory) {
    stats().n_graphs++;
    if (computes_nothing(*graph)) {
        return GGML_STATUS_SUCCESS;
    }
    preparing_ = false;
    Stopwatch total;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * weight = graph->nodes[i]->src[0];
        if (weight != nullptr && !is_sound(weight)) {
            throw Error(OALLAMA_FAILED,
                        std::string("nothing is computed with ") + weight->name +
                            ": what was loaded with it failed; the plan's problems and the log say why");
        }
    }
    const auto        whole    = [&](ggml_cgraph * part) { return run(find(part, memory, next_slot()), part); };
    const int64_t     n_tokens = chunk_of(graph);
    const ggml_status status   = n_tokens > 0 ? for_chunks(graph, n_tokens, whole) : whole(graph);
    total.lap(stats().total_ns);
    return status;
}

ggml_status SplitBackend::run(Program & program, ggml_cgraph * graph) {
    for (const Binding & binding : program.bindings) {
        const ggml_tensor * origin = binding.origin.of(graph);
        binding.tensor->data       = origin->data;
        binding.tensor->buffer     = origin->buffer;
    }
    host_.place(program);
    for (ggml_tensor * view : program.host_views) {
        view->data   = static_cast<char *>(view->view_src->data) + view->view_offs;
        view->buffer = view->view_src->buffer;
    }
    bind_residents(program, graph);
    n_tokens_ = program.n_tokens;
    Stopwatch watch;
    PhaseTime took;
    for (Phase & phase : program.phases) {
        stats().n_phases++;
        const bool on_device = phase.device_end > phase.device_begin || program.resident;
        if (on_device) {
            try {
                launch(program, phase, graph);
            } catch (...) {
                ggml_backend_synchronize(partner_->backend()); // what was queued reads memory that may go now
                throw;
            }
            took.launch_ns += watch.lap(stats().launch_ns);
        }
        ggml_cgraph host   = graph_range(program.host_graph, phase.host_begin, phase.host_end);
        ggml_status status = GGML_STATUS_SUCCESS;
        if (!computes_nothing(host)) { // where all rows are hits, there may be nothing
            status = ggml_backend_graph_compute(host_.backend(), &host);
            took.host_ns += watch.lap(stats().host_ns);
        }
        if (on_device && partner_->fetch_blocks() && status == GGML_STATUS_SUCCESS) {
            fetch(phase, graph);
            took.wait_ns += watch.lap(stats().wait_ns);
        }
        if (program.resident && status == GGML_STATUS_SUCCESS) {
            if (!phase.downloads.empty()) { // rows that come together on the host before they are sent up
                ggml_backend_synchronize(partner_->backend());
                join(phase, graph);
            }
            lift(program, phase);
            took.join_ns += watch.lap(stats().join_ns);
        }
        if (on_device) {
            ggml_backend_synchronize(partner_->backend()); // whatever became of the host side: the device must be idle
            took.wait_ns += watch.lap(stats().wait_ns);
            end(phase);
            if (partner_->streams()) { // the slot that was computed with is free now
                ask_ahead();
                took.launch_ns += watch.lap(stats().launch_ns);
            }
            if (status == GGML_STATUS_SUCCESS && !program.resident) {
                join(phase, graph);
            }
            took.join_ns += watch.lap(stats().join_ns);
        }
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
    if (program.times != nullptr) {
        program.times->add(program.n_tokens, took);
    }
    return GGML_STATUS_SUCCESS;
}

void SplitBackend::launch(Program & program, Phase & phase, const ggml_cgraph * graph) {
    ggml_backend_t device  = partner_->backend();
    const bool     streams = phase.block != nullptr;
    // the device goes on while what the host reads is on its way to pinned memory (Vulkan writes to any other only when
    // the stream is waited for), unless which experts are used is to be read first
    const int64_t fetched = program.resident ? fetch_inputs(phase, graph, device) : 0;
    const bool    chosen  = phase.routed || !phase.routings.empty();
    const bool    goes_on = fetched > 0 && !chosen && host_.is_pinned(program.device) && partner_->mark();
    stats().bytes_out.fetch_add(fetched, std::memory_order_relaxed);
    if (fetched > 0 && !goes_on) {
        ggml_backend_synchronize(device);
    }
    last_ = nullptr;
    route(phase, graph, batches_);
    const int64_t sent =
        send(phase, graph) + send_routed(phase, graph); // before weights are asked for, which it would wait for
    // also where there is nothing to send: else it would never be known until when the link is free
    if (sent > 0 || (program.resident && phase.lifts.empty())) {
        turns_.made(&phase.pace.sent);
    }
    start(program, phase.device_begin, phase.stream_begin);
    slot_ = streams ? acquire(phase, graph) : no_slot;
    if (streams) {
        streamed_ = n_tokens_;
        partner_->stream().ready(device, slot_);
        for (size_t i = 0; i < phase.streamed.size(); i++) {
            partner_->stream().bind(phase.streamed[i].tensor, *phase.block, i, slot_);
        }
    }
    start(program, phase.stream_begin, phase.lift_begin);
    if (!partner_->fetch_blocks()) {
        fetch(phase, graph);
    }
    ask_ahead();
    if (goes_on) {
        partner_->await_mark();
    }
}

// Results become whole in device memory: what the host has of them is sent there, behind what the device computes.
void SplitBackend::lift(Program & program, Phase & phase) {
    try {
        const int64_t sent = send_lifts(phase, partner_->backend());
        stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
        if (sent > 0) {
            turns_.made(&phase.pace.lifted);
        }
        start(program, phase.lift_begin, phase.device_end);
        ask_ahead();
    } catch (...) {
        ggml_backend_synchronize(partner_->backend());
        throw;
    }
}

// Nodes [begin, end) of the device graph.
void SplitBackend::start(Program & program, int begin, int end) {
    if (begin == end) {
        return;
    }
    ggml_cgraph       range  = graph_range(program.device_graph, begin, end);
    const ggml_status status = ggml_backend_graph_compute_async(partner_->backend(), &range);
    if (status != GGML_STATUS_SUCCESS) {
        ggml_backend_synchronize(partner_->backend());
        throw Error(OALLAMA_FAILED, std::string("device ") + ggml_backend_dev_name(partner_->device()) +
                                        " could not compute its side (ggml status " + std::to_string(status) + ")");
    }
}

} // namespace oallama
