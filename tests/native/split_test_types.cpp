// Every type that the CPU can multiply by, cut in every way, against the unsplit result.
//
// Bounds. TEST0 and the CPU device compute with ggml's CPU kernels, so the products are the same and only these things
// can differ:
//
//   r = 0        nothing: the CPU backend runs the same kernel on the same layout. Equal bytes.
//   r = 1        nothing: the device runs the plain layout's kernel. Equal bytes as the CPU with the plain layout.
//   rows, plain  nothing: each row is a dot product of its own. Equal bytes.
//   FFN, plain   the two partial sums of down are added last instead of somewhere in the middle: a rounding of F32,
//                2^-24, times the cancellation among what is added. Where the sums cancel little that is an NMSE of
//                about 4e-15; types with a minimum in every block (Q4_K) subtract two large sums, and cancel up to 30
//                times in decode: 4e-12 was seen. Bound 1e-10, which is a cancellation of 100. A single activation
//                quantised to the next step is 1e-7 here, a single wrong element 1e-4 or more.
//   repacked CC  CPU_REPACK and AMX sum in another order than the plain kernel does and may round otherwise when they
//                quantise activations; an intermediate that rounds to the next step is 1e-7. The elements that do so
//                are among those that do so when all of the weight is repacked, so the bound is the NMSE between the
//                two unsplit CPU runs, plain and repacked, with headroom 4, and 1e-10 as above. A layout that stock
//                ggml itself computes wrongly is left out and said: CPU_REPACK reads strided src1 as if it were
//                contiguous.

#include <algorithm>
#include <cstdio>

#include "split_test.h"

namespace split_test {

int64_t largest_batch = 512;

namespace {

constexpr double layout_headroom = 4.0;
constexpr double stock_bound     = 1e-3; // layouts that differ more are not merely rounding

using Tokens = std::vector<int64_t>;

std::vector<Outputs> reference(const Block & block, const Data & data, ggml_backend_buffer_type_t layout,
                               const Tokens & tokens) {
    const Model          model(block, data, layout);
    Session              session({/*split=*/false, /*gpu=*/false});
    std::vector<Outputs> all;
    for (int64_t n_tokens : tokens) {
        all.push_back(session.compute(model, n_tokens));
    }
    return all;
}

double worst_of(const std::vector<Outputs> & expected, const std::vector<Outputs> & results) {
    double worst = 0.0;
    for (size_t i = 0; i < expected.size(); i++) {
        worst = std::max(worst, nmse(expected[i], results[i]));
    }
    return worst;
}

struct Case {
    const Block &                block;
    const Data &                 data;
    Tokens                       tokens;
    std::string                  layout;
    const std::vector<Outputs> & plain;    // by position in tokens
    const std::vector<Outputs> & repacked; // the same in the layout
    Same                         same;
    SessionOptions               options;
};

// Returns the largest NMSE of the cuts that leave something to both sides.
double check_case(const Case & own, const std::string & device) {
    const bool plain = own.layout == ggml_backend_buft_name(host_layouts().front());
    double     worst = 0.0;
    for (Cut cut : all_cuts) {
        const PlanPtr plan = new_plan(plan_text({&own.block}, cut, device, own.layout));
        if (plan == nullptr) {
            continue;
        }
        const Model model(own.block, own.data, plan.get());
        Session     session(own.options);
        for (size_t i = 0; i < own.tokens.size(); i++) {
            const std::string what   = own.block.name + ", " + own.layout + " and " + device + ", " + cut_name(cut) +
                                       ", " + std::to_string(own.tokens[i]) + " tokens";
            const Outputs     result = session.compute(model, own.tokens[i]);
            if (cut == Cut::none && late == Late::none) {
                check(same_bytes(own.repacked[i], result), what + ": bytes differ from the CPU alone");
                continue;
            }
            const double error   = nmse(own.plain[i], result);
            const bool   one_sum = streamed != Streamed::half;            // else the device adds two partial sums
            const bool   one_way = late == Late::none || cut == Cut::all; // else some kernels get fewer tokens at once
            const bool   all     = cut == Cut::all && own.same != Same::host && one_sum;
            if (one_way && (all || (own.same == Same::rows && plain))) {
                check(same_bytes(own.plain[i], result),
                      what + ": bytes differ from the CPU alone, NMSE " + text(error));
                continue;
            }
            const double bound = summation_bound + layout_headroom * nmse(own.plain[i], own.repacked[i]);
            check(error <= bound, what + ": NMSE " + text(error) + " exceeds " + text(bound));
            worst = std::max(worst, error);
        }
    }
    return worst;
}

} // namespace

void check_block(const Block & block, const std::vector<int64_t> & tokens, Same same, const SessionOptions & options) {
    const Data                 data  = make_data(block);
    const std::vector<Outputs> plain = reference(block, data, host_layouts().front(), tokens);
    std::string                line  = block.name;
    for (ggml_backend_buffer_type_t buft : host_layouts()) {
        const bool holds = std::any_of(block.weights.begin(), block.weights.end(),
                                       [&](const Weight & weight) { return layout_holds(buft, weight); });
        if (!holds) {
            continue;
        }
        const std::string          layout   = ggml_backend_buft_name(buft);
        const std::vector<Outputs> repacked = reference(block, data, buft, tokens);
        if (const double wrong = worst_of(plain, repacked); wrong > stock_bound) {
            line += ", " + layout + " is wrong by " + text(wrong) + " in stock ggml";
            continue;
        }
        const Case own = {block, data, tokens, layout, plain, repacked, same, options};
        for (const char * device : {async_device::device_name, "CPU"}) {
            line += ", " + layout + " and " + device + " " + text(check_case(own, device));
        }
    }
    done(line);
}

void test_types_dense() {
    for (ggml_type type : mul_mat_types()) {
        check_block(ffn_block(type, type), {1, 2, 7, 32, largest_batch}, Same::sides);
    }
}

void test_types_moe() {
    for (ggml_type type : mul_mat_types()) {
        check_block(moe_block(type, type), {1, 2, 7, 32}, Same::sides);
    }
    check_block(moe_block(GGML_TYPE_F16, GGML_TYPE_F16), {largest_batch}, Same::sides);
}

void test_types_lone() {
    for (ggml_type type : mul_mat_types()) {
        check_block(lone_block(type), {1, 2, 7, 32, largest_batch}, Same::rows);
    }
}

} // namespace split_test
