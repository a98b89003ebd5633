"""Parsing and formatting of bytes, seconds and ranges: the only place where units become text.

Everything else keeps bytes as int and times as float seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}


def parse_bytes(text: str) -> int:
    """`6GiB`, `6000MiB`, `1.5GB`, `6G` (binary, as llama.cpp's users write it) or plain bytes, as bytes.

    Raises ValueError with a sentence that names the accepted forms.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write e.g. 6GiB, 6000MiB or 6442450944")
    number, prefix, binary, byte = match.groups()
    decimal = byte and prefix and not binary
    scale = (_DECIMAL if decimal else _BINARY)[prefix.lower()]
    size = float(number) * scale  # exact below 2^53
    if size >= 1 << 63:
        raise ValueError(f"{text!r} does not fit into 64 bits; write e.g. 6GiB")
    return int(size)


def parse_memory(text: str) -> int:
    """A memory size, as parse_bytes, but a small number needs a unit. Raises ValueError that suggests the probable
    unit."""
    n_bytes = parse_bytes(text)
    if 0 < n_bytes < MIB and text.strip().replace(".", "", 1).isdecimal():
        raise ValueError(f"{text!r} is {n_bytes} bytes; write the unit, e.g. {text.strip()}GiB")
    return n_bytes


def parse_share(text: str) -> float:
    """`50%` or `0.5` as 0.5. Raises ValueError outside 0..1."""
    stripped = text.strip()
    try:
        value = float(stripped[:-1]) / 100 if stripped.endswith("%") else float(stripped)
    except ValueError:
        raise ValueError(f"{text!r} is not a share; write e.g. 50% or 0.5") from None
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not between 0 and 1 (0 % and 100 %)")
    return value


def format_bytes(n_bytes: float) -> str:
    """Bytes as text, in the binary unit with one to three digits before the point."""
    sign, size = ("-", -n_bytes) if n_bytes < 0 else ("", n_bytes)
    if size < KIB:
        return f"{sign}{size:.0f} B"
    for scale, unit in ((KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")):
        if size < 999.5 * scale:
            return f"{sign}{size / scale:.3g} {unit}"
    return f"{sign}{size / TIB:.4g} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds as text in ns, us, ms, s or min, three significant digits."""
    sign, size = ("-", -seconds) if seconds < 0 else ("", seconds)
    if size == 0:
        return "0 s"
    for scale, unit in ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s")):
        if size < 999.5 * scale:
            return f"{sign}{size / scale:.3g} {unit}"
    return f"{sign}{size / 60:.3g} min"


def format_ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Integers as the shortest list of ranges: 0, 2, 3 as `0,2-3`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
