"""Bytes that a llama_context has allocated, by buffer type."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import encode, ffi, record

if TYPE_CHECKING:
    from ggml_bridge.bridge import Bridge

_MANGLED = "_Z26llama_get_memory_breakdownPK13llama_context"
_MAX_ROWS = 64


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
