"""Growth over a long run: least-squares slope with its interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope of y over x and half of its 95 % interval. Neighbours are alike, so that there are fewer
    independent samples than samples: n (1 - r) / (1 + r), r their correlation at lag 1 (Santer et al. 2000, eq. 6)."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    centred = xs - xs.mean()
    gradient = float(centred @ ys / (centred @ centred))
    rest = ys - ys.mean() - gradient * centred
    power = float(rest @ rest)
    if power == 0.0:
        return gradient, 0.0
    r = max(0.0, float(rest[1:] @ rest[:-1]) / power)
    independent = max(3.0, len(xs) * (1 - r) / (1 + r))
    return gradient, 1.96 * float(np.sqrt(power / (independent - 2) / (centred @ centred)))


def pooled_slope(series: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float]:
    """Of several processes: the mean of their slopes, weighted by their precision."""
    each = [slope(x, y) for x, y in series]
    if any(half == 0.0 for _, half in each):
        return float(np.mean([gradient for gradient, _ in each])), max(half for _, half in each)
    weights = np.array([half**-2 for _, half in each])
    mean = float(weights @ np.array([gradient for gradient, _ in each]) / weights.sum())
    return mean, float(weights.sum() ** -0.5)
