"""From a policy's name to a verified placement: propose with predicted costs, verify with what a load really takes.

Pure but for `probe`, which the caller gives: it answers what a placement puts on the device (a no_alloc load, DESIGN
2.10).
"""

from __future__ import annotations

from dataclasses import replace

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.types import CPU_DEVICE, Phase, PrefetchMode, Workload
from oallama.cost.predict import Costs
from oallama.cost.timeline import Prefetch
from oallama.place.baselines import Placed, layers
from oallama.place.budget import DeviceMemory
from oallama.place.fill import FillRule
from oallama.place.oato import AffinityRule, search
from oallama.place.problem import (
    Decision,
    Problem,
    costs_of,
    device_memory,
    measured,
    nothing_placed,
    on_cpu,
    predicted_of,
)
from oallama.place.proposals import VERIFY_ROUNDS
from oallama.place.scheinfer import decide_scheinfer
from oallama.place.split import decide_split

POLICIES = ("auto", "oato", "scheinfer", "split", "layers", "cpu")
LATER_POLICIES = ("hetegen", "twinpilots", "fit", "flexgen", "fiddler")
"""Policies of the contract that this version does not have."""


def decide(
    problem: Problem,
    policy: str,
    load: Workload,
    phase: Phase,
    affinity: AffinityRule = "default",
    fill: FillRule = "continue",
    prefetch: PrefetchMode = "ahead",
) -> Decision:
    """The placement of a policy for a workload; "auto" takes the one with the least predicted time. prefetch: how far
    copies of streamed weights run ahead.

    Raises UsageError for a policy this version does not have, DoesNotFit where the policy needs the device and not
    even KV and compute buffers of one layer fit.
    """
    if policy in LATER_POLICIES:
        raise UsageError(f"policy {policy} is not in this version; choose one of {', '.join(POLICIES)}")
    if policy not in POLICIES:
        raise UsageError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if policy == "cpu" or problem.profile.device == CPU_DEVICE:
        return on_cpu(problem, load, phase)
    ahead = Prefetch("layer" if prefetch == "layer" else "continuous")

    def sliced() -> list[Decision]:
        """What needs nothing of llama.cpp on the device."""
        return [
            on_cpu(problem, load, phase),
            decide_split(problem, load, phase),
            decide_scheinfer(problem, load, phase, ahead),
        ]

    if policy == "split":
        return decide_split(problem, load, phase)
    if policy == "scheinfer":
        return decide_scheinfer(problem, load, phase, ahead)
    if policy == "auto" and problem.slices_only:
        return min(sliced(), key=_predicted_s)
    memory, lowered, notes = device_memory(problem, load, required=policy != "auto")
    if memory is None:
        on_host, *others = sliced()
        return min(replace(on_host, notes=notes), *others, key=_predicted_s)
    whole = ("oato", "layers") if policy == "auto" else (policy,)
    decisions = [_decide_whole(problem, one, lowered, load, phase, memory, affinity, fill) for one in whole]
    best = min(decisions, key=_predicted_s)
    if best.placed.uses_device(problem.graph.n_layer):  # without the device, nothing had to be lowered for it
        best = replace(best, notes=(*notes, *best.notes))
    if policy != "auto":
        return best
    return min(best, *sliced(), key=_predicted_s)


def decide_as_given(problem: Problem, placed: Placed, load: Workload, policy: str) -> Decision:
    """A placement of the caller's own, priced for the workload and probed but not changed: `spare` may be negative."""
    costs = costs_of(problem, load, "mixed")
    capacity = problem.probe(load, placed).device_free if problem.vram is None else problem.vram
    memory = measured(problem, load, placed, capacity)
    return Decision(policy, load, costs, placed, memory, predicted_of(problem, load, placed), ())


def _predicted_s(decision: Decision) -> float:
    return decision.placed.seconds


def _decide_whole(
    problem: Problem,
    policy: str,
    load: Workload,
    asked: Workload,
    phase: Phase,
    memory: DeviceMemory,
    affinity: AffinityRule,
    fill: FillRule,
) -> Decision:
    """Propose a placement of whole operators, ask what it really takes, and take what is too much off the budget until
    it fits.

    load is asked, with the micro-batch lowered as the device needs; a placement that leaves it empty is for asked."""
    device = problem.profile.device
    costs = costs_of(problem, load, phase)
    overrun = 0
    for _ in range(VERIFY_ROUNDS):
        placed = _propose(policy, costs, problem, memory, overrun, affinity, fill)
        if not placed.uses_device(problem.graph.n_layer):
            reason = (
                "no layer fits the device"
                if policy == "layers"
                else f"with crossings counted, no operator is predicted to be faster on {device} "
                "(--fill full uses it anyway)"
            )
            return nothing_placed(problem, policy, asked, phase, memory.capacity, reason)
        real = measured(problem, load, placed, memory.capacity)
        if real.spare >= 0:
            return Decision(policy, load, costs, placed, real, predicted_of(problem, load, placed), ())
        overrun -= real.spare
    raise DoesNotFit(real.limit - real.spare, real.limit, device, f"the {policy} placement")


def _propose(
    policy: str,
    costs: Costs,
    problem: Problem,
    memory: DeviceMemory,
    overrun: int,
    affinity: AffinityRule,
    fill: FillRule,
) -> Placed:
    def budget(first_device_layer: int) -> int:
        return memory.operator_room(first_device_layer) - overrun

    if policy == "layers":
        return layers(costs, budget)
    return search(costs, problem.operators, budget, affinity=affinity, rule=fill)
