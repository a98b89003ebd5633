// ggml's public functions, called over vtables whose every slot tells its name: each must call the slot that the
// headers mean. And buffer types in the layout of each API that is known, and an API that is not.

#include <algorithm>
#include <array>
#include <cstring>

#include "native_test.h"
#include "split/abi_check.h"
#include "support.h"

namespace native_test {

namespace {

const void * called = nullptr;

template <auto Slot> struct Stub;

template <typename Table, typename R, typename... Args, R (*Table::*Slot)(Args...)> struct Stub<Slot> {
    static R run(Args...) {
        called = &name;
        return R();
    }

    static constexpr char name = 0; // its address is the slot's
};

void other_slot() {}

template <typename Table> Table filled() {
    Table table;
    std::fill_n(reinterpret_cast<void (**)()>(&table), sizeof table / sizeof(void *), other_slot);
    return table;
}

template <auto Slot, typename Table, typename Call> void expect_call(const char * what, Table & table, Call && call) {
    table.*Slot = Stub<Slot>::run;
    called      = nullptr;
    call();
    check(called == &Stub<Slot>::name, std::string("ggml calls the slot ") + what);
}

#define CALLS(table, slot, call)                                                                                       \
    expect_call<&std::decay_t<decltype(table)>::slot>(#slot, table, [&] { static_cast<void>(call); })

void test_slots() {
    char                     data[64] = {};
    const bridge::ContextPtr ctx      = bridge::new_context(1);
    ggml_tensor *            tensor   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 16);
    ggml_backend_reg         reg      = {GGML_BACKEND_API_VERSION, filled<ggml_backend_reg_i>(), nullptr};
    ggml_backend_device      device   = {filled<ggml_backend_device_i>(), &reg, nullptr};
    ggml_backend_buffer_type buft     = {filled<ggml_backend_buffer_type_i>(), &device, nullptr};
    ggml_backend_buffer_t    buffer   = ggml_backend_buffer_init(&buft, filled<ggml_backend_buffer_i>(), data, 64);
    ggml_backend             backend  = {nullptr, filled<ggml_backend_i>(), &device, nullptr};
    ggml_backend_event       event    = {&device, nullptr};
    ggml_backend_dev_props   props    = {};
    size_t                   size     = 0;

    CALLS(reg.iface, get_name, ggml_backend_reg_name(&reg));
    CALLS(reg.iface, get_device_count, ggml_backend_reg_dev_count(&reg));
    CALLS(reg.iface, get_proc_address, ggml_backend_reg_get_proc_address(&reg, ""));

    CALLS(device.iface, get_name, ggml_backend_dev_name(&device));
    CALLS(device.iface, get_description, ggml_backend_dev_description(&device));
    CALLS(device.iface, get_memory, ggml_backend_dev_memory(&device, &size, &size));
    CALLS(device.iface, get_type, ggml_backend_dev_type(&device));
    CALLS(device.iface, get_props, ggml_backend_dev_get_props(&device, &props));
    CALLS(device.iface, init_backend, ggml_backend_dev_init(&device, nullptr));
    CALLS(device.iface, get_buffer_type, ggml_backend_dev_buffer_type(&device));
    CALLS(device.iface, get_host_buffer_type, ggml_backend_dev_host_buffer_type(&device));
    CALLS(device.iface, buffer_from_host_ptr, ggml_backend_dev_buffer_from_host_ptr(&device, data, 1, 1));
    CALLS(device.iface, supports_op, ggml_backend_dev_supports_op(&device, tensor));
    CALLS(device.iface, supports_buft, ggml_backend_dev_supports_buft(&device, &buft));
    CALLS(device.iface, offload_op, ggml_backend_dev_offload_op(&device, tensor));
    CALLS(device.iface, event_new, ggml_backend_event_new(&device));
    CALLS(device.iface, event_free, ggml_backend_event_free(&event));
    CALLS(device.iface, event_synchronize, ggml_backend_event_synchronize(&event));

    tensor->buffer = buffer;
    tensor->data   = data;
    CALLS(buffer->iface, init_tensor, ggml_backend_buffer_init_tensor(buffer, tensor));
    CALLS(buffer->iface, memset_tensor, ggml_backend_tensor_memset(tensor, 0, 0, 8));
    CALLS(buffer->iface, set_tensor, ggml_backend_tensor_set(tensor, data, 0, 8));
    CALLS(buffer->iface, get_tensor, ggml_backend_tensor_get(tensor, data, 0, 8));
    CALLS(buffer->iface, set_tensor_2d, ggml_backend_tensor_set_2d(tensor, data, 0, 4, 2, 8, 8));
    CALLS(buffer->iface, get_tensor_2d, ggml_backend_tensor_get_2d(tensor, data, 0, 4, 2, 8, 8));
    CALLS(buffer->iface, cpy_tensor, ggml_backend_buffer_copy_tensor(tensor, tensor));
    CALLS(buffer->iface, clear, ggml_backend_buffer_clear(buffer, 0));
    CALLS(buffer->iface, reset, ggml_backend_buffer_reset(buffer));
    CALLS(buffer->iface, free_buffer, ggml_backend_buffer_free(buffer));

    CALLS(buft.iface, get_name, ggml_backend_buft_name(&buft));
    CALLS(buft.iface, alloc_buffer, ggml_backend_buft_alloc_buffer(&buft, 1));
    CALLS(buft.iface, get_alignment, ggml_backend_buft_get_alignment(&buft));
    CALLS(buft.iface, get_max_size, ggml_backend_buft_get_max_size(&buft));
    tensor->ne[0] = 0; // no allocation is smaller than its tensor
    CALLS(buft.iface, get_alloc_size, ggml_backend_buft_get_alloc_size(&buft, tensor));
    CALLS(buft.iface, is_host, ggml_backend_buft_is_host(&buft));
    tensor->ne[0] = 16;

    CALLS(backend.iface, get_name, ggml_backend_name(&backend));
    CALLS(backend.iface, set_tensor_async, ggml_backend_tensor_set_async(&backend, tensor, data, 0, 8));
    CALLS(backend.iface, get_tensor_async, ggml_backend_tensor_get_async(&backend, tensor, data, 0, 8));
    CALLS(backend.iface, set_tensor_2d_async, ggml_backend_tensor_set_2d_async(&backend, tensor, data, 0, 4, 2, 8, 8));
    CALLS(backend.iface, get_tensor_2d_async, ggml_backend_tensor_get_2d_async(&backend, tensor, data, 0, 4, 2, 8, 8));
    CALLS(backend.iface, synchronize, ggml_backend_synchronize(&backend));
    CALLS(backend.iface, graph_plan_create, ggml_backend_graph_plan_create(&backend, nullptr));
    CALLS(backend.iface, graph_plan_free, ggml_backend_graph_plan_free(&backend, nullptr));
    CALLS(backend.iface, graph_plan_compute, ggml_backend_graph_plan_compute(&backend, nullptr));
    CALLS(backend.iface, graph_compute, ggml_backend_graph_compute_async(&backend, nullptr));
    CALLS(backend.iface, event_record, ggml_backend_event_record(&event, &backend));
    CALLS(backend.iface, event_wait, ggml_backend_event_wait(&backend, &event));
    CALLS(backend.iface, free, ggml_backend_free(&backend));
}

template <size_t N> std::array<uintptr_t, N> words_of(const void * memory) {
    std::array<uintptr_t, N> words;
    std::memcpy(words.data(), memory, sizeof words);
    return words;
}

void test_layouts() {
    const std::array<uintptr_t, 8> described = {1, 2, 3, 4, 5, 6, 7, 8}; // 6 slots, the device, the context
    ggml_backend_buffer_type       buft;
    static_assert(sizeof buft == sizeof described, "six slots, and two pointers");
    std::memcpy(&buft, described.data(), sizeof buft);
    for (const int api : {2, 3}) {
        oallama::api_version = api;
        oallama::BufferType            made(buft);
        const ggml_backend_buffer_type again = oallama::as_api2(made.get());
        check(api == 2 ? words_of<8>(made.get()) == described
                       : words_of<10>(made.get()) == std::array<uintptr_t, 10>{1, 2, 0, 3, 4, 5, 0, 6, 7, 8},
              "a buffer type as API " + std::to_string(api) + " has it");
        check(words_of<8>(&again) == described, "and back");
    }
    oallama::api_version = 2;
}

void test_other_apis() {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(bridge::cpu_device());
    reg->api_version       = 4;
    check(gb_open() == OALLAMA_MISMATCH && std::strstr(gb_last_error(), "has version 4") != nullptr &&
              std::strstr(gb_last_error(), "only 2 and 3 are known") != nullptr,
          "an unknown API is refused, and the known ones are named");
    reg->api_version = 3; // and is not laid out so
    check(gb_open() == OALLAMA_MISMATCH && std::strstr(gb_last_error(), "ggml_backend_buffer_type") != nullptr,
          "an API that is another than it says is refused");
    reg->api_version = 2;
    check(gb_open() == OALLAMA_OK, "the true API is taken");
}

} // namespace

void test_vtables() {
    test_slots();
    test_layouts();
    test_other_apis();
}

} // namespace native_test
