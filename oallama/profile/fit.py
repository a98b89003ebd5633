"""t = alpha + beta * bytes from measured points (ScheInfer, section IV, Eq. 3). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.types import LinearFit


def fit_linear(points: Sequence[tuple[int, float]]) -> LinearFit:
    """Least squares of the relative error, so that a 4 KiB message counts as much as a 16 MiB one.

    points: (bytes, median seconds), at least two different sizes, every time above 0.
    alpha and beta are times and never negative: where the free optimum is, the best fit with that term at 0 is taken.
    r2 is 1 - (weighted residuals / weighted spread) with the same weights 1/t^2.

    Raises ValueError where the points cannot determine a line.
    """
    if any(seconds <= 0 for _, seconds in points):
        raise ValueError("every point of a linear fit needs a time above 0")
    if len({size for size, _ in points}) < 2:
        raise ValueError("a linear fit needs at least two different sizes")
    ordered = sorted(points)  # float sums depend on order
    weights = [1.0 / seconds**2 for _, seconds in ordered]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, ordered, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, ordered, strict=True)) / total
    spread_x = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, ordered, strict=True))
    covariance = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, ordered, strict=True))

    beta = covariance / spread_x
    alpha = mean_t - beta * mean_x
    if beta < 0:
        alpha, beta = mean_t, 0.0
    elif alpha < 0:
        square_x = sum(w * x * x for w, (x, _) in zip(weights, ordered, strict=True))
        alpha, beta = 0.0, sum(w * x * t for w, (x, t) in zip(weights, ordered, strict=True)) / square_x

    residual = sum(w * (t - alpha - beta * x) ** 2 for w, (x, t) in zip(weights, ordered, strict=True))
    spread_t = sum(w * (t - mean_t) ** 2 for w, (_, t) in zip(weights, ordered, strict=True))
    r2 = 1.0 - residual / spread_t if spread_t > 0 else 1.0
    return LinearFit(alpha, beta, r2, tuple((int(x), float(t)) for x, t in ordered))
