// Bytes that a llama_context has allocated, by buffer type, from libllama's exported C++ function; and the experts that
// its routers choose, read as ggml's scheduler computes them.

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "support.h"

//
// memory
//

// As in llama.cpp's src/llama-ext.h. At global scope and by these names, for the compiler must pass and return them as
// libllama does.
struct llama_context;

struct llama_memory_breakdown_data {
    size_t model   = 0; // bytes
    size_t context = 0;
    size_t compute = 0;
};

#ifdef __APPLE__
using llama_memory_breakdown = std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>;
#else
// The same map as libstdc++ has it in memory, which libllama is linked with; this library may be linked with another.
class llama_memory_breakdown {
  public:
    struct Row {
        ggml_backend_buffer_type_t  buft;
        llama_memory_breakdown_data bytes;
    };

    llama_memory_breakdown(const llama_memory_breakdown &)             = delete;
    llama_memory_breakdown & operator=(const llama_memory_breakdown &) = delete;
    ~llama_memory_breakdown() { release(root_); }

    std::vector<Row> rows() const {
        std::vector<Row> found;
        collect(root_, found);
        return found;
    }

  private:
    struct Node {
        int    colour;
        Node * parent;
        Node * left;
        Node * right;
        Row    row;
    };

    static void collect(const Node * node, std::vector<Row> & found) { // in the order of keys, as deep as the tree
        if (node != nullptr) {
            collect(node->left, found);
            found.push_back(node->row);
            collect(node->right, found);
        }
    }
    static void release(Node * node) {
        if (node != nullptr) {
            release(node->left);
            release(node->right);
            ::operator delete(node); // libstdc++'s takes memory by malloc, as every other does
        }
    }

    [[maybe_unused]] void * head_[2]; // how keys compare; the root's colour
    Node *                  root_;
    [[maybe_unused]] void * tail_[3]; // first and last node; how many there are
};
static_assert(sizeof(llama_memory_breakdown) == 48, "libstdc++'s map");
#endif

using llama_get_memory_breakdown_func = llama_memory_breakdown (*)(const llama_context *);

using namespace bridge;

namespace {

// How many backends of a context compute in this buffer type: llama.cpp makes one for each device of the model, one for
// each accelerator there is, and the CPU's, which takes the first device's pinned memory where it has such.
int64_t count_users(ggml_backend_buffer_type_t buft, const std::vector<ggml_backend_dev_t> & devices) {
    ggml_backend_buffer_type_t pinned = devices.empty() ? nullptr : ggml_backend_dev_host_buffer_type(devices.front());
    int64_t count = (pinned != nullptr ? pinned : ggml_backend_dev_buffer_type(cpu_device())) == buft ? 1 : 0;
    for (ggml_backend_dev_t device : devices) {
        count += ggml_backend_dev_buffer_type(device) == buft ? 1 : 0;
    }
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            count += ggml_backend_dev_buffer_type(device) == buft ? 1 : 0;
        }
    }
    return count;
}

} // namespace

//
// routing
//

struct gb_routing {
    std::atomic<bool>    listening = false;
    std::mutex           mutex; // of what follows
    std::vector<int32_t> numbers;
    std::vector<int32_t> taken; // numbers of the last take, which its caller still reads
    std::vector<char>    rows;  // of one node, as they lie in its buffer
    oallama_status       status = OALLAMA_OK;
};

namespace {

// llama.cpp names a router's choice so, and appends the number of the layer (llama-graph.cpp, build_moe_ffn).
constexpr std::string_view TOP_K = "ffn_moe_topk-";

// The layer of a router's choice; -1 for any other node.
int32_t layer_of(const ggml_tensor & node) noexcept {
    const std::string_view name(node.name);
    if (name.substr(0, TOP_K.size()) != TOP_K) {
        return -1;
    }
    const std::string_view digits        = name.substr(TOP_K.size());
    int32_t                layer         = -1;
    const char *           behind_digits = digits.data() + digits.size();
    const auto [end, error]              = std::from_chars(digits.data(), behind_digits, layer);
    return error == std::errc() && end == behind_digits ? layer : -1;
}

// The ids are the first columns of an argsort of all experts: between two tokens lie the others.
void record(gb_routing & routing, const ggml_tensor & ids, int32_t layer) {
    const int64_t n_used = ids.ne[0], n_tokens = ids.ne[1];
    if (ids.type != GGML_TYPE_I32 || ids.nb[0] != sizeof(int32_t) || ids.ne[2] != 1 || ids.ne[3] != 1 || n_used < 1) {
        throw Error(OALLAMA_UNSUPPORTED, "this llama.cpp keeps the experts that a router chose in another form");
    }
    if (n_tokens == 0) {
        return;
    }
    require(n_used <= std::numeric_limits<int32_t>::max() && n_tokens <= std::numeric_limits<int32_t>::max(),
            "a router chose for more tokens than can be counted");
    const size_t row_bytes = static_cast<size_t>(mul(n_used, sizeof(int32_t)));
    routing.rows.resize(ggml_nbytes(&ids));
    ggml_backend_tensor_get(&ids, routing.rows.data(), 0, routing.rows.size());

    const size_t first = routing.numbers.size();
    routing.numbers.resize(first + 3 + static_cast<size_t>(mul(n_used, n_tokens)));
    int32_t * out = routing.numbers.data() + first;
    *out++        = layer;
    *out++        = static_cast<int32_t>(n_used);
    *out++        = static_cast<int32_t>(n_tokens);
    for (int64_t token = 0; token < n_tokens; token++) {
        std::memcpy(out, routing.rows.data() + static_cast<size_t>(token) * ids.nb[1], row_bytes);
        out += n_used;
    }
}

} // namespace

//
// C interface
//

int gb_memory_breakdown(void * breakdown, const void * context, int32_t no_alloc, const char * const * devices,
                        int64_t n_devices, gb_memory_row * rows, int64_t capacity, int64_t * n_rows) {
    return guarded([&] {
        std::vector<ggml_backend_dev_t> given;
        for (int64_t i = 0; i < n_devices; i++) {
            given.push_back(find_device(devices[i]));
        }
        require(context != nullptr, "a memory breakdown is of a context");
        const auto function                = reinterpret_cast<llama_get_memory_breakdown_func>(breakdown);
        *n_rows                            = 0;
        const llama_memory_breakdown found = function(static_cast<const llama_context *>(context));
#ifdef __APPLE__
        const auto & all = found;
#else
        const std::vector<llama_memory_breakdown::Row> all = found.rows();
#endif
        for (const auto & [buft, bytes] : all) {
            require(*n_rows < capacity, "there are more buffer types than rows");
            gb_memory_row &    row    = rows[(*n_rows)++];
            ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
            if (device == nullptr && ggml_backend_buft_is_host(buft)) {
                device = cpu_device(); // ggml's plain host buffer types name no device
            }

            row = {};
            copy_text(ggml_backend_buft_name(buft), row.buft, sizeof row.buft);
            copy_text(device == nullptr ? "" : ggml_backend_dev_name(device), row.device, sizeof row.device);
            row.is_host = ggml_backend_buft_is_host(buft) ? 1 : 0;
            row.model   = static_cast<int64_t>(bytes.model);
            row.context = static_cast<int64_t>(bytes.context);
            row.compute = static_cast<int64_t>(bytes.compute);
            if (no_alloc != 0 && row.compute > 0) {
                row.compute /= std::max<int64_t>(count_users(buft, given), 1);
            }
        }
    });
}

int gb_routing_new(gb_routing ** routing) {
    return guarded([&] { *routing = new gb_routing(); });
}

void gb_routing_free(gb_routing * routing) {
    delete routing;
}

// ggml_backend_sched_eval_callback: asked of every node whether it is wanted, then called with it computed. True then
// lets the scheduler go on: what cannot be recorded is told by the next take.
bool gb_routing_on_node(ggml_tensor * node, bool ask, void * user_data) {
    gb_routing & routing = *static_cast<gb_routing *>(user_data);
    if (!routing.listening.load(std::memory_order_relaxed)) {
        return !ask;
    }
    const int32_t layer = layer_of(*node);
    if (ask || layer < 0) {
        return !ask || layer >= 0;
    }
    guarded([&] {
        const std::lock_guard<std::mutex> lock(routing.mutex);
        if (routing.status == OALLAMA_OK) {
            routing.status = static_cast<oallama_status>(guarded([&] { record(routing, *node, layer); }));
        }
    });
    return true;
}

void gb_routing_listen(gb_routing * routing, int32_t on) {
    routing->listening.store(on != 0, std::memory_order_relaxed);
}

int gb_routing_take(gb_routing * routing, const int32_t ** numbers, int64_t * n_numbers) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(routing->mutex);
        const oallama_status              status = std::exchange(routing->status, OALLAMA_OK);
        if (status != OALLAMA_OK) {
            throw Error(status, "the experts that routers chose could not be recorded");
        }
        routing->taken = std::exchange(routing->numbers, {});
        *numbers       = routing->taken.data();
        *n_numbers     = static_cast<int64_t>(routing->taken.size());
    });
}
