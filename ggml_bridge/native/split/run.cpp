#include "run.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "device_side.h"

namespace oallama {

SplitBackend::SplitBackend() = default;

SplitBackend::~SplitBackend() = default;

//
// programs
//

namespace {

// Most programs that a context keeps: those of 32 layers with three blocks each at thirty batch sizes, some 16 MiB.
constexpr size_t max_programs = 3000;

} // namespace

// A sub-graph has a program for each slot that its first streamed block may get (both of two slots with an odd number
// of blocks). So the tensors of a device graph never move, and CUDA can capture it. foreseen: the graph is prepared,
// not computed.
Program & SplitBackend::find(const ggml_cgraph * graph, ggml_backend_dev_t memory, bool foreseen) {
    make_signature(graph, memory, signature_);
    size_t slot = 0;
    if (const ggml_tensor * weight = first_streamed(graph); weight != nullptr) {
        const DeviceSide * side = side_of(device_of(weight));
        slot                    = side == nullptr ? 0 : foreseen ? side->copy_state.foreseen : side->next_slot();
        signature_.push_back(slot);
    }
    const auto known = programs_.find(signature_);
    return known != programs_.end() ? *known->second : build(graph, memory, slot);
}

DeviceSide * SplitBackend::side_of(ggml_backend_dev_t device) const {
    const auto found =
        std::find_if(sides_.begin(), sides_.end(), [&](const auto & side) { return side->device() == device; });
    return found == sides_.end() ? nullptr : found->get();
}

Program & SplitBackend::build(const ggml_cgraph * graph, ggml_backend_dev_t memory, size_t slot) {
    std::unique_ptr<Program> program = build_program(graph, memory);
    stats().n_built++;
    host_.reserve(*program);
    if (program->device != nullptr) {
        if (side_of(program->device) == nullptr) {
            sides_.push_back(std::make_unique<DeviceSide>(program->device));
        }
        DeviceSide & side  = *side_of(program->device);
        bool         moved = true;
        try {
            moved = side.allocate(*program, slot);
        } catch (...) {
            forget_programs_on(side);
            throw;
        }
        if (moved) {
            forget_programs_on(side);
        }
    }
    if (programs_.size() >= max_programs) {
        forget();
    }
    return *(programs_[signature_] = std::move(program));
}

void SplitBackend::forget_programs_on(DeviceSide & side) {
    side.copy_state.forget_copies();
    for (auto known = programs_.begin(); known != programs_.end();) {
        known = known->second->device == side.device() ? programs_.erase(known) : std::next(known);
    }
}

void SplitBackend::forget() {
    for (const auto & side : sides_) {
        side->copy_state.forget_copies();
    }
    programs_.clear();
}

//
// chunks: some tokens of a mul-mat at a time
//
// llama.cpp reserves memory for the logits of a whole micro-batch, but mostly one token's are wanted. With a vocabulary
// of 128k they take half a megabyte per token: on a small device more than all other activations together. So plans
// give the output weight chunks.
//

namespace {

// Calls `compute` with the same mul-mat for at most n_tokens of its tokens at a time, until a call fails.
template <typename F> ggml_status for_chunks(const ggml_cgraph * whole, int64_t n_tokens, const F & compute) {
    const int64_t all    = whole->nodes[0]->ne[1];
    ggml_status   status = GGML_STATUS_SUCCESS;
    for (int64_t first = 0; first < all && status == GGML_STATUS_SUCCESS; first += n_tokens) {
        ggml_tensor   result = *whole->nodes[0];
        ggml_tensor   x      = *whole->nodes[0]->src[1];
        ggml_tensor * node   = &result;
        for (ggml_tensor * tensor : {&result, &x}) {
            tensor->ne[1] = std::min(n_tokens, all - first);
            if (tensor->data != nullptr) { // NULL: prepared, but not allocated yet
                tensor->data = static_cast<char *>(tensor->data) + static_cast<size_t>(first) * tensor->nb[1];
            }
        }
        result.src[1]     = &x;
        ggml_cgraph chunk = *whole;
        chunk.nodes       = &node;
        chunk.uid         = 0;
        status            = compute(&chunk);
    }
    return status;
}

// Tokens of a chunk, if the sub-graph is a single mul-mat with chunks and has more tokens; 0: it is computed whole.
int64_t chunk_of(const ggml_cgraph * graph) {
    const ggml_tensor * node      = graph->nodes[0];
    const auto          of_tokens = [](const ggml_tensor * tensor) { return tensor->ne[2] == 1 && tensor->ne[3] == 1; };
    if (graph->n_nodes != 1 || node->op != GGML_OP_MUL_MAT || !of_tokens(node) || !of_tokens(node->src[1])) {
        return 0;
    }
    const SliceSpec * slice = planned(node->src[0]);
    return slice != nullptr && node->ne[1] > slice->chunk ? slice->chunk : 0;
}

// Whether its first mul-mat has one row to multiply.
bool is_single(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) {
            return (node->op == GGML_OP_MUL_MAT_ID ? node->src[1]->ne[2] : ggml_nrows(node->src[1])) == 1;
        }
    }
    return false;
}

} // namespace

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
        return; // the only node is also the last one, so inputs stay allocated
    }
    if (!std::exchange(preparing_, true)) {
        for (const auto & side : sides_) {
            side->copy_state.foreseen = side->next_slot();
        }
    }
    Program & program = find(graph, memory, /*foreseen=*/true);
    program.prepared  = true;
    for (const Segment & segment : program.segments) {
        if (segment.block != nullptr) {
            DeviceSide & side        = *side_of(program.device);
            side.copy_state.foreseen = side.stream().slot_after(side.copy_state.foreseen);
        }
    }
    if (params == nullptr || params->add_alloc_dep == nullptr || program.device == nullptr) {
        return;
    }
    ggml_tensor * last = graph->nodes[graph->n_nodes - 1];
    for (const Segment & segment : program.segments) {
        for (const Upload & upload : segment.uploads) {
            const Origin & origin = upload.source.origin;
            ggml_tensor *  source =
                origin.src < 0 ? graph->nodes[origin.node] : graph->nodes[origin.node]->src[origin.src];
            if (upload.packed && weight_of(source) == nullptr) {
                params->add_alloc_dep(params->user_data, source, last);
            }
        }
    }
}

//
// small copies, between which copies of weights may be asked for
//

void SplitBackend::ask_ahead(Time until) const {
    side_->ask_ahead(until, n_tokens_);
}

void SplitBackend::computes_input(ggml_backend_dev_t device) {
    if (DeviceSide * side = side_of(device); side != nullptr) {
        side->computes_input(n_tokens_);
    }
}

// When the next small copy is due after a launch. With hot experts the number of misses, and so the host's time,
// differs from token to token: by the mean time, a token with few misses would have to wait for weights. So their
// number counts.
Time SplitBackend::due(const Segment & segment) const {
    const int64_t n_rows = n_host_rows(segment, batches_);
    if (segment.routings.empty() || (n_rows > 0 && segment.row_times.host_s == 0.0)) {
        return side_->copy_state.small_copies.due();
    }
    return Clock::now() + to_duration(static_cast<double>(n_rows) * segment.row_times.host_s);
}

//
// a run
//

ggml_status SplitBackend::compute(ggml_cgraph * graph, ggml_backend_dev_t memory) {
    current_batch = is_single(graph) ? SINGLE : SEVERAL;
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
    const auto        whole    = [&](ggml_cgraph * part) { return run(find(part, memory, /*foreseen=*/false), part); };
    const int64_t     n_tokens = chunk_of(graph);
    const ggml_status status   = n_tokens > 0 ? for_chunks(graph, n_tokens, whole) : whole(graph);
    total.lap(stats().total_ns);
    return status;
}

// Gives a program's tensors the addresses that llama.cpp's and the host's memory have now.
void SplitBackend::bind(const Program & program, const ggml_cgraph * graph) {
    for (const Binding & binding : program.bindings) {
        const ggml_tensor * origin = binding.origin.of(graph);
        binding.tensor->data       = origin->data;
        binding.tensor->buffer     = origin->view_src == nullptr ? origin->buffer : origin->view_src->buffer;
    }
    host_.place(program);
    for (ggml_tensor * view : program.views) {
        view->data   = static_cast<char *>(view->view_src->data) + view->view_offs;
        view->buffer = view->view_src->buffer;
    }
}

ggml_status SplitBackend::run(Program & program, const ggml_cgraph * graph) {
    bind(program, graph);
    side_     = side_of(program.device);
    n_tokens_ = program.n_tokens;
    Stopwatch watch;
    RunTimes  took = {};
    for (Segment & segment : program.segments) {
        stats().n_segments++;
        const int64_t before    = took[1] + took[2] + took[3];
        const bool    on_device = segment.device_end > segment.device_begin || program.resident;
        if (on_device) {
            try {
                launch(program, segment, graph);
            } catch (...) {
                side_->finish(); // queued work reads memory that may be freed next
                if (side_->exchange() != nullptr) {
                    side_->exchange()->cancel();
                }
                throw;
            }
            took[0] += watch.lap(stats().launch_ns);
        }
        count_experts(segment, graph);
        ggml_cgraph host   = graph_range(program.host_graph, segment.host_begin, segment.host_end);
        ggml_status status = GGML_STATUS_SUCCESS;
        if (!computes_nothing(host)) { // if all rows are hits, the host computes nothing
            status           = ggml_backend_graph_compute(host_.backend(), &host);
            const int64_t ns = watch.lap(stats().host_ns);
            took[1] += ns;
            row_clock_.note_host(segment, batches_, n_tokens_, ns);
        }
        if (on_device && download_blocks() && status == GGML_STATUS_SUCCESS) {
            download(segment, graph);
            took[2] += watch.lap(stats().wait_ns);
        }
        if (program.resident && status == GGML_STATUS_SUCCESS) {
            // wait for rows that the host adds up before it sends the sum; or to measure the device's time again, now
            // and then, as the host's sum is sent only after that wait
            const bool asks =
                side_->exchange() != nullptr && !segment.sums.empty() && segment.n_sums++ % n_remembered == 0;
            if (!segment.downloads.empty() || asks) {
                side_->synchronize();
                const int64_t ns = watch.lap(stats().wait_ns);
                took[2] += ns;
                RowClock::note_device(segment, batches_, side_->exchange(), ns);
                join(segment, graph);
            }
            for (const HostSum & sum : segment.sums) {
                sum_rows(host_, batches_[static_cast<size_t>(sum.routed)], sum);
            }
            join_on_device(program, segment);
            took[3] += watch.lap(stats().join_ns);
        }
        if (on_device) {
            side_->synchronize(); // also if the host side failed: the device must be idle
            const int64_t ns = watch.lap(stats().wait_ns);
            took[2] += ns;
            if (!program.resident) {
                RowClock::note_device(segment, batches_, side_->exchange(), ns);
            }
            if (std::exchange(segment.pacing.feeds_device, false)) {
                side_->copy_state.small_copies.copied(nullptr);
            }
            side_->copy_state.last_segment = &segment;
            side_->copy_state.slot         = no_slot; // the slot is free now
            for (const Routed & routed : segment.routings) {
                if (side_->exchange() != nullptr) {
                    side_->exchange()->computed(routed.weights.front()->table());
                }
            }
            if (side_->streams()) {
                ask_ahead(side_->copy_state.small_copies.due());
                took[0] += watch.lap(stats().launch_ns);
            }
            if (status == GGML_STATUS_SUCCESS && !program.resident) {
                join(segment, graph);
            }
            took[3] += watch.lap(stats().join_ns);
            if (side_->exchange() != nullptr) {
                RowClock::note_both(segment, batches_, took[1] + took[2] + took[3] - before);
            }
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

void SplitBackend::launch(Program & program, Segment & segment, const ggml_cgraph * graph) {
    // the device computes while inputs are copied to the host's pinned memory (Vulkan copies to other memory only when
    // the stream is waited for), unless the experts that are used decide what it computes
    const int64_t downloaded = download_inputs(segment, graph);
    const bool goes_on = downloaded > 0 && segment.routings.empty() && host_.is_pinned(program.device) && side_->mark();
    if (downloaded > 0 && !goes_on) {
        ggml_backend_synchronize(side_->downloading());
    }
    side_->copy_state.last_segment = nullptr;
    if (n_tokens_ > 1 && segment.row_times.host_s == 0.0) {
        segment.row_times.host_s = row_clock_.expected(segment, n_tokens_, host_.n_threads());
    }
    // a slot serves several experts if copies can wait for computing (events)
    route_segment(segment, graph, batches_, side_->exchange(), side_->has_events());
    const int64_t sent = send(program, segment, graph); // before weights are requested, for which it would wait
    // for resident programs also without a send: else the time until the next small copy would never be measured
    if (sent > 0 || (program.resident && segment.host_results.empty())) {
        side_->copy_state.small_copies.copied(&segment.pacing.sent);
    }
    if (side_->exchange() != nullptr) {
        side_->exchange()->fetch(side_->backend(), segment.packs() ? 0 : side_->exchange()->n_chosen());
    }
    start(program, segment.device_begin, segment.launches_begin);
    start_packed(program, segment);
    GGML_ASSERT(side_->exchange() == nullptr || side_->exchange()->n_chosen() == 0);
    side_->copy_state.slot = no_slot;
    if (segment.block != nullptr) {
        if (segment.routed) {
            if (goes_on) {
                side_->await_mark();
            }
            read_all(segment.ids.of(graph), experts_);
        }
        side_->copy_state.slot =
            side_->stream().acquire(*segment.block, segment.routed ? &experts_ : nullptr, segment.n_used);
        side_->copy_state.streamed = n_tokens_;
        side_->stream().ready(side_->backend(), side_->copy_state.slot);
        for (size_t i = 0; i < segment.streamed.size(); i++) {
            side_->stream().bind(segment.streamed[i].tensor, *segment.block, side_->copy_state.slot,
                                 segment.block->offsets[i]);
        }
    }
    start(program, segment.stream_begin, segment.join_begin);
    if (!download_blocks()) {
        download(segment, graph);
    }
    ask_ahead(due(segment));
    if (goes_on) {
        side_->await_mark();
    }
}

// Starts the device's packed rows launch by launch, with copies of the experts that they need.
void SplitBackend::start_packed(Program & program, const Segment & segment) {
    for (size_t i = 0; i < segment.routings.size(); i++) {
        const Routed & routed = segment.routings[i];
        if (!routed.packs()) {
            continue;
        }
        if (side_->exchange() != nullptr) {
            side_->exchange()->forget_marks();
        }
        for (const RoutedLaunch & launch : batches_[i].launches) {
            if (launch.n_copies > 0) {
                side_->exchange()->fetch(side_->backend(), launch.n_copies, launch.after);
            }
            shape(routed, launch);
            start(program, routed.device_begin, routed.device_end);
            download_packed(segment, i, launch);
            if (side_->exchange() != nullptr) {
                side_->exchange()->mark(side_->backend());
            }
        }
    }
}

// Counts the experts that the segment uses.
void SplitBackend::count_experts(const Segment & segment, const ggml_cgraph * graph) {
    for (const Counted & counted : segment.counted) {
        const ggml_tensor * ids = counted.ids.of(graph);
        read_all(ids, experts_);
        counted.uses->add(experts_, ids->ne[1]);
    }
}

// Launches nodes [begin, end) of the device graph. ggml-cuda identifies a graph by its first node, and captures it if
// its tensors have not moved since its last launch. So GG and CG are separate launches: CG's slots differ from run to
// run, and in one launch neither could be captured.
void SplitBackend::start(Program & program, int begin, int end) {
    if (begin == end) {
        return;
    }
    ggml_cgraph       range  = graph_range(program.device_graph, begin, end);
    const ggml_status status = ggml_backend_graph_compute_async(side_->backend(), &range);
    if (status != GGML_STATUS_SUCCESS) {
        side_->synchronize();
        throw Error(OALLAMA_FAILED, std::string("device ") + side_->name() +
                                        " could not compute its side (ggml status " + std::to_string(status) + ")");
    }
}

// Makes results whole in device memory: sends the host's parts, behind the device's own work.
void SplitBackend::join_on_device(Program & program, Segment & segment) {
    try {
        int64_t sent = 0;
        for (const HostResult & result : segment.host_results) {
            const size_t bytes = ggml_nbytes(result.to);
            ggml_backend_tensor_set_async(side_->backend(), result.to, result.from->data, 0, bytes);
            sent += static_cast<int64_t>(bytes);
        }
        stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
        if (sent > 0) {
            side_->copy_state.small_copies.copied(&segment.pacing.results_sent);
        }
        start(program, segment.join_begin, segment.device_end);
        ask_ahead(side_->copy_state.small_copies.due());
    } catch (...) {
        side_->synchronize();
        throw;
    }
}

//
// copies of a segment: activations to the device, ids and biases of experts, results back
//

// Queues copies to the host of its inputs that are in device memory. Returns the bytes.
int64_t SplitBackend::download_inputs(const Segment & segment, const ggml_cgraph * graph) {
    int64_t downloaded = 0;
    for (const Input & input : segment.inputs) {
        ggml_backend_tensor_get_async(side_->downloading(), input.origin.of(graph), input.tensor->data, 0, input.bytes);
        downloaded += static_cast<int64_t>(input.bytes);
    }
    stats().bytes_out.fetch_add(downloaded, std::memory_order_relaxed);
    return downloaded;
}

// Queues copies of a segment's inputs to the device, from pinned memory, so that the calls do not wait. Returns the
// bytes.
int64_t SplitBackend::send(const Program & program, const Segment & segment, const ggml_cgraph * graph) {
    int64_t sent = 0;
    for (const Upload & upload : segment.uploads) {
        if (upload.what == Upload::What::biases) {
            sent += send_biases(upload, graph);
            continue;
        }
        const size_t bytes = ggml_nbytes(upload.tensor);
        sent += static_cast<int64_t>(bytes);
        if (upload.what == Upload::What::value) {
            send_value(upload, graph, program.prepared);
            continue;
        }
        char *     staged = host_.scratch() + upload.staging;
        const auto number = static_cast<size_t>(upload.routed);
        pack(host_, segment.routings[number], batches_[number], upload, graph, staged);
        ggml_backend_tensor_set_async(side_->backend(), upload.tensor, staged, 0, bytes);
    }
    stats().bytes_in.fetch_add(sent, std::memory_order_relaxed);
    return sent;
}

// Sends the biases of experts that are new in slots. Returns the bytes.
int64_t SplitBackend::send_biases(const Upload & upload, const ggml_cgraph * graph) {
    SlotBiases &               slots   = *upload.slots;
    const ggml_tensor *        biases  = upload.source.of(graph);
    const std::vector<int32_t> experts = slots.table->expert_in();
    const size_t               bytes   = biases->nb[1];
    int64_t                    sent    = 0;
    for (size_t slot = 0; slot < experts.size(); slot++) {
        const int32_t expert = experts[slot];
        if (expert < 0 || expert == slots.experts[slot]) {
            continue; // results of an empty slot are discarded
        }
        char * staged = host_.scratch() + upload.staging + slot * bytes;
        std::memcpy(staged, host_data(biases) + static_cast<size_t>(expert) * bytes, bytes);
        ggml_backend_tensor_set_async(side_->backend(), upload.tensor, staged, slot * bytes, bytes);
        slots.experts[slot] = expert;
        sent += static_cast<int64_t>(bytes);
    }
    return sent;
}

// Sends a value directly, or through pinned memory: piece by piece, each packed while the last one is copied.
void SplitBackend::send_value(const Upload & upload, const ggml_cgraph * graph, bool prepared) {
    constexpr int64_t   piece  = int64_t{1} << 20;
    const ggml_tensor * source = upload.source.of(graph);
    if (upload.packed && prepared && reaches(source)) {
        const char * data = host_data(source) + static_cast<size_t>(upload.first_row) * source->nb[1];
        ggml_backend_tensor_set_async(side_->backend(), upload.tensor, data, 0, ggml_nbytes(upload.tensor));
        return;
    }
    char *        staged   = host_.scratch() + upload.staging;
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
        ggml_backend_tensor_set_async(side_->backend(), upload.tensor, staged + begin, begin,
                                      static_cast<size_t>(count) * row);
    }
}

// Whether a call that downloads a result returns only once it has arrived, as CUDA's does for memory that is not
// pinned.
bool SplitBackend::download_blocks() const {
    return !host_.is_pinned(side_->device()) && ggml_backend_dev_host_buffer_type(side_->device()) != nullptr;
}

// Whether the device can copy from or to a host tensor of llama.cpp's directly, not through the Host's memory.
bool SplitBackend::reaches(const ggml_tensor * tensor) const {
    const ggml_tensor * whole = tensor->view_src == nullptr ? tensor : tensor->view_src;
    return !host_.is_pinned(side_->device()) || is_pinned(whole->buffer, side_->device());
}

// Whether a result is downloaded directly to its place in the node.
bool SplitBackend::lands(const Download & download, const ggml_tensor * node) const {
    return download.direct && reaches(node);
}

namespace {

// Address of a download's first byte in the node's memory, for a direct download.
char * place_of(const Download & download, const ggml_tensor * node) {
    const int64_t begin = download.join == Download::Join::scatter ? download.begin : 0;
    return static_cast<char *>(node->data) + static_cast<size_t>(begin) * node->nb[0] +
           static_cast<size_t>(download.first_row) * node->nb[1];
}

size_t download_bytes(const Download & download) {
    return static_cast<size_t>(download.n_rows) * download.tensor->nb[1];
}

// Makes a node whole from the device's elements in `from` and the host's, packed in the node's memory. The host's
// elements of each row (or of each half of it) move to their places, then the device's fill the gaps.
void scatter(Host & host, const Download & download, const ggml_tensor * node, const char * from) {
    char *       data  = static_cast<char *>(node->data);
    const auto   n_run = static_cast<size_t>(node->ne[0] / download.extent);
    const size_t run   = static_cast<size_t>(download.extent) * node->nb[0];
    if (download.spread > 0) {
        host.spread(data, download.spread_rows * static_cast<int64_t>(n_run),
                    static_cast<size_t>(download.spread) * node->nb[0], [&](int64_t item) {
                        const auto at = static_cast<size_t>(item);
                        return offset_of(node, static_cast<int64_t>(at / n_run)) + at % n_run * run;
                    });
    }
    const size_t bytes = static_cast<size_t>(download.count) * node->nb[0];
    data += static_cast<size_t>(download.begin) * node->nb[0];
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

} // namespace

// Queues copies of results to the host behind the computation: through pinned memory, so that the calls do not wait.
// Without pinned memory (download_blocks) it is called after the host has computed its side.
void SplitBackend::download(const Segment & segment, const ggml_cgraph * graph) {
    int64_t downloaded = 0;
    for (const Download & download : segment.downloads) {
        if (download.packed) {
            continue;
        }
        const ggml_tensor * node  = graph->nodes[download.node];
        const size_t        bytes = download_bytes(download);
        char *              to = lands(download, node) ? place_of(download, node) : host_.scratch() + download.staging;
        ggml_backend_tensor_get_async(side_->backend(), download.tensor, to, 0, bytes);
        downloaded += static_cast<int64_t>(bytes);
    }
    stats().bytes_out.fetch_add(downloaded, std::memory_order_relaxed);
}

// Queues copies of a launch's rows to the host, after those of earlier launches; of a sum, after the host's rows.
void SplitBackend::download_packed(const Segment & segment, size_t number, const RoutedLaunch & launch) {
    int64_t downloaded = 0;
    for (const Download & download : segment.downloads) {
        if (!download.packed || static_cast<size_t>(download.routed) != number) {
            continue;
        }
        const size_t row   = download.tensor->nb[2];
        const size_t bytes = static_cast<size_t>(launch.end - launch.begin) * row;
        char * to = download.join == Download::Join::sum ? static_cast<char *>(download.host_rows->data) +
                                                               static_cast<size_t>(batches_[number].n_host_rows()) * row
                                                         : host_.scratch() + download.staging;
        ggml_backend_tensor_get_async(side_->backend(), download.tensor, to + static_cast<size_t>(launch.begin) * row,
                                      0, bytes);
        downloaded += static_cast<int64_t>(bytes);
    }
    stats().bytes_out.fetch_add(downloaded, std::memory_order_relaxed);
}

void SplitBackend::join(const Segment & segment, const ggml_cgraph * graph) {
    for (const Download & download : segment.downloads) {
        const ggml_tensor * node = graph->nodes[download.node];
        const char *        from = host_.scratch() + download.staging;
        if (lands(download, node)) {
            continue;
        }
        switch (download.join) {
            case Download::Join::add: add(host_, download, node, from); break;
            case Download::Join::scatter: scatter(host_, download, node, from); break;
            case Download::Join::rows:
            case Download::Join::sum:
                join_routed(host_, batches_[static_cast<size_t>(download.routed)], download,
                            download.to == nullptr ? node : download.to, from);
        }
    }
}

} // namespace oallama
