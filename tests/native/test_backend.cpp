// TEST0 as a back end in a library of its own, as users have them: what --backend and GGML_BACKEND_PATH load.

#include "async_device.h"

extern "C" {

// What ggml_backend_load calls of a library.
__attribute__((visibility("default"))) void * ggml_backend_init(void);

void * ggml_backend_init(void) {
    return async_device::registry();
}

} // extern "C"
