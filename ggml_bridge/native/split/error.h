// Errors of the split backend, owners of ggml objects, and the log.

#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "ggml-oallama.h"
#include "ggml_backend_abi.h"

namespace oallama {

class Error : public std::runtime_error {
  public:
    Error(oallama_status status, const std::string & message) : std::runtime_error(message), status_(status) {}

    oallama_status status() const noexcept { return status_; }

  private:
    oallama_status status_;
};

void require(bool condition, const std::string & message); // throws OALLAMA_INVALID

void         set_last_error(const char * message) noexcept;
const char * last_error() noexcept;

// Runs f and turns every exception into a status and a message.
template <typename F> int guarded(F && f) noexcept {
    try {
        f();
        return OALLAMA_OK;
    } catch (const Error & error) {
        set_last_error(error.what());
        return error.status();
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
        return OALLAMA_NO_MEMORY;
    } catch (const std::exception & error) {
        set_last_error(error.what());
        return OALLAMA_FAILED;
    } catch (...) {
        set_last_error("unknown C++ exception");
        return OALLAMA_FAILED;
    }
}

// One line at error level through whatever callback ggml logs with.
void log_error(const char * message) noexcept;

// The same, for callbacks that only the log can tell what went wrong.
template <typename F> int logged(F && f) noexcept {
    const int status = guarded(f);
    if (status != OALLAMA_OK) {
        log_error(last_error());
    }
    return status;
}

template <auto Free> struct Deleter {
    template <typename T> void operator()(T * object) const noexcept { Free(object); }
};

using ContextPtr = std::unique_ptr<ggml_context, Deleter<ggml_free>>;
using BufferPtr  = std::unique_ptr<ggml_backend_buffer, Deleter<ggml_backend_buffer_free>>;
using GallocrPtr = std::unique_ptr<ggml_gallocr, Deleter<ggml_gallocr_free>>;

using BackendPtr = std::unique_ptr<ggml_backend, Deleter<ggml_backend_free>>;
using EventPtr   = std::unique_ptr<ggml_backend_event, Deleter<ggml_backend_event_free>>;

// A context for the headers of n_tensors tensors, and of graphs of n_nodes nodes together in n_graphs.
ContextPtr new_context(int64_t n_tensors, int64_t n_graphs = 0, int64_t n_nodes = 0);

} // namespace oallama
