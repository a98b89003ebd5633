// The split backend under test, with the real ggml: every type it can cut, every shape of FFN that llama.cpp builds,
// loading, faults and threads; on a second CPU backend and on a strict asynchronous device (async_device.h).
//
// usage: split_test [--threads N] [--list] [name...]     runs the named tests, all when none is named; prints a line
// for each part and what fails; exit code 1 when anything does

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>

#include "split_test.h"

#if defined(__SANITIZE_THREAD__)
// ggml's libraries are not instrumented: what their own copies and fills race with is theirs, but accesses by our code
// are never hidden. One line for each library, as the loader names it.
extern "C" __attribute__((visibility("default"))) const char * __tsan_default_suppressions() {
    return "called_from_lib:libggml-base.so\ncalled_from_lib:libggml-cpu.so\n";
}
#endif

#if defined(__SANITIZE_ADDRESS__)
// Memory that is not to be had is one of the tests' faults.
extern "C" __attribute__((visibility("default"))) const char * __asan_default_options() {
    return "allocator_may_return_null=1";
}
#elif defined(__SANITIZE_THREAD__)
extern "C" __attribute__((visibility("default"))) const char * __tsan_default_options() {
    return "allocator_may_return_null=1";
}
#endif

namespace split_test {

int n_threads = 1;

namespace {

int n_failed  = 0;
int n_checked = 0;

struct Test {
    const char * name;
    void (*run)();
};

constexpr Test tests[] = {
    {"device", test_device},   {"plan", test_plan},       {"random", test_random},     {"graphs", test_graphs},
    {"loading", test_loading}, {"memory", test_memory},   {"programs", test_programs}, {"stream", test_stream},
    {"tokens", test_tokens},   {"times", test_times},     {"resident", test_resident}, {"faults", test_faults},
    {"hot", test_hot},         {"threads", test_threads}, {"report", test_report},
};

} // namespace

void check(bool condition, const std::string & what) {
    static std::mutex                 mutex; // threads check too
    const std::lock_guard<std::mutex> lock(mutex);
    n_checked++;
    if (!condition) {
        n_failed++;
        std::printf("FAILED %s\n", what.c_str());
        std::fflush(stdout);
    }
}

void check_ok(int status, const std::string & what) {
    check(status == OALLAMA_OK, status == OALLAMA_OK ? what : what + ": " + oallama_last_error());
}

} // namespace split_test

int main(int argc, char ** argv) {
    using namespace split_test;

    std::vector<std::string> names;
    for (int i = 1; i < argc; i++) {
        if (std::strcmp(argv[i], "--list") == 0) {
            for (const Test & test : tests) {
                std::printf("%s\n", test.name);
            }
            return 0;
        }
        if (std::strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
            n_threads = std::atoi(argv[++i]);
        } else if (std::strcmp(argv[i], "--streams") == 0) {
            streamed = Streamed::half;
            late     = true;
        } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            random_seed = std::strtoull(argv[++i], nullptr, 10);
        } else if (std::strcmp(argv[i], "--cases") == 0 && i + 1 < argc) {
            random_cases = std::atoll(argv[++i]);
        } else if (std::strcmp(argv[i], "--first") == 0 && i + 1 < argc) {
            random_first = std::atoll(argv[++i]);
        } else if (std::strcmp(argv[i], "--resident") == 0) {
            resident = true;
        } else {
            names.emplace_back(argv[i]);
            const auto is_named = [&](const Test & test) { return names.back() == test.name; };
            if (std::none_of(std::begin(tests), std::end(tests), is_named)) {
                std::fprintf(stderr, "there is no test %s\n", argv[i]);
                return 2;
            }
        }
    }

    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // faults are meant
    async_device::add();
    check_ok(oallama_check(), "this ggml is the expected one");
    check_ok(oallama_register(), "the backend registers");
    check_ok(oallama_register(), "the backend registers once only");
    for (const Test & test : tests) {
        if (names.empty() || std::count(names.begin(), names.end(), test.name) > 0) {
            const int n_before = n_checked;
            test.run();
            check_nothing_held(std::string("after ") + test.name);
            std::printf("%s, %d checks\n", test.name, n_checked - n_before);
            std::fflush(stdout);
        }
    }
    std::printf("%d failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}
