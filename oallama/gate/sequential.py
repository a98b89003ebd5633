"""A test that may be looked at after every pair: how many times as fast one side is as the other. Pure.

The logarithms of the pairs' ratios are taken for draws from one normal distribution. The interval inverts a mixture of
t-tests (Lai 1976; Wang and Ramdas 2024, "Anytime-valid t-tests"): the e-value of each mean m is a likelihood ratio of
"another mean" against "m", averaged over effect sizes and over all deviations. Its chance ever to reach 1/error is at
most `error` where m is the truth. So the interval holds at all numbers of pairs together, in one run or over several,
and measuring may end as soon as it excludes 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from oallama.bench.stats import Ratio

SPREAD = 0.05
"""Inverse variance of the effect sizes that are averaged over: a small one tells large effects from four pairs on."""


def speed_interval(pairs: Sequence[tuple[float, float]], error: float) -> Ratio | None:
    """How many times as fast the second side of the pairs of seconds is as the first; None: too few pairs to tell."""
    n = len(pairs)
    if n < 2:
        return None
    logs = [math.log(first / second) for first, second in pairs]
    shrink = SPREAD / (n + SPREAD)
    growth = (1 / (error * math.sqrt(shrink))) ** (2 / n)
    if growth * shrink >= 1:
        return None
    half = stdev(logs) * math.sqrt((growth - 1) / (1 - growth * shrink) * (n - 1) / n)
    mean = fmean(logs)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
