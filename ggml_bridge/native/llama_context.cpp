// Bytes that a llama_context has allocated, by buffer type, from libllama's exported C++ function.

#include <algorithm>
#include <map>

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
