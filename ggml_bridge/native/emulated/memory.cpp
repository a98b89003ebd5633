#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

namespace emulated {

namespace {

void * map(size_t size, int protection) {
    void * memory = ::mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        throw std::bad_alloc();
    }
    return memory;
}

} // namespace

DeviceRange::DeviceRange(size_t size, int64_t born) : size_(std::max<size_t>(size, 1)), born_(born) {
    address_ = map(size_, PROT_NONE);
    try {
        memory_ = static_cast<char *>(map(size_, PROT_READ | PROT_WRITE));
    } catch (...) {
        ::munmap(address_, size_);
        throw;
    }
}

DeviceRange::~DeviceRange() {
    ::munmap(address_, size_);
    ::munmap(memory_, size_);
}

char * DeviceRange::behind(const void * address, size_t size) const {
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(address_);
    return offset <= size_ && size <= size_ - offset ? memory_ + offset : nullptr;
}

void * PinnedRanges::allocate(size_t size) {
    const size_t aligned = std::max<size_t>(size, 1);
    void * const memory  = map(aligned, PROT_READ | PROT_WRITE);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (aligned > most_ - std::min(most_, n_bytes_)) {
            ::munmap(memory, aligned);
            return nullptr;
        }
        ranges_[static_cast<const char *>(memory)] = aligned;
        n_bytes_ += aligned;
    }
    std::memset(memory, 0, aligned); // pinned memory is there, all of it
    return memory;
}

void PinnedRanges::free(void * memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        found = ranges_.find(static_cast<const char *>(memory));
    if (found != ranges_.end()) {
        ::munmap(memory, found->second);
        n_bytes_ -= found->second;
        ranges_.erase(found);
    }
}

bool PinnedRanges::contains(const void * memory, size_t size) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto                              after = ranges_.upper_bound(static_cast<const char *>(memory));
    if (after == ranges_.begin()) {
        return false;
    }
    --after;
    return static_cast<const char *>(memory) + size <= after->first + after->second;
}

size_t PinnedRanges::n_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return n_bytes_;
}

} // namespace emulated
