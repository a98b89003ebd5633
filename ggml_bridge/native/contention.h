// Two kinds of work at once: how fast is each alone, and both together?
//
// Mul-mats and copies share memory, cores or a queue. Both are asked for by one thread, as the split back end does it:
// it queues work on the device, computes with all threads, then waits. So much is queued that the device is still at it
// when the first kind is done. What the first lost is by how much longer it took than alone; what the second lost
// meanwhile, by how much later than alone it was done.

#pragma once

#include <functional>

#include "support.h"

namespace bridge {

// One kind of work, in units that are all alike.
struct Work {
    std::function<void()> begin_unit; // a device that works by itself is not done with it on return
    std::function<void()> finish;     // waits for all that was begun
    double                bytes;      // of one unit: multiplied or copied
};

// on_device: the first works by itself, so that it can be queued before the second. seconds: a third of the time to
// measure for. clock: seconds since whenever.
gb_contention measure_contention(Work first, Work second, bool on_device, double seconds,
                                 const std::function<double()> & clock = seconds_now);

} // namespace bridge
