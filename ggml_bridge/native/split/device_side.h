// The device side of a context: its streams, and memory for activations.
//
// A context has one DeviceSide for each device (run.h), whose functions are called by the thread that computes its
// graphs. It has three streams of the device: one computes; one copies inputs of blocks that live on the device to the
// host, concurrently, as these inputs are complete when a segment begins and not overwritten before the host has them;
// one copies weights (stream.h). Memory for activations is shared by all programs on the device, of which one runs at a
// time.

#pragma once

#include "exchange.h"
#include "program.h"

namespace oallama {

// State from one segment to the next: which copies of weights may be requested now.
struct CopyState {
    SmallCopies small_copies;           // to the device
    Segment *   last_segment = nullptr; // the segment that ended last, until the next one is launched
    size_t      slot         = no_slot; // the slot with which the device computes
    size_t      foreseen     = 0;       // the slot of the next streamed block, while a graph is prepared
    int64_t     streamed     = 0;       // tokens of the last program that streamed

    void forget_copies();
};

class DeviceSide {
  public:
    explicit DeviceSide(ggml_backend_dev_t device); // throws OALLAMA_FAILED
    ~DeviceSide();

    DeviceSide(const DeviceSide &)             = delete;
    DeviceSide & operator=(const DeviceSide &) = delete;

    ggml_backend_dev_t device() const { return device_; }

    const char * name() const { return ggml_backend_dev_name(device_); }

    // Gives a program's device tensors memory, which all programs share since one runs at a time. Returns true if that
    // memory moved: then the tensors of all other programs are invalid; so they are if it throws OALLAMA_NO_MEMORY.
    // slot: the slot of the ring for the program's first streamed block.
    bool allocate(Program & program, size_t slot);

    ggml_backend_t backend() const { return compute_.get(); }

    void synchronize() const { ggml_backend_synchronize(compute_.get()); }

    // The stream that copies inputs to the host; without events the stream that computes, as the thread waits anyway.
    ggml_backend_t downloading() const { return downloading_ ? downloading_.get() : compute_.get(); }

    // Waits for what was queued on either stream.
    void finish() const;

    // Records an event behind the queued inputs, for await_mark. False: the device has no events.
    bool mark();
    void await_mark() const { ggml_backend_event_synchronize(mark_.get()); }

    bool has_events() const { return mark_ != nullptr; }

    // The stream of weights, once a program streams.
    bool     streams() const { return stream_ != nullptr; }
    Stream & stream() const { return *stream_; }
    Stream & stream(const StreamSpec & spec); // creates it on first use

    // The slot of the ring that the next streamed block takes.
    size_t next_slot() const { return streams() ? stream_->next_slot() : 0; }

    // NULL: no program has experts that may move.
    Exchange * exchange() const { return exchange_.get(); }

    // Requests streamed weights up to the next small copy, if the batch has the size of the last one that streamed
    // (decode may stream no weights, and needs none of a prompt's). Then requests experts to exchange. n_tokens: of the
    // program that runs, or ran last.
    void ask_ahead(Time until, int64_t n_tokens);

    // Called when llama.cpp waits for an input that the device was given to compute.
    void computes_input(int64_t n_tokens);

    CopyState copy_state;

  private:
    void                        place_biases(Program & program);
    std::unique_ptr<SlotBiases> new_biases(const Upload & upload, const std::shared_ptr<ExpertTable> & table);
    void                        place_streamed(Program & program, size_t slot);
    void                        open_fetching(const Program & program);

    ggml_backend_dev_t      device_;
    BackendPtr              compute_;
    BackendPtr              downloading_; // NULL: no program needed it yet, or the device has no second one
    EventPtr                mark_;        // NULL: the device has no events
    GallocrPtr              activations_;
    size_t                  n_activation_bytes_ = 0;
    std::unique_ptr<Stream> stream_; // NULL: nothing was streamed yet

    std::unique_ptr<Exchange> exchange_;

    std::vector<std::unique_ptr<SlotBiases>> slot_biases_;
};

} // namespace oallama
