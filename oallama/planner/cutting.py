"""The best cuts of a block, and the tokens of a prompt that use CC on the device (ScheInfer, section IV).

r_CG* (IV-A3, Eq. 6-13): with r_GG fixed every task's duration is affine in r_CG, so the finishing time is piecewise
affine. The paper solves three cases, which assume equal mul-mats, no joins and no copies that run ahead; here the
timeline itself is searched (`least`). n_g (IV-B, Eq. 15): each token moved to the device is one less for the CPU, and
the first one makes CC a streamed slice. Cuts stay the same; one n_g holds for all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache
from itertools import pairwise
from math import ceil
from operator import itemgetter

from oallama.core.types import Phase, Workload
from oallama.cost.passes import passes
from oallama.cost.slices import BlockType, Cut, Pricing

GRID = 4
"""Intervals between the starting points of the search for the least. Eight change none of 32 plans of the corpus, and
take longer."""


def least(seconds: Callable[[int], float], low: int, high: int) -> tuple[int, float]:
    """(x, seconds(x)) of the minimum over low..high; the lowest x of equal ones. The function is convex, except for
    jumps at both ends, a few kinks and a few valleys.

    A short range is tried completely. Otherwise: both ends, GRID + 1 points between them, and downhill by halving steps
    from each point that is lower than its neighbours, as contention between streams may make several valleys.
    """
    known: dict[int, float] = {}

    def at(x: int) -> float:
        if x not in known:
            known[x] = seconds(x)
        return known[x]

    for end in {low, high}:
        at(end)
    first, last = low + 1, high - 1
    if last - first <= 2 * GRID:
        for x in range(first, last + 1):
            at(x)
    else:
        points = [first + (last - first) * i // GRID for i in range(GRID + 1)]
        levels = [float("inf"), *map(at, points), float("inf")]
        for i, x in enumerate(points, start=1):
            if levels[i - 1] > levels[i] <= levels[i + 1]:
                downhill(at, x, (last - first) // (2 * GRID), first, last)
    best = min(sorted(known), key=at)
    return best, known[best]


def downhill(seconds: Callable[[int], float], x: int, stride: int, first: int, last: int) -> int:
    """Walk downhill from x within first..last, by steps that halve from `stride` to 1. Returns the local minimum."""
    while stride:
        lower = next((y for y in (x - stride, x + stride) if first <= y <= last and seconds(y) < seconds(x)), None)
        x, stride = (x, stride // 2) if lower is None else (lower, stride)
    return x


ROWS_AT_ONCE = 4
"""Rows that ggml's repacked kernels multiply at a time; the remaining rows of a batch are multiplied one by one, each
nearly as slow as a batch of one. Prices do not show this: they are linear between the few profiled batch sizes."""

CutBlocks = Sequence[tuple[BlockType, Cut]]
Counted = Sequence[tuple[BlockType, Cut, int]]
"""(type, cut, number of such blocks)."""

TokenTable = tuple[tuple[int, int], ...]
"""((n_tokens, n_g), ...) with ascending n_tokens: Plan.token_assignment."""


def best_cg(block_type: BlockType, gg: int, seconds: Callable[[Cut], float]) -> tuple[Cut, float]:
    """The best CC and CG beside gg elements on the device (Eq. 13), and its seconds; the least CG of equal ones.

    gg: elements such that the rest is a multiple of the block's step, or all of the extent.
    """
    step, rest = block_type.block.step, block_type.block.extent - gg
    n_steps = ceil(rest / step)

    def cut(n_streamed: int) -> Cut:
        """The cut with n_streamed steps of CG; the last step may be partial."""
        cc = (n_steps - n_streamed) * step if n_streamed else rest
        return Cut(cc, rest - cc, gg)

    n_streamed, best_s = least(lambda n: seconds(cut(n)), 0, n_steps)
    return cut(n_streamed), best_s


def count_blocks(cut_blocks: CutBlocks) -> Counted:
    """Count equal blocks with equal cuts."""
    return [(*cut_block, count) for cut_block, count in Counter(cut_blocks).items()]


def counted_seconds(counted: Counted, pricing: Pricing, n_tokens: int, n_g: int, n_outputs: int = 1) -> float:
    """Seconds of one pass over counted blocks."""
    return sum(count * pricing.seconds(block_type, cut, n_tokens, n_g, n_outputs) for block_type, cut, count in counted)


def least_n_g(counted: Counted, pricing: Pricing, n_tokens: int) -> tuple[int, float]:
    """(n_g, seconds of the pass) with the least seconds, the smallest n_g of equal ones. The CPU's number of tokens is
    one of in_groups."""
    streamable = any(
        cut.cc and not cut.n_hot and block_type.takes_n_g and not block_type.outputs_only
        for block_type, cut, _ in counted
    )

    @cache
    def seconds(n_g: int) -> float:
        return counted_seconds(counted, pricing, n_tokens, n_g)

    if not streamable:
        return 0, seconds(0)
    n_g, _ = least(seconds, 0, n_tokens)
    grouped = {n_tokens - n for n in in_groups(n_tokens - n_g, n_tokens)}
    n_g = min(sorted(grouped | {0, n_tokens}), key=seconds)
    return n_g, seconds(n_g)


def in_groups(n_cpu: int, n_tokens: int) -> set[int]:
    """The numbers of tokens nearest to n_cpu that leave the CPU's kernels no remaining rows: 0, 1, n_tokens, or a
    multiple of ROWS_AT_ONCE."""
    down = n_cpu // ROWS_AT_ONCE * ROWS_AT_ONCE
    return {n_cpu} if n_cpu in (down, 1, n_tokens) else {down, min(down + ROWS_AT_ONCE, n_tokens)}


def token_table(cut_blocks: CutBlocks, pricing: Pricing, most: int, also: Collection[int] = ()) -> TokenTable:
    """n_g at the powers of two up to `most` tokens, at the lengths in `also`, and at the shortest length with n_g > 0
    and the length before it, so that interpolation keeps that step. Empty if no length gains."""
    lengths = sorted({2**i for i in range(most.bit_length())} | {most, *also})
    counted = count_blocks(cut_blocks)
    table = {n: least_n_g(counted, pricing, n)[0] for n in lengths}
    used = [n for n in lengths if table[n]]
    if not used:
        return ()
    above = used[0]
    below = max((n for n in lengths if n < above), default=0)
    while above - below > 1:  # the first length that gains lies in between
        middle = (above + below) // 2
        n_g = least_n_g(counted, pricing, middle)[0]
        above, below = (middle, below) if n_g else (above, middle)
        table[middle] = n_g
    return tuple((n, n_g) for n, n_g in sorted(table.items()) if n >= max(1, below))


def n_g_at(table: TokenTable, n_tokens: int) -> int:
    """n_g of a pass: the table's value, else linear_n_g lowered so that the CPU's tokens come in groups (in_groups).
    Computes the same as n_g_at in split/plan.cpp."""
    n_g = linear_n_g(table, n_tokens)
    return n_g if n_tokens in dict(table) else n_tokens - max(in_groups(n_tokens - n_g, n_tokens))


def linear_n_g(table: TokenTable, n_tokens: int) -> int:
    """n_g by interpolation: 0 below the first length of the table, linear between two (a half is rounded up), and the
    last one's share of n_tokens above it. In whole numbers."""
    if not table or n_tokens < table[0][0]:
        return 0
    for (n0, g0), (n1, g1) in pairwise(table):
        if n_tokens <= n1:
            twice, span = 2 * (g0 * (n1 - n_tokens) + g1 * (n_tokens - n0)), n1 - n0
            return (twice + span) // (2 * span)
    last, n_g = table[-1]
    return n_g * n_tokens // last


Choice = tuple[Cut, float]
"""A cut and the seconds of its block."""


class BlockChoices:
    """The options of each kind of block for the knapsack, cached."""

    def __init__(self, pricing: Pricing, workload: Workload, streams: bool, n_values: int) -> None:
        """n_values: number of values of r_GG above 0."""
        self._pricing, self._streams, self._n_values = pricing, streams, n_values
        self._passes_of = {phase: passes(workload, phase) for phase in ("decode", "mixed")}
        self._cuts_of: dict[Hashable, tuple[tuple[Cut, ...], ...]] = {}
        self.choices, self._seconds = cache(self._choices), cache(self._seconds_of)

    def _choices(self, block_type: BlockType, objective: Phase, most_cg: int | None) -> tuple[Choice, ...]:
        """The fastest option for each number of bytes on the device, by ascending bytes, with the best CG for the
        objective. most_cg: most elements of CG; None: no limit."""
        key = (block_type.gemms, block_type.context.resident, block_type.use, objective)
        if key not in self._cuts_of:
            self._cuts_of[key] = self._cuts(block_type, objective)
        sliced = [[_streaming(block_type, cut, most_cg) for cut in cuts] for cuts in self._cuts_of[key]]
        hot = [[cut] for cut in _hot_cuts(block_type, self._n_values)]

        def fastest(cuts: Sequence[Cut]) -> Choice:
            """The fastest cut, ignoring n_g; the first of equal ones."""
            return min(((cut, self._seconds(block_type, cut, objective)) for cut in cuts), key=itemgetter(1))

        return _ascending(block_type, list(map(fastest, (*sliced, *hot))))

    def _cuts(self, block_type: BlockType, objective: Phase) -> tuple[tuple[Cut, ...], ...]:
        """Cuts for each GG, ascending: r_GG = i/n for i = 0..n, rounded to the block's step, and the best two-way split
        over the workload. At least one step is not GG. For each GG: the cut without CG, then, if weights may be
        streamed, the one with the best r_CG for the objective."""
        extent, step = block_type.block.extent, block_type.block.step
        if block_type.block.biases:
            return ((block_type.all_host,),)
        n_steps = ceil(extent / step)

        def without_cg(n: int) -> Cut:
            """The cut with n steps of CC, and the rest GG."""
            cc = min(n * step, extent)
            return Cut(cc, 0, extent - cc)

        balanced, _ = least(lambda n: self._seconds(block_type, without_cg(n), "mixed"), 1, max(1, n_steps - 1))
        shares = (1 - i / self._n_values for i in range(self._n_values))
        wanted = {max(1, round(share * extent / step)) for share in shares} | {1, balanced, n_steps}

        def cuts(n: int) -> tuple[Cut, ...]:
            cut = without_cg(n)
            if not self._streams:
                return (cut,)
            streamed, _ = best_cg(block_type, cut.gg, lambda cut: self._seconds(block_type, cut, objective))
            return (cut, streamed)

        return tuple(map(cuts, sorted(wanted, reverse=True)))

    def _seconds_of(self, block_type: BlockType, cut: Cut, objective: Phase) -> float:
        """Seconds of one block over the passes of an objective, ignoring n_g."""
        objective_passes = self._passes_of[objective]
        return sum(
            p.count * self._pricing.seconds(block_type, cut, p.n_tokens, 0, p.n_outputs) for p in objective_passes
        )


def _streaming(block_type: BlockType, cut: Cut, most_cg: int | None) -> Cut:
    """The cut with at most most_cg elements of CG; the others become CC."""
    if most_cg is None or cut.cg <= most_cg:
        return cut
    rest, step = cut.cc + cut.cg, block_type.block.step
    cc = min(ceil((rest - most_cg) / step) * step, rest)
    return Cut(cc, rest - cc, cut.gg)


def _hot_cuts(block_type: BlockType, n_values: int) -> tuple[Cut, ...]:
    """Cuts with i/n of the experts hot for i = 1..n, rounded to whole experts."""
    if block_type.use is None:
        return ()
    least = 1 + block_type.use.follows  # one slot is empty while an expert is on its way there
    counts = {max(least, round(i * block_type.n_expert / n_values)) for i in range(1, n_values + 1)}
    return tuple(block_type.all_host._replace(n_hot=n) for n in sorted(counts))


def _ascending(block_type: BlockType, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The options by ascending bytes; for equal bytes the fastest, or the first of equal ones."""
    fastest: dict[int, Choice] = {}
    for choice in choices:
        n_bytes = block_type.weight_bytes(choice[0])
        if n_bytes not in fastest or choice[1] < fastest[n_bytes][1]:
            fastest[n_bytes] = choice
    return tuple(fastest[n_bytes] for n_bytes in sorted(fastest))
