"""The records of a GGUF that was read, and the wording of errors in it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oallama.core.errors import ModelFileError
from oallama.core.types import ModelFile

DOWNLOAD_AGAIN = "the file is cut short or damaged, so download it again"
DO_NOT_TRUST = "the file is damaged or hostile, so download it again from a source you trust"
CONVERT_AGAIN = "convert the model again with a current llama.cpp"

METADATA_OFFSET = 24
"""Offset of a GGUF's metadata: after magic, version and the two counts."""


def fault(path: str, offset: int, what: str, remedy: str = DO_NOT_TRUST) -> ModelFileError:
    """Return the error for a fault at byte `offset` of `path`, as one sentence that ends with the remedy."""
    return ModelFileError(f"{path}: {what} (at byte {offset}); {remedy}")


def quoted(name: str | bytes) -> str:
    """Return a name from a file, safe to print: escaped, and cut at 80 characters."""
    text = ascii(name.decode("utf-8", "replace") if isinstance(name, bytes) else name)
    return text if len(text) <= 80 else text[:77] + "...'"


@dataclass(frozen=True, eq=False)
class GgufArray(Sequence[Any]):
    """A metadata array, decoded at its first use: reading the header records only its place.

    Strings are UTF-8, invalid bytes become U+FFFD; numbers are int, float or bool.
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
        if self.type == "string":
            return tuple(raw.decode("utf-8", "replace") for raw in self.raw_strings())
        return struct.unpack_from(f"<{self.length}{self.format}", self.header, self.offset)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """A metadata value, its type in GGUF's words (uint32, string, array[int32], ...) and its offset in the file."""

    value: Any
    type: str
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's header. `shape` is ggml's ne (ne[0] runs fastest), with as many dimensions as the file has."""

    name: str
    shape: tuple[int, ...]
    type: str  # ggml type in capitals
    offset: int  # absolute byte of the data in `path`
    n_bytes: int
    path: str  # the part of a split file that holds it
    header_offset: int  # byte of this header in `path`

    def fault(self, what: str, remedy: str = DO_NOT_TRUST) -> ModelFileError:
        """Return the error for a fault in this tensor; `what` follows its name."""
        return fault(self.path, self.header_offset, f"tensor {quoted(self.name)} {what}", remedy)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF, or one part of it: metadata and tensor headers, no weights."""

    entries: Mapping[str, MetadataEntry]  # of the first part
    tensors: tuple[TensorInfo, ...]  # in file order, all parts
    files: tuple[ModelFile, ...]  # every part, in order
    raw: bytes = field(repr=False)  # metadata and tensor headers of all parts, each from its byte 0

    @property
    def path(self) -> str:
        """The first part, the path that llama.cpp loads."""
        return self.files[0].path

    @property
    def file_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

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

    def entry(self, key: str, type: str, required: bool = False) -> MetadataEntry | None:
        """Return the entry under `key`, None if an optional key is missing. Raises ModelFileError for another type."""
        entry = self.entries.get(key)
        if entry is None and required:
            raise self.fault(key, f"the metadata lack {quoted(key)}", CONVERT_AGAIN)
        if entry is not None and entry.type != type:
            raise self.fault(key, f"{quoted(key)} is of type {entry.type} instead of {type}", CONVERT_AGAIN)
        return entry

    def fault(self, key: str, what: str, remedy: str = DO_NOT_TRUST) -> ModelFileError:
        """Return the error for a fault in the value under `key`, or in the metadata if the key is missing."""
        entry = self.entries.get(key)
        return fault(self.path, entry.offset if entry else METADATA_OFFSET, what, remedy)


def check_unchanged(files: Iterable[ModelFile]) -> None:
    """Raise ModelFileError if a file of a model changed on disk since it was checked.

    Call it right before native code loads them, so that it loads what was checked."""
    for file in files:
        try:
            now = Path(file.path).stat()
        except OSError as error:
            raise ModelFileError(f"{file.path}: {error.strerror} since it was checked; run again") from None
        if (now.st_size, now.st_mtime_ns) != (file.n_bytes, file.mtime_ns):
            raise ModelFileError(f"{file.path}: the file changed since it was checked; run again")
