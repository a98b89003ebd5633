#include "shared_core.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "../split/util.h"

namespace emulated {

namespace {

pid_t thread_id() {
    return static_cast<pid_t>(::syscall(SYS_gettid));
}

// Changes the affinity of every thread of this process but those that are pinned to the core.
template <typename Change> void change_affinities(int cpu, Change && change) {
    for (const auto & entry : std::filesystem::directory_iterator("/proc/self/task")) {
        const auto task = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
        cpu_set_t  set;
        if (::sched_getaffinity(task, sizeof set, &set) != 0) {
            continue; // it has ended
        }
        if (CPU_COUNT(&set) == 1 && CPU_ISSET(static_cast<size_t>(cpu), &set)) {
            continue;
        }
        change(set);
        ::sched_setaffinity(task, sizeof set, &set);
    }
}

std::atomic<int> left_by_others{-1}; // a core; -1: none

// Whether an open file is a regular one of this user's, by this name alone.
bool is_own_file(int file) {
    struct stat status = {};
    return ::fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid() &&
           status.st_nlink == 1;
}

} // namespace

SharedCore::SharedCore(int cpu) {
    // in a folder of everybody's, where another user may have put a link to a file of ours under this name
    const std::string path = "/dev/shm/oallama-emulated-" + std::to_string(::geteuid()) + "-cpu" + std::to_string(cpu);
    file_                  = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    std::string fault;
    if (file_ < 0 || !is_own_file(file_)) {
        fault = "it is not a file of this user alone; remove it";
    } else if (const int error = ::posix_fallocate(file_, 0, sizeof(uint64_t)); error != 0) { // else SIGBUS when full
        fault = std::strerror(error);
    } else {
        void * mapped = ::mmap(nullptr, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (mapped != MAP_FAILED) {
            count_ = static_cast<std::atomic<uint64_t> *>(mapped);
            return;
        }
        fault = std::strerror(errno);
    }
    ::close(file_);
    throw oallama::Error(OALLAMA_FAILED, "the emulated device cannot use " + path + ": " + fault);
}

SharedCore::~SharedCore() {
    ::munmap(static_cast<void *>(count_), sizeof(uint64_t));
    ::close(file_); // and with it the lock
}

void SharedCore::take() {
    if (!taken_) {
        taken_ = ::flock(file_, LOCK_EX | LOCK_NB) == 0;
        if (!taken_) {
            count_->fetch_add(1);
        }
    }
}

void SharedCore::give_back() {
    if (taken_) {
        ::flock(file_, LOCK_UN);
        taken_ = false;
    }
}

uint64_t SharedCore::n_shared() const {
    return count_->load();
}

void pin_this_thread(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    if (::sched_setaffinity(0, sizeof set, &set) != 0) {
        throw oallama::Error(OALLAMA_INVALID, "the emulated device's core " + std::to_string(cpu) +
                                                  " does not exist, or this process may not use it");
    }
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(thread_id()), -20); // where that is allowed
    ::pthread_setname_np(::pthread_self(), "emulated");
}

void keep_others_off(int cpu) {
    change_affinities(cpu, [cpu](cpu_set_t & set) { CPU_CLR(static_cast<size_t>(cpu), &set); });
    left_by_others = cpu;
}

void let_others_on() {
    const int cpu = left_by_others.exchange(-1);
    if (cpu >= 0) {
        change_affinities(cpu, [cpu](cpu_set_t & set) { CPU_SET(static_cast<size_t>(cpu), &set); });
    }
}

} // namespace emulated
