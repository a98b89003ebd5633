// The device side of a program whose inputs and results are in the device's memory: the device reads the inputs where
// they are, the host's part of each result is sent up when a phase ends, and joined there.

#pragma once

#include <utility>

#include "split_program.h"
#include "split_sides.h"

namespace oallama {

class Resident {
  public:
    Resident(const ggml_cgraph * graph, Program & program) : graph_(graph), program_(program) {}

    // Elements [begin, begin + count) of each row of some tokens of a tensor of llama.cpp's, as kernels can read them:
    // where they lie, or what makes them contiguous.
    ggml_tensor * part(const ggml_tensor * tensor, Origin origin, int64_t begin, int64_t count, Tokens tokens);

    // A node becomes the sum of what the host has of these tokens, which is sent to its memory, and of the device's.
    // Either may be NULL.
    void add(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens);

    // Elements of each row (or of each half of one) of some tokens of a node become these of a side.
    void put(int node, const Value & v, Side side, ggml_tensor * from);

    // A node becomes what the host has computed of it.
    void put_whole(int node, ggml_tensor * host);

    // What is sent when the phase at hand ends, and the device's nodes behind that, which write llama.cpp's memory. Not
    // before: a result may lie where the phase still reads.
    std::vector<Lift>          take_lifts() { return std::exchange(lifts_, {}); }
    std::vector<ggml_tensor *> take_nodes() { return std::exchange(nodes_, {}); }

  private:
    struct Known {
        const ggml_tensor * tensor;
        int64_t             begin;
        int64_t             count;
        Tokens              tokens;
        ggml_tensor *       part;
    };

    ggml_context * ctx() const;
    ggml_tensor *  whole(const ggml_tensor * tensor, Origin origin);
    ggml_tensor *  result(int node);
    ggml_tensor *  view(ggml_tensor * of, const std::array<int64_t, GGML_MAX_DIMS> & ne, const size_t * nb, size_t at);
    ggml_tensor *  rows(int node, Tokens tokens);
    void           write(ggml_tensor * node);

    const ggml_cgraph *        graph_;
    Program &                  program_;
    std::vector<Known>         known_;
    std::vector<Lift>          lifts_;
    std::vector<ggml_tensor *> nodes_;
};

// Gives the device's tensors the addresses that llama.cpp's have now.
void bind_residents(const Program & program, const ggml_cgraph * graph);

// Queues fetching what the host needs of a phase's inputs. Bytes.
int64_t fetch_inputs(const Phase & phase, const ggml_cgraph * graph, ggml_backend_t device);

// Sends what the host has computed of a phase's results. Bytes.
int64_t send_lifts(const Phase & phase, ggml_backend_t device);

} // namespace oallama
