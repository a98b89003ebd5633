"""Reads and checks the tensor headers of a GGUF file, and where each tensor's data lie."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.ggml_types import GGML_TYPES
from oallama.model.gguf_cursor import Cursor
from oallama.model.gguf_file import CONVERT_AGAIN, DO_NOT_TRUST, DOWNLOAD_AGAIN, TensorInfo, fault, quoted
from oallama.model.gguf_types import GGML_MAX_DIMS, GGML_MAX_NAME


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor header before its place is known."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    relative_offset: int
    header_offset: int


def read_tensor_headers(cursor: Cursor, n: int) -> list[TensorHeader]:
    infos: list[TensorHeader] = []
    seen: set[str] = set()
    for index in range(n):
        info = _tensor_header(cursor, index)
        if info.name in seen:
            raise fault(cursor.path, info.header_offset, f"tensor {quoted(info.name)} is there twice")
        seen.add(info.name)
        infos.append(info)
    return infos


def _tensor_header(cursor: Cursor, index: int) -> TensorHeader:
    path, start = cursor.path, cursor.position
    raw = cursor.take_string(f"the name of tensor {index}", GGML_MAX_NAME - 1)
    name = raw.decode("ascii", "replace")
    if not raw or not name.isprintable() or " " in name or not name.isascii():
        raise fault(path, start, f"tensor {index} has the name {quoted(raw)}, which is empty or not plain ASCII")
    what = f"the header of tensor {quoted(name)}"
    n_dims = cursor.take("I", what)
    if not 1 <= n_dims <= GGML_MAX_DIMS:
        raise fault(path, start, f"tensor {quoted(name)} has {n_dims} dimensions instead of 1 to {GGML_MAX_DIMS}")
    shape = tuple(cursor.take("Q", what) for _ in range(n_dims))
    n_elements = 1
    for extent in shape:
        n_elements *= extent
    if n_elements == 0:
        raise fault(path, start, f"tensor {quoted(name)} of shape {shape} has no elements")
    type_id = cursor.take("I", what)
    if type_id not in GGML_TYPES:
        raise fault(path, start, f"tensor {quoted(name)} has the unknown or removed ggml type {type_id}", CONVERT_AGAIN)
    kind = GGML_TYPES[type_id]
    if n_elements >= 1 << 63 or kind.n_bytes(n_elements) >= 1 << 63:
        raise fault(path, start, f"tensor {quoted(name)} of shape {shape} is larger than 64 bits can count")
    if shape[0] % kind.block_size:
        message = (
            f"tensor {quoted(name)} has rows of {shape[0]}, no multiple of {kind.name}'s block of {kind.block_size}"
        )
        raise fault(path, start, message)
    return TensorHeader(name, shape, kind.name, kind.n_bytes(n_elements), cursor.take("Q", what), start)


def place_tensors(
    cursor: Cursor, infos: list[TensorHeader], data_offset: int, alignment: int
) -> tuple[TensorInfo, ...]:
    """Check that the data of all tensors lie one after another, aligned, inside the file (as llama.cpp requires)."""
    path, expected, tensors = cursor.path, 0, []
    for info in infos:
        if info.relative_offset % alignment:
            message = f"tensor {quoted(info.name)} has offset {info.relative_offset}, not aligned to {alignment}"
            raise fault(path, info.header_offset, message)
        if info.relative_offset != expected:
            how = "overlaps the tensor before it" if info.relative_offset < expected else "leaves a gap before it"
            message = f"tensor {quoted(info.name)} {how}: its offset is {info.relative_offset} instead of {expected}"
            raise fault(path, info.header_offset, message, DO_NOT_TRUST)
        start = data_offset + info.relative_offset
        if start + info.n_bytes > cursor.size:
            missing = start + info.n_bytes - cursor.size
            message = f"the data of tensor {quoted(info.name)} go {missing} bytes beyond the end of the file"
            raise fault(path, info.header_offset, message, DOWNLOAD_AGAIN)
        tensors.append(TensorInfo(info.name, info.shape, info.type, start, info.n_bytes, path, info.header_offset))
        expected += -(-info.n_bytes // alignment) * alignment
    return tuple(tensors)
