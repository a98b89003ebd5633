"""Seconds of one operator on one side, read off a profile.

A profile holds each distinct mul-mat at a few batch sizes; between two measured batch sizes the time is taken as
linear in n_tokens (ScheInfer Eq. 3 has t = α + β·size for a fixed weight), beyond the last one as linear with the last
slope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from oallama.core.errors import ProfileError
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, LinearFit, Operator, Profile, ProfileCase, Shape, Workload
from oallama.cost.graph import computes_outputs_only

Signature = tuple[str, str, Shape, int]
"""(op, type, shape, n_expert_used): what distinguishes a mul-mat except where it runs and its batch size."""

CaseKey = tuple[str, str, Signature]
"""(device, layout, signature)."""

Curve = tuple[tuple[int, float], ...]
"""((n_tokens, seconds), ...) with ascending n_tokens."""

CaseIndex = Mapping[CaseKey, Curve]

PLAIN_LAYOUT = "CPU"
OFFLOAD_MIN_TOKENS = 32
"""llama.cpp computes a host weight on the device from this batch size on, streaming it there first (DESIGN 2.13)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a workload: n_tokens computed at once while n_kv tokens are already in the cache, `count`
    times."""

    n_tokens: int
    n_kv: int
    count: int
    n_outputs: int = 1  # tokens whose logits are wanted: the last of a prompt, each generated one


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """An operator's seconds over a phase on either side; `t_gpu_s` is None where the device cannot compute it."""

    name: str
    bytes: int
    t_cpu_s: float  # T_c, in the fastest layout
    t_gpu_s: float | None  # T_g
    layout: str  # CPU layout that gave t_cpu_s


def signature(of: Operator | ProfileCase) -> Signature:
    return (of.op, of.type, of.shape, of.n_expert_used)


def index_cases(profile: Profile) -> CaseIndex:
    """The profile's cases by everything but batch size. Of two that differ in working set only, the colder one
    counts."""
    curves: dict[CaseKey, dict[int, float]] = {}
    for case in sorted(profile.cases, key=lambda case: case.working_set_bytes):
        key = (case.device, case.layout, signature(case))
        curves.setdefault(key, {})[case.n_tokens] = case.seconds
    return {key: tuple(sorted(points.items())) for key, points in curves.items()}


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


def passes(workload: Workload, phase: str) -> tuple[Pass, ...]:
    """The forward passes that a phase counts: `decode` one token at the mean depth, `prefill` the whole prompt in
    micro-batches of n_ubatch, `mixed` the prompt and n_gen tokens."""
    depth = workload.n_prompt + max(1, workload.n_gen) // 2
    if phase == "decode":
        return (Pass(1, depth, 1),)
    n_gen = 0 if phase == "prefill" else workload.n_gen
    return passes_at(0, workload.n_prompt, n_gen, workload.n_ubatch)


def passes_at(n_past: int, n_prompt: int, n_gen: int, n_ubatch: int) -> tuple[Pass, ...]:
    """The forward passes of a prompt and a generation behind n_past tokens that are in the cache already."""
    made = []
    done = 0
    while done < n_prompt:
        n = min(n_ubatch, n_prompt - done)
        made.append(Pass(n, n_past + done + n, 1, int(done + n == n_prompt)))
        done += n
    if n_gen:
        made.append(Pass(1, n_past + n_prompt + n_gen // 2, n_gen))
    return tuple(made)


def _seconds(curve: Curve, over: Iterable[Pass]) -> float:
    return sum(p.count * interpolate(curve, p.n_tokens) for p in over)


def operator_cost(
    index: CaseIndex, operator: Operator, device: str, over: Sequence[Pass], stream: LinearFit | None = None
) -> OperatorCost:
    """T_c in the layout that is fastest over `over`, and T_g.

    stream: the link over which llama.cpp streams plain host weights to this device for large batches, one after another
    with the computation; None where the device does not take them. Repacked weights are never streamed.
    Raises ProfileError if the CPU never measured this operator's shape.
    """

    wanted = signature(operator)
    layouts = sorted(layout for on, layout, known in index if on == CPU_DEVICE and known == wanted)
    if not layouts:
        raise ProfileError(
            f"the profile has no CPU timing of {operator.type} {list(operator.shape)} ({operator.name}); "
            "run `oallama profile` for this model"
        )
    curve = index.get((device, DEVICE_LAYOUT, wanted)) if device != CPU_DEVICE else None
    t_gpu_s = _seconds(curve, over) if curve else None
    timed = []
    for layout in layouts:
        streamed = [p for p in over if stream and curve and layout == PLAIN_LAYOUT and p.n_tokens >= OFFLOAD_MIN_TOKENS]
        seconds = _seconds(index[CPU_DEVICE, layout, wanted], [p for p in over if p not in streamed])
        if stream and curve and streamed:
            n_streams = sum(p.count for p in streamed)
            seconds += n_streams * stream.seconds(operator.bytes) + _seconds(curve, streamed)
        timed.append((seconds, layout))
    t_cpu_s, layout = min(timed)
    return OperatorCost(operator.name, operator.bytes, t_cpu_s, t_gpu_s, layout)


def operator_costs(
    index: CaseIndex,
    operators: Sequence[Operator],
    n_layer: int,
    device: str,
    over: Sequence[Pass],
    stream: LinearFit | None = None,
) -> tuple[OperatorCost, ...]:
    """operator_cost of each operator, equal ones computed once; those behind the last layer's attention over the tokens
    whose logits are wanted."""
    output_passes = [replace(p, n_tokens=p.n_outputs) for p in over if p.n_outputs]
    seen: dict[tuple[Signature, bool], OperatorCost] = {}
    costs = []
    for operator in operators:
        outputs_only = computes_outputs_only(operator, n_layer)
        key = (signature(operator), outputs_only)
        if key not in seen:
            seen[key] = operator_cost(index, operator, device, output_passes if outputs_only else over, stream)
        known = seen[key]
        costs.append(replace(known, name=operator.name, bytes=operator.bytes))
    return tuple(costs)
