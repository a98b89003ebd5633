// Is TEST0 as strict as it says? Without the split backend. What it computes, and how much memory it has, the other
// tests show.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "split_test.h"

namespace split_test {

namespace {

// A tensor of 256 numbers in TEST0's memory.
struct DeviceTensor {
    ContextPtr    ctx    = ContextPtr(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_tensor * tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 256);
    BufferPtr     buffer = BufferPtr(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(async_device::add())));
};

void check_addresses() {
    const DeviceTensor own;
    const pid_t        child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        const volatile char * at = static_cast<const char *>(own.tensor->data);
        _exit(*at == 0 ? 0 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status), "the host cannot follow an address of TEST0");
}

// The last number that another stream reads while a copy of so long is under way, after which it waits for the copy's
// event.
float read_beside_copy(double ns_per_byte) {
    const DeviceTensor own;
    const BackendPtr   first(ggml_backend_dev_init(async_device::add(), nullptr));
    const BackendPtr   second(ggml_backend_dev_init(async_device::add(), nullptr));
    DeviceOptions      slow;
    slow.set_ns_per_byte = ns_per_byte;
    slow.set();
    const oallama::EventPtr  event(ggml_backend_event_new(async_device::add()));
    const std::vector<float> sent(256, 1.0F);
    std::vector<float>       early(256);
    std::vector<float>       late(256);
    ggml_backend_tensor_set_async(first.get(), own.tensor, sent.data(), 0, 1024);
    ggml_backend_event_record(event.get(), first.get());
#if !defined(__SANITIZE_THREAD__) // it would be right to complain
    ggml_backend_tensor_get_async(second.get(), own.tensor, early.data(), 0, 1024);
    ggml_backend_synchronize(second.get());
#endif
    ggml_backend_event_wait(second.get(), event.get());
    ggml_backend_tensor_get_async(second.get(), own.tensor, late.data(), 0, 1024);
    ggml_backend_synchronize(second.get());
    check(late == sent, "a stream waits for an event");
    ggml_backend_event_synchronize(event.get());
    return early.back();
}

// The second stream sees what the first copies only when an event orders them.
void check_streams() {
#if defined(__SANITIZE_THREAD__)
    read_beside_copy(0.02 * 1e9 / 1024);
#else
    bool before = false;
    for (double seconds = 0.02; seconds < 10.0 && !before; seconds *= 10.0) { // the second may get its core late
        before = std::isnan(read_beside_copy(seconds * 1e9 / 1024));
    }
    check(before, "a stream does not wait for another, and fresh memory is no number");
#endif
}

} // namespace

void test_device() {
    check_addresses();
    check_streams();
}

} // namespace split_test
