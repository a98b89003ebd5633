"""The `twinpilots` policy: the least makespan against brute force, and what becomes of it as a plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_cases import LOAD, problem
from seeds import examples
from split_cases import EMBD, FF, VOCAB, World, attention, ffn, operator, where

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


@settings(max_examples=examples(100))
@given(layered(), st.integers(0, 80), st.integers(0, 80))
def test_more_memory_never_makes_it_longer(operations: list[Operation], one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert least_makespan(operations, large).seconds <= least_makespan(operations, small).seconds * (1 + 1e-6)


@settings(max_examples=examples(60))
@given(layered(), st.integers(0, 80), st.integers(0, 30))
def test_a_search_that_is_cut_short_keeps_to_the_memory_and_bounds_what_there_is(
    operations: list[Operation], room: int, most_nodes: int
) -> None:
    made = least_makespan(operations, room, most_nodes)
    check(operations, room, made)
    assert made.bound_s <= least_makespan(operations, room).seconds * (1 + 1e-6)


@settings(max_examples=examples(60))
@given(layered(), st.integers(0, 80), st.randoms(use_true_random=False))
@example([*[Operation(0, 1.0, 1.0, None)] * 2, Operation(0, 1.0, 1.0, 1.0)], 0, random.Random(0))
def test_the_order_of_operations_changes_nothing(operations: list[Operation], room: int, by: random.Random) -> None:
    """Operations of which none would gain by residence are one kind."""
    mixed = list(operations)
    by.shuffle(mixed)
    found = [
        sorted(
            zip(
                ((k.seconds, k.bytes) for k in (o.without_waste for o in listed)),
                least_makespan(listed, room).sides,
                strict=True,
            )
        )
        for listed in (operations, mixed)
    ]
    assert found[0] == found[1]


def test_a_model_of_eighty_layers_is_solved_to_the_end() -> None:
    """The shapes of a 70B: query and output are alike, key and value are, and the last FFN sees less of a prompt."""
    layer = [(36, 0.92, 1.71, 0.21), (5, 0.124, 0.27, 0.031), (5, 0.124, 0.27, 0.031), (36, 0.92, 1.71, 0.21)]
    made = [Operation(*kind) for _ in range(80) for kind in (*layer, (370, 9.13, 17.9, 2.07))]
    made[-1] = Operation(370, 8.9, 17.5, 1.9)
    for room in (0, 3_000, 10_000, 25_000):
        found = least_makespan([*made, Operation(140, 4.1, None, 0.8)], room)
        assert found.is_least
        assert found.cpu_s == pytest.approx(found.device_s, rel=1e-2)


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

SLOW = World(cpu_rate=2e8, device_rate=8e9, token_s_per_byte=5e-10, link=LinearFit(1e-6, 2e-9, 1.0))
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
    assert max(least.cpu_s, least.device_s) < sum(cost.t_cpu_s for cost in decision.costs.operators)


def test_where_the_device_would_only_lengthen_it_all_stays_on_the_cpu() -> None:
    made = problem(World(cpu_rate=1e12, device_rate=1e4), free=10**7)
    decision = decide(made, "twinpilots", LOAD, "mixed")
    assert not decision.placement.uses_device(made.graph.n_layer)
    assert decision.placement.seconds == pytest.approx(decide(made, "cpu", LOAD, "mixed").placement.seconds)


def test_the_note_has_the_makespan_and_the_predicted_times_stay_the_timelines() -> None:
    made = problem(LEVEL, free=400_000)
    decision, least = decide(made, "twinpilots", LOAD, "mixed"), makespan(made, LOAD, "mixed")
    assert least is not None
    (note,) = (note for note in decision.notes if note.startswith("makespan "))
    assert "graph order" in note and format_seconds(decision.placement.seconds) in note
    assert decision.predicted.total_s == pytest.approx(decision.placement.seconds)
    assert least.seconds < decision.predicted.total_s


def test_the_cpu_has_its_share_even_where_the_device_has_room_for_all() -> None:
    """Both sides are taken to work at the same time, so the makespan is less with some on a slow CPU, too."""
    made = problem(SLOW, free=10**8)
    placed, least = decide(made, "twinpilots", LOAD, "mixed").placement, makespan(made, LOAD, "mixed")
    assert least is not None and least.cpu_s > 0
    assert not all(placed.on_device) and not placed.is_sliced


@settings(max_examples=examples(15))
@given(st.integers(30_000, 1_500_000), st.integers(30_000, 1_500_000))
def test_more_vram_never_makes_the_makespan_longer(one: int, other: int) -> None:
    found = []
    for free in sorted((one, other)):
        least = makespan(problem(LEVEL, free=free), replace(LOAD, n_ubatch=8), "mixed")
        found.append(float("inf") if least is None else least.seconds)
    assert found[1] <= found[0] * (1 + 1e-6)


@settings(max_examples=examples(15))
@given(st.sampled_from([0.0, 0.2, 0.5, None]), st.integers(50_000, 4_000_000))
def test_layers_in_another_order_get_the_same_plan(gpu_weights: float | None, free: int) -> None:
    """Two layers whose FFNs differ in size, one before the other and the other way round, for decode: of a prompt the
    last layer's FFN sees one token only."""
    found = []
    for sizes in ((FF, 2 * FF), (2 * FF, FF)):
        layers = [op for i, n_ff in enumerate(sizes) for op in (*attention(i), *ffn(i, n_ff=n_ff))]
        made = problem(SLOW, free, [*layers, operator("output", EMBD, VOCAB, None)], gpu_weights=gpu_weights)
        decision = decide(made, "twinpilots", replace(LOAD, n_ubatch=8), "decode")
        rows = where(decision, made.operators)
        found.append(sorted((op.role, op.shape, rows[op.name]) for op in made.operators))
    assert found[0] == found[1]
