"""Bytes that a llama_context has allocated, by buffer type; and the experts that its routers choose, as they choose."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import encode, ffi, record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ggml_bridge.bridge import Bridge

_MANGLED = "_Z26llama_get_memory_breakdownPK13llama_context"
_MAX_ROWS = 64
_HEADER = 3  # of what a router chose: layer, n_used, n_tokens


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one buffer type: weights, KV cache and other context memory, compute buffers."""

    buft: str  # name of the buffer type: CPU, CPU_REPACK, CUDA0, RPC0[host:port], ...
    device: str  # name of its device; CPU for plain host memory
    is_host: bool  # the CPU can read it in ggml's plain layout
    model: int
    context: int
    compute: int

    @property
    def total(self) -> int:
        return self.model + self.context + self.compute


def memory_breakdown(bridge: Bridge, context: int, no_alloc_on: Sequence[str] | None = None) -> list[MemoryRow]:
    """Return the bytes that the llama_context at an address holds in each buffer type, exactly.

    no_alloc_on: the devices that the model was given, where it was loaded with no_alloc: of such contexts llama.cpp
    counts a compute buffer once for each backend that uses it (plain host memory is an accelerator's as well as the
    CPU's), which is put right. Raises ValueError for a device that there is not, BridgeError.
    """
    try:
        function = getattr(bridge.libraries.llama_cpp.llama_cpp._lib, _MANGLED)
    except AttributeError:
        raise BridgeError(
            "this libllama does not export llama_get_memory_breakdown; run `oallama setup --refresh`"
        ) from None
    address = ctypes.cast(function, ctypes.c_void_p).value
    rows = ffi.new("gb_memory_row[]", _MAX_ROWS)
    n_rows = ffi.new("int64_t *")
    names = [ffi.new("char[]", encode(name)) for name in no_alloc_on or ()]
    bridge.native.call(
        "gb_memory_breakdown",
        ffi.cast("void *", address),
        ffi.cast("void *", context),
        int(no_alloc_on is not None),
        ffi.new("char *[]", names),
        len(names),
        rows,
        _MAX_ROWS,
        n_rows,
    )
    return [record(MemoryRow, rows[i]) for i in range(n_rows[0])]


class RoutingRecorder:
    """Records ids [n_tokens, n_used] of every router while it listens; not at first.

    callback, user_data: for cb_eval and cb_eval_user_data of llama_context_params. It must outlive the context. Of a
    context that has it, ggml's scheduler waits for every split of a graph; while it listens, also for every router.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._native = bridge.native
        made = self._native.value("gb_routing *", "gb_routing_new")
        self._handle: Any = ffi.gc(made, self._native.lib.gb_routing_free)
        self.callback = int(ffi.cast("uintptr_t", self._native.lib.gb_routing_on_node))
        self.user_data = int(ffi.cast("uintptr_t", self._handle))

    def close(self) -> None:
        """Free it; its context must be gone. May be called twice."""
        if self._handle is not None:
            ffi.release(self._handle)
            self._handle = None

    def listen(self, listens: bool) -> None:
        """Record from now on, or stop recording."""
        self._native.lib.gb_routing_listen(self._handle, int(listens))

    def take(self) -> list[tuple[int, npt.NDArray[np.int32]]]:
        """(layer, ids [n_tokens, n_used]) of every router since the last take, in the order they were computed. Raises
        Unsupported where this llama.cpp keeps ids in another form, OutOfMemory."""
        import numpy as np

        address, size = ffi.new("int32_t **"), ffi.new("int64_t *")
        self._native.call("gb_routing_take", self._handle, address, size)
        taken = ffi.buffer(address[0], size[0] * 4) if size[0] else b""
        return list(_routers(np.frombuffer(taken, dtype=np.int32).copy()))


def _routers(numbers: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    start = 0
    while start < len(numbers):
        layer, n_used, n_tokens = (int(number) for number in numbers[start : start + _HEADER])
        start += _HEADER
        yield layer, numbers[start : start + n_used * n_tokens].reshape(n_tokens, n_used)
        start += n_used * n_tokens
