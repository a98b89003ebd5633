// What a llama_context has allocated, by buffer type, from libllama's exported C++ function.

#include <map>

#include "support.h"

// As in llama.cpp's src/llama-ext.h. At global scope and by these names, for the compiler must pass and return them as
// libllama does; a map's layout is fixed by the C++ library that both use.
struct llama_context;

struct llama_memory_breakdown_data {
    size_t model   = 0; // bytes
    size_t context = 0;
    size_t compute = 0;
};

using llama_memory_breakdown          = std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>;
using llama_get_memory_breakdown_func = llama_memory_breakdown (*)(const llama_context *);

using namespace bridge;

//
// C interface
//

int gb_memory_breakdown(void * breakdown, const void * context, gb_memory_row * rows, int64_t capacity,
                        int64_t * n_rows) {
    return guarded([&] {
        require(breakdown != nullptr && context != nullptr && rows != nullptr && n_rows != nullptr,
                "a function, a context and room for the result are needed");
        const auto function = reinterpret_cast<llama_get_memory_breakdown_func>(breakdown);
        *n_rows             = 0;
        for (const auto & [buft, bytes] : function(static_cast<const llama_context *>(context))) {
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
        }
    });
}
