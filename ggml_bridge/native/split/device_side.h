// The device side of a context: its streams, and memory for activations.
//
// A context has one DeviceSide for each device (run.h), whose functions are called by the thread that computes its
// graphs. One stream computes. Inputs come to the host on another, beside it: when a phase begins, all that it reads of
// llama.cpp's is there, and it writes over none before the host has it. Weights come on a third (stream.h). Memory for
// activations belongs to all programs of the context and the device, of which one runs at a time.

#pragma once

#include "exchange.h"
#include "program.h"

namespace oallama {

// When weights may be sent to a device: between its small copies.
struct Turns {
    SmallCopies small_copies;         // to the device
    Phase *     last_phase = nullptr; // that ended, until the next one is launched
    size_t      slot       = no_slot; // that the device computes with
    size_t      foreseen   = 0;       // the next streamed block's, of a graph that is prepared
    int64_t     streamed   = 0;       // tokens of the last program that streamed

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

    // Gives a program's device tensors their memory, which all programs share since one runs at a time. True where that
    // memory moved: then every other program's tensors are void. Throws OALLAMA_NO_MEMORY, and then they are as well.
    // slot: of the ring, for the first block that it streams.
    bool allocate(Program & program, size_t slot);

    ggml_backend_t backend() const { return compute_.get(); }

    void synchronize() const { ggml_backend_synchronize(compute_.get()); }

    // The stream of inputs: that of what is computed where the device has no events, as it is waited for anyway.
    ggml_backend_t fetching() const { return fetching_ ? fetching_.get() : compute_.get(); }

    // Waits for what was queued on either stream.
    void finish() const;

    // Marks the inputs that are queued now, to be waited for. False: the device has no events.
    bool mark();
    void await_mark() const { ggml_backend_event_synchronize(mark_.get()); }

    bool has_events() const { return mark_ != nullptr; }

    // The stream of weights, where something is streamed.
    bool     streams() const { return stream_ != nullptr; }
    Stream & stream() const { return *stream_; }
    Stream & stream(const StreamSpec & spec); // made by whoever needs it first

    // The slot of the ring that the next streamed block takes.
    size_t next_slot() const { return streams() ? stream_->next_slot() : 0; }

    // NULL: no program has experts that may move.
    Exchange * exchange() const { return exchange_.get(); }

    // Asks for streamed weights until the next small copy is due, unless the batch has another size than the one that
    // streamed last: decode may stream nothing, and needs no weights of a prompt. Then for experts that take other's
    // places. n_tokens: of the program that runs, or ran last.
    void ask_ahead(Time until, int64_t n_tokens);

    // Called where llama.cpp asks for an input that the device has been told to compute.
    void computes_input(int64_t n_tokens);

    Turns turns;

  private:
    void                        place_biases(Program & program);
    std::unique_ptr<SlotBiases> new_biases(const Upload & upload, const std::shared_ptr<ExpertTable> & table);
    void                        place_streamed(Program & program, size_t slot);
    void                        open_fetching(const Program & program);

    ggml_backend_dev_t      device_;
    BackendPtr              compute_;
    BackendPtr              fetching_; // NULL: no program needed it yet, or the device has no second one
    EventPtr                mark_;     // NULL: the device has no events
    GallocrPtr              activations_;
    size_t                  n_activation_bytes_ = 0;
    std::unique_ptr<Stream> stream_; // NULL: nothing was streamed yet

    std::unique_ptr<Exchange> exchange_;

    std::vector<std::unique_ptr<SlotBiases>> slot_biases_;
};

} // namespace oallama
