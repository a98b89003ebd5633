"""The share of a block that is streamed: r_CG* of ScheInfer (section IV-A3, Eq. 6-13).

With r_GG fixed, every task's duration is affine in r_CG, so the finishing time is piecewise affine and its minimum lies
where two of the expressions meet that the paper compares: launch, copy and device time of a mul-mat (conditions Q1-Q3),
the CPU's time and the device's in each of the three cases, and both ends. The three cases take all mul-mats as equal,
do not cover every order of tasks, and know neither joins nor copies that run ahead. So these edge points are where the
search starts: it compares the timeline itself (cost/steady.py) there and at their granular neighbours, and walks
downhill from the best. Without contention the timeline is convex between the ends (maxima of sums of affine terms), so
that is the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, floor
from typing import Protocol

from oallama.core.types import Contention
from oallama.cost.slice_times import Rates, StreamedBlock, StreamRates, slice_times
from oallama.cost.steady import steady_seconds
from oallama.cost.timeline import BlockTimes, Prefetch

PROBES = 15
"""With contention: CPU and link slow each other down only while both are busy, which is not quite convex."""

Line = tuple[float, float]
"""(value at 0, slope)."""


class TimesOf(Protocol):
    """slice_times or paper_times."""

    def __call__(
        self, streamed: StreamedBlock, on: StreamRates, rates: Rates, n_tokens: int, n_g: int = 0, n_outputs: int = 1
    ) -> BlockTimes: ...


@dataclass(frozen=True, slots=True)
class Streaming:
    """How slices are run: what the device and the link cost, how far copies run ahead, what the memory allows."""

    rates: StreamRates
    prefetch: Prefetch = Prefetch()  # noqa: RUF009 - frozen
    contention: Contention | None = None
    times: TimesOf = slice_times
    n_probes: int = PROBES

    def seconds(self, streamed: StreamedBlock, rates: Rates, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> float:
        """Of one block among others like it."""
        times = self.times(streamed, self.rates, rates, n_tokens, n_g, n_outputs)
        return steady_seconds(times, self.prefetch, self.contention)


@dataclass(frozen=True, slots=True)
class Slices:
    """A block's slices in elements along its axis, and the seconds of one pass over it."""

    cc: int
    cg: int
    gg: int
    seconds: float

    @property
    def rates(self) -> Rates:
        extent = self.cc + self.cg + self.gg
        return Rates(self.cc / extent, self.cg / extent, self.gg / extent)


def solve_cg(streamed: StreamedBlock, on: Streaming, gg: int, n_tokens: int = 1) -> Slices:
    """The best CC and CG beside gg elements on the device; of equals, the least CG. Eq. 13.

    gg: elements such that the rest is a multiple of the block's step, or all of the extent.
    """
    extent, step = streamed.block.extent, streamed.block.step
    rest = extent - gg

    def slices(n_streamed: int) -> tuple[int, int]:
        """(CC, CG) with so many steps of CG; the last step may be a part of one."""
        cc = (ceil(rest / step) - n_streamed) * step if n_streamed else rest
        return cc, rest - cc

    def times(n_streamed: int) -> BlockTimes:
        cc, cg = slices(n_streamed)
        return on.times(streamed, on.rates, Rates(cc / extent, cg / extent, gg / extent), n_tokens)

    def seconds(n_streamed: int) -> float:
        return steady_seconds(times(n_streamed), on.prefetch, on.contention)

    n_streamed, least_s = least(
        seconds, times, 0, ceil(rest / step), on.n_probes if on.contention or on.rates.beside else 0
    )
    return Slices(*slices(n_streamed), gg, least_s)


def least(
    seconds: Callable[[int], float], times: Callable[[int], BlockTimes], low: int, high: int, n_probes: int = 0
) -> tuple[int, float]:
    """(x, seconds(x)) of the least over the integers low..high, where `times` is affine strictly between them; of
    equals the lowest x. n_probes: evenly spaced points that are looked at too, for a function that is not convex."""
    known: dict[int, float] = {}

    def at(x: int) -> float:
        if x not in known:
            known[x] = seconds(x)
        return known[x]

    first, last = low + 1, high - 1
    for end in {low, high}:
        at(end)
    if first <= last:
        starts = {first, last} | {first + (last - first) * i // (n_probes + 1) for i in range(1, n_probes + 1)}
        if first < last:
            for edge in edge_points(times(first), times(last), first, last):
                if first <= edge <= last:
                    starts |= {floor(edge), ceil(edge)}
        x = min(sorted(starts), key=at)
        stride = max(1, (last - first) // 8)
        while stride:
            near = [y for y in (x - stride, x + stride) if first <= y <= last and at(y) < at(x)]
            if near:
                x = min(near, key=at)
            else:
                stride //= 2
    best = min(sorted(known), key=at)
    return best, known[best]


def edge_points(at_first: BlockTimes, at_last: BlockTimes, first: int, last: int) -> list[float]:
    """Where the expressions of Eq. 6-12 meet, given the tasks at two points; in x, any order, also outside of both."""

    def line(of: Callable[[BlockTimes], float]) -> Line:
        slope = (of(at_last) - of(at_first)) / (last - first)
        return of(at_first) - slope * first, slope

    n = max(1, len(at_first.steps))
    launch = line(lambda t: sum(step.launch_s for step in t.steps))
    copy = line(lambda t: sum(step.copy_s for step in t.steps))
    gpu = line(lambda t: sum(step.gpu_s for step in t.steps))
    cpu = line(lambda t: t.cpu_s)
    around = line(lambda t: t.gap_s + t.send_s + t.join_s)
    finishing = [
        _sum([(launch, 1 / n), (copy, 1.0), (gpu, 1 / n)]),  # Eq. 10: the link leads
        _sum([(launch, 1 / n), (copy, 1 / n), (gpu, 1.0)]),  # Eq. 11: the device leads
        _sum([(launch, 1.0), (copy, 1 / n), (gpu, 1 / n)]),  # Eq. 12: launching leads
        gpu,
    ]
    meeting = [(launch, copy), (copy, gpu), (launch, gpu), *((end, cpu) for end in finishing)]
    # copies that run ahead across blocks: the link is busy all the time
    meeting += [(copy, _sum([(around, 1.0), (side, 1.0)])) for side in (cpu, gpu)]
    points = []
    for (a0, a1), (b0, b1) in meeting:
        if a1 != b1:
            points.append((b0 - a0) / (a1 - b1))
    return points


def _sum(terms: Iterable[tuple[Line, float]]) -> Line:
    listed = list(terms)
    return sum(line[0] * factor for line, factor in listed), sum(line[1] * factor for line, factor in listed)
