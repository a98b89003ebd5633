"""Opens a GGUF model, split or not, and validates all of it before any native code sees the file.

llama.cpp b11549 aborts, divides by zero or hangs on hostile or damaged files, so this reader never asserts, and checks
every number in Python's integers. It reads only metadata and tensor headers: a file of 40 GB takes no longer than its
header. `gguf.GGUFReader` trusts its input and is not used.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import DOWNLOAD_AGAIN, GgufFile
from oallama.model.gguf_header import read_header
from oallama.model.validate import validate

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and validate the model at `path`: for a split model any part, with the other parts in the same folder.

    Raises ModelFileError, one sentence with the file, the offset of the fault, and the remedy.
    """
    parts = _parts(os.fspath(path))
    gguf = replace(
        parts[0],
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        files=tuple(part.files[0] for part in parts),
        raw=b"".join(part.raw for part in parts),
    )
    validate(gguf)
    return gguf


def _parts(path: str) -> list[GgufFile]:
    """Return all of the model's files, in order, checked against each other."""
    named = read_header(path)
    count = named.entry("split.count", "uint16")
    if count is None or count.value <= 1:
        return [named]
    match = _PART_NAME.fullmatch(Path(path).name)
    if not match or int(match[3]) != count.value or not 1 <= int(match[2]) <= count.value:
        message = f"this is one of {count.value} parts but is not named as such"
        raise named.fault("split.count", message, f"rename it, e.g. model-00001-of-{count.value:05d}.gguf")
    # Parts are looked for only in the named file's folder, by names derived from its name.
    names = [Path(path).with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count.value + 1)]
    if missing := next((name for name in names if not name.exists()), None):
        raise ModelFileError(f"{path}: the part {missing.name} of this split model is missing; put it beside this file")
    parts = [named if i == int(match[2]) else read_header(str(name)) for i, name in enumerate(names, start=1)]
    _check_parts(parts)
    return parts


def _check_parts(parts: list[GgufFile]) -> None:
    """Check that the parts are in order, and that their tensors are complete without duplicates."""
    for i, part in enumerate(parts):
        for key, expected in (("split.count", len(parts)), ("split.no", i)):
            entry = part.entry(key, "uint16")
            if entry is None or entry.value != expected:
                message = f"{key} is {entry.value if entry else 'missing'} instead of {expected}"
                raise part.fault(key, message, "use parts of one and the same model")
    names: set[str] = set()
    for tensor in (tensor for part in parts for tensor in part.tensors):
        if tensor.name in names:
            raise tensor.fault("is also in an earlier part")
        names.add(tensor.name)
    total = parts[0].entry("split.tensors.count", "int32")
    if total is None or total.value != len(names):
        stated = total.value if total else "no number of"
        message = f"split.tensors.count states {stated} tensors but the parts hold {len(names)}"
        raise parts[0].fault("split.tensors.count", message, DOWNLOAD_AGAIN)
