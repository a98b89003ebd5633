"""Policies of other systems by name, in our engine and with our cost model: one placement each, not verified yet, for
the costs of a workload and the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from oallama.core.errors import UsageError
from oallama.core.types import Phase, StreamSettings, Workload
from oallama.cost.placement import Costs
from oallama.place import flexgen, hetegen
from oallama.place.atsinfer import atsinfer
from oallama.place.budget import DeviceMemory, for_weights
from oallama.place.fiddler import fiddler
from oallama.place.modules import modules, place_modules
from oallama.place.placed import Placed, nothing_there
from oallama.place.problem import Problem, costs_of
from oallama.place.slicer import Slicer
from oallama.place.twinpilots import twinpilots

PUBLISHED = {
    "hetegen": "HeteGen's shares and promotion alone: weights are pinned for good, not while it runs, and gate, up and "
    "down whose shares are equal are joined once",
    "twinpilots": "TwinPilots' plan for one workload: no history is kept, and nothing is planned anew while it runs",
    "flexgen": "FlexGen's place of weights alone: not its attention on the CPU, its schedule of batches or its linear "
    "program",
    "fiddler": "Fiddler's choice by tokens holds for all experts of a batch at once, not for each by its own",
    "atsinfer": "ATSInfer's placement alone: nothing is planned anew while it runs",
}
"""And what of the published system is not there."""

Propose = Callable[[Workload, Costs, DeviceMemory], Placed]


def published(problem: Problem, policy: str, phase: Phase, streaming: StreamSettings) -> Propose:
    """The policy as a function of a workload, the costs over the phase, and memory in which norms and KV of the last
    layers fit. Raises UsageError for a device that llama.cpp cannot use, and for a model without what the policy is
    for."""
    if problem.slices_only:
        raise UsageError(
            f"policy {policy} keeps whole operators on the device, and llama.cpp can keep none on "
            f"{problem.profile.device}; use split or scheinfer"
        )
    operators = problem.operators
    if policy == "fiddler" and all(operator.op != "MUL_MAT_ID" for operator in operators):
        raise UsageError("policy fiddler is for models with experts, and this one has none; use layers or oato")
    slicer_for = cache(partial(Slicer, problem, streaming=streaming))

    def propose(load: Workload, costs: Costs, memory: DeviceMemory) -> Placed:
        if policy == "atsinfer":
            return atsinfer(costs, memory.operator_room)
        slicer = slicer_for(load)
        first = next((first for first in range(memory.n_layer) if memory.room(first) >= 0), memory.n_layer)
        room = memory.room(first)
        weights_room = for_weights(room, memory.operators_limit)
        if policy == "fiddler":
            return fiddler(slicer, costs, operators, first, room, weights_room, phase)
        base = nothing_there(len(operators), first)
        of_token = costs_of(problem, load, "decode")
        if policy in ("flexgen", "twinpilots"):
            found = modules(slicer, of_token, operators, base, flexgen.streamed)
            if policy == "twinpilots":
                return twinpilots(slicer, found, base, costs, phase, room, weights_room)
            order = flexgen.order(found)
        else:
            found = modules(slicer, of_token, operators, base, partial(hetegen.cut, on=slicer.on))
            order = hetegen.order(found, slicer.on)
        return place_modules(slicer, found, order, base, costs, phase, room, weights_room)

    return propose


def published_notes(problem: Problem, policy: str, placed: Placed) -> tuple[str, ...]:
    """What of the published system is not there, and how many operators it would stream and cannot."""
    notes = (PUBLISHED[policy],)
    if policy not in ("hetegen", "flexgen"):
        return notes
    cg = placed.slices.cg if placed.slices else (0,) * len(problem.operators)
    n_left = sum(
        can and operator.layer is not None and not there and not streamed
        for can, operator, there, streamed in zip(
            problem.splittable, problem.operators, placed.on_device, cg, strict=True
        )
    )
    if not n_left:
        return notes
    return (*notes, f"{n_left} operators stay on the CPU whole: no part of them pays, or none fits the ring")
