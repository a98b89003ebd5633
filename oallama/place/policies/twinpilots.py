"""The `twinpilots` policy, to compare with: whole operations on the CPU or on the device, their weights loaded there
for each pass, so that the side that takes longer takes the least (Yu and Jiang, TwinPilots, SYSTOR 2024: S_cpu, S_gpu
and the makespan λ of a plan D).

Ours are modules: a linear operator of attention, a whole FFN, whatever cannot be cut. Their times are those of the
profile over the passes of the workload, each side alone; TwinPilots takes them from its history of the same batch size
and length. A module whose weights stay in the device's memory has nothing to load, which is a third choice while memory
lasts. The makespan says when both sides would be done if neither waited for the other. Operators run in graph order, so
a plan's own time is what the timeline says, and norms, attention and joins come on top. Only its copies may run beside
the device's own work, which S_gpu counts one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from oallama.core.units import format_seconds
from oallama.cost.placement import Costs
from oallama.place.placed import Placed, cpu
from oallama.place.policies.flexgen import streamed
from oallama.place.policies.makespan import CPU, RESIDENT, STREAMED, Makespan, Operation, least_makespan
from oallama.place.policies.modules import Module, modules_in, on_cpu, placed_modules, staging_of
from oallama.place.policies.registry import Room, policy
from oallama.place.problem import Problem
from oallama.place.slicer import Slicer


@policy(
    "twinpilots", "whole operations on either side, for the least makespan", streams=True,
    published="TwinPilots' plan for one workload: no history is kept, and nothing is planned anew while it runs",
)  # fmt: skip
def twinpilots(problem: Problem, room: Room) -> Iterable[Placed]:
    """The modules on the sides of the least makespan, which the placement's notes say."""
    costs, (slicer, base, found) = room.costs, modules_in(problem, room, streamed)
    made = module_makespan(slicer, found, costs, base.first_device_layer, *room.cut_bytes)
    if made is None or set(made.sides) == {CPU}:
        yield cpu(costs)
        return
    chosen = [
        module if side == STREAMED or module.cut is None else on_cpu(module)
        for module, side in zip(found, made.sides, strict=False)
    ]
    there = [i for i, side in enumerate(made.sides) if side == RESIDENT]
    placed = placed_modules(slicer, chosen, there, base, costs, room.asked.phase, staging_of(slicer, chosen))
    yield replace(placed, notes=(_note(made, placed.seconds),))


def module_makespan(
    slicer: Slicer, found: Sequence[Module], costs: Costs, first_device_layer: int, room: int, weights_room: int
) -> Makespan | None:
    """The least makespan of the modules, which come first in it, and of what always stays on the host. The larger what
    may be streamed, the less may stay. None: not even nothing that is streamed fits."""
    inside = {i for module in found for i in module.operators}
    of_host = [Operation(0, cost.t_cpu_s, None, None) for i, cost in enumerate(costs.operators) if i not in inside]
    alone = [0 if module.cut is None else staging_of(slicer, [module]) for module in found]
    best: Makespan | None = None
    for largest in sorted({0, *alone}):
        may_be_streamed = [m.cut is not None and size <= largest for m, size in zip(found, alone, strict=True)]
        # whichever of them are streamed: each as if it were followed by its like
        twice = [(module, module) for module, may in zip(found, may_be_streamed, strict=True) if may]
        staging = staging_of(slicer, [module for pair in twice for module in pair])
        if staging > max(0, room):
            break
        operations = [
            _operation(slicer, costs, module, may, first_device_layer)
            for module, may in zip(found, may_be_streamed, strict=True)
        ]
        made = least_makespan([*operations, *of_host], min(room - staging, weights_room))
        best = made if best is None else min(best, made, key=lambda one: one.seconds)
    return best


def _operation(
    slicer: Slicer, costs: Costs, module: Module, may_be_streamed: bool, first_device_layer: int
) -> Operation:
    """A module over the passes of `costs`: gpu_i with loading, and without."""
    own = [costs.operators[i] for i in module.operators]
    device_s = sum(cost.t_gpu_s for cost in own if cost.t_gpu_s is not None)
    loaded_s = 0.0
    if module.cut is not None:
        of, line = module.cut[0], slicer.on.rates.weights
        for p in costs.passes:
            rows = p.n_outputs if of.outputs_only else p.n_tokens
            loaded_s += p.count * line.seconds(of.gemms.read_bytes(1.0, rows)) if rows else 0.0
    layer = costs.graph.operator_layer[module.operators[0]]
    return Operation(
        module.bytes,
        sum(cost.t_cpu_s for cost in own),
        device_s + loaded_s if may_be_streamed else None,
        device_s if layer >= first_device_layer else None,
    )


def _note(made: Makespan, seconds: float) -> str:
    """The makespan beside the plan's own time, both over the workload."""
    sides = f"CPU {format_seconds(made.cpu_s)}, device with its loading {format_seconds(made.device_s)}"
    known = "" if made.is_least else f", at most {format_seconds(made.seconds - made.bound_s)} above the least there is"
    return (
        f"makespan {format_seconds(made.seconds)} if neither side waited for the other ({sides}{known}); "
        f"operators run in graph order, which is predicted to take {format_seconds(seconds)}"
    )
