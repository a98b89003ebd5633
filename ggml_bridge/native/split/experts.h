// Hot experts: which of a batch's rows the device computes, with the experts that it holds, and which the host.
//
// A token uses n_used experts, and each mul-mat by them gives it n_used rows, one for each rank. A row is a hit where
// its expert is hot, else a miss. Rows are counted token by token: rank + n_used * token. Shapes of the device's graph
// are constant, those of the host's follow the batch (program.h).
//
// In a batch of several tokens whose experts may be fetched, the device's rows are packed too, expert by expert, and
// computed in several launches: first with the experts in the slots, those in slots that others need before the rest;
// then with the experts that take their place. So the device computes needed rows only, and computes one launch while
// the next launch's experts are copied.
//
// When a segment is launched, `route_segment` reads its ids and gives the host's tensors their sizes; `pack` makes what
// the device is sent; when both sides have computed, `join_routed` makes a node whole. All three are called by the
// thread that computes (run.cpp). A batch's routing is kept by the context, not with programs: of large batches not
// many would fit.

#pragma once

#include <cstdint>
#include <vector>

#include "exchange.h"
#include "host.h"

namespace oallama {

// Some of the device's packed rows, and what is copied before they are computed.
struct RoutedLaunch {
    int64_t begin; // rows [begin, end)
    int64_t end;
    int64_t at;       // where their slots and rows are among those that are sent
    size_t  n_copies; // of experts
    size_t  after;    // launches that have to be done before these are copied
};

// One of a segment's routings for the batch at hand.
struct RoutedBatch {
    std::vector<int32_t> chosen;  // experts, [n_used, n_tokens]
    std::vector<float>   weights; // of these, where they are needed

    int64_t n_used   = 0;
    int64_t n_tokens = 0;
    int64_t n_device = 0; // rows that the device computes for each token: as many as can be hits

    // Slots of the device's rows, [n_device, n_tokens]: hits come first. Rows left over compute with some slot and are
    // thrown away, so that shapes stay as they are.
    std::vector<int32_t> slots;
    std::vector<int32_t> device_rows; // -1: none

    std::vector<RoutedLaunch> launches; // of packed rows

    // The host's rows: misses, and hits that it computes sooner than the device, which has others.
    std::vector<int32_t> host_ids;
    std::vector<int32_t> host_rows; // ascending

    int64_t n_host_rows() const { return static_cast<int64_t>(host_rows.size()); }

    // Rows of the device, and those of them that wait for the last copies.
    int64_t n_device_rows() const { return static_cast<int64_t>(device_rows.size()); }
    int64_t n_last_rows() const;
};

// Finds the rows of `chosen`, of which the device computes n_device for each token. slot_of: the slot of each expert;
// -1: none. once: no slot twice in a token. A spare row gets a slot that its token does not use; a single token's the
// slot of a hit, so that nothing more is read. n_hits: of a token at most; the host computes the others like misses.
void route(RoutedBatch & batch, int64_t n_device, const std::vector<int32_t> & slot_of, int64_t n_slots, bool once,
           int64_t n_hits);

// The same with packed rows, at most so many in a launch. moves: experts that take the place of others, in this order.
void route_packed(RoutedBatch & batch, int64_t n_most, const std::vector<int32_t> & slot_of,
                  const std::vector<ExpertTable::Move> & moves);

// Reads the ids of the batch at hand, a batch for each of the segment's routings, and gives the host's tensors their
// sizes and the rows that are misses. exchange: of the context's hot experts; NULL: they stay. in_turns: a slot may
// serve several of a batch's experts, one after the other. Throws OALLAMA_FAILED for an expert that does not exist, or
// where mul-mats of one block have come to other hot experts.
void route_segment(Segment & segment, const ggml_cgraph * graph, std::vector<RoutedBatch> & batches,
                   Exchange * exchange, bool in_turns);

// Gives the device's tensors the sizes of a launch, and those that it is sent the places of what is sent for it.
void shape(const Routed & routed, const RoutedLaunch & launch);

// Packs an upload of a routing into out.
void pack(Host & host, const Routed & routed, const RoutedBatch & batch, const Upload & upload,
          const ggml_cgraph * graph, char * out);

// Makes a node whole. from: what the device computed.
void join_routed(Host & host, const RoutedBatch & batch, const Download & download, const ggml_tensor * node,
                 const char * from);

// Adds a row of n elements times its weight to a sum.
void add_weighted(float * sum, const float * row, float weight, int64_t n);

// Weights the host's rows and adds them up, where the device adds the sum to its own.
void sum_rows(Host & host, const RoutedBatch & batch, const HostSum & sum);

} // namespace oallama
