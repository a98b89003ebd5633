"""Operators that are alike, in one line of a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from oallama.core.affinity import Affinity
from oallama.core.types import Backend, Shape


@dataclass(frozen=True, slots=True)
class Fold:
    """Operators of one role, type, shape and backend. Times are medians over them; spans are (least, greatest)."""

    role: str
    type: str
    shape: Shape
    backend: Backend
    layers: tuple[int, ...]  # ascending; empty for an operator outside blocks
    count: int
    bytes: int  # together
    t_cpu_s: float
    t_gpu_s: float | None  # None: the device cannot compute it
    t_transfer_s: float
    benefit_s_per_byte: float | None
    affinity: tuple[float, float]
    ranked: Backend | None  # where the ranking by itself puts them; None: where they are
    ranks: tuple[int, ...]  # ascending

    @property
    def rank(self) -> tuple[int, int]:
        return self.ranks[0], self.ranks[-1]


def fold(rows: Sequence[Affinity], ranked: Mapping[str, Backend] | None = None) -> tuple[Fold, ...]:
    """One Fold per (role, type, shape, backend), in the order of their best rank. ranked: where the ranking by itself
    puts operators, by name; those that it puts elsewhere are in another line."""
    groups: dict[tuple[object, ...], list[Affinity]] = {}
    for row in rows:
        other = None if ranked is None else ranked[row.name]
        groups.setdefault((row.role, row.type, row.shape, row.backend, row.layer is None, other), []).append(row)
    folds = (_fold(group, None if ranked is None else ranked[group[0].name]) for group in groups.values())
    return tuple(sorted(folds, key=lambda f: (f.rank, f.role)))


def _fold(group: Sequence[Affinity], ranked: Backend | None) -> Fold:
    first = group[0]
    affinities = [row.affinity for row in group]
    return Fold(
        role=first.role,
        type=first.type,
        shape=first.shape,
        backend=first.backend,
        layers=tuple(sorted(row.layer for row in group if row.layer is not None)),
        count=len(group),
        bytes=sum(row.bytes for row in group),
        t_cpu_s=median(row.t_cpu_s for row in group),
        t_gpu_s=_median(row.t_gpu_s for row in group),
        t_transfer_s=median(row.t_transfer_s for row in group),
        benefit_s_per_byte=_median(row.benefit_s_per_byte for row in group),
        affinity=(min(affinities), max(affinities)),
        ranked=ranked,
        ranks=tuple(sorted(row.rank for row in group)),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
