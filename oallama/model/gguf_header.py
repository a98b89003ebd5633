"""Reads the header of one GGUF file: bounded in memory and work, trusting no number it finds.

Layout (docs/gguf.md of ggml): magic, version, n_tensors, n_kv; n_kv records of key, type, value; n_tensors records of
name, n_dims, ne[n_dims], type, offset; padding to the alignment; data. Everything little-endian. Read with plain read()
calls, not mmap, so that a file cut while it is being read gives an error and no SIGBUS.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.core.errors import ModelFileError
from oallama.core.ggml_types import GGML_TYPES
from oallama.core.types import ModelFile
from oallama.core.units import MIB
from oallama.model.gguf_cursor import Cursor
from oallama.model.gguf_file import (
    CONVERT_AGAIN,
    DO_NOT_TRUST,
    DOWNLOAD_AGAIN,
    METADATA_OFFSET,
    GgufArray,
    GgufFile,
    MetadataEntry,
    TensorInfo,
    fault,
    quoted,
)

GGML_MAX_DIMS = 4
GGML_MAX_NAME = 64
"""Bytes of a tensor name with its terminating zero (ggml.h)."""

DEFAULT_ALIGNMENT = 32

VALUE_STRING = 8
VALUE_ARRAY = 9
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    VALUE_STRING: ("string", ""),
    VALUE_ARRAY: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
"""Types of metadata values: GGUF's number -> (name, struct format of one little-endian value)."""

MAX_ARRAY_LENGTH = 1 << 24
MAX_KEY_BYTES = (1 << 16) - 1
MAX_ALIGNMENT = 1 * MIB
MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 18
"""Limits far above any real model, low enough to bound the work."""

_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


def read_header(path: str) -> GgufFile:
    """Read and check the header of one GGUF file, a model or another, without the checks of a model (validate.py).

    Raises ModelFileError for a file that is missing, unreadable, not a GGUF, truncated, or damaged.
    """
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: is a directory; name the .gguf file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: not a regular file; copy the model into one")
        with Path(path).open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            cursor = Cursor(file, path, status.st_size)
            return _parse(cursor, status.st_mtime_ns)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(f"{path}: cannot read the file ({reason}); check the path and its permissions") from None


def _parse(cursor: Cursor, mtime_ns: int) -> GgufFile:
    n_tensors, n_kv = _preamble(cursor)
    entries: dict[str, MetadataEntry] = {}
    for index in range(n_kv):
        _entry(cursor, index, entries)
    alignment = _alignment(cursor.path, entries)
    headers = _tensor_headers(cursor, n_tensors)
    end = cursor.position
    data_offset = aligned(end, alignment)
    if headers and data_offset > cursor.size:
        raise fault(cursor.path, end, "the file ends before its tensor data", DOWNLOAD_AGAIN)
    tensors = tuple(_place(headers, data_offset, alignment, cursor.size))
    return GgufFile(entries, tensors, (ModelFile(cursor.path, cursor.size, mtime_ns),), cursor.buffer[:end])


def _preamble(cursor: Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata keys."""
    path, size = cursor.path, cursor.size
    if size == 0:
        raise fault(path, 0, "the file is empty", DOWNLOAD_AGAIN)
    magic = cursor.take_bytes(min(4, size), "the magic")
    if magic != b"GGUF":
        raise fault(path, 0, f"this is not a GGUF file (it begins with {quoted(magic)})", "name a .gguf model file")
    version = cursor.take("I", "the version")
    if version & 0xFFFF == 0 and version != 0:
        raise fault(path, 4, "the file is big-endian", "convert the model again for little-endian machines")
    if version == 1:
        raise fault(path, 4, "GGUF version 1 is no longer read by llama.cpp", CONVERT_AGAIN)
    if version not in (2, 3):
        raise fault(path, 4, f"GGUF version {version} is unknown (2 and 3 are known)", CONVERT_AGAIN)
    n_tensors = cursor.take("Q", "the tensor count")
    n_kv = cursor.take("Q", "the metadata count")
    for offset, n, least, most, what in (
        (8, n_tensors, _MIN_TENSOR_BYTES, MAX_TENSORS, "tensors"),
        (16, n_kv, _MIN_ENTRY_BYTES, MAX_ENTRIES, "metadata keys"),
    ):
        if n > (size - METADATA_OFFSET) // least:
            raise fault(path, offset, f"{n} {what} are claimed, more than {size} bytes can hold")
        if n > most:
            raise fault(path, offset, f"{n} {what} are claimed, more than any real model has")
    return n_tensors, n_kv


def _entry(cursor: Cursor, index: int, entries: dict[str, MetadataEntry]) -> None:
    start = cursor.position
    raw = cursor.take_string(f"metadata key {index}", MAX_KEY_BYTES)
    try:
        key = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise fault(cursor.path, start, f"metadata key {index} is not UTF-8") from None
    if not key:
        raise fault(cursor.path, start, f"metadata key {index} is empty")
    if not key.isprintable():
        raise fault(cursor.path, start, f"metadata key {quoted(key)} has unprintable characters")
    if key in entries:
        raise fault(cursor.path, start, f"metadata key {quoted(key)} occurs twice")
    what = f"the value of {quoted(key)}"
    offset = cursor.position
    kind = cursor.take("I", what)
    if kind not in VALUE_TYPES:
        raise fault(cursor.path, offset, f"{quoted(key)} has the unknown value type {kind}")
    name, format = VALUE_TYPES[kind]
    value: Any
    if kind == VALUE_ARRAY:
        value = _array(cursor, key, what)
        name = f"array[{value.type}]"
    elif kind == VALUE_STRING:
        value = cursor.take_string(what).decode("utf-8", "replace")
    elif name == "bool":
        byte = cursor.take("B", what)
        if byte > 1:
            raise fault(cursor.path, offset, f"{quoted(key)} is a bool of value {byte}")
        value = byte == 1
    else:
        value = cursor.take(format, what)
    entries[key] = MetadataEntry(value, name, offset)


def _array(cursor: Cursor, key: str, what: str) -> GgufArray:
    """Note where an array is and step over it."""
    offset = cursor.position
    kind = cursor.take("I", what)
    if kind == VALUE_ARRAY:
        raise fault(cursor.path, offset, f"{quoted(key)} is an array of arrays, which GGUF readers do not accept")
    if kind not in VALUE_TYPES:
        raise fault(cursor.path, offset, f"{quoted(key)} is an array of the unknown type {kind}")
    name, format = VALUE_TYPES[kind]
    n = cursor.take("Q", what)
    least = 8 if kind == VALUE_STRING else struct.calcsize("<" + format)
    if n > (cursor.size - cursor.position) // least:
        message = f"{quoted(key)} claims {n} elements, more than the file has left"
        raise fault(cursor.path, offset, message, DOWNLOAD_AGAIN)
    if n > MAX_ARRAY_LENGTH:
        raise fault(cursor.path, offset, f"{quoted(key)} claims {n} elements, more than any real model has")
    start = cursor.position
    if kind == VALUE_STRING:
        cursor.skip_strings(n, what)
    else:
        cursor.load(start + n * least, what)
        cursor.position = start + n * least
    return GgufArray(name, n, start, format, cursor.buffer)


def _alignment(path: str, entries: dict[str, MetadataEntry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.type != "uint32":
        raise fault(path, entry.offset, f"general.alignment is a {entry.type} instead of a uint32")
    alignment = int(entry.value)
    if alignment == 0 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        message = f"general.alignment is {alignment} instead of a power of two up to {MAX_ALIGNMENT}"
        raise fault(path, entry.offset, message)
    if alignment < DEFAULT_ALIGNMENT:
        # ggml's CPU buffers assert 32-byte alignment of mapped weights: stock llama.cpp aborts on such a file.
        message = f"general.alignment is {alignment}, less than the {DEFAULT_ALIGNMENT} ggml needs"
        raise fault(path, entry.offset, message, CONVERT_AGAIN)
    return alignment


#
# tensor headers
#


def _tensor_headers(cursor: Cursor, n: int) -> list[TensorInfo]:
    """Return the next n tensor headers; their offsets count from the beginning of the data, as in the file."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(n):
        tensor = _tensor_header(cursor, index)
        if tensor.name in tensors:
            raise tensor.fault("occurs twice")
        tensors[tensor.name] = tensor
    return list(tensors.values())


def _tensor_header(cursor: Cursor, index: int) -> TensorInfo:
    start = cursor.position
    raw = cursor.take_string(f"the name of tensor {index}", GGML_MAX_NAME - 1)
    name = raw.decode("ascii", "replace")
    if not raw or not name.isprintable() or " " in name or not name.isascii():
        message = f"tensor {index} has the name {quoted(raw)}, which is empty or not plain ASCII"
        raise fault(cursor.path, start, message)

    def wrong(what: str, remedy: str = DO_NOT_TRUST) -> ModelFileError:
        return fault(cursor.path, start, f"tensor {quoted(name)} {what}", remedy)

    what = f"the header of tensor {quoted(name)}"
    n_dims = cursor.take("I", what)
    if not 1 <= n_dims <= GGML_MAX_DIMS:
        raise wrong(f"has {n_dims} dimensions instead of 1 to {GGML_MAX_DIMS}")
    shape = tuple(cursor.take("Q", what) for _ in range(n_dims))
    n_elements = math.prod(shape)
    if n_elements == 0:
        raise wrong(f"of shape {shape} has no elements")
    type_id = cursor.take("I", what)
    if type_id not in GGML_TYPES:
        raise wrong(f"has the unknown or removed ggml type {type_id}", CONVERT_AGAIN)
    kind = GGML_TYPES[type_id]
    n_bytes = kind.n_bytes(n_elements)
    if n_elements >= 1 << 63 or n_bytes >= 1 << 63:
        raise wrong(f"of shape {shape} is larger than 64 bits can count")
    if shape[0] % kind.block_size:
        raise wrong(f"has rows of {shape[0]}, not a multiple of {kind.name}'s block of {kind.block_size}")
    return TensorInfo(name, shape, kind.name, cursor.take("Q", what), n_bytes, cursor.path, start)


def _place(headers: list[TensorInfo], data_offset: int, alignment: int, file_bytes: int) -> Iterator[TensorInfo]:
    """Return the tensors with their offsets in the file.

    Checks that their data lie one behind another, aligned, inside the file, as llama.cpp requires."""
    expected = 0
    for tensor in headers:
        if tensor.offset % alignment:
            raise tensor.fault(f"has offset {tensor.offset}, not aligned to {alignment}")
        if tensor.offset != expected:
            how = "overlaps the tensor before it" if tensor.offset < expected else "leaves a gap before it"
            raise tensor.fault(f"{how}: its offset is {tensor.offset} instead of {expected}")
        start = data_offset + tensor.offset
        if start + tensor.n_bytes > file_bytes:
            missing = start + tensor.n_bytes - file_bytes
            message = f"tensor {quoted(tensor.name)} extends {missing} bytes beyond the end of the file"
            raise fault(tensor.path, tensor.header_offset, message, DOWNLOAD_AGAIN)
        yield replace(tensor, offset=start)
        expected += aligned(tensor.n_bytes, alignment)


def aligned(n_bytes: int, alignment: int) -> int:
    """n_bytes, rounded up to whole multiples of the alignment."""
    return -(-n_bytes // alignment) * alignment
