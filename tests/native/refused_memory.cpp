// The standard's own operator new and delete, but for a thread that is to have no memory.

#include "refused_memory.h"

#include <cstdlib>
#include <new>

thread_local bool out_of_memory = false;

// Not inlined: gcc would take free for a mistake.
__attribute__((noinline)) void * operator new(size_t size, const std::nothrow_t &) noexcept {
    return out_of_memory ? nullptr : std::malloc(size);
}

__attribute__((noinline)) void * operator new(size_t size) {
    void * memory = operator new(size, std::nothrow);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}

__attribute__((noinline)) void operator delete(void * memory) noexcept {
    std::free(memory);
}

__attribute__((noinline)) void operator delete(void * memory, size_t) noexcept {
    std::free(memory);
}
