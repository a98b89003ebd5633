"""Texts about figures, filled in from the results, so that a sentence says what the numbers beside it say.

`{fig10-50.max.ours.gib:.2f}` in a text of a paper is that part of the paper's figure: a key of its row in the JSON, of
one of its cells, or what Seen adds to them. `[llama2-13b b 24]` is the cell with these words. A `holds` is
`A < B`, `A > B` or `A ~ B` (to 2 %), each a number or such a part.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oallama.core.units import GIB

TEXTS = ("assumed", "why", "beside")
SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, ">": operator.gt, "~": lambda one, other: abs(one / other - 1) <= 0.02,
}  # fmt: skip
GAINS = {"prompt": "ttft_s", "token": "tpot_s", "whole": "total_s"}


class Seen:
    """A part of the results, whose keys are attributes."""

    def __init__(self, of: Mapping[str, Any]) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        of = self._of
        if name in GAINS:  # of a cell
            return of["baseline"][GAINS[name]] / of["ours"][GAINS[name]]
        if name == "gib":  # of weights on the card, of an arm
            return of["device_bytes"] / GIB
        if name in ("min", "max"):  # of a figure: the cell with the smallest or largest gain
            cells = [cell for cell in of["cells"] if "speed_up" in cell]
            return Seen({"min": min, "max": max}[name](cells, key=lambda cell: cell["speed_up"]))
        if name not in of:
            raise KeyError(name)
        return Seen(of[name]) if isinstance(of[name], dict) else of[name]

    def __getitem__(self, words: str) -> Seen:
        """The figure's cell with these words."""
        found = [cell for cell in self._of["cells"] if set(words.split()) <= set(_words(cell))]
        if len(found) != 1:
            raise KeyError(words)
        return Seen(found[0])


def _words(cell: Mapping[str, Any]) -> list[str]:
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in cell.values()]


def filled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their texts filled in. Raises KeyError for what is not in the results."""
    return [{**row, **{key: _filled(row[key], _own(row, rows)) for key in TEXTS}} for row in rows]


def _own(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Seen]:
    return {one["id"]: Seen(one) for one in rows if one["paper"] == row["paper"]}


PART = re.compile(r"\{([^{}:]+?)(:[^{}]*)?\}")


def _filled(text: str, own: Mapping[str, Seen]) -> str:
    return PART.sub(lambda part: format(_value(part[1], own), (part[2] or ":")[1:]), text)


def _value(path: str, own: Mapping[str, Seen]) -> Any:
    """The value of a number or a path. A path begins with a figure's id: the longest that fits, as ids may have
    points."""
    try:
        return float(path)
    except ValueError:
        ids = [name for name in own if path.startswith(name) and path[len(name) :][:1] in (".", "[")]
        if not ids:
            raise KeyError(path) from None
    name = max(ids, key=len)
    found: Any = own[name]
    for key, words in re.findall(r"\.([a-z_]+)|\[([^]]*)\]", path[len(name) :]):
        found = getattr(found, key) if key else found[words]
    return found


def fails(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a row's texts take for granted and is not so."""
    own, made = _own(row, rows), []
    for claim in row["holds"]:
        left, sign, right = re.split(" ([<>~]) ", claim)
        if not SIGNS[sign](_value(left, own), _value(right, own)):
            made.append(claim)
    return made
