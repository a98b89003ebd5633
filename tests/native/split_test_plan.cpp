// Plan texts: what is accepted and what is refused. That no text does harm is fuzz_plan's to test.

#include "split_test.h"

namespace split_test {

namespace {

const std::string head  = "oallama-plan 1\ndevice TEST0\n";
const std::string valid = "tensor blk.0.ffn_down.weight Q4_0 256x64x1 cols 128 0 128 CPU\n";

void check_refused(const std::string & text, int status = OALLAMA_INVALID) {
    oallama_plan *    plan = nullptr;
    const int         got  = oallama_plan_new(text.c_str(), &plan);
    const PlanPtr     owner(plan);
    const std::string message = got == OALLAMA_OK ? "" : oallama_last_error();
    check(got == status && plan == nullptr && !message.empty() && message.find('\n') == std::string::npos,
          "refused with one sentence, status " + std::to_string(got) + " '" + message + "':\n" + text);
}

void check_accepted() {
    const std::string model(64, 'a');
    for (const std::string & text : std::vector<std::string>{
             "oallama-plan 1",
             head + valid,
             head +
                 "slots 3\nring 65536\nstaging 4096\nprefetch layer\npiece 4096\nlink 1\ntwice 1\ntokens 8 0\n"
                 "tokens 16 16\n" +
                 valid,
             head + "tensor x F32 7x64x1 rows 64 0 0 CPU n_g=0\n",
             head + "tensor x F32 7x64x1 rows 32 0 32 CPU resident n_g=0\n",
             head + "tensor x_exps F32 7x64x4 rows 64 0 0 CPU input=F32 hot=1\n",
             head + "tensor x F32 7x64x1 rows 32 0 32 CPU chunk=64 n_g=0\n",
             "oallama-plan 1\ntensor x F32 7x64x1 rows 64 0 0 CPU n_g=0 resident\ndevice TEST0\n",
             head + "prefetch ahead\ntwice 0\ntokens 1 1\n",
             head + "staging 4096\n" + valid + "device CPU\ntokens 4 4\ntokens 8 8\n" +
                 "tensor b Q8_0 64x70x1 rows 32 0 38 CPU resident\n",
             "\n# comment\n  # another\n\noallama-plan 1\n\n",
             "oallama-plan 1\nmodel " + model + "\ndevice TEST0\n" + valid,
             head + "  tensor\tx F32 32x31x1 rows 0 0 31 -\r\n",
             "oallama-plan 1\ntensor x F32 7x64x1 rows 64 0 0 CPU_REPACK",
             head + "tensor a F16 64x64x4 halves 0 0 32 -\ntensor b Q8_0 64x70x1 rows 32 0 38 AMX\n",
         }) {
        new_plan(text);
    }
}

void check_all_refused() {
    for (const char * text : {"", "\n\n", "# only a comment\n", "oallama-plan", "oallama-plan 2\n",
                              "oallama-plan 1 more\n", "oallama-plan one\n", "device TEST0\noallama-plan 1\n"}) {
        check_refused(text);
    }
    for (const char * line : {"tensors x F32 32x64x1 rows 32 0 32 CPU",
                              "device TEST0",
                              "slots 0",
                              "slots 65",
                              "slots",
                              "prefetch",
                              "prefetch never",
                              "prefetch layer ahead",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU n_g=1",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU n_g=0 n_g=0",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU resident resident",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU alone",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU input=F16",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU input=F32 input=F32",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU chunk=0",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU chunk=64 chunk=64",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU chunk=64 resident",
                              "tensor x F32 32x64x2 rows 32 0 32 CPU chunk=64",
                              "piece",
                              "piece 4095",
                              "piece many",
                              "link",
                              "link 0",
                              "link fast",
                              "twice",
                              "twice 2",
                              "twice yes",
                              "tokens",
                              "tokens 8",
                              "tokens 0 0",
                              "tokens 8 9",
                              "tokens 8 -1",
                              "tokens 8 4 2",
                              "tokens 4294967296 1",
                              "tokens 8 4\ntokens 8 5",
                              "tokens 8 4\ntokens 7 5",
                              "model",
                              "model a b",
                              "tensor",
                              "tensor x",
                              "tensor x F32",
                              "tensor x F32 32x64x1 rows 32 0 32",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU more",
                              "tensor x F33 32x64x1 rows 32 0 32 CPU",
                              "tensor x q4_0 32x64x1 rows 32 0 32 CPU",
                              "tensor x F32 32x64 rows 32 0 32 CPU",
                              "tensor x F32 32x64x1x1 rows 32 0 32 CPU",
                              "tensor x F32 -32x64x1 rows 32 0 32 CPU",
                              "tensor x F32 32x0x1 rows 0 0 0 -",
                              "tensor x F32 0x64x1 cols 0 0 0 -",
                              "tensor x F32 32x64x0 rows 32 0 32 CPU",
                              "tensor x F32 3000000000x3000000000x3000000000 rows 0 0 3000000000 -",
                              "tensor x F32 99999999999999999999x1x1 rows 0 0 1 -",
                              "tensor x F32 32x64x1 depth 32 0 32 CPU",
                              "tensor x F32 32x64x1 rows 32 0 33 CPU",
                              "tensor x F32 32x64x1 rows 32 0 31 CPU",
                              "tensor x F32 32x64x1 rows 96 0 -32 CPU",
                              "tensor x F32 32x64x1 rows 16 0 48 CPU",
                              "tensor x F32 32x64x1 rows 1e1 0 54 CPU",
                              "tensor x F32 32x63x1 halves 32 0 0 CPU",
                              "tensor x Q4_K 512x64x1 cols 128 0 384 CPU",
                              "tensor x Q4_K 250x64x1 rows 32 0 32 CPU",
                              "tensor x F32 32x64x1 rows 32 0 32 -",
                              "tensor x F32 32x64x1 rows 0 0 64 CPU",
                              "tensor x F32 32x64x1 rows 32 0 32 CPU\ntensor x F32 32x64x1 rows 32 0 32 CPU",
                              "tensor x F32 32x64x1 rows 9223372036854775807 0 9223372036854775807 CPU"}) {
        check_refused(head + line + "\n");
    }
    check_refused(head + "tensor " + std::string(64, 'n') + " F32 32x64x1 rows 32 0 32 CPU\n");
    check_refused("oallama-plan 1\n" + valid);                 // GG without a device
    check_refused("oallama-plan 1\ndevice NOBODY\n" + valid);  // a device that is not here
    check_refused("oallama-plan 1\ndevice OALLAMA\n" + valid); // the backend itself
    check_refused("oallama-plan 1\ndevice OALLAMA_Split\n" + valid);
    check_refused(head + "tensor x F32 32x96x1 rows 32 16 48 CPU\n");         // no granule of CG
    check_refused("oallama-plan 1\ntensor x F32 32x96x1 rows 32 64 0 CPU\n"); // CG without a device
    for (const char * end : {"64 0 0 CPU hot=", "64 0 0 CPU hot=4", "64 0 0 CPU hot=1,1", "64 0 0 CPU hot=2,1",
                             "64 0 0 CPU hot=1 hot=2", "32 0 32 CPU hot=1", "64 0 0 CPU hot=1,,2", "0 64 0 - hot=1"}) {
        check_refused(head + "tensor a_exps Q4_0 64x64x4 rows " + end);
    }
    check_refused(head + "tensor a_exps Q4_0 64x64x65537 rows 64 0 0 CPU hot=1");
    check_refused("oallama-plan 1\ntensor a_exps Q4_0 64x64x4 rows 64 0 0 CPU hot=1"); // without a device
    check_refused(head + "staging many\n" + valid);
    check_refused(head + "ring -1\n" + valid);
}

void check_arguments() {
    oallama_plan * plan     = nullptr;
    void *         buft     = nullptr;
    int64_t        n_slices = 0;
    oallama_slice  slice    = {};
    int32_t        usable   = 0;
    char           line[8]  = "";
    check(oallama_abi() == OALLAMA_ABI, "the header belongs to the library");
    check(ggml_backend_init() == ggml_backend_reg_by_name("OALLAMA"), "what is registered already stays the same");
    check(oallama_plan_new(nullptr, &plan) == OALLAMA_INVALID && oallama_plan_new("", nullptr) == OALLAMA_INVALID &&
              oallama_plan_buft(nullptr, &buft) == OALLAMA_INVALID &&
              oallama_plan_count(nullptr, &n_slices) == OALLAMA_INVALID &&
              oallama_plan_slice(nullptr, 0, &slice) == OALLAMA_INVALID &&
              oallama_plan_problems(nullptr, &usable, line, sizeof line) == OALLAMA_INVALID &&
              oallama_get_memory(nullptr) == OALLAMA_INVALID && oallama_get_stats(nullptr) == OALLAMA_INVALID,
          "no argument is refused");
    oallama_plan_free(nullptr);
    const PlanPtr made = new_plan(head + valid);
    check(oallama_plan_buft(made.get(), nullptr) == OALLAMA_INVALID &&
              oallama_plan_count(made.get(), nullptr) == OALLAMA_INVALID &&
              oallama_plan_slice(made.get(), 0, nullptr) == OALLAMA_INVALID &&
              oallama_plan_problems(made.get(), nullptr, line, 0) == OALLAMA_INVALID,
          "no room for a result is refused");
    check_ok(oallama_plan_problems(made.get(), &usable, line, 1), "room for nothing but the end");
    check(usable == 1 && line[0] == '\0', "a plan that was not used has no problems");
}

} // namespace

void test_plan() {
    check_accepted();
    check_all_refused();
    check_arguments();
}

} // namespace split_test
