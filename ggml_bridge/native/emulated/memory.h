// The device's memory, which host code cannot touch, and pinned host memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "../split/ggml_backend_abi.h"

namespace emulated {

// A buffer in device memory: addresses that nobody may use, and the memory behind them, which takes room only where it
// is written.
class DeviceRange {
  public:
    // born: graphs that the device had launched by then. Throws std::bad_alloc.
    DeviceRange(size_t size, int64_t born);

    DeviceRange(const DeviceRange &)             = delete;
    DeviceRange & operator=(const DeviceRange &) = delete;
    ~DeviceRange();

    void * address() const { return address_; }
    size_t size() const { return size_; }

    int64_t born() const { return born_; }

    // Where the device finds size bytes at an address of this buffer; nullptr: they are not all in it.
    char * behind(const void * address, size_t size) const;

  private:
    void *  address_ = nullptr;
    char *  memory_  = nullptr;
    size_t  size_    = 0;
    int64_t born_    = 0;
};

// Pinned host memory by address.
class PinnedRanges {
  public:
    explicit PinnedRanges(size_t most) : most_(most) {}

    void * allocate(size_t size); // NULL: more than can be pinned. Throws std::bad_alloc
    void   free(void * memory);
    bool   contains(const void * memory, size_t size) const;
    size_t n_bytes() const;

  private:
    mutable std::mutex             mutex_;
    std::map<const char *, size_t> ranges_;
    size_t                         most_;
    size_t                         n_bytes_ = 0;
};

} // namespace emulated
