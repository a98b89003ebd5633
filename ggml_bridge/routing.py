"""Which experts the routers of a llama_context choose, as they choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ggml_bridge.ffi import Native, ffi

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HEADER = 3  # layer, n_used, n_tokens


class RoutingRecorder:
    """Records ids [n_tokens, n_used] of every router while it listens; not at first.

    callback, user_data: for cb_eval and cb_eval_user_data of llama_context_params. It must outlive the context. Of a
    context that has it, ggml's scheduler waits for every split of a graph; while it listens, also for every router.
    """

    def __init__(self, native: Native) -> None:
        self._native = native
        handle = ffi.new("gb_routing **")
        native.call("gb_routing_new", handle)
        self._handle: Any = ffi.gc(handle[0], native.lib.gb_routing_free)
        self.callback = native.pointer("gb_routing_callback")
        self.user_data = int(ffi.cast("uintptr_t", self._handle))

    def close(self) -> None:
        """Free it; its context must be gone. May be called twice."""
        if self._handle is not None:
            ffi.release(self._handle)
            self._handle = None

    def listen(self, listens: bool) -> None:
        """Whether what is computed from now on is recorded."""
        self._native.lib.gb_routing_listen(self._handle, int(listens))

    def take(self) -> list[tuple[int, npt.NDArray[np.int32]]]:
        """(layer, ids [n_tokens, n_used]) of every router since the last take, in the order they were computed. Raises
        Unsupported where this llama.cpp keeps ids in another form, OutOfMemory."""
        import numpy as np

        size = ffi.new("int64_t *")
        self._native.call("gb_routing_size", self._handle, size)
        numbers = np.empty(size[0], dtype=np.int32)
        self._native.call("gb_routing_take", self._handle, ffi.cast("int32_t *", numbers.ctypes.data), size[0])
        return list(_routers(numbers))


def _routers(numbers: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    start = 0
    while start < len(numbers):
        layer, n_used, n_tokens = (int(number) for number in numbers[start : start + _HEADER])
        start += _HEADER
        yield layer, numbers[start : start + n_used * n_tokens].reshape(n_tokens, n_used)
        start += n_used * n_tokens
