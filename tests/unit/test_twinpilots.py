"""The `twinpilots` policy: the least makespan against brute force, and what becomes of it as a plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import LOAD, problem
from seeds import examples
from split_cases import World, where

from oallama.core.profile import LinearFit
from oallama.core.types import Phase, Workload
from oallama.core.units import format_seconds
from oallama.place.decide import decide
from oallama.place.placement import nothing_there
from oallama.place.policies.flexgen import streamed
from oallama.place.policies.modules import modules
from oallama.place.policies.twinpilots import (
    CPU,
    RESIDENT,
    STREAMED,
    Makespan,
    Operation,
    least_makespan,
    module_makespan,
)
from oallama.place.problem import Problem, costs_of, device_memory
from oallama.place.sharing import Slicer

SECONDS = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.25, 1.0]))
OPERATIONS = st.builds(
    Operation, st.integers(0, 20), SECONDS, st.one_of(st.none(), SECONDS), st.one_of(st.none(), SECONDS)
)


@st.composite
def layered(draw: st.DrawFn) -> list[Operation]:
    """A few kinds, some of them more than once, in any order."""
    kinds = draw(st.lists(OPERATIONS, min_size=1, max_size=4))
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))


def seconds_of(operations: list[Operation], sides: tuple[int, ...]) -> float:
    """Infinite where one cannot be where it is."""
    cpu_s = device_s = 0.0
    for operation, side in zip(operations, sides, strict=True):
        seconds = (operation.cpu_s, operation.streamed_s, operation.resident_s)[side]
        if seconds is None:
            return float("inf")
        if side == CPU:
            cpu_s += seconds
        else:
            device_s += seconds
    return max(cpu_s, device_s)


def resident_bytes(operations: list[Operation], sides: tuple[int, ...]) -> int:
    return sum(operation.bytes for operation, side in zip(operations, sides, strict=True) if side == RESIDENT)


def check(operations: list[Operation], room: int, made: Makespan) -> None:
    assert resident_bytes(operations, made.sides) <= room
    assert made.seconds == pytest.approx(seconds_of(operations, made.sides))
    assert made.bound_s <= made.seconds


#
# the least makespan
#


@settings(max_examples=examples(200))
@given(layered(), st.integers(0, 80))
def test_it_is_the_least_of_all_placements(operations: list[Operation], room: int) -> None:
    made = least_makespan(operations, room)
    check(operations, room, made)
    possible = (
        sides for sides in itertools.product((CPU, STREAMED, RESIDENT), repeat=len(operations))
        if resident_bytes(operations, sides) <= room
    )  # fmt: skip
    assert made.seconds == pytest.approx(min(seconds_of(operations, sides) for sides in possible), rel=1e-6)
    assert made.is_least


@settings(max_examples=examples(60))
@given(layered(), st.integers(0, 80), st.integers(0, 30))
def test_a_search_that_is_cut_short_keeps_to_the_memory_and_bounds_what_there_is(
    operations: list[Operation], room: int, most_nodes: int
) -> None:
    made = least_makespan(operations, room, most_nodes)
    check(operations, room, made)
    assert made.bound_s <= least_makespan(operations, room).seconds * (1 + 1e-6)


def test_eighty_layers_of_seven_kinds_are_solved_to_the_end() -> None:
    layer = [(40, 0.9, 1.7, 0.2), (10, 0.21, 0.5, 0.05), (10, 0.23, 0.6, 0.04), (41, 0.97, 1.8, 0.2)]
    made = [Operation(*kind) for _ in range(80) for kind in layer]
    made += [Operation(*((500, 9.1, 20.3, 2.1) if i % 2 else (640, 11.7, 26.1, 2.6))) for i in range(80)]
    found = least_makespan([*made, Operation(300, 7.0, None, 1.0)], 25_000)
    assert found.is_least


def test_operations_of_one_kind_lie_evenly_on_both_sides() -> None:
    made = least_makespan([Operation(0, 2.0, 1.0, None)] * 9, 0)
    assert made.sides == (STREAMED, CPU, STREAMED) * 3
    assert (made.cpu_s, made.device_s) == (6.0, 6.0)


#
# as a policy
#

LEVEL = World(cpu_rate=4e8, device_rate=8e9, link=LinearFit(1e-6, 2e-9, 1.0))


def makespan(made: Problem, load: Workload, phase: Phase) -> Makespan | None:
    """That the policy's modules are placed for, before any placement was verified."""
    memory, load, _ = device_memory(made, load, required=True)
    assert memory is not None
    slicer = Slicer(made, load)
    base = nothing_there(len(made.operators), 0)
    found = modules(slicer, costs_of(made, load, "decode"), made.operators, base, streamed)
    room, limit = memory.room(0), memory.operators_limit
    weights_room = room if limit is None else min(room, limit)
    return module_makespan(slicer, found, costs_of(made, load, phase), 0, room, weights_room)


def test_operators_are_whole_on_one_side_and_both_sides_have_some() -> None:
    made = problem(LEVEL, free=10**7, gpu_weights=0.0)
    decision = decide(made, "twinpilots", LOAD, "decode")
    slices = decision.placement
    assert slices.is_sliced and not any(slices.gg)
    found = where(decision, made.operators)
    assert set(found.values()) == {"cpu", "streamed"}
    extents = {of.shape[1] if of.role != "ffn_down" else of.shape[0] for of in made.operators}
    assert {cg for cg in slices.cg if cg} <= extents
    least = makespan(made, LOAD, "decode")
    assert least is not None and least.is_least
    assert max(least.cpu_s, least.device_s) < sum(cost.t_cpu_s for cost in costs_of(made, LOAD, "decode").operators)


def test_the_note_has_the_makespan_and_the_predicted_times_stay_the_timelines() -> None:
    made = problem(LEVEL, free=400_000)
    decision, least = decide(made, "twinpilots", LOAD, "mixed"), makespan(made, LOAD, "mixed")
    assert least is not None
    (note,) = (note for note in decision.notes if note.startswith("makespan "))
    assert "graph order" in note and format_seconds(decision.placement.seconds) in note
    assert decision.predicted.total_s == pytest.approx(decision.placement.seconds)
    assert least.seconds < decision.predicted.total_s
