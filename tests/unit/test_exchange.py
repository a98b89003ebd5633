"""The exchange step after OATO's fill: never slower, never over the memory, and what it finds that a greedy cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import ROLES, best_by_brute_force, costs, operators, rates

from oallama.core.types import Operator
from oallama.cost.whole import Costs, placement_seconds
from oallama.place.placement import Placement
from oallama.place.whole import exchange, search

SHAPES: list[tuple[int, Sequence[str], bool]] = [
    (1, ROLES, True),
    (2, ("attn_qkv", "attn_output", "ffn_up", "ffn_down"), True),
    (4, ("ffn_up", "ffn_down"), True),
    (3, ("attn_qkv", "ffn_gate_up", "ffn_down"), False),
]
SECONDS = st.floats(1e-4, 1e-2)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Operator], Costs, int]:
    """Of seven to nine operators, and the bytes that they may take."""
    n_layer, roles, output = draw(st.sampled_from(SHAPES))
    ops = [replace(o, bytes=draw(st.integers(100, 4000))) for o in operators(n_layer, roles, output)]
    times = [(cpu_s, cpu_s / draw(st.floats(0.5, 30.0))) for cpu_s in (draw(SECONDS) for _ in ops)]
    transfer = rates(draw(st.floats(0, 1e-3)), 0.0, draw(st.floats(0, 2e-4)))
    rest = (draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-3)))
    budget = int(draw(st.floats(0.05, 1.0)) * sum(o.bytes for o in ops))
    return ops, costs(ops, n_layer, times, transfer, rest), budget


def used(problem: Costs, placed: Placement) -> int:
    return sum(c.bytes for c, there in zip(problem.operators, placed.on_device, strict=True) if there)


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 500))
def test_exchanges_are_never_slower_than_the_fill_and_never_over_the_memory(
    drawn: tuple[list[Operator], Costs, int], layer_bytes: int
) -> None:
    ops, problem, room = drawn
    n_layer = problem.graph.n_layer

    def budget(first: int) -> int:
        return room - (n_layer - min(first, n_layer)) * layer_bytes

    filled = search(problem, ops, budget)
    found = exchange(problem, ops, budget, filled)
    assert found.seconds <= filled.seconds
    assert found.seconds == pytest.approx(
        placement_seconds(problem, found.on_device, found.first_device_layer), rel=1e-9
    )
    assert used(problem, found) <= max(0, budget(found.first_device_layer))
    layers = zip(problem.graph.operator_layer, found.on_device, strict=True)
    assert all(layer >= found.first_device_layer for layer, there in layers if there)
    exact = min(
        best_by_brute_force(problem, budget(first), first) for first in range(n_layer + 2) if budget(first) >= 0
    )
    assert found.seconds >= exact * (1 - 1e-9)
    assert (not found.notes) == (found == filled)


def test_two_that_gain_more_take_the_place_of_the_one_that_gains_most_for_each_byte() -> None:
    ops = [
        replace(o, bytes=size)
        for o, size in zip(operators(1, ("attn_q", "attn_k", "ffn_up"), False), (6, 5, 5), strict=True)
    ]
    problem = costs(ops, 1, [(8.0, 1.0), (6.0, 1.0), (6.0, 1.0)])
    filled = search(problem, ops, lambda first: 10)
    assert filled.on_device == (True, False, False)
    found = exchange(problem, ops, lambda first: 10, filled)
    assert found.on_device == (False, True, True)
    assert filled.notes == ()
    (note,) = found.notes
    assert "OATO's fill" in note and "3 operators" in note


def test_one_of_another_layer_takes_the_place_of_one() -> None:
    ops = [replace(o, bytes=size) for o, size in zip(operators(3, ("ffn_up",), False), (6, 10, 5), strict=True)]
    problem = costs(ops, 3, [(8.0, 1.0), (15.0, 1.0), (2.0, 1.0)])
    filled = Placement.whole((True, False, False), 0, placement_seconds(problem, (True, False, False), 0))
    assert exchange(problem, ops, lambda first: 10 if first == 0 else -1, filled).on_device == (False, True, False)


def test_what_the_device_cannot_compute_stays_on_the_host() -> None:
    ops = operators(1)
    times: list[tuple[float, float | None]] = [(9.0, None), *[(1.0, 0.5)] * (len(ops) - 1)]
    problem = costs(ops, 1, times)
    placed = exchange(problem, ops, lambda first: 10**9, Placement.whole((False,) * len(ops), 0, 100.0))
    assert placed.on_device == (False, *[True] * (len(ops) - 1))
