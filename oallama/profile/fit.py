"""t = alpha + beta * bytes from measured points (ScheInfer, section IV, Eq. 3). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oallama.core.profile import LinearFit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

ITERATIONS = 30
TRUSTED = 0.25
"""Relative residual up to which a point counts fully; beyond it its pull no longer grows (Huber)."""

NOISE_S = 1e-6
"""Precision to which times are known."""


def fit_linear(points: Sequence[tuple[int, float]]) -> LinearFit:
    """Least squares of the relative error, so that a 4 KiB message counts as much as a 16 MiB one.

    points: (bytes, median seconds), at least two different sizes. A time may be a difference that noise made zero or
    negative: residuals are relative to the fitted time, and points far off pull no harder than near ones
    (iteratively reweighted least squares with Huber's weights).
    alpha and beta are times and never negative: where the free optimum is, the best fit with that term at 0 is taken.
    r2 is 1 - (residuals / spread), each relative to the fitted time, every point counting fully.

    Raises ValueError if the points cannot determine a line.
    """
    import numpy as np

    if len({size for size, _ in points}) < 2:
        raise ValueError("a linear fit needs at least two different sizes")
    ordered = sorted((int(size), float(seconds)) for size, seconds in points)  # float sums depend on order
    n_bytes, seconds = np.array(ordered).T
    scale = np.maximum(np.maximum.accumulate(seconds), NOISE_S)  # a first guess: more bytes never take less time
    trust = np.ones_like(scale)
    alpha = beta = 0.0
    for _ in range(ITERATIONS):
        alpha, beta = _weighted_line(n_bytes, seconds, trust / scale**2)
        scale = np.maximum(alpha + beta * n_bytes, NOISE_S)
        off = np.abs(seconds - alpha - beta * n_bytes) / scale
        trust = TRUSTED / np.maximum(off, TRUSTED)
    spread = float(np.sum(((seconds - np.average(seconds, weights=scale**-2)) / scale) ** 2))
    return LinearFit(alpha, beta, 1.0 - float(np.sum(off**2)) / spread if spread > 0 else 1.0, tuple(ordered))


def _weighted_line(x: Floats, t: Floats, weights: Floats) -> tuple[float, float]:
    """(alpha, beta) >= 0 of least squares."""
    total = weights.sum()
    mean_x, mean_t = (weights * x).sum() / total, (weights * t).sum() / total
    beta = (weights * (x - mean_x) * (t - mean_t)).sum() / (weights * (x - mean_x) ** 2).sum()
    alpha = mean_t - beta * mean_x
    if beta < 0:
        return max(0.0, float(mean_t)), 0.0
    if alpha < 0:
        return 0.0, max(0.0, float((weights * x * t).sum() / (weights * x * x).sum()))
    return float(alpha), float(beta)
