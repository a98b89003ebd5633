// The loaded ggml library: is it the one this bridge was written for, what are its types, and what does it log.

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>

#include "split/abi_check.h"
#include "support.h"

namespace bridge {

namespace {

//
// log
//

constexpr size_t max_log_lines = 64;

struct Log {
    std::mutex              mutex;
    std::deque<std::string> lines;
    std::string             partial;    // a line that ggml has not ended yet
    std::string             last_error; // the last line of level error
    bool                    to_stderr = false;
};

// Never destroyed: ggml may log from its own threads while the process ends.
Log & the_log() {
    static Log * log = new Log;
    return *log;
}

void on_log(ggml_log_level level, const char * text, void * /*user_data*/) {
    guarded([&] { // ggml is C: a line that there is no memory for is lost
        Log &                       log = the_log();
        std::lock_guard<std::mutex> lock(log.mutex);
        if (log.to_stderr) {
            std::fputs(text, stderr);
        }
        log.partial += text;
        for (size_t end = log.partial.find('\n'); end != std::string::npos; end = log.partial.find('\n')) {
            std::string line = log.partial.substr(0, end);
            log.partial.erase(0, end + 1);
            if (level == GGML_LOG_LEVEL_ERROR) {
                log.last_error = line;
            }
            log.lines.push_back(std::move(line));
            if (log.lines.size() > max_log_lines) {
                log.lines.pop_front();
            }
        }
    });
}

// ggml calls this just before abort(); its own default would start a debugger to print a backtrace.
void on_abort(const char * message) {
    std::fprintf(stderr, "ggml aborted: %s\n", message);
    std::fflush(stderr);
}

} // namespace

std::string ggml_reason() {
    Log &                       log = the_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    std::string                 reason;
    if (!log.last_error.empty()) {
        reason = " (ggml: " + log.last_error + ")";
        log.last_error.clear();
    }
    return reason;
}

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_abi(void) {
    return GB_ABI;
}

const char * gb_ggml_version(void) {
    return ggml_version();
}

const char * gb_ggml_commit(void) {
    return ggml_commit();
}

int gb_check(void) {
    return guarded(oallama::check_ggml);
}

int gb_log_capture(int to_stderr) {
    return guarded([&] {
        {
            std::lock_guard<std::mutex> lock(the_log().mutex);
            the_log().to_stderr = to_stderr != 0;
        }
        ggml_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
    });
}

int gb_log_tail(char * text, int64_t capacity) {
    return guarded([&] {
        Log &                       log = the_log();
        std::lock_guard<std::mutex> lock(log.mutex);
        std::string                 tail = join_lines({log.lines.begin(), log.lines.end()});
        const size_t                room = static_cast<size_t>(std::max<int64_t>(capacity - 1, 0));
        copy_text(tail.size() > room ? tail.substr(tail.size() - room) : tail, text, capacity);
    });
}

int gb_type_count(void) {
    return GGML_TYPE_COUNT;
}

int gb_get_type_info(int number, gb_type_info * info) {
    return guarded([&] {
        require(info != nullptr && number >= 0 && number < GGML_TYPE_COUNT, "there is no ggml type of this number");
        const auto type = static_cast<ggml_type>(number);
        *info           = {};
        info->number    = number;
        if (ggml_type_size(type) == 0 || ggml_blck_size(type) == 0) {
            return; // removed from ggml
        }
        std::string name = ggml_type_name(type);
        std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
        copy_text(name, info->name, GB_NAME_BYTES);
        info->block_elements = ggml_blck_size(type);
        info->block_bytes    = static_cast<int64_t>(ggml_type_size(type));
        info->quantized      = ggml_is_quantized(type) ? 1 : 0;
        info->mul_mat        = has_cpu_kernel(type) ? 1 : 0;
    });
}
