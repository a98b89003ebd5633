#include "async_device.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include "emulated/graph.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void * address, unsigned long size);
extern "C" void __tsan_write_range(void * address, unsigned long size);
#else
static void __tsan_read_range(void *, unsigned long) {}
static void __tsan_write_range(void *, unsigned long) {}
#endif

namespace async_device {

namespace {

constexpr size_t    alignment    = 256;
constexpr uintptr_t device_space = uintptr_t{1} << 52; // no address that any process has
constexpr int64_t   row_padding  = 512;                // elements; what CUDA's matrix kernels may read beyond a row

[[noreturn]] void die(const char * what, const ggml_tensor * tensor) {
    std::fprintf(stderr, "%s: %s: %s %s\n", device_name, what, ggml_op_name(tensor->op), tensor->name);
    std::abort();
}

//
// state: options, counters
//

struct State {
    std::mutex mutex; // of all of this
    Options    options;
    Counters   counters;
    uint64_t   n_random   = 0;
    int64_t    n_computed = 0; // graphs

    std::map<const char *, size_t> pinned; // where pinned memory is
};

State & state() {
    static State * state = new State; // ggml keeps what it registers
    return *state;
}

Options options() {
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().options;
}

void count(int64_t Counters::* counter, int64_t n = 1) {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().counters.*counter += n;
}

uint64_t random_bits() {
    std::lock_guard<std::mutex> lock(state().mutex);
    uint64_t                    z = state().options.seed + 0x9E3779B97F4A7C15ULL * ++state().n_random;

    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
}

void delay() {
    if (const int64_t most_us = options().max_delay_us; most_us > 0) {
        const uint64_t us = random_bits() % static_cast<uint64_t>(most_us + 1);
        std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
}

//
// streams and events: a thread that runs commands in order, and points in such orders
//

class Stream {
  public:
    Stream() : thread_([this] { run(); }) {}

    // Runs what has been submitted first.
    ~Stream() {
        submit(nullptr); // the end
        thread_.join();
    }

    Stream(const Stream &)             = delete;
    Stream & operator=(const Stream &) = delete;

    void submit(std::function<void()> command) {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(std::move(command));
        n_submitted_++;
        changed_.notify_all();
    }

    // Waits for what has been submitted until now.
    void drain() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint64_t               until = n_submitted_;
        changed_.wait(lock, [&] { return n_done_ >= until; });
    }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return !queue_.empty(); });
            std::function<void()> command = std::move(queue_.front());
            queue_.pop_front();
            if (!command) {
                return;
            }
            lock.unlock();
            delay();
            command();
            command = nullptr; // frees what it holds before it counts as done
            lock.lock();
            n_done_++;
            changed_.notify_all();
        }
    }

    std::mutex                        mutex_;
    std::condition_variable           changed_;
    std::deque<std::function<void()>> queue_;
    uint64_t                          n_submitted_ = 0;
    uint64_t                          n_done_      = 0;
    std::thread                       thread_;
};

// Who waits, waits for the last point that was recorded until then.
class Event {
  public:
    uint64_t record() {
        std::lock_guard<std::mutex> lock(mutex_);
        return ++n_recorded_;
    }

    uint64_t last() {
        std::lock_guard<std::mutex> lock(mutex_);
        return n_recorded_;
    }

    void reach(uint64_t n) {
        std::lock_guard<std::mutex> lock(mutex_);
        n_reached_ = std::max(n_reached_, n);
        changed_.notify_all();
    }

    void wait(uint64_t n) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return n_reached_ >= n; });
    }

  private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    uint64_t                n_recorded_ = 0;
    uint64_t                n_reached_  = 0;
};

std::shared_ptr<Event> event_of(ggml_backend_event_t event) {
    return *static_cast<std::shared_ptr<Event> *>(event->context);
}

//
// device memory
//

const char * device_buft_name(ggml_backend_buffer_type_t) {
    return device_name;
}

size_t buft_alignment(ggml_backend_buffer_type_t) {
    return alignment;
}

char * real(const void * device_address) {
    return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(device_address) - device_space);
}

// Memory of a tensor in a device buffer, of which size bytes from offset are to be used.
char * memory_of(const ggml_tensor * tensor, size_t offset, size_t size) {
    const ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    char * const                begin  = static_cast<char *>(buffer->context);
    char * const                at     = real(tensor->data) + offset;
    if (at < begin || at + size > begin + buffer->size) {
        die("access beyond a buffer", tensor);
    }
    return at;
}

void free_device_buffer(ggml_backend_buffer_t buffer) {
    ::operator delete(buffer->context, std::align_val_t{alignment});
    count(&Counters::device_bytes, -static_cast<int64_t>(buffer->size));
}

void * device_base(ggml_backend_buffer_t buffer) {
    return reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(buffer->context) + device_space);
}

// CUDA's does the same for weights that are not streamed.
ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    const size_t n_bytes = ggml_nbytes(tensor);
    const size_t size    = ggml_backend_buft_get_alloc_size(buffer->buft, tensor);
    if (tensor->view_src == nullptr && size > n_bytes) {
        std::memset(memory_of(tensor, n_bytes, size - n_bytes), 0, size - n_bytes);
    }
    return GGML_STATUS_SUCCESS;
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    count(&Counters::n_blocking);
    std::memcpy(memory_of(tensor, offset, size), data, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    count(&Counters::n_blocking);
    std::memcpy(data, memory_of(tensor, offset, size), size);
}

void clear_device_buffer(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
}

ggml_backend_buffer_t alloc_device_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    const Options now  = options();
    const size_t  used = static_cast<size_t>(counters().device_bytes);
    if (size > now.max_alloc_bytes || used + size > now.capacity_bytes) {
        return nullptr;
    }
    void * memory = ::operator new(size, std::align_val_t{alignment});
    std::memset(memory, 0xFF, size); // NaN
    count(&Counters::device_bytes, static_cast<int64_t>(size));
    count(&Counters::n_allocs);
    ggml_backend_buffer_i iface = {};
    iface.free_buffer           = free_device_buffer;
    iface.get_base              = device_base;
    iface.init_tensor           = init_tensor;
    iface.set_tensor            = set_tensor;
    iface.get_tensor            = get_tensor;
    iface.clear                 = clear_device_buffer;
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

size_t device_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    size_t        size = ggml_nbytes(tensor);
    const int64_t rest = tensor->ne[0] % row_padding;
    if (ggml_is_quantized(tensor->type) && rest != 0) {
        size += ggml_row_size(tensor->type, row_padding - rest);
    }
    return size;
}

//
// pinned host memory: as ggml's own, but counted
//

const char * pinned_buft_name(ggml_backend_buffer_type_t) {
    return "TEST0_Host";
}

bool buft_is_host(ggml_backend_buffer_type_t) {
    return true;
}

// Whether the host's bytes there are pinned.
bool is_pinned(const void * data, size_t size) {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto *                begin = static_cast<const char *>(data);
    auto                        after = state().pinned.upper_bound(begin);
    return after != state().pinned.begin() && begin + size <= std::prev(after)->first + std::prev(after)->second;
}

void free_pinned_buffer(ggml_backend_buffer_t buffer) {
    {
        std::lock_guard<std::mutex> lock(state().mutex);
        state().pinned.erase(static_cast<const char *>(buffer->context));
        state().counters.pinned_bytes -= static_cast<int64_t>(buffer->size);
    }
    ::operator delete(buffer->context, std::align_val_t{alignment});
}

ggml_backend_buffer_t alloc_pinned_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    constexpr size_t            large = size_t{64} << 20;
    std::lock_guard<std::mutex> lock(state().mutex);
    Counters &                  now = state().counters;
    now.n_pinned++;
    now.most_pinned = std::max(now.most_pinned, static_cast<int64_t>(size));
    if (static_cast<size_t>(now.pinned_bytes) + size > state().options.pinned_capacity) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t plain = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), alignment);
    ggml_backend_buffer_i iface = plain->iface;
    ggml_backend_buffer_free(plain);
    iface.free_buffer = free_pinned_buffer;
    iface.clear       = clear_device_buffer;
    void * memory     = ::operator new(size, std::align_val_t{alignment});
    std::memset(memory, 0xFF, std::min(size, large)); // what is larger is never there
    now.pinned_bytes += static_cast<int64_t>(size);
    state().pinned[static_cast<const char *>(memory)] = size;
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

ggml_backend_device      the_device;
ggml_backend_buffer_type device_buft = {
    {device_buft_name, alloc_device_buffer, nullptr, buft_alignment, nullptr, device_alloc_size, nullptr, nullptr},
    &the_device,
    nullptr};
ggml_backend_buffer_type pinned_buft = {
    {pinned_buft_name, alloc_pinned_buffer, nullptr, buft_alignment, nullptr, nullptr, nullptr, buft_is_host},
    &the_device,
    nullptr};

//
// graphs
//

// What follows a row of a quantised weight is multiplied by zero, which gives zero unless it is NaN.
void check_behind(const ggml_tensor * weight, const char * row_end) {
    const int64_t      n = row_padding - weight->ne[0] % row_padding;
    std::vector<float> values(static_cast<size_t>(n));
    ggml_get_type_traits(weight->type)->to_float(row_end, values.data(), n);
    for (const float value : values) {
        if (!std::isfinite(value)) {
            die("what is read behind a row is no number", weight);
        }
    }
}

int32_t id_at(const ggml_tensor * ids, int64_t rank, int64_t token) {
    int32_t      id = 0;
    const size_t at = static_cast<size_t>(token) * ids->nb[1] + static_cast<size_t>(rank) * ids->nb[0];
    std::memcpy(&id, static_cast<const char *>(ids->data) + at, sizeof id);
    return id;
}

// CUDA's kernels for weights in float keep one rank for each expert and token: of two, the other's row stays stale.
void check_ranks(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT_ID || ggml_is_quantized(node->src[0]->type) || node->src[2]->op != GGML_OP_NONE) {
        return;
    }
    const ggml_tensor * ids = node->src[2];
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        std::set<int32_t> used;
        for (int64_t rank = 0; rank < ids->ne[0]; rank++) {
            if (!used.insert(id_at(ids, rank, token)).second) {
                die("a token uses an expert in float twice", node);
            }
        }
    }
}

// Behind the last row of a weight, or of each expert that is used.
void check_padding(const ggml_tensor * node) {
    const ggml_tensor * weight = node->src[0];
    if ((node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) || !ggml_is_quantized(weight->type) ||
        weight->ne[0] % row_padding == 0) {
        return;
    }
    const auto * data = static_cast<const char *>(weight->data);
    check_behind(weight, data + ggml_nbytes(weight));
    const ggml_tensor * ids = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
    if (ids == nullptr || ids->op != GGML_OP_NONE) {
        return; // the graph has yet to compute them
    }
    for (int64_t i = 0; i < ids->ne[0] * ids->ne[1]; i++) {
        const int32_t expert = id_at(ids, i % ids->ne[0], i / ids->ne[0]);
        check_behind(weight, data + static_cast<size_t>(expert + 1) * weight->nb[2]);
    }
}

// Computes a graph as it was when it was launched.
void compute(emulated::Launch & launch, ggml_backend_t cpu) {
    const ggml_cgraph * graph = launch.graph();
    for (int i = 0; i < graph->n_nodes; i++) { // the CPU's kernels are unknown to the thread sanitizer
        const ggml_tensor * node = graph->nodes[i];
        check_padding(node);
        check_ranks(node);
        const bool routed = node->op == GGML_OP_MUL_MAT_ID && node->src[2]->op == GGML_OP_NONE;
        for (const ggml_tensor * src : node->src) {
            if (src != nullptr && (!routed || src != node->src[0])) {
                __tsan_read_range(src->data, ggml_nbytes(src));
            }
        }
        for (int64_t id = 0; routed && id < ggml_nelements(node->src[2]); id++) { // others may be on their way
            const auto * data = static_cast<char *>(node->src[0]->data);
            const auto   expert =
                static_cast<size_t>(id_at(node->src[2], id % node->src[2]->ne[0], id / node->src[2]->ne[0]));
            __tsan_read_range(const_cast<char *>(data) + expert * node->src[0]->nb[2], node->src[0]->nb[2]);
        }
        __tsan_write_range(node->data, ggml_nbytes(node));
    }
    if (launch.run(cpu) != GGML_STATUS_SUCCESS) {
        std::fprintf(stderr, "TEST0: ggml's CPU backend failed to compute a graph\n");
        std::abort();
    }
}

//
// backend: one stream
//

void * graph_memory(const ggml_tensor * tensor) {
    if (tensor->buffer == nullptr || tensor->buffer->buft != &device_buft) {
        die("a graph uses memory of something else", tensor);
    }
    return memory_of(tensor, 0, ggml_nbytes(tensor));
}

struct Backend {
    oallama::Cpu cpu;
    Stream       stream; // ends before the CPU that it computes with

    std::map<const ggml_tensor *, std::vector<const void *>> places; // of a graph's tensors the last time, by its first
};

// Notes where a graph's tensors lie. Whether they lay elsewhere the last time, in a graph with the same first node: so
// CUDA knows graphs.
bool moves(Backend & backend, const ggml_cgraph * graph) {
    std::vector<const void *> now;
    for (int i = 0; i < graph->n_nodes; i++) {
        now.push_back(graph->nodes[i]->data);
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            now.push_back(src == nullptr ? nullptr : src->data);
        }
    }
    std::vector<const void *> & before = backend.places[graph->nodes[0]];
    const bool                  moved  = !before.empty() && before != now;
    before                             = std::move(now);
    return moved;
}

// Ends the process where a graph writes over what it is sent before: an input without a name, that another device's
// kernel may read for longer than ggml's allocator knows.
void check_inputs(const ggml_cgraph * graph) {
    const auto begin_of = [](const ggml_tensor * tensor) { return static_cast<const char *>(tensor->data); };
    for (int i = 0; i < graph->n_nodes; i++) {
        for (const ggml_tensor * sent : graph->nodes[i]->src) {
            const bool is_input =
                sent != nullptr && (sent->flags & GGML_TENSOR_FLAG_INPUT) != 0 && sent->name[0] == '\0';
            for (int j = 0; is_input && j < graph->n_nodes; j++) {
                const ggml_tensor * node = graph->nodes[j];
                GGML_ASSERT(node->view_src != nullptr || begin_of(node) >= begin_of(sent) + ggml_nbytes(sent) ||
                            begin_of(sent) >= begin_of(node) + ggml_nbytes(node));
            }
        }
    }
}

// To queue a command in.
Stream & stream_of(ggml_backend_t backend) {
    return static_cast<Backend *>(backend->context)->stream;
}

const char * backend_name(ggml_backend_t) {
    return device_name;
}

void free_backend(ggml_backend_t backend) {
    delete static_cast<Backend *>(backend->context);
    delete backend;
    count(&Counters::n_streams, -1);
}

void set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    char * const to = memory_of(tensor, offset, size);
    count(&Counters::n_copies_in);
    stream_of(backend).submit([to, data, size] {
        const double ns = options().set_ns_per_byte * static_cast<double>(size);
        if (ns > 0.0) {
            std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<int64_t>(ns)));
        }
        std::memcpy(to, data, size);
    });
}

int64_t n_computed() {
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().n_computed;
}

// Holds up a stream until more than so many graphs have been computed, which is no use where one of its own would be
// the next.
void wait_for_graph(int64_t n_before) {
    for (int tries = 0; tries < 10000; tries++) {
        if (n_computed() > n_before) {
            count(&Counters::n_beside);
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

void get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const char * const from = memory_of(tensor, offset, size);
    count(&Counters::n_copies_out);
    Stream &   stream = stream_of(backend);
    const bool pinned = is_pinned(data, size);
    stream.submit([from, data, size, waits = pinned && options().waits_for_graph, n_before = n_computed()] {
        if (waits) {
            wait_for_graph(n_before);
        }
        std::memcpy(data, from, size);
    });
    if (!pinned) {
        stream.drain();
    }
}

void synchronize(ggml_backend_t backend) {
    stream_of(backend).drain();
    delay();
}

// Takes one of the graphs that are computed until the device is lost; false: none is left.
bool is_there() {
    std::lock_guard<std::mutex> lock(state().mutex);
    int64_t &                   left = state().options.graphs_until_lost;
    const int64_t               was  = left;
    left -= left > 0 ? 1 : 0;
    return was != 0;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    if (!is_there()) {
        return GGML_STATUS_FAILED;
    }
    count(&Counters::n_graphs);
    if (graph->n_nodes == 0) {
        return GGML_STATUS_SUCCESS;
    }
    check_inputs(graph);
    count(&Counters::n_moved, moves(*static_cast<Backend *>(backend->context), graph) ? 1 : 0);
    const auto           launch = std::make_shared<emulated::Launch>(graph, graph_memory);
    const ggml_backend_t cpu    = static_cast<Backend *>(backend->context)->cpu.get();
    stream_of(backend).submit([launch, cpu] {
        compute(*launch, cpu);
        std::lock_guard<std::mutex> lock(state().mutex);
        state().n_computed++;
    });
    return GGML_STATUS_SUCCESS;
}

void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    stream_of(backend).submit([own = event_of(event), n = event_of(event)->record()] { own->reach(n); });
}

void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    stream_of(backend).submit([own = event_of(event), n = event_of(event)->last()] { own->wait(n); });
}

ggml_backend_t new_backend(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = {0x74, 0x65, 0x73, 0x74, 0x30, 0x2d, 0x6f, 0x61,
                             0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x30, 0x30, 0x31};

    auto * own = new Backend;
    own->cpu.set_n_threads(1);
    count(&Counters::n_streams);
    ggml_backend_i iface   = {};
    iface.get_name         = backend_name;
    iface.free             = free_backend;
    iface.set_tensor_async = set_tensor_async;
    iface.get_tensor_async = get_tensor_async;
    iface.synchronize      = synchronize;
    iface.graph_compute    = graph_compute;
    iface.event_record     = event_record;
    iface.event_wait       = event_wait;
    return new ggml_backend{&guid, iface, device, own};
}

//
// device, registration
//

void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *total = options().capacity_bytes;
    *free  = *total - std::min(*total, static_cast<size_t>(counters().device_bytes));
}

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    props->name        = device->iface.get_name(device);
    props->description = device->iface.get_description(device);
    props->type        = device->iface.get_type(device);
    props->caps        = {/*async=*/true, /*host_buffer=*/true, /*buffer_from_host_ptr=*/false,
                          /*events=*/!options().refuse_events,
                          /*mmap_support=*/false};
    get_memory(device, &props->memory_free, &props->memory_total);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    const int32_t refused = options().refused_type;
    for (const ggml_tensor * src : op->src) {
        if (src != nullptr && src->type == refused) {
            return false;
        }
    }
    return op->type != refused && emulated::cuda_supports(op) &&
           ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}

void set_up_device(ggml_backend_reg_t reg) {
    ggml_backend_device_i & iface = the_device.iface;
    iface.get_name                = [](ggml_backend_dev_t) { return device_name; };
    iface.get_description         = [](ggml_backend_dev_t) { return "a strict asynchronous device for tests"; };
    iface.get_memory              = get_memory;
    iface.get_type                = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    iface.get_props               = get_props;
    iface.init_backend            = new_backend;
    iface.get_buffer_type         = [](ggml_backend_dev_t) { return &device_buft; };
    iface.get_host_buffer_type    = [](ggml_backend_dev_t) { return &pinned_buft; };
    iface.supports_op             = supports_op;
    iface.supports_buft           = [](ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
        return options().by_address ? buft == &device_buft
                                    : buft->iface.get_name == device_buft_name; // as ggml's own devices know theirs
    };
    iface.event_new = [](ggml_backend_dev_t device) {
        if (options().refuse_events) {
            return static_cast<ggml_backend_event_t>(nullptr);
        }
        count(&Counters::n_events);
        return new ggml_backend_event{device, new std::shared_ptr<Event>(std::make_shared<Event>())};
    };
    iface.event_free = [](ggml_backend_dev_t, ggml_backend_event_t event) {
        count(&Counters::n_events, -1);
        delete static_cast<std::shared_ptr<Event> *>(event->context);
        delete event;
    };
    iface.event_synchronize = [](ggml_backend_dev_t, ggml_backend_event_t event) {
        event_of(event)->wait(event_of(event)->last());
    };
    the_device.reg = reg;
}

// As ggml-cuda tells that it was built without virtual memory.
ggml_backend_feature * features(ggml_backend_reg_t) {
    static ggml_backend_feature the_features[] = {{"ARCHS", "900"}, {"NO_VMM", "1"}, {nullptr, nullptr}};
    return the_features;
}

} // namespace

ggml_backend_reg_t registry() {
    static ggml_backend_reg * reg = [] {
        auto * made                  = new ggml_backend_reg{};
        made->api_version            = GGML_BACKEND_API_VERSION;
        made->iface.get_name         = [](ggml_backend_reg_t) { return "TEST"; };
        made->iface.get_device_count = [](ggml_backend_reg_t) { return size_t{1}; };
        made->iface.get_device       = [](ggml_backend_reg_t, size_t) { return &the_device; };
        made->iface.get_proc_address = [](ggml_backend_reg_t, const char * name) {
            const bool asked = options().no_vmm && std::strcmp(name, "ggml_backend_get_features") == 0;
            return asked ? reinterpret_cast<void *>(features) : nullptr;
        };
        set_up_device(made);
        return made;
    }();
    return reg;
}

ggml_backend_dev_t add() {
    static ggml_backend_reg_t reg = [] {
        ggml_backend_register(registry());
        return registry();
    }();
    return ggml_backend_reg_dev_get(reg, 0);
}

void set_options(const Options & wanted) {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().options  = wanted;
    state().n_random = 0;
}

Counters counters() {
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().counters;
}

} // namespace async_device
