"""A good plan in a fraction of a second, for questions that are asked of many devices at once.

The policies of decide.py look at hundreds of placements, each by the exact recursion. Here a few are looked at, those
that the search usually ends at, and sliced by the closed form of cost/steady.py; the best two are then priced exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oallama.core.types import Profile, Workload
from oallama.cost.predict import Costs
from oallama.place.baselines import Placed, cpu, layers
from oallama.place.budget import DeviceMemory
from oallama.place.oato import search
from oallama.place.problem import Decision, Problem, costs_of, measured, operators_limit, predicted_of
from oallama.place.slice_plan import SlicePlan, exact, priced
from oallama.place.slice_rest import Slicer, streamed_placement
from oallama.place.units import Granularity

N_VALUES = 4  # of r_GG
SHARES = (1.0, 0.5, 0.125)  # of the room for whole operators that OATO may fill
GRANULARITIES: tuple[Granularity, ...] = ("block",)  # of OATO
PRICED = 2  # plans that are priced exactly


def decide_quickly(problem: Problem, load: Workload, memory: DeviceMemory) -> Decision | None:
    """The placement with the least predicted time of those looked at; None: none of them uses the device.

    memory: as a probe with every operator on the host says (problem.device_memory).
    """
    rough = Slicer(replace(problem, profile=_without_turns(problem.profile)), load, n_probes=0)
    fine = Slicer(problem, load)
    costs = costs_of(problem, load, "mixed")
    cap = operators_limit(problem)
    whole: list[Placed] = []
    sliced: list[tuple[Placed, SlicePlan]] = []
    for placed in _frames(problem, load, costs, memory):
        if placed.uses_device(problem.graph.n_layer):
            whole.append(placed)
        used = sum(cost.bytes for cost, there in zip(costs.operators, placed.on_device, strict=True) if there)
        room = _room(memory, placed.first_device_layer) - used
        plan = rough.rest(placed, room, room if cap is None else min(room, cap - used), N_VALUES, any_length=False)
        if plan is not None:
            sliced.append((placed, plan))
    sliced.sort(key=lambda found: found[1].total_s(load))
    for placed, plan in sliced[:PRICED]:
        again = priced(plan.layers, fine.on, load, plan.token_assignment, plan.kept_twice, plan.weights_bytes,
                       plan.staging_bytes)  # fmt: skip
        again = exact(again, fine.on, load)
        whole.append(replace(streamed_placement(problem, placed, again, fine.on), seconds=again.total_s(load)))
    for placed in sorted(whole, key=lambda placed: placed.seconds):
        real = measured(problem, load, placed, memory.capacity)
        if placed.uses_device(problem.graph.n_layer) and real.spare >= 0:
            return Decision("quick", load, costs, placed, real, predicted_of(problem, load, placed), ())
    return None


def _frames(problem: Problem, load: Workload, costs: Costs, memory: DeviceMemory) -> Iterator[Placed]:
    """Whole operators to slice the rest beside: none, and OATO's in these shares of the room."""
    yield cpu(costs_of(problem, load, "mixed", llama_uses_device=False))
    from_end = layers(costs, memory.operator_room).first_device_layer
    for share in SHARES:

        def budget(first: int, share: float = share) -> int:
            room = memory.operator_room(first)
            return int(share * room) if room > 0 else room

        first_layers = sorted({0, from_end}) if share == 1 else (0,)
        yield search(costs, problem.operators, budget, first_layers=first_layers, granularities=GRANULARITIES)


def _room(memory: DeviceMemory, first_device_layer: int) -> int:
    """Bytes for operators and slices; llama.cpp needs none of it where it does not use the device."""
    return memory.limit if first_device_layer > memory.n_layer else memory.room(first_device_layer)


def _without_turns(profile: Profile) -> Profile:
    """As if queueing work took no time of the caller and nobody slowed anybody down but for the DRAM: what the closed
    form can price."""
    link = {name: fit for name, fit in profile.link.items() if not name.startswith("issue_")}
    return replace(profile, sharing=(), copy_wait=None, launch_issue_s=None, link=link)
