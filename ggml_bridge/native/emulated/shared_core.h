// The core of an emulated device, which no other emulated device may use at the same time: both would be late.

#pragma once

#include <atomic>
#include <cstdint>

namespace emulated {

// Between take() and give_back() the core is this thread's; where another of the same user has it already, both count
// that, in a file. Throws oallama::Error where that file cannot be used.
class SharedCore {
  public:
    explicit SharedCore(int cpu);
    SharedCore(const SharedCore &)             = delete;
    SharedCore & operator=(const SharedCore &) = delete;
    ~SharedCore();

    void take();
    void give_back();
    bool is_taken() const { return taken_; } // by this one

    // Times that two wanted the core at once, on this machine, ever.
    uint64_t n_shared() const;

  private:
    int                     file_  = -1;
    std::atomic<uint64_t> * count_ = nullptr; // in the file, which all processes map
    bool                    taken_ = false;
};

void pin_this_thread(int cpu);

// Every other thread of this process, and so what they will start, leaves the core.
void keep_others_off(int cpu);

// Gives threads that still run the cores back that keep_others_off took from them.
void let_others_on();

} // namespace emulated
