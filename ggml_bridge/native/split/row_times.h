// Seconds that routed rows take on either side. By them missed experts are fetched (exchange.h), hits are left to the
// host (experts.h), and copies ahead end in time (run.cpp).

#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace oallama {

class Exchange;
struct RoutedBatch;
struct Segment;

// Recent means of one segment; 0: not known.
struct RowTimes {
    double              host_s   = 0.0; // of a row on the host
    double              device_s = 0.0; // of a row on the device, without copies of experts
    std::vector<double> both_s;         // until both sides end a token, by rows of the host
};

// Routed rows of this batch that the host computes.
int64_t n_host_rows(const Segment & segment, const std::vector<RoutedBatch> & batches);

class RowClock {
  public:
    // The seconds of a routed row on the host in a batch of this size, else of another size, else a guess: without it a
    // prompt's first layer, whose misses the host would all compute, would take longer than all other layers together.
    double expected(const Segment & segment, int64_t n_tokens, int n_threads) const;

    // Notes the nanoseconds that the host took for its rows.
    void note_host(Segment & segment, const std::vector<RoutedBatch> & batches, int64_t n_tokens, int64_t host_ns);

    // Notes the seconds that a row took the device: exact if the thread had to wait, else an upper bound. It either
    // computed all the time since fetches were chosen, or waited for the last copies and then computed the last launch.
    // exchange: NULL: nothing to note.
    static void note_device(Segment & segment, const std::vector<RoutedBatch> & batches, const Exchange * exchange,
                            int64_t waited_ns);

    // Notes how long both sides took for a token after the launch, by the number of rows that the host computed.
    static void note_both(Segment & segment, const std::vector<RoutedBatch> & batches, int64_t ns);

  private:
    std::map<int64_t, double> host_s_; // of a row, by tokens of the batch (a power of two)
};

} // namespace oallama
