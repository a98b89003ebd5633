"""Statistics of a comparison: speed ratio of paired samples with its confidence interval, and drift. Pure; the seed
makes the bootstrap repeatable.

Samples are compared in pairs that were measured one directly after the other, by the logarithm of their quotient, so
that common disturbances cancel. The estimate is the Hodges-Lehmann median of pairwise means: almost as precise as the
mean for normal samples, and robust to a quarter of outliers, so that no sample is dropped for its value. (`oallama
tune`, which stops at any time, uses tuned/result.py speed_interval.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

from oallama.core.types import Ratio

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 10_000
LEAST_PAIRS = 6
"""Fewest pairs with an interval: with four it would contain the true ratio in 89 of 100 cases, not in 95."""

_CHUNK_VALUES = 4_000_000  # of pairwise means held at once


def speed_ratio(
    reference_s: Sequence[float], other_s: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> Ratio | None:
    """Speed of `other` relative to `reference`, by pairs of seconds that belong together.

    The interval is the expanded percentile bootstrap over pairs (Hesterberg 2015, section 5.4): the percentile interval
    at the level that makes it right for the mean of few normal samples, which the plain one is too narrow for. None
    with fewer than LEAST_PAIRS pairs. Raises ValueError for lengths that differ or times that are not positive.
    """
    if len(reference_s) != len(other_s):
        raise ValueError(f"{len(reference_s)} and {len(other_s)} samples make no pairs")
    if not all(math.isfinite(s) and s > 0 for s in (*reference_s, *other_s)):
        raise ValueError("a time must be positive")
    if len(reference_s) < LEAST_PAIRS:
        return None
    import numpy as np

    logs = np.log(np.asarray(reference_s, float)) - np.log(np.asarray(other_s, float))
    n = len(logs)
    estimate = float(_hodges_lehmann(logs[None, :])[0])
    means = _resampled(logs, resamples, np.random.default_rng(seed))
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_t((1 + CONFIDENCE) / 2, n - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    value = math.exp(estimate)
    # the interval always contains the estimate
    return Ratio(value, min(math.exp(low), value), max(math.exp(high), value), n)


def round_drift(pairs: Sequence[tuple[float, float]]) -> float:
    """Relative change of the machine's speed within one round A B B A: the median over arms of the ratio of an arm's
    second to its first sample. A disturbance of a single arm does not change it with three arms, and counts half with
    two. Raises ValueError without arms."""
    if not pairs:
        raise ValueError("a round needs at least one arm")
    return abs(math.expm1(abs(median(math.log(second / first) for first, second in pairs))))


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution for probability > 0.5: the expansion in Abramowitz and Stegun 26.7.5 (off by
    less than 1 % at three degrees of freedom, 0.2 % at five)."""
    z = NormalDist().inv_cdf(probability)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3 + g4 / freedom**4


def _hodges_lehmann(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Median of the means of all pairs of a row, a value with itself included; [m, n] -> [m]."""
    import numpy as np

    first, second = np.triu_indices(rows.shape[1])
    medians: npt.NDArray[np.float64] = np.median((rows[:, first] + rows[:, second]) / 2, axis=1)
    return medians


def _resampled(logs: npt.NDArray[np.float64], resamples: int, rng: Any) -> npt.NDArray[np.float64]:
    """Hodges-Lehmann of `resamples` bootstrap samples, some at a time to bound memory."""
    import numpy as np

    n = len(logs)
    at_once = max(1, _CHUNK_VALUES // (n * (n + 1) // 2))
    counts = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    return np.concatenate([_hodges_lehmann(logs[rng.integers(0, n, size=(count, n))]) for count in counts])
