// libggml_accept: lets Python choose which connections ggml's RPC server gets. Preloaded into a worker, and nowhere
// else: it stands before libc's accept, which ggml calls, and changes nothing until a function is given.

#include <sys/socket.h>

#include <atomic>

namespace {

using AcceptFunction = int (*)(int);

std::atomic<AcceptFunction> chosen{nullptr};

} // namespace

extern "C" {

// function(listener): the descriptor of a connection that may be served; -1 where there will be none.
__attribute__((visibility("default"))) void ggml_accept_with(AcceptFunction function) {
    chosen = function;
}

__attribute__((visibility("default"))) int accept(int listener, sockaddr * address, socklen_t * length) {
    const AcceptFunction function = chosen;
    if (function != nullptr && address == nullptr) {
        return function(listener);
    }
    return accept4(listener, address, length, 0);
}
}
