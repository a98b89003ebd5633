// Routed values of a program: what the device computes with hot experts, and the host with the others.
//
// Shapes of the device's graph are constant. The host's are those of a batch without hits; before each run they shrink
// to the rows that are misses, one expert each: x [k, 1, n_misses], ids [1, n_misses], results [n, 1, n_misses].

#pragma once

#include <utility>

#include "split_program.h"
#include "split_routing.h"

namespace oallama {

// Builds them, for the phase at hand.
class RoutedBuilder {
  public:
    RoutedBuilder(const ggml_cgraph * graph, Program & program) : graph_(graph), program_(program) {}

    // The routing that a mul-mat of the graph is done by. ids: where they come from.
    Routed & routing_of(int mul_mat, Origin ids);

    // Which of the phase's routings it is.
    int number_of(const Routed & routed) const { return static_cast<int>(&routed - routed_.data()); }

    // Rows of a full input for the misses. x: on the host, [k, 1 or n_used, n_tokens].
    ggml_tensor * host_input(Routed & routed, ggml_tensor * x);

    // Rows of a full input that has one for each rank, for the device, which gets them when the phase begins. host: the
    // input there, where llama.cpp's is in device memory.
    ggml_tensor * device_input(Routed & routed, const ggml_tensor * x, Origin origin, ggml_tensor * host);

    // A bias for each of the hot experts, sent when the phase begins. biases: [n, n_expert].
    ggml_tensor * device_biases(Routed & routed, const ggml_tensor * biases, Origin origin);

    // A tensor of one row of n for each miss.
    ggml_tensor * host_rows(Routed & routed, ggml_tensor * rows);

    // Memory for such a tensor that stays until the phase ends.
    ggml_tensor * keep(Routed & routed, ggml_tensor * rows);

    // Memory for a whole node that such rows, which lie at its beginning, are part of.
    ggml_tensor * whole(const ggml_tensor * node, ggml_tensor * rows);

    // Rows of the device times their routing weights, added up for each token.
    ggml_tensor * device_sum(Routed & routed, ggml_tensor * rows);

    std::vector<Routed> take() { return std::exchange(routed_, {}); }

  private:
    ggml_context * ctx() const { return program_.ctx.get(); }

    ggml_tensor * stage(ggml_tensor * tensor);
    ggml_tensor * send(Routed & routed, SentRows::What what, ggml_tensor * tensor, Origin origin = {},
                       ggml_tensor * host = nullptr);

    const ggml_cgraph * graph_;
    Program &           program_;
    std::vector<Routed> routed_;
};

// One of a phase's routings for the batch at hand. Not kept with programs: of large batches not many would fit.
struct RoutedBatch {
    std::vector<int32_t> chosen; // experts, [n_used, n_tokens]
    std::vector<float>   weights;
    Routing              routing;
};

// Reads the ids of the batch at hand, a batch for each of the phase's routings, and gives the host's tensors their
// sizes and the rows that are misses. Throws OALLAMA_FAILED for an expert that does not exist, or where mul-mats of one
// block have come to other hot experts.
void route(Phase & phase, const ggml_cgraph * graph, std::vector<RoutedBatch> & batches);

// What a phase's device side is sent of a routing, packed.
void pack(Host & host, const Routed & routed, const RoutedBatch & batch, const SentRows & sent,
          const ggml_cgraph * graph, char * out);

// Makes a node whole, as split_join does of others. from: what the device computed.
void join_routed(Host & host, const RoutedBatch & batch, const Download & download, const ggml_tensor * node,
                 const char * from);

} // namespace oallama
