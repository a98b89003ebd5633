"""cffi (ABI mode) over libggml_bridge: reads native/bridge.h, opens the library, turns status codes into exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cffi

from ggml_bridge.errors import BridgeError, OutOfMemory, Unsupported, VersionMismatch

HEADER = Path(__file__).parent / "native" / "bridge.h"

_INVALID, _UNSUPPORTED, _NO_MEMORY, _MISMATCH = 1, 2, 3, 4  # gb_status
_TEXT_BYTES = 1 << 16

ffi: Any = cffi.FFI()
ffi.cdef(HEADER.read_text(encoding="utf-8").partition("// cdef begin")[2].partition("// cdef end")[0])


class Native:
    """The functions of bridge.h as methods of `lib`; `call` raises what they report."""

    def __init__(self, path: Path) -> None:
        """Opens the library at `path`; ggml's symbols must be global already. Raises BridgeError."""
        try:
            self.lib: Any = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
        except OSError as error:
            raise BridgeError(f"cannot load {path}: {error}; build it again") from None
        if self.lib.gb_abi() != self.lib.GB_ABI:
            raise VersionMismatch(f"{path} does not belong to this ggml_bridge; build it again with: pip install .")

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function that returns gb_status. Raises ValueError for GB_INVALID, else a BridgeError."""
        status = getattr(self.lib, function)(*arguments)
        if status == 0:
            return
        message = ffi.string(self.lib.gb_last_error()).decode(errors="replace")
        if status == _INVALID:
            raise ValueError(message)
        kinds = {_UNSUPPORTED: Unsupported, _NO_MEMORY: OutOfMemory, _MISMATCH: VersionMismatch}
        raise kinds.get(status, BridgeError)(message)

    def lines(self, function: str, *arguments: Any) -> list[str]:
        """Calls a function whose last two parameters are a text of lines to fill and its capacity."""
        text = ffi.new("char[]", _TEXT_BYTES)
        self.call(function, *arguments, text, _TEXT_BYTES)
        return [line for line in decode(text).split("\n") if line]

    def pointer(self, function: str, *arguments: Any) -> int:
        """Calls a function whose last parameter is a `void **`; returns the address, 0 for NULL."""
        out = ffi.new("void **")
        self.call(function, *arguments, out)
        return int(ffi.cast("uintptr_t", out[0]))


def decode(text: Any) -> str:
    """A NUL-terminated char array as str."""
    decoded: str = ffi.string(text).decode(errors="replace")
    return decoded


def encode(text: str | None) -> Any:
    """A str as `const char *`, None as NULL."""
    return ffi.NULL if text is None else text.encode()
