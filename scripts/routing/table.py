"""Routing as a file that the emulated device reads (`routing=FILE`), and figures of it.

A line is `LAYER ID ID …`: the experts of one token in one layer. Lines of one layer are in the order of its tokens;
`#` begins a line that is a remark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path

Row = tuple[int, ...]  # one token's experts
Routing = Mapping[int, Sequence[Row]]  # layer -> rows


def write_routing(path: Path, routing: Routing, remark: str) -> None:
    """Write the file, token by token, so that its head is a shorter run of all layers."""
    longest = max(len(rows) for rows in routing.values())
    lines = [f"# {remark}"]
    for token in range(longest):
        for layer, rows in sorted(routing.items()):
            if token < len(rows):
                lines.append(" ".join(map(str, (layer, *rows[token]))))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_routing(path: Path) -> dict[int, list[Row]]:
    """The rows of a file. Raises ValueError naming the line that is wrong."""
    found: dict[int, list[Row]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            layer, *ids = map(int, line.split())
        except ValueError:
            raise ValueError(f"{path}:{number}: a line is LAYER ID ID …, not {line[:60]!r}") from None
        found.setdefault(layer, []).append(tuple(ids))
    if not found:
        raise ValueError(f"{path} has no rows")
    return found


@dataclass(frozen=True)
class LayerUse:
    """How a layer's experts are used. Shares are of all uses.

    entropy: of the experts' shares, over that of equal ones, 0 to 1. coverage: share of traffic that the most used
    quarter and half of the experts carry. overlap: share of a token's experts that the token before had too.
    chance: that share for tokens that know nothing of each other, sum of use² / n_used.
    """

    n_tokens: int
    entropy: float
    quarter: float
    half: float
    overlap: float
    chance: float


def layer_use(rows: Sequence[Row], n_expert: int) -> LayerUse:
    """Of one layer's rows, all as long."""
    shares = traffic(rows, n_expert)
    n_used = len(rows[0])
    return LayerUse(
        n_tokens=len(rows),
        entropy=-sum(share * log(share) for share in shares if share > 0) / log(n_expert),
        quarter=coverage(shares, 0.25),
        half=coverage(shares, 0.5),
        overlap=overlap(rows),
        chance=n_used * sum(share**2 for share in shares),
    )


def traffic(rows: Iterable[Row], n_expert: int) -> list[float]:
    """Each expert's share of all uses."""
    counts = Counter(expert for row in rows for expert in row)
    return [counts[expert] / counts.total() for expert in range(n_expert)]


def coverage(shares: Sequence[float], part: float) -> float:
    """What the most used part of the experts carries; a fraction of an expert carries that fraction of its share."""
    ordered, n = sorted(shares, reverse=True), part * len(shares)
    whole = int(n)
    return sum(ordered[:whole]) + (ordered[whole] * (n - whole) if whole < len(ordered) else 0.0)


def overlap(rows: Sequence[Row]) -> float:
    """Mean share of a token's experts that the token before had too; 0 for a single row."""
    shared = [len(set(before) & set(row)) / len(row) for before, row in pairwise(rows)]
    return sum(shared) / len(shared) if shared else 0.0
