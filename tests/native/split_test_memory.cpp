// Memory that a device copies from and to: what is pinned, who waits for a copy, where results lie.

#include "split_test.h"
#include "support.h"

namespace split_test {

namespace {

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);
constexpr int64_t   gib  = int64_t{1} << 30;

std::string problems_of(const oallama_plan * plan) {
    bool              usable = false;
    const std::string lines  = problems(plan, &usable);
    check(usable, "what was loaded can compute");
    return lines;
}

void set_pinned_capacity(int64_t bytes) {
    async_device::Options options;
    options.pinned_capacity = static_cast<size_t>(bytes);
    async_device::set_options(options);
}

// Three weights of half a GiB, all streamed: so much is never there, it only has addresses.
void check_pieces(int64_t capacity, int64_t wanted_pinned, const std::string & wanted_problem) {
    set_pinned_capacity(capacity);
    std::string      text = std::string("oallama-plan 1\nmodel test\ndevice ") + async_device::device_name + "\n";
    const ContextPtr ctx(ggml_init({4 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    for (const char * name : {"a", "b", "c"}) {
        ggml_set_name(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 16384, 8192), name);
        text += std::string("tensor ") + name + " F32 16384x8192x1 rows 0 8192 0 -\n";
    }
    const PlanPtr plan = new_plan(text);
    void *        buft = nullptr;
    check_ok(oallama_plan_buft(plan.get(), &buft), "a plan has a buffer type");
    const int64_t   n_before = async_device::counters().n_pinned;
    const BufferPtr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), static_cast<ggml_backend_buffer_type_t>(buft)));
    float first = 0.0F;
    ggml_backend_tensor_get(ggml_get_first_tensor(ctx.get()), &first, 0, sizeof first);

    const async_device::Counters now  = async_device::counters();
    const std::string            said = problems_of(plan.get());
    check(now.most_pinned <= gib, "pinned memory is asked for in pieces of a GiB at most");
    check(now.n_pinned - n_before == 2, "each piece is asked for once: " + std::to_string(now.n_pinned - n_before));
    check(now.pinned_bytes / (gib / 2) == wanted_pinned, "half GiBs pinned: " + std::to_string(now.pinned_bytes));
    check(wanted_problem.empty() ? said.empty() : said.find(wanted_problem) != std::string::npos,
          "what is not pinned is told: " + said);
    set_pinned_capacity(INT64_MAX);
}

// Computes a block's graph, and calls `on_host` whenever the host has computed a node.
void compute_watched(const Model & model, int64_t n_tokens, const std::function<void()> & on_host) {
    const LonePass        pass(model, n_tokens);
    std::function<void()> watch = on_host;
    pass.on_host_node(
        [](void * data) {
            (*static_cast<std::function<void()> *>(data))();
            return false;
        },
        &watch);
    check(pass.compute() == GGML_STATUS_SUCCESS, "a graph is computed");
}

// A call that fetches a result to plain memory returns when it is there: so it must come behind what the host computes.
// To pinned memory it is queued before.
void check_order(const Block & block) {
    const Data data          = make_data(block);
    int64_t    n_before_last = 0; // host nodes before the first fetch, with pinned memory
    for (const bool pinned : {true, false}) {
        set_pinned_capacity(pinned ? INT64_MAX : 0);
        const PlanPtr plan = plan_of(block, Cut::half);
        const Model   model(block, data, plan.get());
        const int64_t before   = async_device::counters().n_copies_out;
        int64_t       n_before = 0; // host nodes before the first fetch
        compute_watched(model, 5, [&] { n_before += async_device::counters().n_copies_out == before ? 1 : 0; });
        check(pinned || n_before > n_before_last, block.name + ": the host computes " + std::to_string(n_before) +
                                                      " nodes before a fetch that blocks, " +
                                                      std::to_string(n_before_last) + " before one that does not");
        check(async_device::counters().n_copies_out > before, block.name + ": results are fetched");
        n_before_last = n_before;
    }
    set_pinned_capacity(INT64_MAX);
}

// Without pinned memory the host's own memory is not allocated anew for each program.
void check_no_growth(const Block & block) {
    set_pinned_capacity(0);
    const PlanPtr plan = plan_of(block, Cut::half);
    const Model   model(block, make_data(block), plan.get());
    Session       session;
    session.compute(model, 7);
    const int64_t before = async_device::counters().n_pinned;
    const int64_t built  = stats().n_built;
    for (int64_t n_tokens = 6; n_tokens > 3; n_tokens--) {
        session.compute(model, n_tokens);
    }
    const int64_t asked = async_device::counters().n_pinned - before;
    check(stats().n_built > built, block.name + ": smaller batches are other programs");
    check(asked == 0, block.name + ": pinned memory is asked for again for smaller ones: " + std::to_string(asked));
    set_pinned_capacity(INT64_MAX);
}

// Results that llama.cpp finds in host memory are in the partner's pinned memory.
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
        const PlanPtr other  = new_plan(plan_text({&block}, Cut::half, "CPU", "CPU"));
        check(ggml_backend_dev_buffer_type(ours) == plain, "with plans for two devices they are in plain memory");
    }
    check(ggml_backend_dev_buffer_type(ours) == pinned, "the first plan is still there");
}

// A device that takes no buffer type but its own, by address: blocks do not live there, which is told.
void check_refused_residents(const Block & block) {
    const Setting         lives(resident, true);
    const Data            data = make_data(block);
    async_device::Options options;
    options.by_address     = true;
    const Outputs expected = on_cpu(block, data, 5);
    for (const bool refused : {false, true}) {
        async_device::set_options(refused ? options : async_device::Options());
        const PlanPtr     plan = plan_of(block, Cut::half);
        const Model       model(block, data, plan.get());
        const std::string said = problems_of(plan.get());
        check((said.find("cannot live on TEST0") != std::string::npos) == refused,
              block.name + ", told where blocks cannot live: " + said);
        Session      session;
        const double error = nmse(expected, session.compute(model, 5));
        check(error <= summation_bound, block.name + ": NMSE " + text(error));
    }
    async_device::set_options({});
}

} // namespace

void test_memory() {
    const Block dense   = ffn_block(q4_0, q4_0);
    const Block experts = moe_block(q4_0, q4_0);
    check_pieces(4 * gib, 3, "");
    check_pieces(gib, 2, "not as planned: no pinned host memory is left for 536870912 of 1610612736 bytes of weights");
    check_pieces(gib / 4, 0, "no pinned host memory is left for 1610612736 of 1610612736 bytes of weights");
    check_order(dense);
    check_order(experts);
    for (const bool on_device : {false, true}) {
        const Setting lives(resident, on_device);
        check_no_growth(dense);
        check_no_growth(experts);
    }
    check_default_memory(dense);
    check_refused_residents(dense);
    check_refused_residents(experts);
    done("memory that devices copy from and to");
}

} // namespace split_test
