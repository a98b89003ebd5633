"""Where the body of an HTTP answer ends, and what of it is payload. Pure.

h11 does that too. It took a third of our time for a streamed token (docs/decisions.md), of which there are very many.
"""

from __future__ import annotations

import re

LONGEST_LINE = 4096  # bytes; of a chunk's size, or of a trailer
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


class FramingError(Exception):
    """Bytes that are no body."""


class Counted:
    """A body of so many bytes."""

    def __init__(self, n_bytes: int) -> None:
        self._left = n_bytes

    @property
    def is_whole(self) -> bool:
        return not self._left

    def payload(self, data: bytes) -> bytes:
        """Of the bytes that came next; what is behind the end is left out."""
        part = data[: self._left]
        self._left -= len(part)
        return part


class Unbounded:
    """A body that ends with its connection."""

    is_whole = False

    def payload(self, data: bytes) -> bytes:
        return data


class Chunked:
    """A body in chunks, each with its size before it; one of size 0 is the last. Trailers are left out."""

    def __init__(self) -> None:
        self._held = b""  # part of a line
        self._left = 0  # of the chunk
        self._is_at_end_of_chunk = False
        self._is_trailer = False
        self.is_whole = False

    def payload(self, data: bytes) -> bytes:
        """Of the bytes that came next. Raises FramingError."""
        if self._held:
            data, self._held = self._held + data, b""
        parts = []
        at = 0
        while not self.is_whole:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                self._is_at_end_of_chunk = True
            end = data.find(b"\r\n", at)
            if end < 0:
                self._held = data[at:]
                if len(self._held) > LONGEST_LINE:
                    raise FramingError("a line has no end")
                break
            self._line(data[at:end])
            at = end + 2
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _line(self, line: bytes) -> None:
        if self._is_at_end_of_chunk:
            if line:
                raise FramingError("a chunk is longer than its size")
            self._is_at_end_of_chunk = False
        elif self._is_trailer:
            self.is_whole = not line
        elif (match := _SIZE.fullmatch(line)) is None:
            raise FramingError("a chunk has no size")
        else:
            self._left = int(match[1], 16)
            self._is_trailer = not self._left


Body = Counted | Unbounded | Chunked
