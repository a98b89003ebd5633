// The builder of results in device memory: blocks that live there read llama.cpp's tensors where they are, and what the
// host has of a result is sent up when the segment ends. Not before: a result may lie where the segment still reads.

#pragma once

#include "build.h"

namespace oallama {

class ResidentBuilder {
  public:
    explicit ResidentBuilder(Build & build) : build_(build) {}

    // A node becomes the sum of what the host has of these tokens, which is sent to its memory, and of the device's.
    // Either may be NULL.
    void make_sum(int node, ggml_tensor * host, ggml_tensor * device, Tokens tokens);

    // Elements of each row (or of each half of one) of some tokens of a node become those of a side.
    void put(int node, const Value & v, Side side);

  private:
    // A node that writes memory of llama.cpp's, so a view of it.
    void write(ggml_tensor * node);

    Build & build_;
};

} // namespace oallama
