"""Policies: each says where operators go, for the prices of a workload and the memory that a device has.

A policy is a function from a problem and a room to placements. The fastest one that fits is taken, after dry loads
(place/verify.py). `@policy(name, help)` makes one; it is then known by that name, and `Placer.plan` takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import get_args

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.types import Phase, PrefetchMode, StreamSettings, Workload
from oallama.cost.whole import Costs
from oallama.place.affinity import AffinityRule, FillRule
from oallama.place.memory import DeviceMemory, for_weights
from oallama.place.placement import Decision, Placed
from oallama.place.problem import Problem, costs_of, device_memory
from oallama.place.sharing import Slicer
from oallama.place.verify import nothing_placed, on_cpu, verified_in_rounds


@dataclass(frozen=True, slots=True)
class Rules:
    """What a caller may choose of how a policy places: OATO's affinity and fill, and how far copies of streamed weights
    run ahead. Raises UsageError for what there is not."""

    affinity: AffinityRule = "default"
    fill: FillRule = "continue"
    prefetch: PrefetchMode = "ahead"

    def __post_init__(self) -> None:
        for name, known in (("affinity", AffinityRule), ("fill", FillRule), ("prefetch", PrefetchMode)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(get_args(known))}")

    @property
    def are_oatos(self) -> bool:
        """Whether some were chosen that only OATO has."""
        return (self.affinity, self.fill) != ("default", "continue")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a placement."""

    workload: Workload
    phase: Phase
    rules: Rules = Rules()
    quick: bool = False  # look at less, as many devices are asked about at once
    required: bool = True  # raise DoesNotFit where the device has no room, else leave everything on the CPU
    lowers_ubatch: bool = True  # whether a smaller micro-batch may be taken


@dataclass(frozen=True, slots=True)
class Room:
    """Prices of the workload, and room in the device's memory, that a policy places by."""

    asked: Asked
    workload: Workload  # its micro-batch may be smaller than the one that was asked for
    costs: Costs  # over the phase
    memory: DeviceMemory  # before any operator
    slicer: Callable[[Workload], Slicer]  # prices of blocks that are cut

    def operator_bytes(self, first_device_layer: int) -> int:
        """For whole operators, with norms and KV of the layers from this one on; negative: these do not fit."""
        return self.memory.operator_room(first_device_layer)

    @property
    def first_device_layer(self) -> int:
        """The first layer from which on norms and KV fit the device."""
        n_layer = self.memory.n_layer
        return next((first for first in range(n_layer) if self.memory.beside_split.room(first) >= 0), n_layer)

    @property
    def cut_bytes(self) -> tuple[int, int]:
        """(for operators and what slices need beside them, for weights alone), with as many layers there as fit."""
        room = self.memory.beside_split.room(self.first_device_layer)
        return room, for_weights(room, self.memory.operators_limit)


Propose = Callable[[Problem, Room], Iterable[Placed]]
Decide = Callable[[Problem, Asked], Decision]


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to place. decide: the verified placement."""

    name: str
    help: str  # what it does, in a few words
    decide: Decide
    streams: bool = False  # whether it may stream weights, so that Rules.prefetch counts
    published: str = ""  # of another system's policy, what of it is not here


POLICIES: dict[str, Policy] = {}
"""Policies by name, in the order in which help lists them."""


def register(made: Policy) -> Policy:
    POLICIES[made.name] = made
    return made


def policy(
    name: str, help: str, *, streams: bool = False, published: str = "", reason: str = ""
) -> Callable[[Propose], Policy]:
    """Make a policy of a function, and register it. reason: why the device stays empty where the function yields
    nothing that uses it."""
    reason = reason or f"{name} finds nothing that fits it"

    def made(propose: Propose) -> Policy:
        def decide(problem: Problem, asked: Asked) -> Decision:
            if published and problem.slices_only:
                raise UsageError(
                    f"policy {name} keeps whole operators on the device, and llama.cpp can keep none on "
                    f"{problem.profile.device}; use split or scheinfer"
                )
            decision = best_verified(problem, name, asked, propose, reason)
            return replace(decision, notes=(*decision.notes, published)) if published else decision

        return register(Policy(name, help, decide, streams, published))

    return made


def best_verified(problem: Problem, name: str, asked: Asked, propose: Propose, reason: str) -> Decision:
    """The best that `propose` finds in rounds of verification (place/verify.py): the fastest; of OATO as published the
    one that uses the device best. A placement that leaves the device empty is for the workload as it was asked for."""
    memory, workload, notes = device_memory(problem, asked.workload, asked.required)
    if memory is None:
        return replace(on_cpu(problem, asked.workload, asked.phase), notes=notes)
    costs = costs_of(problem, workload, asked.phase)
    streaming = StreamSettings(prefetch=asked.rules.prefetch)
    slicer = cache(partial(Slicer, problem, streaming=streaming))

    def proposed(memory: DeviceMemory) -> Placed | None:
        found = propose(problem, Room(asked, workload, costs, memory, slicer))
        placed = min(found, key=lambda one: one.seconds, default=None)
        return placed if placed is not None and placed.uses_device(problem.graph.n_layer) else None

    def key(decision: Decision) -> float:
        return decision.memory.spare if asked.rules.affinity == "paper" else decision.placed.seconds

    best, last = verified_in_rounds(problem, name, workload, costs, memory, proposed, notes, key)
    if best is not None:
        return best
    if last is not None and asked.required:
        real = last.memory
        raise DoesNotFit(real.limit - real.spare, real.limit, problem.profile.device, f"the {name} placement")
    why = reason if last is None else "no placement that was tried fits it"
    return nothing_placed(problem, name, asked.workload, asked.phase, memory.capacity, why)
