"""The cuts of a block that a search of slices chooses from: bytes on the device against seconds of the workload."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from math import ceil
from typing import Literal

from oallama.core.types import Workload
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.passes import Pass, passes
from oallama.cost.slices import Pricing
from oallama.place.cuts import best_cg
from oallama.place.least import least

Objective = Literal["decode", "workload"]
Choice = tuple[Cut, float]
"""A cut and the seconds of its block."""


class Menus:
    """Made once for each kind of block."""

    def __init__(self, on: Pricing, load: Workload, streams: bool, n_values: int) -> None:
        """n_values: of r_GG above 0."""
        self._on, self._load, self._streams, self._n_values = on, load, streams, n_values
        self._over: dict[Objective, Sequence[Pass]] = {"decode": (Pass(1, 0, 1),), "workload": passes(load, "mixed")}
        self._cuts_of: dict[Hashable, tuple[tuple[Cut, ...], ...]] = {}
        self._made: dict[tuple[Hashable, Objective, int | None], tuple[Choice, ...]] = {}

    def choices(self, kind: BlockCost, objective: Objective, most_cg: int | None) -> tuple[Choice, ...]:
        """By bytes on the device, the fastest of as many; of what may be streamed beside them the best for the
        objective. most_cg: so many elements at most; None: as many as are best."""
        key = (kind.gemms, kind.around.resident, kind.use)
        if key not in self._cuts_of:
            self._cuts_of[key] = self._cuts(kind)
        if (kind.same, objective, most_cg) not in self._made:
            sliced = (
                self._best(kind, objective, [_streaming(kind, cut, most_cg) for cut in alike])
                for alike in self._cuts_of[key]
            )
            hot = (self._best(kind, objective, (cut,)) for cut in _hot_cuts(kind, self._n_values))
            self._made[kind.same, objective, most_cg] = _ascending(kind, (*sliced, *hot))
        return self._made[kind.same, objective, most_cg]

    def _cuts(self, kind: BlockCost) -> tuple[tuple[Cut, ...], ...]:
        """Cuts by GG, ascending: r_GG = i/n for i = 0..n, each rounded to what the backend can cut, and the best of
        what is split in two. At least one step is left beside GG. Of each GG first nothing streamed, then, where
        weights may be streamed, the best r_CG in decode and over the workload."""
        extent, step = kind.block.extent, kind.block.step
        if kind.block.biases:
            return ((Cut(extent, 0, 0),),)
        n_steps = ceil(extent / step)

        def resident(n: int) -> Cut:
            """With so many steps of CC, and the rest GG."""
            cc = min(n * step, extent)
            return Cut(cc, 0, extent - cc)

        balanced, _ = least(lambda n: self._best(kind, "workload", (resident(n),))[1], 1, max(1, n_steps - 1))
        shares = (1 - i / self._n_values for i in range(self._n_values))
        wanted = {max(1, round(share * extent / step)) for share in shares} | {1, balanced, n_steps}
        best: dict[Objective, list[Cut]] = {objective: [] for objective in self._over}

        def streamed(gg: int) -> set[Cut]:
            for objective, over in self._over.items():
                seconds, cuts = partial(self._seconds, kind, over=over), best[objective]
                cuts.append(best_cg(kind, gg, seconds, _in_line(cuts[-2:], gg))[0])
            return {cuts[-1] for cuts in best.values()}

        found = []
        for n in sorted(wanted, reverse=True):
            cuts = {resident(n)} | (streamed(resident(n).gg) if self._streams else set())
            found.append(tuple(sorted(cuts, key=lambda cut: cut.cg)))
        return tuple(found)

    def _best(self, kind: BlockCost, objective: Objective, cuts: Sequence[Cut]) -> Choice:
        """Of these cuts, without n_g; of equals the one that streams the least."""
        over = self._over[objective]
        return min(((cut, self._seconds(kind, cut, over)) for cut in cuts), key=lambda choice: choice[1])

    def _seconds(self, kind: BlockCost, cut: Cut, over: Sequence[Pass]) -> float:
        """Of one block over these passes, without n_g."""
        return sum(p.count * self._on.seconds(kind, cut, p.n_tokens, 0, p.n_outputs) for p in over)


def _streaming(of: BlockCost, cut: Cut, most_cg: int | None) -> Cut:
    """The cut with at most so many elements of CG; CC has the others."""
    if most_cg is None or cut.cg <= most_cg:
        return cut
    rest, step = cut.cc + cut.cg, of.block.step
    cc = min(ceil((rest - most_cg) / step) * step, rest)
    return Cut(cc, rest - cc, cut.gg)


def _in_line(cuts: Sequence[Cut], gg: int) -> int | None:
    """CG beside gg, in line with these two cuts: while the device computes more of GG, more may be copied. None: there
    are no two, or one streams nothing or all, where the line ends."""
    if len(cuts) < 2 or not all(cut.cg and cut.cc for cut in cuts):
        return None
    first, last = cuts
    return last.cg + (last.cg - first.cg) * (gg - last.gg) // (last.gg - first.gg)


def _hot_cuts(of: BlockCost, n_values: int) -> tuple[Cut, ...]:
    """i/n of the experts for i = 1..n, each rounded to whole ones."""
    if of.use is None:
        return ()
    counts = {max(1, round(i * of.n_expert / n_values)) for i in range(1, n_values + 1)}
    return tuple(Cut(of.block.extent, 0, 0, n) for n in sorted(counts))


def _ascending(of: BlockCost, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """By bytes; of those with as many bytes the fastest, of equals the first."""
    fastest: dict[int, Choice] = {}
    for choice in choices:
        n_bytes = of.weight_bytes(choice[0])
        if n_bytes not in fastest or choice[1] < fastest[n_bytes][1]:
            fastest[n_bytes] = choice
    return tuple(fastest[n_bytes] for n_bytes in sorted(fastest))
