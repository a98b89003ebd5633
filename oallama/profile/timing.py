"""Number of repetitions of a measurement, and quality of its samples. Independent of ggml and of the wall clock.

A runner does the work and times it; a clock limits how long that may go on. So the schedule is tested exactly, without
sleeping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median, median_low
from typing import Literal

Runner = Callable[[int], Sequence[float]]  # n -> the seconds of each of n runs
Clock = Callable[[], float]  # monotonic seconds

SIGMA_PER_MAD = 1.4826  # standard deviation / median absolute deviation of a normal distribution


@dataclass(frozen=True, slots=True)
class TimingPolicy:
    """The rule by which a measurement ends.

    It ends when the 95 % interval of the median is narrower than +-target, at max_repeats, or when time_cap_s is spent
    and min_repeats are in. A run so slow that min_repeats would take hard_cap times as long ends there, with one sample
    at least.
    """

    target: float = 0.02
    min_repeats: int = 5
    max_repeats: int = 100
    warmup_runs: int = 1
    time_cap_s: float = 0.25
    hard_cap: float = 4.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement; warm-up runs are not among its samples.

    seconds: the median of samples; of an even number the lower middle one, not the mean of both: of two samples one
    during which the process was stopped would decide (54 ms became 13.6 s).
    """

    seconds: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault in a set of samples; `amount` is its size relative to the median (0.1: 10 %)."""

    kind: Literal["unsettled", "drift", "outliers"]
    amount: float


def measure(runner: Runner, clock: Clock, policy: TimingPolicy) -> Timing:
    """Warm up, then repeat until the median settles or the time is spent (see TimingPolicy).

    Raises ValueError if the runner returns another number of times than requested.
    """
    start = clock()
    if policy.warmup_runs:
        _run(runner, policy.warmup_runs)
    samples: list[float] = []
    batch = 1
    while True:
        samples += _run(runner, batch)
        spent = clock() - start
        enough = len(samples) >= policy.min_repeats
        if enough and (relative_half_width(samples) < policy.target or len(samples) >= policy.max_repeats):
            break
        if spent >= policy.time_cap_s * (1 if enough else policy.hard_cap):
            break
        batch = _next_batch(samples, policy)
    return Timing(median_low(samples), tuple(samples))


def _run(runner: Runner, n: int) -> Sequence[float]:
    seconds = runner(n)
    if len(seconds) != n:
        raise ValueError(f"the runner gave {len(seconds)} times for {n} runs")
    return seconds


def _next_batch(samples: Sequence[float], policy: TimingPolicy) -> int:
    """Runs to do before looking again: a tenth of the time cap, so that short runs are not asked for one by one."""
    per_run = median(samples)
    left = policy.max_repeats - len(samples)
    wanted = int(policy.time_cap_s / 10 / per_run) if per_run > 0 else left
    return max(1, min(wanted, left, policy.min_repeats))


def relative_half_width(samples: Sequence[float]) -> float:
    """Half the 95 % interval of the median, over the median; inf for one sample.

    The interval lies between two order statistics (sign test): it assumes no distribution, so that a machine which
    flips between two speeds does not look settled. Up to five samples it is all of them.
    """
    if len(samples) < 2:
        return math.inf
    ordered = sorted(samples)
    rank = _interval_rank(len(ordered))
    width = ordered[-rank] - ordered[rank - 1]
    middle = median(ordered)
    if width <= 0:
        return 0.0
    return width / 2 / middle if middle > 0 else math.inf


@lru_cache(maxsize=1024)
def _interval_rank(n: int) -> int:
    """The largest r >= 1 such that fewer than r of n samples lie below their median with at most 2.5 % probability."""
    below, rank = 0, 0
    while rank < n // 2 and (below + math.comb(n, rank)) / 2**n <= 0.025:
        below += math.comb(n, rank)
        rank += 1
    return max(1, rank)


UNSETTLED, DRIFT, OUTLIER = 0.05, 0.1, 0.5  # relative to the median


def assess(samples: Sequence[float]) -> list[Finding]:
    """Find faults in samples: a median known worse than +-UNSETTLED; halves whose medians differ by more than DRIFT and
    by more than their noise explains; more than a tenth of the samples off by more than OUTLIER and 5 sigma."""
    findings: list[Finding] = []
    if len(samples) < 2:
        return findings
    middle = median(samples)
    width = relative_half_width(samples)
    if width > UNSETTLED:
        findings.append(Finding("unsettled", width))
    if len(samples) >= 6 and middle > 0:
        half = len(samples) // 2
        early, late = samples[:half], samples[-half:]
        change = (median(late) - median(early)) / middle
        if abs(change) > max(DRIFT, relative_half_width(early) + relative_half_width(late)):
            findings.append(Finding("drift", change))
        sigma = SIGMA_PER_MAD * median(abs(x - middle) for x in samples)
        off = [x for x in samples if abs(x - middle) > max(OUTLIER * middle, 5 * sigma)]
        if len(off) > len(samples) / 10:
            findings.append(Finding("outliers", max(abs(x - middle) for x in off) / middle))
    return findings
