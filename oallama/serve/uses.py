"""Uses of hot experts that the plug-in of llama-server has left in a file, line by line, when its model was freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from oallama.core.routing import Tally, Traffic
from oallama.core.types import Operator


def traffic_of(file: Path, operators: Sequence[Operator], n_expert: int) -> Iterator[Traffic]:
    """Yield the uses of a file in the order in which they were left: of each layer, those of its first operator of
    experts. Lines that are no use are passed over, as is a file that is not there."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    first: dict[int, str] = {}
    for operator in operators:
        if operator.layer is not None and operator.op == "MUL_MAT_ID":
            first.setdefault(operator.layer, operator.name)
    layers = {name: layer for layer, name in first.items()}
    for line in lines:
        name, _, uses = line.partition(" ")
        kind, _, numbers = uses.partition(" ")
        tally = _tally(numbers, n_expert)
        if name in layers and tally is not None:
            found = {layers[name]: tally}
            yield Traffic(found, {}) if kind == "single" else Traffic({}, found)


def _tally(text: str, n_expert: int) -> Tally | None:
    words = text.split()
    if len(words) != 1 + n_expert or not all(word.isdecimal() and len(word) < 16 for word in words):
        return None
    n_tokens, *uses = map(int, words)
    return Tally(n_tokens, tuple(uses)) if n_tokens else None
