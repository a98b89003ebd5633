"""Seconds of mul-mats, read off a profile.

A profile holds each distinct mul-mat at a few batch sizes; between two of them the time is taken as linear in n_tokens
(ScheInfer Eq. 3: t = α + β·size for a fixed weight), beyond the last one as linear with the last slope. A slice of a
weight takes α and its share of the rest; α is what a mul-mat of no size would take, fitted over the shapes that were
timed at one batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oallama.core.errors import ProfileError
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, MulMat, Operator
from oallama.profile.fit import fit_linear

MIN_SIZE_RATIO = 4.0
"""Of the largest to the smallest weight below which a profile says nothing of α."""

Curve = tuple[tuple[int, float], ...]
"""((n_tokens, seconds), ...) with ascending n_tokens."""

NO_TIME: Curve = ((1, 0.0),)


def interpolate(curve: Curve, n_tokens: int) -> float:
    """Seconds at n_tokens on a curve: linear between points, constant below the first, last slope above the last."""
    first_n, first_s = curve[0]
    if n_tokens <= first_n or len(curve) == 1:
        return first_s if n_tokens <= first_n else first_s * n_tokens / first_n
    for (n0, s0), (n1, s1) in pairwise(curve):
        if n_tokens <= n1:
            return s0 + (s1 - s0) * (n_tokens - n0) / (n1 - n0)
    (n0, s0), (n1, s1) = curve[-2], curve[-1]
    slope = max(0.0, (s1 - s0) / (n1 - n0))
    return s1 + slope * (n_tokens - n1)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One mul-mat on one side, by batch size: seconds of the whole weight, and α, which a slice has in full."""

    whole: Curve
    alpha: Curve = NO_TIME

    def at(self, n_tokens: int) -> tuple[float, float]:
        """(seconds that do not depend on the slice, seconds that the rest of the whole weight takes)."""
        whole_s = interpolate(self.whole, n_tokens)
        alpha_s = min(interpolate(self.alpha, n_tokens), whole_s)
        return alpha_s, whole_s - alpha_s


class Kernels:
    """Every mul-mat of a profile. Of two cases that differ in working set only, the colder one counts."""

    def __init__(self, profile: Profile) -> None:
        self.device = profile.device
        points: dict[tuple[str, str, MulMat], dict[int, float]] = {}
        for case in sorted(profile.cases, key=lambda case: case.working_set_bytes):
            points.setdefault((case.device, case.layout, case.mul_mat), {})[case.n_tokens] = case.seconds
        curves = {key: tuple(sorted(known.items())) for key, known in points.items()}
        alphas = _alphas(curves)
        self._on_host: dict[MulMat, dict[str, Kernel]] = {}
        self._on_device: dict[MulMat, Kernel] = {}
        for (device, layout, what), curve in sorted(curves.items(), key=lambda item: item[0][1]):
            kernel = Kernel(curve, alphas[device, layout, what.op, what.type])
            if device == CPU_DEVICE:
                self._on_host.setdefault(what, {})[layout] = kernel
            elif (device, layout) == (self.device, DEVICE_LAYOUT):
                self._on_device[what] = kernel

    def on_host(self, operator: Operator) -> Mapping[str, Kernel]:
        """By CPU layout, in alphabetical order. Raises ProfileError if the CPU never measured this operator's shape."""
        found = self._on_host.get(operator.mul_mat)
        if found is None:
            raise ProfileError(
                f"the profile has no CPU timing of {operator.type} {list(operator.shape)} ({operator.name}); "
                "run `oallama profile` for this model"
            )
        return found

    def on_device(self, operator: Operator) -> Kernel | None:
        """None: the device cannot compute it, or there is none."""
        return self._on_device.get(operator.mul_mat)


def _alphas(curves: Mapping[tuple[str, str, MulMat], Curve]) -> dict[tuple[str, str, str, str], Curve]:
    """(device, layout, op, type) -> α by batch size."""
    points: dict[tuple[str, str, str, str], dict[int, list[tuple[int, float]]]] = {}
    for (device, layout, what), curve in curves.items():
        k, n, e = what.shape
        by_batch = points.setdefault((device, layout, what.op, what.type), {})
        for n_tokens, seconds in curve:
            by_batch.setdefault(n_tokens, []).append((k * n * e, seconds))
    return {
        key: tuple((n_tokens, _alpha(measured)) for n_tokens, measured in sorted(by_batch.items()))
        for key, by_batch in points.items()
    }


def _alpha(measured: Sequence[tuple[int, float]]) -> float:
    sizes = [size for size, _ in measured]
    return fit_linear(measured).alpha_s if max(sizes) >= MIN_SIZE_RATIO * min(sizes) else 0.0
