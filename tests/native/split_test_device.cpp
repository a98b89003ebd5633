// Is TEST0 as strict as it says? Without the split backend.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "split_test.h"

namespace split_test {

namespace {

struct DeviceTensor {
    ContextPtr    ctx;
    BufferPtr     buffer;
    ggml_tensor * tensor = nullptr;
};

DeviceTensor device_tensor(int64_t n) {
    DeviceTensor own;
    own.ctx.reset(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    own.tensor = ggml_new_tensor_1d(own.ctx.get(), GGML_TYPE_F32, n);
    own.buffer.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(own.ctx.get(), ggml_backend_dev_buffer_type(async_device::add())));
    return own;
}

void check_results() {
    const Block block = ffn_block(GGML_TYPE_F16, GGML_TYPE_F16);
    const Data  data  = make_data(block);
    const Model whole(block, data, host_layouts().front());
    const Model there(block, data, ggml_backend_dev_buffer_type(async_device::add()));
    Session     cpu({/*split=*/false, /*gpu=*/false});
    Session     gpu({/*split=*/false, /*gpu=*/true});
    for (int64_t delay_us : {0, 100}) {
        async_device::Options options;
        options.max_delay_us = delay_us;
        async_device::set_options(options);
        for (int64_t n_tokens : {1, 7}) {
            check(same_bytes(cpu.compute(whole, n_tokens), gpu.compute(there, n_tokens)),
                  "TEST0 computes what the CPU computes");
        }
    }
    check(gpu.ran_on().at("mm_ffn_down") == async_device::device_name, "TEST0 did compute");
    async_device::set_options({});
}

void check_addresses() {
    const DeviceTensor own   = device_tensor(4);
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

// What another stream reads while a copy of so long is under way, after which it waits for the copy's event.
std::vector<float> read_beside_copy(double ns_per_byte) {
    const DeviceTensor own = device_tensor(256);
    const BackendPtr   first(ggml_backend_dev_init(async_device::add(), nullptr));
    const BackendPtr   second(ggml_backend_dev_init(async_device::add(), nullptr));

    async_device::Options slow;
    slow.set_ns_per_byte = ns_per_byte;
    async_device::set_options(slow);
    ggml_backend_event_t     event = ggml_backend_event_new(async_device::add());
    const std::vector<float> sent(256, 1.0F);
    std::vector<float>       early(256);
    std::vector<float>       late(256);
    ggml_backend_tensor_set_async(first.get(), own.tensor, sent.data(), 0, 1024);
    ggml_backend_event_record(event, first.get());
#if !defined(__SANITIZE_THREAD__) // it would be right to complain
    ggml_backend_tensor_get_async(second.get(), own.tensor, early.data(), 0, 1024);
    ggml_backend_synchronize(second.get());
#endif
    ggml_backend_event_wait(second.get(), event);
    ggml_backend_tensor_get_async(second.get(), own.tensor, late.data(), 0, 1024);
    ggml_backend_synchronize(second.get());
    check(late == sent, "a stream waits for an event");
    ggml_backend_event_synchronize(event);
    ggml_backend_event_free(event);
    async_device::set_options({});
    return early;
}

// The second stream sees what the first copies only when an event orders them.
void check_streams() {
#if defined(__SANITIZE_THREAD__)
    read_beside_copy(0.02 * 1e9 / 1024);
#else
    bool before = false;
    for (double seconds = 0.02; seconds < 10.0 && !before; seconds *= 10.0) { // the second may get its core late
        before = std::isnan(read_beside_copy(seconds * 1e9 / 1024)[255]);
    }
    check(before, "a stream does not wait for another, and fresh memory is no number");
#endif
}

void check_memory() {
    async_device::Options options;
    options.max_alloc_bytes = 1100;
    async_device::set_options(options);
    check(device_tensor(300).buffer == nullptr, "TEST0 refuses a large allocation");
    check(device_tensor(200).buffer != nullptr, "TEST0 allows a small allocation");
    options                = {};
    options.capacity_bytes = 2000;
    async_device::set_options(options);
    const DeviceTensor first = device_tensor(300);
    check(first.buffer != nullptr && device_tensor(300).buffer == nullptr, "TEST0 has no more than its capacity");
    async_device::set_options({});
}

} // namespace

void test_device() {
    check_addresses();
    check_results();
    check_streams();
    check_memory();
    done("device");
}

} // namespace split_test
