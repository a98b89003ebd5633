"""Seconds of mul-mats, and of a layer's non-matmul work, from a profile.

A profile holds each distinct mul-mat at a few batch sizes. Between two of them the time is assumed to be linear in
n_tokens, above the largest in proportion to it: by then kernels multiply all the time. A share s of a weight takes
α + s·(t - α) (ScheInfer Eq. 3): α is the time of a mul-mat of size 0, fitted over the shapes that were timed at one
batch size. The non-matmul work of a layer is norms, rope, KV write, attention, GLU and adds; adding up the results of
experts is priced with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oallama.core.errors import ProfileError
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, DecodeStep, MulMat, Operator
from oallama.cost.blocks import experts_bytes
from oallama.cost.experts import share_of_step
from oallama.cost.passes import Pass
from oallama.profile.fit import fit_linear
from oallama.profile.wanted import in_steps

MIN_SIZE_RATIO = 4.0
"""Least ratio of the largest to the smallest weight from which α can be fitted; else α is 0."""

Curve = tuple[tuple[int, float], ...]
"""((n_tokens, seconds), ...) with ascending n_tokens."""

NO_TIME: Curve = ((1, 0.0),)
ONE_TOKEN = DecodeStep()


def interpolate(curve: Curve, n_tokens: int) -> float:
    """Seconds at n_tokens on a curve: linear between points, constant below the first, in proportion to n_tokens above
    the last."""
    first_n, first_s = curve[0]
    if n_tokens <= first_n:
        return first_s
    for (n0, s0), (n1, s1) in pairwise(curve):
        if n_tokens <= n1:
            return s0 + (s1 - s0) * (n_tokens - n0) / (n1 - n0)
    last_n, last_s = curve[-1]
    return last_s * n_tokens / last_n


def added(first: Curve, second: Curve) -> Curve:
    """The sum of two curves with the same batch sizes. `second` may be NO_TIME."""
    if second == NO_TIME:
        return first
    return tuple((n, seconds + more_s) for (n, seconds), (_, more_s) in zip(first, second, strict=True))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One mul-mat on one side, by batch size: seconds of the whole weight, and α, which a slice takes in full."""

    whole: Curve
    alpha: Curve = NO_TIME

    def at(self, n_tokens: int) -> tuple[float, float]:
        """(α, remaining seconds of the whole weight)."""
        whole_s = interpolate(self.whole, n_tokens)
        alpha_s = min(interpolate(self.alpha, n_tokens), whole_s)
        return alpha_s, whole_s - alpha_s


class Kernels:
    """The kernels of all mul-mats of a profile. Of two cases that differ in working set only, the one with the larger
    set counts. step: a decode step, whose tokens use fewer different experts than the independent tokens that were
    timed; gaps: as in share_of_step."""

    def __init__(self, profile: Profile, step: DecodeStep = ONE_TOKEN, gaps: Sequence[float] = ()) -> None:
        self.device = profile.device
        points: dict[tuple[str, str, MulMat], dict[int, float]] = {}
        for case in sorted(profile.cases, key=lambda case: case.working_set_bytes):
            points.setdefault((case.device, case.layout, case.mul_mat), {})[case.n_tokens] = case.seconds
        curves = {
            key: _of_step(tuple(sorted(seconds_at.items())), key[-1], step, gaps) for key, seconds_at in points.items()
        }
        alphas = _alphas(curves)
        self._s_per_byte = seconds_per_byte(profile, CPU_DEVICE), seconds_per_byte(profile, profile.device)
        self._on_host: dict[MulMat, dict[str, Kernel]] = {}
        self._on_device: dict[MulMat, Kernel] = {}
        for (device, layout, mul_mat), curve in sorted(curves.items(), key=lambda item: item[0][1]):
            kernel = Kernel(curve, alphas[device, layout, mul_mat.op, mul_mat.type])
            if device == CPU_DEVICE:
                self._on_host.setdefault(mul_mat, {})[layout] = kernel
            elif (device, layout) == (self.device, DEVICE_LAYOUT):
                self._on_device[mul_mat] = kernel

    def on_host(self, operator: Operator) -> Mapping[str, Kernel]:
        """Kernels by CPU layout, in alphabetical order. Raises ProfileError if the CPU was not measured with this
        operator's shape."""
        kernels = self._on_host.get(operator.mul_mat)
        if kernels is None:
            raise ProfileError(
                f"the profile has no CPU time for {operator.type} {list(operator.shape)} ({operator.name}); "
                "run `oallama profile` for this model"
            )
        return kernels

    def on_device(self, operator: Operator) -> Kernel | None:
        """The kernel on the device; None if it cannot compute the operator, or without a device."""
        return self._on_device.get(operator.mul_mat)

    def after_experts_s(self, operator: Operator) -> tuple[float, float]:
        """Seconds per token, on the CPU and on the device, of what follows a mul-mat of experts (blocks.experts_bytes);
        0 after any other."""
        n_bytes = experts_bytes(operator)
        on_cpu, on_device = self._s_per_byte
        return n_bytes * on_cpu, n_bytes * on_device


def seconds_per_byte(profile: Profile, device: str | None) -> float:
    """Seconds that a device takes to read or write a byte of its memory, at the fastest rate at which it read weights;
    0 if it was not timed."""
    fastest_gb_per_s = max((case.gb_per_s for case in profile.cases if case.device == device), default=0.0)
    return 1 / (fastest_gb_per_s * 1e9) if fastest_gb_per_s else 0.0


def _of_step(curve: Curve, mul_mat: MulMat, step: DecodeStep, gaps: Sequence[float]) -> Curve:
    """The curve with the seconds of a decode step. From the timed independent tokens follow the seconds of an expert's
    first row (as of a single token) and of each further row; the step has fewer first rows."""
    n = step.n_tokens
    if n == 1 or not mul_mat.routed or curve[0][0] > 1:
        return curve
    seconds, n_expert, rows = interpolate(curve, n), mul_mat.shape[2], n * mul_mat.n_expert_used
    drawn, used = n_expert * mul_mat.share_read(n), n_expert * share_of_step(mul_mat, step, gaps)
    first_s = min(curve[0][1] / mul_mat.n_expert_used, seconds / drawn)
    more_s = max(0.0, (seconds - first_s * drawn) / (rows - drawn)) if rows > drawn else 0.0
    points = dict(curve) | {n: used * first_s + (rows - used) * min(first_s, more_s)}
    return tuple(sorted(points.items()))


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


@dataclass(frozen=True, slots=True)
class NonMatmulCurves:
    """Seconds of a layer's non-matmul work on one device."""

    # (n_tokens, ((positions in the KV cache, seconds per layer), ...)), ascending
    by_tokens: tuple[tuple[int, Curve], ...]
    stepped: bool  # whether the time grows in steps of KV_STEP positions, as without flash attention

    def seconds(self, n_tokens: int, n_kv: int) -> float:
        """Linear in n_tokens and in depth between measured points."""
        depth = in_steps(n_kv) if self.stepped else n_kv
        return interpolate(tuple((n, interpolate_depth(points, depth)) for n, points in self.by_tokens), n_tokens)


NonMatmulIndex = Mapping[str, NonMatmulCurves]
"""Curves of non-matmul work by device."""


def index_non_matmul(profile: Profile) -> NonMatmulIndex:
    """Curves of non-matmul work by device: with flash attention if the profile has it, else without
    (attention.with_attention keeps one mode).

    With flash attention the time depends on the positions that a token sees; without it on the whole cache, in steps.
    """
    index = {}
    for device in {case.device for case in profile.rest}:
        cases = [case for case in profile.rest if case.device == device]
        plain = [case for case in cases if not case.shape.flash_attn]
        stepped = len(plain) == len(cases)
        by_tokens: dict[int, dict[int, float]] = {}
        for case in plain if stepped else [case for case in cases if case not in plain]:
            depth = in_steps(case.n_kv) if stepped else case.n_kv
            by_tokens.setdefault(case.n_tokens, {})[depth] = case.seconds
        curves = tuple((n, tuple(sorted(points.items()))) for n, points in sorted(by_tokens.items()))
        index[device] = NonMatmulCurves(curves, stepped)
    return index


def non_matmul_seconds(index: NonMatmulIndex, device: str, passes: Sequence[Pass]) -> float:
    """Seconds of one layer's non-matmul work over `passes`; 0 if the profile has none."""
    curves = index.get(device)
    return sum(p.count * curves.seconds(p.n_tokens, p.n_kv) for p in passes) if curves else 0.0


def non_matmul_of(index: NonMatmulIndex, device: str, passes: Sequence[Pass]) -> tuple[float, float]:
    """(CPU, device) seconds of one layer's non-matmul work; the device's are the CPU's if it was not timed."""
    on_cpu = non_matmul_seconds(index, CPU_DEVICE, passes)
    return on_cpu, (non_matmul_seconds(index, device, passes) if device in index else on_cpu)


def interpolate_depth(points: Curve, n_kv: int) -> float:
    """Seconds at a KV depth: linear between measured depths, and extrapolated with the outer slopes (attention is
    affine in depth); below the first depth at least proportional to depth."""
    if len(points) == 1:
        return points[0][1]
    below = [i for i in range(len(points) - 1) if points[i][0] <= n_kv]
    i = below[-1] if below else 0
    (n0, s0), (n1, s1) = points[i], points[i + 1]
    linear = s0 + (s1 - s0) * (n_kv - n0) / (n1 - n0)
    return max(linear, points[0][1] * n_kv / points[0][0]) if n_kv < points[0][0] else linear
