// The builder of rows of tokens' experts of which some are hot: the misses on the host, what may be hits on the device.

#pragma once

#include "build_resident.h"

namespace oallama {

class RoutedBuilder {
  public:
    RoutedBuilder(Build & build, ResidentBuilder & resident) : build_(build), resident_(resident) {}

    void emit_rows(int i);
    void emit_view(int i); // a half of a fused gate_up's rows

    // Sums rows on the device if the result stays there, or if that saves many copies; else on the host.
    void emit_sum(int i);

    void end_segment() { packed_.clear(); }

  private:
    // The routing that a mul-mat of the graph is done by.
    Routed & routing_of(int mul_mat);

    int number_of(const Routed & routed) const { return static_cast<int>(&routed - build_.segment.routings.data()); }

    // The input of a mul-mat by hot experts on a side.
    ggml_tensor * routed_input(int i, Side side, Routed & routed);

    // Rows of a mirrored input for the misses. x: on the host, [k, 1 or n_used, n_tokens].
    ggml_tensor * rows_for_misses(Routed & routed, ggml_tensor * x);

    // Rows of a mirrored input for a launch. x: on the device, [k, 1 or n_used, n_tokens].
    ggml_tensor * rows_for_launches(Routed & routed, ggml_tensor * x);

    // Numbers of a launch's rows, of which all launches' are sent at once. dim: along which they lie.
    ggml_tensor * numbers(Routed & routed, Upload::What what, int dim);

    // A bias for each slot. biases: [n, n_expert].
    ggml_tensor * device_biases(Routed & routed, int i);

    // Sends a tensor of a routing to the device when the segment begins.
    ggml_tensor * send(Upload::What what, ggml_tensor * tensor, const Routed & routed, Source source);

    // Routing weights of the device's rows, [1, n_ranks, n_tokens].
    ggml_tensor * weights_of(Routed & routed, int64_t n_ranks, int64_t n_tokens);

    // Rows of the device times their routing weights, added up for each token.
    ggml_tensor * device_sum(Routed & routed, ggml_tensor * rows);

    // whole: where llama.cpp's tensors are in device memory, what the node becomes there.
    void download_rows(int i, Download::Join how, ggml_tensor * rows, const Routed & routed, ggml_tensor * whole);

    Build &           build_;
    ResidentBuilder & resident_;

    std::map<std::pair<std::ptrdiff_t, const ggml_tensor *>, ggml_tensor *> packed_; // rows of an input, by routing
};

} // namespace oallama
