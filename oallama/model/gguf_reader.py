"""Opens a GGUF model, split or not, and validates all of it before any native code sees the file.

llama.cpp 0.3.36 aborts, divides by zero or hangs on hostile or damaged files, so this reader never asserts, and checks
every number in Python's integers. It reads only metadata and tensor headers: a file of 40 GB takes no longer than its
header. `gguf.GGUFReader` trusts its input and is not used.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import DOWNLOAD_AGAIN, GgufArray, GgufFile, fault, quoted
from oallama.model.gguf_header import Header, read_header
from oallama.model.validate import validate

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and validate the model at `path`: for a split model any part, with the other parts in the same folder.

    Raises ModelFileError, one sentence with the file, the offset of the fault, and the remedy.
    """
    headers = _parts(os.fspath(path))
    digest = hashlib.sha256()
    for header in headers:
        digest.update(header.raw)
    first = headers[0]
    gguf = GgufFile(
        version=first.version,
        entries=first.entries,
        tensors=tuple(tensor for header in headers for tensor in header.tensors),
        files=tuple(header.file for header in headers),
        fingerprint=digest.hexdigest(),
    )
    validate(gguf)
    return gguf


def _parts(path: str) -> list[Header]:
    """Return the headers of all of the model's files, in order, checked against each other."""
    header = read_header(path)
    n_parts = _split_value(header, "split.count", "uint16", 1)
    if n_parts <= 1:
        return [header]
    match = _PART_NAME.fullmatch(Path(path).name)
    if not match or int(match[3]) != n_parts or not 1 <= int(match[2]) <= n_parts:
        offset = header.entries["split.count"].offset
        example = f"model-00001-of-{n_parts:05d}.gguf"
        raise fault(
            path, offset, f"this is one of {n_parts} parts but is not named as such", f"rename it, e.g. {example}"
        )
    # Parts are looked for only in the named file's folder, by names derived from its name.
    names = [str(Path(path).with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf")) for i in range(1, n_parts + 1)]
    headers = [header if i == int(match[2]) - 1 else _read_part(name, path) for i, name in enumerate(names)]
    _check_parts(headers)
    return headers


def _read_part(name: str, named: str) -> Header:
    if not Path(name).exists():
        raise ModelFileError(
            f"{named}: the part {Path(name).name} of this split model is missing; put it beside this file"
        )
    return read_header(name)


def _split_value(header: Header, key: str, type: str, default: int) -> int:
    entry = header.entries.get(key)
    if entry is None:
        return default
    if entry.type != type:
        raise fault(header.file.path, entry.offset, f"{key} is a {entry.type} instead of a {type}")
    return int(entry.value)


def _check_parts(headers: list[Header]) -> None:
    """Check that all parts agree about the model, and that their tensors are complete without duplicates."""
    arch = headers[0].entries.get("general.architecture")
    seen: set[str] = set()
    for i, header in enumerate(headers):
        path = header.file.path
        for key, expected in (("split.count", len(headers)), ("split.no", i)):
            number = _split_value(header, key, "uint16", -1)
            if number != expected:
                offset = header.entries[key].offset if key in header.entries else 0
                stated = "missing" if number < 0 else str(number)
                raise fault(
                    path, offset, f"{key} is {stated} instead of {expected}", "use parts of one and the same model"
                )
        part_arch = header.entries.get("general.architecture")
        if part_arch and arch and part_arch.value != arch.value:
            message = (
                f"this part is of architecture {quoted(str(part_arch.value))}, "
                f"the first one of {quoted(str(arch.value))}"
            )
            raise fault(path, part_arch.offset, message, "use parts of one and the same model")
        for key, entry in header.entries.items():
            first = headers[0].entries.get(key)
            if arch is None or first is None or not key.startswith(f"{arch.value}.") or type(entry.value) is GgufArray:
                continue
            if entry.value != first.value:
                value, first_value = quoted(str(entry.value)), quoted(str(first.value))
                message = f"{quoted(key)} is {value} in this part, {first_value} in the first one"
                raise fault(path, entry.offset, message, "use parts of one and the same model")
        for tensor in header.tensors:
            if tensor.name in seen:
                raise fault(path, tensor.header_offset, f"tensor {quoted(tensor.name)} is also in an earlier part")
            seen.add(tensor.name)
    total = headers[0].entries.get("split.tensors.count")
    if total is None or total.type != "int32" or total.value != len(seen):
        offset = total.offset if total else 0
        stated = str(total.value) if total and total.type == "int32" else "no number of"
        message = f"split.tensors.count states {stated} tensors but the parts hold {len(seen)}"
        raise fault(headers[0].file.path, offset, message, DOWNLOAD_AGAIN)
