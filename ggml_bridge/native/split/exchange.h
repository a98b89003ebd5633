// Exchange: copies experts to slots of the device, while the link is idle and when a batch misses them.
//
// Idle: when a block has been computed, the move that its table finds due (expert_table.h) is copied on the stream of
// weights while the link has nothing else to do: in pieces, and only as many as the link can copy before the next
// activation is due (stream.h). If the link is never idle, no expert moves, and nothing waits.
//
// Missed: when a block is launched, the batch's missed experts are divided between link and host. x of them are fetched
// into the slots of the least used experts, and the device computes their rows; the host computes the others meanwhile.
// x is chosen so that both end together, by the link's speed and the host's recent time per row (ScheInfer, Eq. 13, for
// experts). Several tokens may use more experts than there are slots: then a slot serves several experts in sequence,
// each copied once the device has computed with the one before.
//
// A DeviceSide has one Exchange, which one thread at a time uses.

#pragma once

#include <deque>

#include "expert_table.h"
#include "stream.h"

namespace oallama {

class Exchange {
  public:
    // eager: whatever the link has to do, a move that is due is copied at once.
    Exchange(Stream & stream, bool eager) : stream_(stream), eager_(eager) {}

    ~Exchange();

    Exchange(const Exchange &)             = delete;
    Exchange & operator=(const Exchange &) = delete;

    // Marks experts of a table whose copies have ended as present, before its block is launched.
    void receive(const std::shared_ptr<ExpertTable> & table);

    // Chooses which of the experts that a batch misses are fetched, once the table has counted it, in the order in
    // which they are. host_row_s, device_row_s: seconds of a row; 0: not known. n_rows: of the device, which all wait
    // for what is fetched; 0: packed rows, of which only those of what is fetched wait. in_turns: a slot may be given
    // to several experts.
    std::vector<ExpertTable::Move> choose_fetched(const std::shared_ptr<ExpertTable> & table,
                                                  const std::vector<int32_t> & chosen, double host_row_s,
                                                  double device_row_s, int64_t n_rows, bool in_turns);

    // When that was chosen, and when what was fetched for it last is expected there, if anything was.
    Time chosen_at() const { return chosen_at_; }
    Time ready() const { return std::max(chosen_at_, ready_); }

    // Queues the next n of what was chosen. All later work of `compute` waits for them, and for received experts.
    // after: number of marks that they wait for.
    void fetch(ggml_backend_t compute, size_t n, size_t after = 0);

    size_t n_chosen() const { return chosen_.size(); }

    // Records an event behind the work queued so far, until the next block.
    void mark(ggml_backend_t compute);
    void forget_marks();

    // Forgets what was chosen and not queued.
    void cancel();

    // A block has been computed: what its table finds due may be copied.
    void computed(const std::shared_ptr<ExpertTable> & table);

    // Copies what is due, as far as the link can have copied it until then.
    void go_on(Time until);

  private:
    struct Copy {
        std::shared_ptr<ExpertTable> table;
        ExpertTable::Move            move;
        EventPtr                     event;      // behind its bytes; NULL: the device has no events
        size_t                       weight = 0; // the first of which not all is asked for
        size_t                       at     = 0; // bytes of it that are
        Time                         ends;       // when the link is expected to have copied all of it
    };

    EventPtr new_event();
    Copy     new_copy(const std::shared_ptr<ExpertTable> & table, ExpertTable::Move move);
    bool     begin();
    bool     ask(Copy & copy, Time until, bool whole);
    bool     may_move(const std::shared_ptr<ExpertTable> & table);

    Stream &                                  stream_;
    bool                                      eager_;
    std::deque<std::shared_ptr<ExpertTable>>  due_;      // of which a move may be due
    std::vector<Copy>                         going_;    // one at most, of which not all is asked for
    std::vector<Copy>                         coming_;   // all asked for
    std::deque<Copy>                          chosen_;   // to be fetched
    std::vector<Copy>                         received_; // whose events what is computed next has to wait for
    std::vector<EventPtr>                     marks_;    // of this block's launches
    std::vector<EventPtr>                     events_;   // that are free
    Time                                      chosen_at_;
    double                                    request_s_ = 0.0; // recent mean of the thread, to fetch an expert
    Time                                      ready_;
    std::vector<std::shared_ptr<ExpertTable>> claimed_;
};

} // namespace oallama
