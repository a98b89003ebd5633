"""Seconds of whole operators over the passes of a phase, on either side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from oallama.core.profile import LinearFit
from oallama.core.types import PLAIN_LAYOUT, MulMat, Operator
from oallama.cost.graph import computes_outputs_only
from oallama.cost.kernels import Kernel, Kernels, interpolate
from oallama.cost.passes import Pass

OFFLOAD_MIN_TOKENS = 32
"""llama.cpp computes a host weight on the device from this batch size on, streaming it there first."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """An operator's seconds over a phase on either side; `t_gpu_s` is None where the device cannot compute it."""

    name: str
    bytes: int
    t_cpu_s: float  # T_c, in the fastest layout
    t_gpu_s: float | None  # T_g
    layout: str  # CPU layout that gave t_cpu_s
    streamed_s: float = 0.0  # of t_cpu_s: the weight is copied to the device, which computes for the rest of that pass


def operator_cost(
    kernels: Kernels,
    operator: Operator,
    over: Sequence[Pass],
    stream: LinearFit | None = None,
    layout: str | None = None,
) -> OperatorCost:
    """T_c in this CPU layout, or None: in the one that is fastest over `over`; and T_g.

    stream: the link over which llama.cpp streams plain host weights to this device for large batches, one after another
    with the computation, of experts those that are used; None where the device does not take them. Repacked weights are
    never streamed.
    Raises ProfileError if the CPU never measured this operator's shape.
    """
    gpu = kernels.on_device(operator)
    timed = []
    for at, cpu in kernels.on_host(operator).items():
        if layout not in (None, at):
            continue
        takes = stream is not None and gpu is not None and at == PLAIN_LAYOUT
        streamed = [p for p in over if takes and p.n_tokens >= OFFLOAD_MIN_TOKENS]
        seconds = _seconds(cpu, [p for p in over if p not in streamed])
        copied_s = 0.0
        if stream is not None and gpu is not None and streamed:
            routed = operator.mul_mat.share_routed
            copied_s = sum(p.count * stream.seconds(operator.bytes * routed(p.n_tokens)) for p in streamed)
            seconds += copied_s + _seconds(gpu, streamed)
        timed.append((seconds, at, copied_s))
    t_cpu_s, found, copied_s = min(timed)
    return OperatorCost(operator.name, operator.bytes, t_cpu_s, _seconds(gpu, over) if gpu else None, found, copied_s)


def _seconds(kernel: Kernel, over: Iterable[Pass]) -> float:
    return sum(p.count * interpolate(kernel.whole, p.n_tokens) for p in over)


def operator_costs(
    kernels: Kernels,
    operators: Sequence[Operator],
    n_run: int,
    over: Sequence[Pass],
    stream: LinearFit | None = None,
    layouts: Sequence[str] | None = None,
) -> tuple[OperatorCost, ...]:
    """operator_cost of each operator, equal ones computed once; those behind the last layer's attention over the tokens
    whose logits are wanted. layouts: of each; None: the fastest."""
    output_passes = [replace(p, n_tokens=p.n_outputs) for p in over if p.n_outputs]
    seen: dict[tuple[MulMat, bool, str | None], OperatorCost] = {}
    costs = []
    for i, operator in enumerate(operators):
        outputs_only = computes_outputs_only(operator, n_run)
        layout = layouts[i] if layouts else None
        key = (operator.mul_mat, outputs_only, layout)
        if key not in seen:
            seen[key] = operator_cost(kernels, operator, output_passes if outputs_only else over, stream, layout)
        of = seen[key]
        costs.append(OperatorCost(operator.name, of.bytes, of.t_cpu_s, of.t_gpu_s, of.layout, of.streamed_s))
    return tuple(costs)
