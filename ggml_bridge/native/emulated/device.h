// Emulated devices: their parameters, their time, their memory.

#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "../split/util.h"
#include "graph.h"
#include "memory.h"
#include "timekeeper.h"

namespace emulated {

class Device {
  public:
    // at: its number among the devices that the keeper keeps the time of.
    Device(Parameters given, size_t at, Timekeeper & keeper);

    const Parameters  parameters;
    const std::string host_name; // of its pinned memory
    const size_t      number;
    Timekeeper &      time;
    PinnedRanges      pinned;

    std::atomic<int64_t> device_bytes{0}, n_streams{0}, n_events{0};
    std::atomic<int64_t> n_graphs{0}, n_captured{0}, bytes_in{0}, bytes_out{0};
    std::atomic<int64_t> n_graphs_ever{0}, n_allocations{0};
    std::atomic<bool>    failed{false}; // something asked for could not be queued: no result is right any more

    // Counts an allocation: whether it is the one that the parameters refuse.
    bool refuses_allocation() { return ++n_allocations == parameters.fail_alloc; }

    StreamPtr new_stream() { return time.new_stream(number); }

    // True for a tensor in its memory.
    bool has(const ggml_tensor * tensor) const;

    // Memory behind a tensor, of which size bytes from offset are used; stops the process, naming the tensor, where
    // that is not this device's.
    char * memory_of(const ggml_tensor * tensor, size_t offset, size_t size) const;

    bool in_use() const { return device_bytes > 0 || n_streams > 0 || n_events > 0 || pinned.n_bytes() > 0; }

    // Copies between host memory and the device. wait: the caller is held up until it is done.
    void upload(const StreamPtr & stream, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                bool wait);
    void download(const StreamPtr & stream, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                  bool wait);
    void copy_within(const StreamPtr & stream, const ggml_tensor * src, ggml_tensor * dst);

    // Starts a graph. captures: of the stream. cpu: computes it where values are real.
    ggml_status launch(const StreamPtr & stream, Captures & captures, const ggml_cgraph * graph, ggml_backend_t cpu);

  private:
    struct Routing {
        int32_t * rows;
        int64_t   n_experts, n_rows;
        int       layer; // -1: not known
    };

    using RoutingStep = std::variant<Routing, RoutedMulMat>;

    // A router on the host chooses from what it is sent: these are the lines of its layer that it shall choose by.
    struct SentLines {
        size_t  first;
        int64_t n_rows;
    };

    const void * noise(ggml_type type);
    bool         has_real_ids(const ggml_tensor * node) const;
    double       route(const std::vector<RoutingStep> & steps);
    void         draw_routing(const Routing & routing);
    void send_routing(const StreamPtr & stream, const ggml_tensor * tensor, void * data, size_t offset, size_t size);

    std::vector<char>     noise_f32_, noise_f16_;
    std::atomic<uint64_t> n_drawn_{0};
    std::map<int, size_t> next_row_; // of a layer's recorded routing; the device thread's

    std::mutex               sent_mutex_;
    std::map<int, SentLines> sent_; // of the layer's graph that was launched last
};

// The devices of a process, whose time one thread keeps.
struct Devices {
    // One device for each element of given, which is not empty.
    explicit Devices(std::vector<Parameters> given);

    bool in_use() const;

    Timekeeper                           time;
    std::vector<std::unique_ptr<Device>> all;
    int64_t                              n_shared_before; // of Timekeeper::n_shared, at the last reset
};

//
// the devices of this process, as ggml's callbacks and the C interface find them
//

// NULL before they are registered for the first time.
std::unique_ptr<Devices> & the_emulated();

// The devices as ggml sees them. Its registry has one for each emulated device, from the first on.
extern std::array<ggml_backend_device, most_devices> the_devices;

inline size_t number_of(ggml_backend_dev_t dev) {
    return static_cast<size_t>(dev - the_devices.data());
}

inline Device & device_of(ggml_backend_dev_t dev) {
    return *the_emulated()->all[number_of(dev)];
}

inline Device & device_of(ggml_backend_buffer_type_t buft) {
    return device_of(ggml_backend_buft_get_device(buft));
}

// Runs what a callback without a result asks for. Where that fails, for want of host memory, graphs fail from then on.
template <typename F> void attempt(Device & device, F && f) noexcept {
    if (oallama::logged(f) != OALLAMA_OK) {
        device.failed = true;
    }
}

ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t dev); // its memory
ggml_backend_buffer_type_t host_buft();                         // pinned host memory

} // namespace emulated
