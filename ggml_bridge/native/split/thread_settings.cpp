#include "thread_settings.h"

#include <algorithm>

#if defined(__linux__)
#include <dirent.h>
#include <sched.h>

#include <cstdlib>
#endif

namespace oallama {

namespace {

#if defined(__linux__)

// Cores that a thread may run on. task: 0 for the calling thread.
std::vector<bool> cores_of(int task) {
    cpu_set_t set;
    CPU_ZERO(&set);
    ::sched_getaffinity(task, sizeof set, &set);
    std::vector<bool> cores(GGML_MAX_N_THREADS);
    for (size_t core = 0; core < cores.size(); core++) {
        cores[core] = CPU_ISSET(core, &set) != 0;
    }
    return cores;
}

// Cores of all threads of this process that have exactly one.
std::vector<bool> single_cores() {
    std::vector<bool> all(GGML_MAX_N_THREADS);
    DIR *             tasks = ::opendir("/proc/self/task");
    if (tasks == nullptr) {
        return all;
    }
    while (const dirent * entry = ::readdir(tasks)) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        const std::vector<bool> cores = cores_of(std::atoi(entry->d_name));
        if (std::count(cores.begin(), cores.end(), true) == 1) {
            std::transform(all.begin(), all.end(), cores.begin(), all.begin(), [](bool a, bool b) { return a || b; });
        }
    }
    ::closedir(tasks);
    return all;
}

#endif

} // namespace

ThreadSettings ThreadSettings::of_this_thread() {
    ThreadSettings settings;
#if defined(__linux__)
    sched_param priority = {};
    settings.cores_      = cores_of(0);
    settings.policy_     = ::sched_getscheduler(0);
    ::sched_getparam(0, &priority);
    settings.priority_ = priority.sched_priority;
#endif
    return settings;
}

ggml_threadpool_params ThreadSettings::pool_params(int n_threads) const {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = 0; // ours sleep while llama.cpp's work
#if defined(__linux__)
    if (n_threads > 1 && std::count(cores_.begin(), cores_.end(), true) == 1) {
        const std::vector<bool> cores = single_cores();
        if (std::count(cores.begin(), cores.end(), true) >= n_threads) {
            std::copy(cores.begin(), cores.end(), std::begin(params.cpumask));
            params.strict_cpu = true;
        }
    }
#endif
    return params;
}

bool ThreadSettings::operator==(const ThreadSettings & other) const {
    return cores_ == other.cores_ && policy_ == other.policy_ && priority_ == other.priority_;
}

} // namespace oallama
