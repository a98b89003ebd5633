"""A bounded cursor over the first bytes of a file, for the GGUF header readers."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

from oallama.core.units import MIB, format_bytes
from oallama.model.gguf_file import DOWNLOAD_AGAIN, fault

MAX_HEADER_BYTES = 256 * MIB
"""Far above any real model (a vocabulary of 256 k tokens with merges takes about 20 MiB); bounds memory and work."""

_CHUNK = 1 * MIB
_MAX_CHUNK = 32 * MIB


class Cursor:
    """A position in a file whose first bytes are held in memory, as many as were needed so far."""

    __slots__ = ("_file", "buffer", "path", "position", "size")

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self._file = file
        self.path = path
        self.size = size
        self.buffer = b""
        self.position = 0

    def load(self, end: int, what: str) -> bytes:
        """Read on until the buffer has the file's first `end` bytes; return it."""
        if end > self.size:
            raise fault(self.path, self.position, f"the file ends inside {what}", DOWNLOAD_AGAIN)
        if end > MAX_HEADER_BYTES:
            limit = format_bytes(MAX_HEADER_BYTES)
            raise fault(self.path, self.position, f"{what} goes beyond the first {limit}, further than any real header")
        while len(self.buffer) < end:
            want = min(max(len(self.buffer), _CHUNK), _MAX_CHUNK)
            more = self._file.read(want)
            if not more:
                raise fault(self.path, self.position, f"the file ends inside {what}", DOWNLOAD_AGAIN)
            self.buffer += more
        return self.buffer

    def take(self, format: str, what: str) -> Any:
        """One little-endian value."""
        n = struct.calcsize("<" + format)
        self.load(self.position + n, what)
        (value,) = struct.unpack_from("<" + format, self.buffer, self.position)
        self.position += n
        return value

    def take_bytes(self, n: int, what: str) -> bytes:
        self.load(self.position + n, what)
        self.position += n
        return self.buffer[self.position - n : self.position]

    def take_string(self, what: str, limit: int | None = None) -> bytes:
        """A string: 64-bit length, then that many bytes, `limit` at most."""
        start = self.position
        n = self.take("Q", what)
        if limit is not None and n > limit:
            raise fault(self.path, start, f"{what} claims {n} bytes, more than the {limit} allowed")
        if n > self.size - self.position:
            raise fault(self.path, start, f"{what} claims {n} bytes, more than the file has left", DOWNLOAD_AGAIN)
        return self.take_bytes(n, what)

    def skip_strings(self, n: int, what: str) -> None:
        """Step over n strings, checking each length: the hot loop of a large vocabulary."""
        unpack = struct.Struct("<Q").unpack_from
        position, buffer, last, size = self.position, self.buffer, len(self.buffer) - 8, self.size
        for _ in range(n):
            if position > last:
                buffer = self.load(position + 8, what)
                last = len(buffer) - 8
            (length,) = unpack(buffer, position)
            end = position + 8 + length
            if end > size:
                message = f"a string in {what} claims {length} bytes, more than the file has left"
                raise fault(self.path, position, message, DOWNLOAD_AGAIN)
            position = end
        self.load(position, what)
        self.position = position
