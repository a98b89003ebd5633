// The text that says what an emulated device is like: parsed, or refused with one sentence.

#include <cmath>

#include "../split/util.h"
#include "fuzz.h"
#include "parameters.h"

namespace fuzz {

const std::vector<std::string> & seeds() {
    static const std::vector<std::string> texts = {
        "name Emulated0\ndescription a card, emulated\nmemory_bytes 12884901888\nvalues drawn\ncpu 1\nseed 7\n"
        "bytes_per_s 3e11\nflops_per_s 3.6e13\nflops_float_per_s 2e13\nkernel_s 1e-6\nlaunch_s 6e-6\n"
        "launch_node_s 1e-7\ncopy_s 9e-6\ncopy_issue_s 2e-6\nsynchronize_s 4e-6\npinned_bytes_per_s 2.5e10\n"
        "pageable_bytes_per_s 1e10\nlost_after 100\n",
        "# emulated-parameters\nmemory_bytes 1000000\nvalues real\nbytes_per_s 1\nflops_per_s 1\nflops_float_per_s 1\n"
        "copy in pinned 0 1e-10\ncopy in pageable 1e-6 1e-9\ncopy out pinned 0 1e-10\ncopy out pageable 0 1e-9\n"
        "kernel MUL_MAT Q4_0 256x512x1 0 1 1e-5\nkernel MUL_MAT Q4_0 256x512x1 0 32 2e-5\n"
        "kernel MUL_MAT_ID q8_0 256x512x8 2 1 1e-5\n",
    };
    return texts;
}

const std::vector<std::string> & words() {
    static const std::vector<std::string> known =
        words_of("name description memory_bytes values real drawn cpu seed copy in out pinned pageable kernel "
                 "MUL_MAT Q4_K lost_after kernel_s bytes_per_s nan inf -inf 1e400 -1 -0 1e-400 9e18 "
                 "8999999999999999999 4294967296 0x1p3 1.5 256x512 0x1x1 axbxc 9223372036854775807x1x1 "
                 "99999999999999999999x1x1");
    return known;
}

} // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const std::string text(reinterpret_cast<const char *>(data), size);
    if (text.find("routing") != std::string::npos) { // names a file, which may be any of this machine
        return 0;
    }
    std::vector<emulated::Parameters> devices;
    const int                         status = oallama::guarded([&] { devices = emulated::parse_parameters(text); });
    if (status != OALLAMA_OK) {
        fuzz::must_be_refused_in_one_sentence(status == OALLAMA_INVALID, oallama::last_error());
        return 0;
    }
    fuzz::must(!devices.empty() && devices.size() <= emulated::most_devices, "there are some devices, not many");
    for (const emulated::Parameters & made : devices) {
        fuzz::must(made.memory_bytes > 0 && made.bytes_per_s > 0.0 && made.flops_per_s > 0.0,
                   "it has memory and rates");
        fuzz::must(made.real_values || made.cpu >= 0, "a device that keeps time has a core");
        fuzz::must(made.cpu >= -1 && made.cpu < 1 << 16, "the core's number is one");
        for (const emulated::Line & line : made.copies) {
            fuzz::must(std::isfinite(line.a + line.b) && line.a + line.b > 0.0, "a copy takes a time");
        }
        for (const auto & [signature, curve] : made.kernels) {
            for (const auto & [tokens, seconds] : curve) {
                fuzz::must(tokens > 0 && seconds > 0.0, "a kernel computes tokens, in a time");
            }
        }
    }
    return 0;
}
