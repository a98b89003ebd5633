// The text of a plan: parsed, or refused with one sentence; what is parsed keeps what the rest relies on.

#include "fuzz.h"
#include "plan.h"

namespace fuzz {

const std::vector<std::string> & seeds() {
    static const std::vector<std::string> texts = {
        "oallama-plan 1\nmodel 00ff\ndevice TEST0\nstaging 4096\nslots 3\nring 4096\nprefetch layer\npiece 4096\nlink "
        "1000000000\n"
        "twice 1\nsum 100\ntokens 8 0\ntokens 512 384\n"
        "tensor blk.0.ffn_up.weight Q4_0 256x512x1 rows 128 128 256 CPU\n"
        "tensor blk.0.ffn_down.weight Q4_0 512x256x1 cols 128 128 256 CPU_REPACK\n"
        "tensor blk.1.ffn_up.weight F16 256x1024x1 halves 256 0 256 CPU n_g=0 resident\n"
        "tensor blk.1.ffn_down_exps.weight Q8_0 512x256x4 cols 0 256 256 -\n",
        "# a comment\n\noallama-plan 1\ndevice RPC0\ntensor output.weight Q6_K 256x1000x1 rows 0 0 1000 - chunk=64\n",
        "oallama-plan 1\ntensor x F32 7x64x1 rows 64 0 0 CPU n_g=0\n",
        "oallama-plan 1\ndevice CPU\ntensor blk.0.ffn_up_exps.weight Q4_0 256x512x8 rows 512 0 0 CPU hot=0,3,7 n_g=0\n",
    };
    return texts;
}

const std::vector<std::string> & words() {
    static const std::vector<std::string> known =
        words_of("oallama-plan model device staging ring slots prefetch ahead layer piece link sum twice tokens "
                 "exchange idle eager off tensor rows cols halves CPU - n_g=0 resident input=F32 chunk=64 hot=1,2 F32 "
                 "Q4_K IQ2_XXS MXFP4 I32 # "
                 "999999999999999999 9999999999999999999 -1 1e3 0x10 1152921504606846975x1x1 32x32x32x32");
    return known;
}

} // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    using namespace oallama;
    PlanSpec  plan;
    const int status = guarded([&] { plan = parse_plan(std::string(reinterpret_cast<const char *>(data), size)); });
    if (status != OALLAMA_OK) {
        fuzz::must_be_refused_in_one_sentence(status == OALLAMA_INVALID, last_error());
        return 0;
    }
    fuzz::must(plan.by_name.size() == plan.slices.size(), "every slice has a name of its own");
    for (const SliceSpec & slice : plan.slices) {
        fuzz::must(slice.cc >= 0 && slice.cg >= 0 && slice.gg >= 0 && slice.cc + slice.cg + slice.gg == slice.extent(),
                   "parts add up");
        fuzz::must(slice.name.size() < OALLAMA_NAME_BYTES, "a name fits where it is told");
        const int64_t step = granularity(slice.type, slice.axis);
        for (const int64_t cut : {slice.cc, slice.cc + slice.cg}) {
            fuzz::must(cut == slice.extent() || cut % step == 0, "cuts are at whole steps");
        }
    }
    for (const int64_t n_tokens : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{512}, int64_t{1} << 31}) {
        for (const DeviceSpec & device : plan.devices) {
            const int64_t n_g = n_g_at(device.tokens, n_tokens);
            fuzz::must(n_g >= 0 && n_g <= n_tokens, "no more tokens on the device than there are");
        }
    }
    return 0;
}
