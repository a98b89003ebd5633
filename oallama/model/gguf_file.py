"""The records a GGUF is read into, and the one way in which a fault in one is said."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oallama.core.errors import ModelFileError

DOWNLOAD_AGAIN = "the file is cut short or damaged, so download it again"
DO_NOT_TRUST = "the file is damaged or hostile, so get it again from a source you trust"
CONVERT_AGAIN = "convert the model again with a current llama.cpp"


def fault(path: str, offset: int, what: str, remedy: str = DO_NOT_TRUST) -> ModelFileError:
    """The error for something wrong at byte `offset` of `path`, as one sentence with the remedy at its end."""
    return ModelFileError(f"{path}: {what} (at byte {offset}); {remedy}")


def quoted(name: str | bytes) -> str:
    """A name out of a file, safe to print: escaped, and cut at 80 characters."""
    text = ascii(name.decode("utf-8", "replace") if isinstance(name, bytes) else name)
    return text if len(text) <= 80 else text[:77] + "...'"


@dataclass(frozen=True, eq=False)
class GgufArray(Sequence[Any]):
    """A metadata array, decoded when it is first looked into: only its place was recorded while reading.

    Strings are UTF-8 (what is not is replaced by U+FFFD); numbers are int, float or bool.
    """

    type: str  # of one element: uint8, float32, string, ...
    length: int
    offset: int  # byte in the file where the elements begin
    format: str = field(repr=False)  # struct format of one element, "" for strings
    header: bytes = field(repr=False)  # the file from byte 0 to beyond this array

    def raw_strings(self) -> Iterator[bytes]:
        """The bytes of each string, in order."""
        unpack = struct.Struct("<Q").unpack_from
        header, position = self.header, self.offset
        for _ in range(self.length):
            (n,) = unpack(header, position)
            position += 8 + n
            yield header[position - n : position]

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """All elements."""
        if self.type == "string":
            return tuple(raw.decode("utf-8", "replace") for raw in self.raw_strings())
        return struct.unpack_from(f"<{self.length}{self.format}", self.header, self.offset)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One metadata value, its type as GGUF names it (uint32, string, array[int32], ...), the byte where it stands."""

    value: Any
    type: str
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's header. `shape` is ggml's ne (ne[0] runs fastest), as many dimensions as the file gives."""

    name: str
    shape: tuple[int, ...]
    type: str  # ggml type in capitals
    offset: int  # absolute byte of the data in `path`
    n_bytes: int
    path: str  # the part of a split file that holds it
    header_offset: int  # byte of this header in `path`


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file of a model and what it looked like when it was read."""

    path: str
    file_bytes: int
    mtime_ns: int
    data_offset: int  # first byte of tensor data
    alignment: int


@dataclass(frozen=True)
class GgufFile:
    """A validated GGUF: metadata and tensor headers of all parts, no weights."""

    version: int
    entries: Mapping[str, MetadataEntry]  # of the first part
    tensors: tuple[TensorInfo, ...]  # in file order, all parts
    parts: tuple[GgufPart, ...]
    fingerprint: str  # sha256 over the metadata and tensor headers of all parts

    @property
    def path(self) -> str:
        """The first part: what llama.cpp is given to load."""
        return self.parts[0].path

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts)

    @property
    def data_offset(self) -> int:
        return self.parts[0].data_offset

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Values by key; arrays are GgufArray."""
        return MappingProxyType({key: entry.value for key, entry in self.entries.items()})

    @cached_property
    def tensor_by_name(self) -> Mapping[str, TensorInfo]:
        return MappingProxyType({tensor.name: tensor for tensor in self.tensors})

    @property
    def arch(self) -> str:
        return str(self.metadata["general.architecture"])

    def check_unchanged(self) -> None:
        """Raise ModelFileError if a part changed on disk since it was validated (call before native code loads it)."""
        for part in self.parts:
            try:
                now = Path(part.path).stat()
            except OSError as error:
                raise ModelFileError(f"{part.path}: {error.strerror} since it was checked; start again") from None
            if (now.st_size, now.st_mtime_ns) != (part.file_bytes, part.mtime_ns):
                raise ModelFileError(f"{part.path}: the file changed since it was checked; start again")
