"""Counts of use of the experts out of an importance matrix: a GGUF that llama-imatrix writes (llama.cpp,
tools/imatrix), whose tensors `<weight>.counts` [1, n_expert] say how many tokens each expert of a weight has seen."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import TensorInfo
from oallama.model.gguf_header import read_header

_COUNTS = re.compile(r"blk\.(\d{1,6})\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")
"""Gate, up and down of an expert see the same tokens."""

_AGAIN = "make one with `llama-imatrix -m MODEL -f TEXT -o FILE.gguf`"


def read_imatrix(path: str, n_expert: int) -> Mapping[int, tuple[float, ...]]:
    """Uses of each expert by layer. Raises ModelFileError for a file that is no GGUF (as those of 2024 are), holds no
    importance matrix, or is of a model with another number of experts."""
    try:
        header = read_header(path)
    except ModelFileError as error:
        raise ModelFileError(f"this importance matrix cannot be read: {error}") from None
    kind = header.entries.get("general.type")
    if kind is None or kind.value != "imatrix":
        raise ModelFileError(f"{path} is a GGUF but holds no importance matrix; {_AGAIN}")
    counts: dict[int, tuple[float, ...]] = {}
    for tensor in header.tensors:
        match = _COUNTS.fullmatch(tensor.name)
        if match and int(match[1]) not in counts:
            counts[int(match[1])] = _values(tensor, n_expert)
    if not counts:
        raise ModelFileError(f"{path} has no counts of experts: it is of a model without; {_AGAIN}")
    return counts


def _values(tensor: TensorInfo, n_expert: int) -> tuple[float, ...]:
    n = 1
    for size in tensor.shape:
        n *= size
    if tensor.type != "F32" or n != n_expert:
        raise tensor.fault(f"counts {n} experts as {tensor.type}, where this model has {n_expert}", _AGAIN)
    try:
        with Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset)
            values = struct.unpack(f"<{n}f", file.read(4 * n))
    except (OSError, struct.error):
        raise ModelFileError(f"{tensor.path} cannot be read to its end; {_AGAIN}") from None
    if not all(0 <= value < 2**53 for value in values):
        raise tensor.fault("has counts that are none", _AGAIN)
    return values
