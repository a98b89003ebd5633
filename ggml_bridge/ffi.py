"""cffi (ABI mode) over our native libraries: reads a C header, opens the library, makes exceptions of status codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import cffi

from ggml_bridge.errors import BridgeError, OutOfMemory, Unsupported, VersionMismatch

_FOLDER = Path(__file__).parent / "native"

_INVALID, _UNSUPPORTED, _NO_MEMORY, _MISMATCH = 1, 2, 3, 4  # oallama_status
TEXT_BYTES = 1 << 16


def declared(header: str) -> Any:
    """An FFI that knows what stands between the two "cdef" lines of native/`header`."""
    made = cffi.FFI()
    text = (_FOLDER / header).read_text(encoding="utf-8")
    made.cdef(text.partition("// cdef begin")[2].partition("// cdef end")[0])
    return made


ffi: Any = declared("bridge.h")

Record = TypeVar("Record")


class Native:
    """The functions of a header as attributes of `lib`; `call` raises what they report.

    prefix: what the header's names begin with: it declares prefix_abi(), PREFIX_ABI and prefix_last_error().
    """

    def __init__(self, path: Path, interface: Any = ffi, prefix: str = "gb") -> None:
        """Opens the library at `path`; ggml's symbols must be global already. Raises BridgeError, VersionMismatch."""
        self._ffi = interface
        try:
            self.lib: Any = interface.dlopen(str(path), interface.RTLD_NOW | interface.RTLD_LOCAL)
            found = getattr(self.lib, f"{prefix}_abi")()
            self._last_error = getattr(self.lib, f"{prefix}_last_error")
        except (OSError, AttributeError) as error:
            raise BridgeError(f"cannot load {path}: {error}; build it again") from None
        if found != getattr(self.lib, f"{prefix.upper()}_ABI"):
            raise VersionMismatch(f"{path} is from another ggml_bridge; run `{sys.executable} -m pip install .` again")

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function that returns a status. Raises ValueError for …_INVALID, else a BridgeError."""
        status = getattr(self.lib, function)(*arguments)
        if status == 0:
            return
        message = decode(self._last_error())
        if status == _INVALID:
            raise ValueError(message)
        kinds = {_UNSUPPORTED: Unsupported, _NO_MEMORY: OutOfMemory, _MISMATCH: VersionMismatch}
        raise kinds.get(status, BridgeError)(message)

    def lines(self, function: str, *arguments: Any) -> list[str]:
        """Calls a function whose last two parameters are a text of lines to fill and its capacity."""
        text = self._ffi.new("char[]", TEXT_BYTES)
        self.call(function, *arguments, text, TEXT_BYTES)
        return [line for line in decode(text).split("\n") if line]

    def value(self, kind: str, function: str, *arguments: Any) -> Any:
        """Calls a function whose last parameter points to room for a value of this kind; returns that value."""
        out = self._ffi.new(f"{kind} *")
        self.call(function, *arguments, out)
        return out[0]

    def pointer(self, function: str, *arguments: Any) -> int:
        """Calls a function whose last parameter is a `void **`; returns the address, 0 for NULL."""
        return int(self._ffi.cast("uintptr_t", self.value("void *", function, *arguments)))


def record(kind: type[Record], struct: Any) -> Record:
    """The dataclass whose fields are those of a C struct, read as their annotations say."""
    readers: dict[Any, Callable[[Any], Any]] = {"str": decode, "bool": bool}
    values = {field.name: (readers.get(field.type), getattr(struct, field.name)) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value if read is None else read(value) for name, (read, value) in values.items()})


def decode(text: Any) -> str:
    """A NUL-terminated char array as str."""
    decoded: str = ffi.string(text).decode(errors="replace")
    return decoded


def encode(text: str | None) -> Any:
    """A str as `const char *`, None as NULL. Raises ValueError for text that C would take for a shorter one."""
    if text is None:
        return ffi.NULL
    if "\0" in text:
        raise ValueError(f"a text for native code has a NUL character after {text.partition(chr(0))[0][-40:]!r}")
    return text.encode()
