// Memory that a device copies from and to: what is pinned, who waits for a copy, where results lie, and what crosses
// where blocks live on the device.

#include <cstdlib>

#include "split/abi_check.h"
#include "split_test.h"

namespace split_test {

namespace {

constexpr int64_t gib = int64_t{1} << 30;

// Three weights of half a GiB, all streamed: so much is never there, it only has addresses.
void check_pieces(int64_t capacity, int64_t wanted_pinned, const std::string & wanted_problem) {
    DeviceOptions device;
    device.pinned_capacity = static_cast<size_t>(capacity);
    device.set();
    std::string      text = "oallama-plan 1\nmodel test\ndevice TEST0\n";
    const ContextPtr ctx(ggml_init({4 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    for (const char * name : {"a", "b", "c"}) {
        ggml_set_name(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 16384, 8192), name);
        text += std::string("tensor ") + name + " F32 16384x8192x1 rows 0 8192 0 -\n";
    }
    const PlanPtr   plan     = new_plan(text);
    const int64_t   n_before = async_device::counters().n_pinned;
    const BufferPtr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft_of(plan.get())));
    float           first = 0.0F;
    ggml_backend_tensor_get(ggml_get_first_tensor(ctx.get()), &first, 0, sizeof first);

    const async_device::Counters now  = async_device::counters();
    const Told                   said = told(plan.get());
    check(now.most_pinned <= gib, "pinned memory is asked for in pieces of a GiB at most");
    check(now.n_pinned - n_before == 2, "each piece is asked for once: " + std::to_string(now.n_pinned - n_before));
    check(now.pinned_bytes / (gib / 2) == wanted_pinned, "half GiBs pinned: " + std::to_string(now.pinned_bytes));
    check(said.usable && (wanted_problem.empty() ? said.problems.empty()
                                                 : said.problems.find(wanted_problem) != std::string::npos),
          "what is not pinned is told: " + said.problems);
}

// A call that fetches a result to plain memory returns when it is there: so it must come behind what the host computes.
// To pinned memory it is queued before.
void check_order(const Block & block) {
    int64_t n_before_last = 0; // host nodes before the first fetch, with pinned memory
    for (const bool pinned : {true, false}) {
        DeviceOptions device;
        device.pinned_capacity = pinned ? SIZE_MAX : 0;
        device.set();
        const PlanPtr  plan = plan_of(block, Cut::half);
        const Model    model(block, plan.get());
        const LonePass pass(model, 5);
        const int64_t  before      = async_device::counters().n_copies_out;
        int64_t        n_before    = 0; // host nodes before the first fetch
        const auto     count_nodes = [&] {
            n_before += async_device::counters().n_copies_out == before ? 1 : 0;
            return false;
        };
        check(pass.compute(count_nodes) == GGML_STATUS_SUCCESS, "a graph is computed");
        check(pinned || n_before > n_before_last, block.name + ": the host computes " + std::to_string(n_before) +
                                                      " nodes before a fetch that blocks, " +
                                                      std::to_string(n_before_last) + " before one that does not");
        check(async_device::counters().n_copies_out > before, block.name + ": results are fetched");
        n_before_last = n_before;
    }
}

// Without pinned memory the host's own memory is not allocated anew for each program.
void check_no_growth(const Block & block) {
    DeviceOptions device;
    device.pinned_capacity = 0;
    device.set();
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, plan.get());
    Session       session;
    session.compute(model, 7);
    const int64_t before = async_device::counters().n_pinned;
    const int64_t built  = stats().n_built;
    for (int64_t n_tokens = 6; n_tokens > 3; n_tokens--) {
        session.compute(model, n_tokens);
    }
    check(stats().n_built > built, block.name + ": smaller batches are other programs");
    check(async_device::counters().n_pinned == before, block.name + ": which ask for no more pinned memory");
}

// Results that llama.cpp finds in host memory are in the device's pinned memory.
void check_default_memory(const Block & block) {
    ggml_backend_dev_t ours   = ggml_backend_dev_by_name("OALLAMA");
    ggml_backend_dev_t test   = ggml_backend_dev_by_name(async_device::device_name);
    const auto         plain  = ggml_backend_cpu_buffer_type();
    const auto         pinned = ggml_backend_dev_host_buffer_type(test);
    check(ggml_backend_dev_buffer_type(ours) == plain, "without a plan results are in plain memory");
    const PlanPtr plan = plan_of(block, Cut::half);
    check(ggml_backend_dev_buffer_type(ours) == pinned, "with a plan they are in its device's pinned memory");
    {
        const PlanPtr second = plan_of(block, Cut::half);
        const PlanPtr other  = plan_of(block, Cut::half, "", "CPU");
        check(ggml_backend_dev_buffer_type(ours) == plain, "with plans for two devices they are in plain memory");
    }
    check(ggml_backend_dev_buffer_type(ours) == pinned, "the first plan is still there");
}

// Where memory that captured graphs use may be freed, none is captured.
void check_graphs(const Block & block) {
    constexpr const char * variable = "GGML_CUDA_DISABLE_GRAPHS";
    for (const bool no_vmm : {false, true}) {
        DeviceOptions device;
        device.no_vmm = no_vmm;
        device.set();
        ::unsetenv(variable);
        const PlanPtr plan = plan_of(block, Cut::half);
        check((std::getenv(variable) != nullptr) == no_vmm,
              "CUDA graphs are turned off for a pool that frees its memory");
    }
    ::unsetenv(variable);
}

//
// blocks that live on the device
//

// A device that takes no buffer type but its own, by address: blocks do not live there, which is told.
void check_refused_residents(const Block & block) {
    for (const bool refused : {false, true}) {
        DeviceOptions device;
        device.by_address = refused;
        device.set();
        const PlanPtr plan = plan_of(block, Cut::half);
        const Model   model(block, plan.get());
        const Told    said = told(plan.get());
        check((said.problems.find("cannot live on TEST0") != std::string::npos) == refused && said.usable,
              block.name + ", told where blocks cannot live: " + said.problems);
        Session session;
        check_right(session, model, 5, "where its device may know buffer types by address");
    }
}

// x goes to the host, the host's part of the result comes back: two crossings, and the scheduler makes none.
void check_crossings(const Block & block, Cut cut, int64_t n_tokens) {
    const std::string what = block.name + ", " + cut_name(cut) + ", " + std::to_string(n_tokens) + " tokens: ";
    const PlanPtr     plan = plan_of(block, cut);
    const Model       model(block, plan.get());
    Session           session;
    session.compute(model, n_tokens);
    DeviceOptions device;
    device.waits_for_graph = true;
    device.set();
    const async_device::Counters before = async_device::counters();
    reset_stats();
    check_right(session, model, n_tokens, "on the device");
    const async_device::Counters after = async_device::counters();
    const int64_t                both  = cut == Cut::all ? 0 : 1;
    check(after.n_copies_out - before.n_copies_out == both, what + "copies to the host");
    check(after.n_copies_in - before.n_copies_in == both, what + "copies to the device");
    check(after.n_blocking - before.n_blocking == 2, what + "the caller waits for the model's input and its result");
    check(after.n_beside - before.n_beside == both, what + "the device computes while its input is fetched");
    check(stats().n_built == 0, what + "built once");
    check(stats().bytes_out == both * n_tokens * block.n_embd * int64_t{sizeof(float)}, what + "bytes are fetched");
}

// One context computes beside two devices, by one plan: each has its own streams and memory.
void check_two_devices() {
    const Block       dense   = ffn_block(q4_0, q4_0);
    const Block       experts = moe_block(q4_0, q4_0);
    const std::string beside  = plan_text({&experts}, Cut::half, "", "CPU");
    const PlanPtr     plan =
        new_plan(plan_text({&dense}, Cut::half) + beside.substr(beside.find('\n') + 1)); // without the first line
    const Model first(dense, plan.get());
    const Model second(experts, plan.get());
    const auto  held_on = [](const std::string & device) {
        int64_t bytes = 0;
        check_ok(oallama_get_device_compute(device.c_str(), &bytes), "memory of a device");
        return bytes;
    };
    {
        Session session;
        for (const int64_t n_tokens : {1, 7, 1, 64, 1}) {
            check_right(session, first, n_tokens, "beside the first of two devices");
            check_right(session, second, n_tokens, "beside the second");
        }
        check(held_on(async_device::device_name) > 0 && held_on("CPU") > 0, "each has memory of its own");
        check(held_on(async_device::device_name) + held_on("CPU") == memory().device_compute, "all of it");
    }
    check(held_on(async_device::device_name) == 0 && held_on("CPU") == 0, "which goes with the context");
    int64_t bytes = 0;
    check(oallama_get_device_compute("none", &bytes) == OALLAMA_INVALID, "a device that is not there");
}

// ggml's registry has no lock: what it lists stays as it is while plans come and go. Who lists devices meanwhile sees
// one of ours that computes nothing.
void check_registry(const Block & block) {
    const size_t       n_before = ggml_backend_dev_count();
    ggml_backend_dev_t ours     = ggml_backend_dev_by_name("OALLAMA_Resident");
    const auto         computes = [&] { return ggml_backend_dev_buffer_type(ours) != ggml_backend_cpu_buffer_type(); };
    check(ours != nullptr && !computes(), "without a plan the device for blocks that live on another computes nothing");
    Session                    early; // knows no device's memory
    ggml_backend_buffer_type_t known = nullptr;
    {
        const PlanPtr plan = plan_of(block, Cut::half);
        check(ggml_backend_dev_count() == n_before && computes(), "a plan registers no device, but uses one");
        known = ggml_backend_dev_buffer_type(ours);
        const Model model(block, plan.get());
        check(early.fails(GGML_STATUS_FAILED, model, 1) &&
                  std::string(oallama_last_error()).find("made before the plan") != std::string::npos,
              std::string("a context that is older than the plan is refused: ") + oallama_last_error());
        check(!Session().compute(model, 1).empty(), "a new one is not");
        const PlanPtr second = plan_of(block, Cut::one);
        check(computes(), "so does a second plan for the same device");
    }
    check(ggml_backend_dev_count() == n_before && !computes(), "and none is removed with them");
    check(ours->iface.supports_buft(ours, known), "a scheduler that asked before may still be made");
}

// The CPU under another name, with memory that no other device reads.
struct ThirdDevice {
    ggml_backend_device device  = *bridge::cpu_device();
    oallama::BufferType buft    = oallama::BufferType(own_type());
    const BackendPtr    backend = BackendPtr(ggml_backend_dev_init(bridge::cpu_device(), nullptr));

    ThirdDevice() {
        device.iface.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
            return type->iface.get_name == own_name;
        };
        backend->device = &device;
    }

    static const char * own_name(ggml_backend_buffer_type_t /*type*/) { return "third"; }

    static ggml_backend_buffer_type own_type() {
        ggml_backend_buffer_type type = oallama::as_api3(ggml_backend_dev_buffer_type(bridge::cpu_device()));
        type.iface.get_name           = own_name;
        type.iface.is_host            = nullptr;
        return type;
    }
};

// Before ggml's scheduler sends an input from a third device, it waits for that device alone. Results of llama.cpp's
// back end in the memory where blocks live may still be missing. So such a block is refused when memory is reserved, as
// a load does, and when it is computed. Blocks with their results on the host need no wait.
void check_third_device(const Block & block) {
    ThirdDevice third;
    for (const bool lives : {false, true}) {
        const Setting    setting(resident, lives);
        const PlanPtr    plan = plan_of(block, Cut::half);
        const Model      model(block, plan.get());
        const BackendPtr gpu(ggml_backend_dev_init(ggml_backend_dev_by_name(async_device::device_name), nullptr));
        const BackendPtr ours(
            ggml_backend_dev_init(ggml_backend_dev_by_name(lives ? "OALLAMA_Resident" : "OALLAMA"), nullptr));
        const BackendPtr           cpu(ggml_backend_dev_init(bridge::cpu_device(), nullptr));
        ggml_backend_t             backends[] = {third.backend.get(), gpu.get(), ours.get(), cpu.get()};
        ggml_backend_buffer_type_t bufts[]    = {third.buft.get(), ggml_backend_get_default_buffer_type(gpu.get()),
                                                 ggml_backend_get_default_buffer_type(ours.get()),
                                                 ggml_backend_get_default_buffer_type(cpu.get())};
        const SchedPtr sched(ggml_backend_sched_new(backends, bufts, 4, 256, /*parallel=*/false, /*op_offload=*/false));
        for (const bool sent : {false, true}) {
            const ContextPtr ctx = oallama::new_context(256, 1, 256);
            Graph            graph;
            graph.ctx       = ctx.get();
            graph.gf        = ggml_new_graph_custom(ctx.get(), 256, false);
            graph.tensors   = model.tensors();
            ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, block.n_embd, 1);
            ggml_set_input(x);
            graph.x = ggml_sqr(ctx.get(), x);
            block.build(graph);
            for (int i = 0; i < ggml_graph_n_nodes(graph.gf); i++) {
                ggml_tensor * node = ggml_graph_node(graph.gf, i);
                if (!ggml_backend_supports_op(ours.get(), node)) {
                    ggml_backend_sched_set_tensor_backend(sched.get(), node, sent ? third.backend.get() : gpu.get());
                }
            }
            check(ggml_backend_sched_alloc_graph(sched.get(), graph.gf), "memory is there");
            const bool refused = lives && sent;
            const Told said    = told(plan.get());
            check(said.usable != refused &&
                      (said.problems.find("what another device computes") != std::string::npos) == refused,
                  "told when memory is reserved: " + said.problems);
            check((ggml_backend_sched_graph_compute(sched.get(), graph.gf) == GGML_STATUS_FAILED) == refused,
                  "refused when it is computed");
            ggml_backend_sched_reset(sched.get());
        }
    }
}

} // namespace

void test_memory() {
    const Block dense   = ffn_block(q4_0, q4_0);
    const Block experts = moe_block(q4_0, q4_0);
    check_pieces(4 * gib, 3, "");
    check_pieces(gib, 2, "not as planned: no pinned host memory is left for 536870912 of 1610612736 bytes of weights");
    check_pieces(gib / 4, 0, "no pinned host memory is left for 1610612736 of 1610612736 bytes of weights");
    check_default_memory(dense);
    check_two_devices();
    check_graphs(dense);
    for (const Block & block : {dense, experts}) {
        check_order(block);
        check_no_growth(block);
        const Setting lives(resident, true);
        check_no_growth(block);
        check_refused_residents(block);
        check_two_devices();
    }
}

void test_resident() {
    const Setting lives(resident, true);
    const Setting streams(streamed, Streamed::none);
    const Setting tokens(late, false);
    for (const Cut cut : {Cut::half, Cut::one, Cut::all}) {
        for (const int64_t n_tokens : {1, 7}) {
            check_crossings(ffn_block(q4_0, q4_0), cut, n_tokens);
            check_crossings(ffn_block(GGML_TYPE_F32, GGML_TYPE_F32, {Ffn::gelu, Gate::none}), cut, n_tokens);
        }
    }
    check_registry(ffn_block(q4_0, q4_0));
    check_third_device(ffn_block(q4_0, q4_0));
}

} // namespace split_test
