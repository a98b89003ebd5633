"""t = alpha + beta * bytes from measured points (ScheInfer, section IV, Eq. 3). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.profile import LinearFit

ITERATIONS = 30
TRUSTED = 0.25
"""Relative residual up to which a point counts fully; beyond it its pull no longer grows (Huber)."""

NOISE_S = 1e-6
"""Times are not known better than this."""


def fit_linear(points: Sequence[tuple[int, float]]) -> LinearFit:
    """Least squares of the relative error, so that a 4 KiB message counts as much as a 16 MiB one.

    points: (bytes, median seconds), at least two different sizes. A time may be a difference that noise made zero or
    negative: residuals are relative to the fitted time, and points far off pull no harder than near ones
    (iteratively reweighted least squares with Huber's weights).
    alpha and beta are times and never negative: where the free optimum is, the best fit with that term at 0 is taken.
    r2 is 1 - (residuals / spread), each relative to the fitted time, every point counting fully.

    Raises ValueError where the points cannot determine a line.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError("a linear fit needs at least two different sizes")
    ordered = sorted((int(size), float(seconds)) for size, seconds in points)  # float sums depend on order
    scale = _rising(ordered)
    trust = [1.0] * len(ordered)
    alpha = beta = 0.0
    for _ in range(ITERATIONS):
        weights = [w / s**2 for w, s in zip(trust, scale, strict=True)]
        alpha, beta = _weighted_line(ordered, weights)
        scale = [max(alpha + beta * x, NOISE_S) for x, _ in ordered]
        off = [abs(t - alpha - beta * x) / s for (x, t), s in zip(ordered, scale, strict=True)]
        trust = [1.0 if r <= TRUSTED else TRUSTED / r for r in off]
    return LinearFit(alpha, beta, _r2(ordered, [1 / s**2 for s in scale], alpha, beta), tuple(ordered))


def _rising(ordered: Sequence[tuple[int, float]]) -> list[float]:
    """A first guess of the times: the largest so far, as more bytes never take less time."""
    rising: list[float] = []
    for _, seconds in ordered:
        rising.append(max(seconds, rising[-1] if rising else NOISE_S))
    return rising


def _weighted_line(points: Sequence[tuple[int, float]], weights: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta) >= 0 of least squares."""
    rows = [(w, x, t) for w, (x, t) in zip(weights, points, strict=True)]
    total = sum(w for w, _, _ in rows)
    mean_x = sum(w * x for w, x, _ in rows) / total
    mean_t = sum(w * t for w, _, t in rows) / total
    beta = sum(w * (x - mean_x) * (t - mean_t) for w, x, t in rows) / sum(w * (x - mean_x) ** 2 for w, x, _ in rows)
    alpha = mean_t - beta * mean_x
    if beta < 0:
        return max(0.0, mean_t), 0.0
    if alpha < 0:
        return 0.0, max(0.0, sum(w * x * t for w, x, t in rows) / sum(w * x * x for w, x, _ in rows))
    return alpha, beta


def _r2(points: Sequence[tuple[int, float]], weights: Sequence[float], alpha: float, beta: float) -> float:
    mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / sum(weights)
    residual = sum(w * (t - alpha - beta * x) ** 2 for w, (x, t) in zip(weights, points, strict=True))
    spread = sum(w * (t - mean) ** 2 for w, (_, t) in zip(weights, points, strict=True))
    return 1.0 - residual / spread if spread > 0 else 1.0
