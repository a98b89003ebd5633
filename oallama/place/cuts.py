"""The share of a block that is streamed, and the tokens of a prompt that use CC on the device (ScheInfer, section IV).

r_CG* (IV-A3, Eq. 6-13): with r_GG fixed every task's duration is affine in r_CG, so the finishing time is piecewise
affine. The paper compares where its expressions meet in three cases, which take all mul-mats as equal and know neither
joins nor copies that run ahead; here the timeline itself is searched (least.py). n_g (IV-B, Eq. 15): for one token more
on the device the CPU has one less; for the first, CC must be streamed. The rates stay; one n_g holds for all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache
from itertools import pairwise
from math import ceil

from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.slices import Pricing
from oallama.place.least import least

ROWS_AT_ONCE = 4
"""Rows that ggml's repacked kernels multiply at a time; what is left of a batch goes row by row, each nearly as long as
a batch of one. Profiles hold times of few batch sizes, between which the price is linear and knows nothing of it."""

Layers = Sequence[tuple[BlockCost, Cut]]
Counted = Sequence[tuple[BlockCost, Cut, int]]
"""One of each kind of block with each cut, and how many there are."""

Table = tuple[tuple[int, int], ...]
"""((n_tokens, n_g), ...) with ascending n_tokens: PlanRecord.token_assignment."""


def best_cg(of: BlockCost, gg: int, seconds: Callable[[Cut], float], near: int | None = None) -> tuple[Cut, float]:
    """The best CC and CG beside gg elements on the device, and its seconds; of equals, the least CG. Eq. 13.

    gg: elements such that the rest is a multiple of the block's step, or all of the extent. near: elements of CG that
    the best is near to.
    """
    step, rest = of.block.step, of.block.extent - gg
    n_steps = ceil(rest / step)

    def cut(n_streamed: int) -> Cut:
        """With so many steps of CG; the last step may be a part of one."""
        cc = (n_steps - n_streamed) * step if n_streamed else rest
        return Cut(cc, rest - cc, gg)

    start = None if near is None else round(near / step)
    n_streamed, best_s = least(lambda n: seconds(cut(n)), 0, n_steps, near=start)
    return cut(n_streamed), best_s


def pass_seconds(layers: Layers, on: Pricing, n_tokens: int, n_g: int) -> float:
    """Of all layers in a pass over n_tokens tokens, one of which gives logits; each among others like it."""
    return counted_seconds(alike(layers), on, n_tokens, n_g)


def alike(layers: Layers) -> Counted:
    """One of each kind of block with each cut, and how many there are."""
    first: dict[tuple[Hashable, Cut], tuple[BlockCost, Cut]] = {}
    counts: Counter[tuple[Hashable, Cut]] = Counter()
    for of, cut in layers:
        key = (of.same, cut)
        first.setdefault(key, (of, cut))
        counts[key] += 1
    return [(*first[key], count) for key, count in counts.items()]


def counted_seconds(layers: Counted, on: Pricing, n_tokens: int, n_g: int, n_outputs: int = 1) -> float:
    """As pass_seconds."""
    return sum(count * on.seconds(of, cut, n_tokens, n_g, n_outputs) for of, cut, count in layers)


def solve_n_g(layers: Layers, on: Pricing, n_tokens: int) -> tuple[int, float]:
    """(n_g, seconds of the pass) with the least seconds, such that the CPU's tokens come in groups (in_groups); of
    equals the smallest n_g."""
    return least_n_g(alike(layers), on, n_tokens)


def least_n_g(layers: Counted, on: Pricing, n_tokens: int, near: int | None = None) -> tuple[int, float]:
    """As solve_n_g. near: n_g of cuts much like these."""
    on_cpu = [of for of, cut, _ in layers if cut.cc and not cut.n_hot and of.takes_n_g and not of.outputs_only]

    @cache
    def seconds(n_g: int) -> float:
        return counted_seconds(layers, on, n_tokens, n_g)

    if not on_cpu:
        return 0, seconds(0)
    # durations have kinks where the tokens of the device or of the CPU pass a batch size that was profiled
    sizes = {n for of in on_cpu for gemm in of.gemms for n, _ in (*gemm.cpu.whole, *gemm.gpu.whole) if n < n_tokens}
    n_g, _ = least(seconds, 0, n_tokens, sizes | {n_tokens - n for n in sizes}, near)
    grouped = {n_tokens - n for n in in_groups(n_tokens - n_g, n_tokens)}
    n_g = min(sorted(grouped | {0, n_tokens}), key=seconds)
    return n_g, seconds(n_g)


def in_groups(n_cpu: int, n_tokens: int) -> set[int]:
    """The numbers of a batch's tokens next to n_cpu of which the CPU's kernels leave no row over: none, one, all of
    them, or a multiple of ROWS_AT_ONCE."""
    down = n_cpu // ROWS_AT_ONCE * ROWS_AT_ONCE
    return {n_cpu} if n_cpu in (down, 1, n_tokens) else {down, min(down + ROWS_AT_ONCE, n_tokens)}


def token_table(layers: Layers, on: Pricing, most: int, also: Collection[int] = ()) -> Table:
    """n_g at the powers of two up to `most` tokens, at the lengths in `also`, and at the first prompt that has any with
    the one before it, so that interpolation does not smear the step there. Empty where no length gains."""
    lengths = sorted({2**i for i in range(most.bit_length())} | {most, *also})
    counted = alike(layers)
    table = {n: least_n_g(counted, on, n)[0] for n in lengths}
    used = [n for n in lengths if table[n]]
    if not used:
        return ()
    above = used[0]
    below = max((n for n in lengths if n < above), default=0)
    while above - below > 1:  # the first length that gains lies in between
        middle = (above + below) // 2
        n_g = least_n_g(counted, on, middle)[0]
        above, below = (middle, below) if n_g else (above, middle)
        table[middle] = n_g
    return tuple((n, n_g) for n, n_g in sorted(table.items()) if n >= max(1, below))


def n_g_at(table: Table, n_tokens: int) -> int:
    """n_g of a pass: what the table says, or linear_n_g less what would leave rows over on the CPU (in_groups). As
    n_g_at of split_plan.cpp computes it."""
    n_g = linear_n_g(table, n_tokens)
    return n_g if n_tokens in dict(table) else n_tokens - max(in_groups(n_tokens - n_g, n_tokens))


def linear_n_g(table: Table, n_tokens: int) -> int:
    """None below the first length of the table, linear between two (a half is rounded up), the same share above the
    last. In whole numbers."""
    if not table or n_tokens < table[0][0]:
        return 0
    for (n0, g0), (n1, g1) in pairwise(table):
        if n_tokens <= n1:
            twice, span = 2 * (g0 * (n1 - n_tokens) + g1 * (n_tokens - n0)), n1 - n0
            return (twice + span) // (2 * span)
    last, n_g = table[-1]
    return n_g * n_tokens // last
