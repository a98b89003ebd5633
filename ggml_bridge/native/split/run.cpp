#include "run.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace oallama {

//
// the device
//

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

//
// programs that were prepared
//

namespace {

// Some 3,000 programs: of a model of 32 layers with three blocks each, those of thirty batch sizes.
constexpr size_t max_bytes = size_t{16} << 20U;

} // namespace

Program * ProgramCache::find(const Signature & signature) {
    const auto [begin, end] = by_hash_.equal_range(hash_of(signature));
    for (auto found = begin; found != end; found++) {
        const List::iterator program = found->second;
        if ((*program)->signature == signature) {
            programs_.splice(programs_.begin(), programs_, program);
            return program->get();
        }
    }
    return nullptr;
}

bool ProgramCache::make_room(size_t bytes) {
    if (bytes_ + bytes <= max_bytes) {
        return false;
    }
    while (!programs_.empty() && bytes_ + bytes > max_bytes / 2) {
        drop_last();
    }
    return true;
}

Program & ProgramCache::add(std::unique_ptr<Program> program) {
    programs_.push_front(std::move(program));
    Program & added = *programs_.front();
    try {
        by_hash_.emplace(hash_of(added.signature), programs_.begin());
    } catch (...) {
        programs_.pop_front();
        throw;
    }
    bytes_ += added.bytes;
    counters().n_programs++;
    counters().program_bytes += static_cast<int64_t>(added.bytes);
    return added;
}

void ProgramCache::clear() {
    while (!programs_.empty()) {
        drop_last();
    }
}

void ProgramCache::drop_last() {
    const Program & last    = *programs_.back();
    const auto [begin, end] = by_hash_.equal_range(hash_of(last.signature));
    for (auto found = begin; found != end; found++) {
        if (found->second->get() == &last) {
            by_hash_.erase(found);
            break;
        }
    }
    bytes_ -= last.bytes;
    counters().n_programs--;
    counters().program_bytes -= static_cast<int64_t>(last.bytes);
    programs_.pop_back();
}

//
// chunks
//

namespace {

bool is_of_tokens(const ggml_tensor * tensor) {
    return tensor->ne[2] == 1 && tensor->ne[3] == 1;
}

void take_rows(ggml_tensor & tensor, int64_t first, int64_t count) {
    tensor.ne[1] = count;
    if (tensor.data != nullptr) { // it is prepared before it is allocated
        tensor.data = static_cast<char *>(tensor.data) + static_cast<size_t>(first) * tensor.nb[1];
    }
}

// The same sub-graph for count of its tokens, from first on.
class Chunk {
  public:
    Chunk(const ggml_cgraph * whole, int64_t first, int64_t count);

    Chunk(const Chunk &)             = delete;
    Chunk & operator=(const Chunk &) = delete;

    ggml_cgraph * graph() { return &graph_; }

  private:
    ggml_tensor   result_;
    ggml_tensor   x_;
    ggml_tensor * node_ = &result_;
    ggml_cgraph   graph_;
};

// Calls with the graph of each chunk in turn, and of what is left, until one gives something else than success.
template <typename F> ggml_status for_chunks(const ggml_cgraph * whole, int64_t n_tokens, const F & compute) {
    const int64_t all    = whole->nodes[0]->ne[1];
    ggml_status   status = GGML_STATUS_SUCCESS;
    for (int64_t first = 0; first < all && status == GGML_STATUS_SUCCESS; first += n_tokens) {
        Chunk chunk(whole, first, std::min(n_tokens, all - first));
        status = compute(chunk.graph());
    }
    return status;
}

} // namespace

int64_t chunk_of(const ggml_cgraph * graph) {
    const ggml_tensor * node = graph->nodes[0];
    if (graph->n_nodes != 1 || node->op != GGML_OP_MUL_MAT || !is_of_tokens(node) || !is_of_tokens(node->src[1])) {
        return 0;
    }
    const SliceSpec * slice = planned(node->src[0]);
    return slice != nullptr && node->ne[1] > slice->chunk ? slice->chunk : 0;
}

Chunk::Chunk(const ggml_cgraph * whole, int64_t first, int64_t count)
    : result_(*whole->nodes[0]), x_(*whole->nodes[0]->src[1]), graph_(*whole) {
    take_rows(result_, first, count);
    take_rows(x_, first, count);
    result_.src[1] = &x_;
    graph_.nodes   = &node_;
    graph_.uid     = 0;
}

//
// joining
//

namespace {

// Where in a node's memory the first byte of a download belongs, if it can be fetched to there.
char * place_of(const Download & download, const ggml_tensor * node) {
    const int64_t begin = download.join == Download::Join::scatter ? download.begin : 0;
    return static_cast<char *>(node->data) + static_cast<size_t>(begin) * node->nb[0] +
           static_cast<size_t>(download.first_row) * node->nb[1];
}

size_t download_bytes(const Download & download) {
    return static_cast<size_t>(download.n_rows) * download.tensor->nb[1];
}

// Moves the host's elements of each row (or of each half of one) from where they lie packed to where they belong.
void spread(Host & host, const Download & download, const ggml_tensor * node) {
    const size_t  bytes = static_cast<size_t>(download.spread) * node->nb[0];
    const size_t  run   = static_cast<size_t>(download.extent) * node->nb[0];
    const int64_t n_run = node->ne[0] / download.extent;
    host.spread(static_cast<char *>(node->data), download.spread_rows * n_run, bytes,
                [&](int64_t item) { return offset_of(node, item / n_run) + static_cast<size_t>(item % n_run) * run; });
}

// The device's elements into their gaps.
void scatter(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    char *       data  = static_cast<char *>(node->data) + static_cast<size_t>(download.begin) * node->nb[0];
    const size_t bytes = static_cast<size_t>(download.count) * node->nb[0];
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    const size_t n_run = static_cast<size_t>(node->ne[0] / download.extent);
    host.share(download.n_rows, static_cast<size_t>(download.n_rows) * n_run * bytes, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            for (size_t r = 0; r < n_run; r++) {
                std::memcpy(data + offset_of(node, download.first_row + row) + r * run,
                            from + (static_cast<size_t>(row) * n_run + r) * bytes, bytes);
            }
        }
    });
}

void add(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    auto *        sum = static_cast<float *>(node->data) + download.first_row * node->ne[0];
    const auto *  b   = reinterpret_cast<const float *>(from);
    const int64_t n   = download.n_rows * node->ne[0];
    host.share(n, static_cast<size_t>(n) * sizeof(float), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            sum[i] += b[i];
        }
    });
}

void copy(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    char *       to    = place_of(download, node);
    const size_t bytes = download_bytes(download);
    host.share(static_cast<int64_t>(bytes), bytes, [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
}

} // namespace

// Makes a node whole: from has what the device computed, the node's memory what the host did.
void join(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    switch (download.join) {
        case Download::Join::copy: copy(host, download, node, from); break;
        case Download::Join::add: add(host, download, node, from); break;
        case Download::Join::scatter:
            if (download.spread > 0) {
                spread(host, download, node);
            }
            scatter(host, download, node, from);
            break;
        case Download::Join::rows:
        case Download::Join::sum: break; // join_routed
    }
}

//
// blocks that live on the device
//

void bind_residents(const Program & program, const ggml_cgraph * graph) {
    for (const DeviceBinding & bound : program.device_bindings) {
        const ggml_tensor * origin = bound.origin.of(graph);
        bound.tensor->data         = origin->data;
        bound.tensor->buffer       = origin->view_src == nullptr ? origin->buffer : origin->view_src->buffer;
    }
    for (ggml_tensor * view : program.device_views) {
        view->data   = static_cast<char *>(view->view_src->data) + view->view_offs;
        view->buffer = view->view_src->buffer;
    }
}

int64_t fetch_inputs(const Phase & phase, const ggml_cgraph * graph, ggml_backend_t device) {
    int64_t fetched = 0;
    for (const Input & input : phase.inputs) {
        const size_t bytes = ggml_nbytes(input.tensor);
        ggml_backend_tensor_get_async(device, input.origin.of(graph), input.tensor->data, 0, bytes);
        fetched += static_cast<int64_t>(bytes);
    }
    return fetched;
}

int64_t send_lifts(const Phase & phase, ggml_backend_t device) {
    int64_t sent = 0;
    for (const Lift & lift : phase.lifts) {
        const size_t bytes = ggml_nbytes(lift.to);
        ggml_backend_tensor_set_async(device, lift.to, lift.from->data, 0, bytes);
        sent += static_cast<int64_t>(bytes);
    }
    return sent;
}

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
    Stopwatch  watch;
    PhaseTimes took = {};
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
            took[0] += watch.lap(stats().launch_ns);
        }
        ggml_cgraph host   = graph_range(program.host_graph, phase.host_begin, phase.host_end);
        ggml_status status = GGML_STATUS_SUCCESS;
        if (!computes_nothing(host)) { // where all rows are hits, there may be nothing
            status = ggml_backend_graph_compute(host_.backend(), &host);
            took[1] += watch.lap(stats().host_ns);
        }
        if (on_device && partner_->fetch_blocks() && status == GGML_STATUS_SUCCESS) {
            fetch(phase, graph);
            took[2] += watch.lap(stats().wait_ns);
        }
        if (program.resident && status == GGML_STATUS_SUCCESS) {
            if (!phase.downloads.empty()) { // rows that come together on the host before they are sent up
                ggml_backend_synchronize(partner_->backend());
                join(phase, graph);
            }
            lift(program, phase);
            took[3] += watch.lap(stats().join_ns);
        }
        if (on_device) {
            ggml_backend_synchronize(partner_->backend()); // whatever became of the host side: the device must be idle
            took[2] += watch.lap(stats().wait_ns);
            end(phase);
            if (partner_->streams()) { // the slot that was computed with is free now
                ask_ahead();
                took[0] += watch.lap(stats().launch_ns);
            }
            if (status == GGML_STATUS_SUCCESS && !program.resident) {
                join(phase, graph);
            }
            took[3] += watch.lap(stats().join_ns);
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

//
// what is copied between host and device in a phase: activations there, the experts that are used, results back
//

// Bytes sent to the device. From pinned memory, so that the call does not wait: what lies elsewhere is moved there
// first, piece by piece, while the piece before is on its way.
int64_t SplitBackend::send(const Phase & phase, const ggml_cgraph * graph) {
    constexpr int64_t piece = int64_t{1} << 20;

    int64_t sent = 0;
    for (const Upload & upload : phase.uploads) {
        const ggml_tensor * source = upload.origin.of(graph);
        const size_t        bytes  = ggml_nbytes(upload.tensor);
        sent += static_cast<int64_t>(bytes);
        if (upload.packed && prepared_ && (!partner_->pinned() || partner_->is_pinned(source))) {
            const char * data = host_data(source) + static_cast<size_t>(upload.first_row) * source->nb[1];
            ggml_backend_tensor_set_async(partner_->backend(), upload.tensor, data, 0, bytes);
            continue;
        }
        char *        staged   = partner_->staging() + upload.staging;
        const size_t  row      = upload.tensor->nb[1];
        const int64_t all_rows = n_rows(upload.tensor);
        const int64_t at_once  = std::max<int64_t>(1, piece / static_cast<int64_t>(row));
        for (int64_t first = 0; first < all_rows; first += at_once) {
            const int64_t count = std::min(at_once, all_rows - first);
            const size_t  begin = static_cast<size_t>(first) * row;
            host_.share(count, static_cast<size_t>(count) * row, [&](int64_t from, int64_t to) {
                gather(source, upload.begin, upload.count, {upload.first_row + first + from, to - from},
                       staged + begin + static_cast<size_t>(from) * row);
            });
            ggml_backend_tensor_set_async(partner_->backend(), upload.tensor, staged + begin, begin,
                                          static_cast<size_t>(count) * row);
        }
    }
    stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
    return sent;
}

// Which slots and which routing weights the device computes with.
int64_t SplitBackend::send_routed(const Phase & phase, const ggml_cgraph * graph) {
    int64_t sent = 0;
    for (size_t i = 0; i < phase.routings.size(); i++) {
        for (const SentRows & rows : phase.routings[i].sent) {
            char *       staged = partner_->staging() + rows.staging;
            const size_t bytes  = ggml_nbytes(rows.tensor);
            pack(host_, phase.routings[i], batches_[i], rows, graph, staged);
            ggml_backend_tensor_set_async(partner_->backend(), rows.tensor, staged, 0, bytes);
            sent += static_cast<int64_t>(bytes);
        }
    }
    stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
    return sent;
}

// A slot with the phase's CG, or with the experts of it that are used.
size_t SplitBackend::acquire(const Phase & phase, const ggml_cgraph * graph) {
    if (!phase.routed) {
        return partner_->stream().acquire(*phase.block, nullptr);
    }
    const ggml_tensor * ids = phase.host_ids == nullptr ? phase.ids.of(graph) : phase.host_ids;
    experts_.resize(static_cast<size_t>(ids->ne[0] * ids->ne[1]));
    gather(ids, 0, ids->ne[0], {0, n_rows(ids)}, reinterpret_cast<char *>(experts_.data()));
    return partner_->stream().acquire(*phase.block, &experts_);
}

// Whether a result is fetched to where it belongs. A call that fetches it to memory that is not pinned may wait for it.
bool SplitBackend::lands(const Download & download, const ggml_tensor * node) const {
    return download.direct && (!partner_->pinned() || partner_->is_pinned(node));
}

// Bytes that come back, queued behind the computation. Through pinned memory where the device has some, so that the
// call does not wait; where there is none left, the host has computed its side before.
void SplitBackend::fetch(const Phase & phase, const ggml_cgraph * graph) {
    int64_t fetched = 0;
    for (const Download & download : phase.downloads) {
        const ggml_tensor * node  = graph->nodes[download.node];
        const size_t        bytes = download_bytes(download);
        char * to = lands(download, node) ? place_of(download, node) : partner_->staging() + download.staging;
        ggml_backend_tensor_get_async(partner_->backend(), download.tensor, to, 0, bytes);
        fetched += static_cast<int64_t>(bytes);
    }
    stats().bytes_out.fetch_add(fetched, std::memory_order_relaxed);
}

void SplitBackend::join(const Phase & phase, const ggml_cgraph * graph) {
    for (const Download & download : phase.downloads) {
        const ggml_tensor * node = graph->nodes[download.node];
        const char *        from = partner_->staging() + download.staging;
        if (lands(download, node)) {
            continue;
        }
        if (download.join == Download::Join::rows || download.join == Download::Join::sum) {
            join_routed(host_, batches_[static_cast<size_t>(download.routed)], download,
                        download.to == nullptr ? node : download.to, from);
        } else {
            oallama::join(host_, download, node, from);
        }
    }
}

} // namespace oallama
