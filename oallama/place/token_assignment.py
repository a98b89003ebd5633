"""n_g of ScheInfer (section IV-B, Eq. 15): how many of a prompt's tokens use the CC slices on the device (CG').

The rates stay those of decode. For one token more on the device the CPU has one less; for the first, CC must be
streamed. Every task's duration is affine in n_g between the batch sizes that were profiled, so each such stretch is
searched like r_CG (slicing.least). One n_g holds for all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise

from oallama.cost.slice_times import StreamedBlock
from oallama.cost.timeline import BlockTimes
from oallama.place.slicing import Slices, Streaming, least

Layers = Sequence[tuple[StreamedBlock, Slices]]
Kinds = Counter[tuple[StreamedBlock, Slices]]
Table = tuple[tuple[int, int], ...]
"""((n_tokens, n_g), ...) with ascending n_tokens: PlanRecord.token_assignment."""


def pass_seconds(layers: Layers, on: Streaming, n_tokens: int, n_g: int, n_outputs: int = 1) -> float:
    """Of all layers in a pass over n_tokens tokens, n_outputs of which give logits; each among others like it."""
    return _pass_seconds(kinds(layers), on, n_tokens, n_g, n_outputs)


def kinds(layers: Layers) -> Kinds:
    """How many layers of each kind there are."""
    return Counter((block.kind(), made) for block, made in layers)


def _pass_seconds(counted: Kinds, on: Streaming, n_tokens: int, n_g: int, n_outputs: int = 1) -> float:
    return sum(
        count * on.seconds(block, made.rates, n_tokens, n_g, n_outputs) for (block, made), count in counted.items()
    )


def solve_n_g(layers: Layers, on: Streaming, n_tokens: int) -> tuple[int, float]:
    """(n_g, seconds of the pass) with the least seconds; of equals the smallest n_g."""
    counted = kinds(layers)
    on_cpu = [(block, made) for block, made in counted if made.cc and block.takes_n_g and not block.outputs_only]

    @cache
    def seconds(n_g: int) -> float:
        return _pass_seconds(counted, on, n_tokens, n_g)

    if not on_cpu:
        return 0, seconds(0)
    # where two kinds meet their edges at different n_g, the sum has edges at both
    found: list[tuple[float, int]] = []
    for low, high in _stretches(on_cpu, n_tokens):
        for block, made in on_cpu:

            def times(n_g: int, block: StreamedBlock = block, made: Slices = made) -> BlockTimes:
                return on.times(block, on.rates, made.rates, n_tokens, n_g)

            n_g, taken = least(
                seconds, times, low, high, on.n_probes if block.routed or on.contention or on.rates.beside else 0
            )
            found.append((taken, n_g))
    taken, n_g = min(found)
    return n_g, taken


def _stretches(layers: Layers, n_tokens: int) -> list[tuple[int, int]]:
    """0..n_tokens cut where the tokens of the device or of the CPU pass a batch size that was profiled."""
    sizes = {n for block, _ in layers for gemm in block.gemms for n, _ in (*gemm.cpu, *gemm.gpu) if n < n_tokens}
    ends = sorted({0, n_tokens} | sizes | {n_tokens - n for n in sizes})
    return list(pairwise(ends))


def token_table(layers: Layers, on: Streaming, most: int, also: Collection[int] = ()) -> Table:
    """n_g at the powers of two up to `most` tokens, at the lengths in `also`, and at the first prompt that has any with
    the one before it, so that interpolation does not smear the step there. Empty where no length gains."""
    lengths = sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most, *also})
    table = {n: solve_n_g(layers, on, n)[0] for n in lengths}
    used = [n for n in lengths if table[n]]
    if not used:
        return ()
    above = used[0]
    below = max((n for n in lengths if n < above), default=0)
    while above - below > 1:  # the first length that gains lies in between
        middle = (above + below) // 2
        n_g = solve_n_g(layers, on, middle)[0]
        above, below = (middle, below) if n_g else (above, middle)
        table[middle] = n_g
    return tuple((n, n_g) for n, n_g in sorted(table.items()) if n >= max(1, below))


def n_g_at(table: Table, n_tokens: int) -> int:
    """n_g of a pass: none below the first length of the table, linear between two, the same share above the last."""
    if not table or n_tokens < table[0][0]:
        return 0
    for (n0, g0), (n1, g1) in pairwise(table):
        if n_tokens <= n1:
            return round(g0 + (g1 - g0) * (n_tokens - n0) / (n1 - n0))
    last, n_g = table[-1]
    return n_g * n_tokens // last
