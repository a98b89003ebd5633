"""Seconds of what a layer computes beside its weight-bearing mul-mats: norms, rope, KV write, attention, GLU, adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE
from oallama.cost.kernels import Curve, interpolate
from oallama.cost.passes import Pass
from oallama.profile.wanted import in_steps


@dataclass(frozen=True, slots=True)
class RestCurves:
    """What a layer takes beside its operators on one device."""

    by_tokens: Mapping[int, Curve]  # n_tokens -> ((positions in the KV cache, seconds per layer), ...)
    stepped: bool  # the time is that of whole steps of KV_STEP, masked or not

    def seconds(self, n_tokens: int, n_kv: int) -> float:
        """Linear in n_tokens and in depth between what was measured."""
        depth = in_steps(n_kv) if self.stepped else n_kv
        return interpolate(
            tuple((n, interpolate_depth(points, depth)) for n, points in sorted(self.by_tokens.items())), n_tokens
        )


RestIndex = Mapping[str, RestCurves]
"""By device."""


def index_rest(profile: Profile) -> RestIndex:
    """With flash attention on each device that has it, else without; attention.with_attention leaves one of them.

    Flash attention takes time for what a token sees, without it attention goes through all that it is shown.
    """
    index = {}
    for device in {case.device for case in profile.rest}:
        cases = [case for case in profile.rest if case.device == device]
        plain = [case for case in cases if case.shape is not None and not case.shape.flash_attn]
        stepped = len(plain) == len(cases)
        by_tokens: dict[int, dict[int, float]] = {}
        for case in plain if stepped else [case for case in cases if case not in plain]:
            depth = in_steps(case.n_kv) if stepped else case.n_kv
            by_tokens.setdefault(case.n_tokens, {})[depth] = case.seconds
        index[device] = RestCurves({n: tuple(sorted(points.items())) for n, points in by_tokens.items()}, stepped)
    return index


def rest_seconds(index: RestIndex, device: str, passes: Sequence[Pass]) -> float:
    """Seconds of one layer's other nodes over `passes`. Zero where the profile has none."""
    curves = index.get(device)
    return sum(p.count * curves.seconds(p.n_tokens, p.n_kv) for p in passes) if curves else 0.0


def rest_of(index: RestIndex, device: str, passes: Sequence[Pass]) -> tuple[float, float]:
    """(CPU, device) seconds of one layer's other nodes; the device's fall back to the CPU's where it was not timed."""
    on_cpu = rest_seconds(index, CPU_DEVICE, passes)
    return on_cpu, (rest_seconds(index, device, passes) if device in index else on_cpu)


def interpolate_depth(points: Curve, n_kv: int) -> float:
    """Linear in KV depth through the measured depths, extrapolated with the outer slopes (attention is affine in
    depth); below the first depth never less than in proportion to depth."""
    if len(points) == 1:
        return points[0][1]
    below = [i for i in range(len(points) - 1) if points[i][0] <= n_kv]
    i = below[-1] if below else 0
    (n0, s0), (n1, s1) = points[i], points[i + 1]
    linear = s0 + (s1 - s0) * (n_kv - n0) / (n1 - n0)
    return max(linear, points[0][1] * n_kv / points[0][0]) if n_kv < points[0][0] else linear
