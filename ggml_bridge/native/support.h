// Checked sizes, devices by name, and valid random values: what every part of the bridge needs beside split/util.h.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bridge.h"
#include "split/util.h"

namespace bridge {

using oallama::BackendPtr;
using oallama::BufferPtr;
using oallama::ContextPtr;
using oallama::cpu_device;
using oallama::cpu_layouts;
using oallama::Error;
using oallama::guarded;
using oallama::proc_address;
using oallama::require;
using oallama::SchedPtr;

// Throws an error that ends with the last error line that ggml logged, and forgets that line.
[[noreturn]] void fail(oallama_status status, const std::string & what);

//
// sizes and strings
//

// Products and sums of sizes in bytes or elements; throw OALLAMA_INVALID on overflow.
int64_t mul(int64_t a, int64_t b);
int64_t add(int64_t a, int64_t b);

int64_t ceil_div(int64_t a, int64_t b);

double seconds_now() noexcept; // steady clock

double median(std::vector<double> values);

// Copies text into a caller's array; throws OALLAMA_INVALID when it does not fit.
void copy_text(const std::string & text, char * out, int64_t capacity);

std::string join_lines(const std::vector<std::string> & lines);

//
// tensors and graphs
//

// A context for the headers of n_tensors tensors, and of a graph of n_nodes nodes.
ContextPtr new_context(int64_t n_tensors, int64_t n_nodes = 0);

// An empty graph in a context made for n_nodes nodes.
ggml_cgraph * new_graph(ggml_context * ctx, int64_t n_nodes);

// Nodes that ggml must reserve for a graph of n_nodes: it counts leafs too, at most three a node here.
size_t graph_capacity(int64_t n_nodes);

// Allocates every tensor of the context in buffers of this type; throws OALLAMA_NO_MEMORY.
BufferPtr alloc_tensors(ggml_context * ctx, ggml_backend_buffer_type_t buft);

BufferPtr alloc_buffer(ggml_backend_buffer_type_t buft, int64_t n_bytes);

//
// devices
//

ggml_backend_dev_t find_device(const char * name); // throws OALLAMA_INVALID
bool               is_cpu(ggml_backend_dev_t device);

// True where ggml's CPU multiplies by weights of a type: all but integers, doubles and formats of activations alone.
// Its own table is in libggml-cpu, which need not be linked with.
bool has_cpu_kernel(ggml_type type);

// The buffer type of a layout name, or "CPU_Mapped", which is plain memory too; of the device's default when the name
// is NULL. Throws OALLAMA_INVALID.
ggml_backend_buffer_type_t find_layout(ggml_backend_dev_t device, const char * layout);

//
// values
//

// A small deterministic generator (splitmix64): the same numbers on every machine.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next();
    int64_t  below(int64_t n); // uniform in [0, n)
    float    normal();         // mean 0, variance 1 (sum of uniforms)

  private:
    uint64_t state_;
};

std::vector<float> random_normal(int64_t n, float scale, uint64_t seed);

// Writes all of a tensor.
template <typename T> void set_values(ggml_tensor * tensor, const std::vector<T> & values) {
    ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
}
void set_normal(ggml_tensor * tensor, uint64_t seed); // F32, variance 1

// Valid weight data of any type, quickly: some rows with random values, to be repeated as often as needed.
struct Tile {
    int64_t              rows = 0;
    std::vector<uint8_t> blocks; // `rows` rows of K elements in the weight's type
    std::vector<float>   values; // F32 [K, rows]: what the blocks stand for
};

// At most max_rows rows of k elements, about normal with variance 1/k, so that products with variance 1 keep it.
Tile make_tile(ggml_type type, int64_t k, int64_t max_rows);

} // namespace bridge

//
// timers
//

// The opaque gb_timer of bridge.h: one kind of work, and the seconds that it is reported to take.
struct gb_timer {
    gb_timer()                             = default;
    gb_timer(const gb_timer &)             = delete;
    gb_timer & operator=(const gb_timer &) = delete;
    virtual ~gb_timer()                    = default;

    virtual double run_once() = 0; // seconds
};

namespace bridge {

// The timer of that kind; throws OALLAMA_INVALID for another one.
template <typename Kind> Kind & timer_of(gb_timer * timer) {
    auto * found = dynamic_cast<Kind *>(timer);
    require(found != nullptr, "this timer is of another kind");
    return *found;
}

} // namespace bridge
