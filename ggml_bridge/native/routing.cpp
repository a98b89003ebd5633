// Which experts the routers of a llama_context choose, read as ggml's scheduler computes them.

#include <atomic>
#include <charconv>
#include <cstring>
#include <limits>
#include <mutex>
#include <string_view>
#include <vector>

#include "support.h"

using namespace bridge;

struct gb_routing {
    std::atomic<bool>    listening = false;
    std::mutex           mutex; // of what follows
    std::vector<int32_t> numbers;
    std::vector<char>    rows; // of one node, as they lie in its buffer
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

// ggml_backend_sched_eval_callback: asked of every node whether it is wanted, then called with it computed. True then
// lets the scheduler go on: what cannot be recorded is told by the next take.
bool on_node(ggml_tensor * node, bool ask, void * user_data) noexcept {
    gb_routing & routing = *static_cast<gb_routing *>(user_data);
    if (!routing.listening.load(std::memory_order_relaxed)) {
        return !ask;
    }
    const int32_t layer = layer_of(*node);
    if (ask || layer < 0) {
        return !ask || layer >= 0;
    }
    const std::lock_guard<std::mutex> lock(routing.mutex);
    if (routing.status == OALLAMA_OK) {
        routing.status = static_cast<oallama_status>(guarded([&] { record(routing, *node, layer); }));
    }
    return true;
}

} // namespace

//
// C interface
//

int gb_routing_new(gb_routing ** routing) {
    return guarded([&] {
        require(routing != nullptr, "room for the result is needed");
        *routing = new gb_routing();
    });
}

int gb_routing_callback(void ** callback) {
    return guarded([&] {
        require(callback != nullptr, "room for the result is needed");
        *callback = reinterpret_cast<void *>(&on_node);
    });
}

void gb_routing_free(gb_routing * routing) {
    delete routing;
}

void gb_routing_listen(gb_routing * routing, int32_t on) {
    routing->listening.store(on != 0, std::memory_order_relaxed);
}

int gb_routing_size(gb_routing * routing, int64_t * n_numbers) {
    return guarded([&] {
        require(routing != nullptr && n_numbers != nullptr, "what records and room for the result are needed");
        const std::lock_guard<std::mutex> lock(routing->mutex);
        if (routing->status != OALLAMA_OK) {
            const oallama_status status = routing->status;
            routing->status             = OALLAMA_OK;
            throw Error(status, "the experts that routers chose could not be recorded");
        }
        *n_numbers = static_cast<int64_t>(routing->numbers.size());
    });
}

int gb_routing_take(gb_routing * routing, int32_t * numbers, int64_t n_numbers) {
    return guarded([&] {
        require(routing != nullptr && numbers != nullptr, "what records and room for the result are needed");
        const std::lock_guard<std::mutex> lock(routing->mutex);
        require(n_numbers == static_cast<int64_t>(routing->numbers.size()), "the room must be of gb_routing_size");
        if (n_numbers > 0) {
            std::memcpy(numbers, routing->numbers.data(), routing->numbers.size() * sizeof(int32_t));
        }
        routing->numbers.clear();
    });
}
