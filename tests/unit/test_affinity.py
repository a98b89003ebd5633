"""OATO: affinity, the iteration and the fill, against hand arithmetic and brute force."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import best_by_brute_force, costs, operators, rates
from seeds import examples

from oallama.cost.graph import crossings
from oallama.cost.whole import Costs, placement_seconds
from oallama.place.affinity import GRANULARITIES, affinity, fill, normalise, rank, units
from oallama.place.affinity import algorithm_1 as iterate
from oallama.place.placement import cpu, layers
from oallama.place.transfers import Transfers
from oallama.place.whole import search
from oallama.placer.affinity import affinities

seconds = st.floats(1e-6, 1e-2)


def test_normalise_is_min_max() -> None:
    assert normalise([1.0, 3.0, 2.0]) == (0.0, 1.0, 0.5)
    assert normalise([2.0, 2.0]) == (1.0, 1.0)
    assert normalise([]) == ()


def test_equal_benefits_keep_graph_order() -> None:
    assert rank([1.0, 2.0, 1.0, 2.0]) == (1, 3, 0, 2)


def test_paper_fill_stops_where_ours_goes_on() -> None:
    # budget 10: 6 fits, 7 does not; Algorithm 1 breaks there, the default still takes the 3 behind it
    assert fill([0, 1, 2], [6, 7, 3], 10, "paper") == {0}
    assert fill([0, 1, 2], [6, 7, 3], 10, "continue") == {0, 2}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 200))
def test_fill_never_exceeds_the_budget_and_leaves_nothing_that_fits(sizes: list[int], budget: int) -> None:
    placed = fill(range(len(sizes)), sizes, budget)
    used = sum(sizes[i] for i in placed)
    assert used <= budget
    assert all(used + sizes[i] > budget for i in range(len(sizes)) if i not in placed)
    assert fill(range(len(sizes)), sizes, budget, "paper") <= placed


@settings(deadline=None)
@given(st.data())
def test_transfer_does_not_depend_on_what_was_asked_before(data: st.DataObject) -> None:
    """What a search remembers: the whole graph's crossings with the unit on either side say the same."""
    n_layer = 4
    ops = operators(n_layer)
    problem = costs(ops, n_layer, [(1.0, 1.0)] * len(ops), rates(1e-3, 1e-9, 1e-4))
    transfers = Transfers(problem)
    everyone = [unit for granularity in GRANULARITIES for unit in units(ops, granularity)]
    for _ in range(6):
        on_device = data.draw(st.lists(st.booleans(), min_size=len(ops), max_size=len(ops)))
        first, unit = data.draw(st.integers(0, n_layer + 1)), data.draw(st.sampled_from(everyone))
        there, back = ([side if i in unit else on for i, on in enumerate(on_device)] for side in (True, False))
        expected = sum(
            sign * problem.rates.over(crossings(problem.graph, sides, first), problem.passes)
            for sign, sides in ((1, there), (-1, back))
        )
        assert transfers.of(on_device, first, unit) == pytest.approx(expected)


def algorithm_1(problem: Costs, memory_limit: int) -> tuple[list[bool], int] | None:
    """OATO's Algorithm 1 line by line, with T' from the crossings around each operator where the last ranking would
    have been filled. (backends, iterations); None: the loop does not end."""
    ops, n = problem.operators, len(problem.operators)
    transfers = Transfers(problem, paper=True)

    def normalize_and_sort(b: list[float]) -> tuple[list[int], list[float]]:
        return sorted(range(n), key=lambda i: -b[i]), list(normalise(b))

    def backends(order: list[int]) -> list[bool]:
        total, on_gpu = 0, [False] * n
        for i in order:
            total += ops[i].bytes
            if total > memory_limit:
                break
            on_gpu[i] = True
        return on_gpu

    order, scaled = normalize_and_sort([(op.t_cpu_s - (op.t_gpu_s or 0.0)) / op.bytes for op in ops])
    for iteration in range(1, 51):
        before, prev_affinities = backends(order), scaled
        t = [transfers.of(before, 0, (i,)) for i in range(n)]
        order, scaled = normalize_and_sort(
            [(op.t_cpu_s - (op.t_gpu_s or 0.0) - t[i]) / op.bytes for i, op in enumerate(ops)]
        )
        if scaled == prev_affinities or backends(order) == before:
            return backends(order), iteration
    return None


@given(st.data(), st.integers(1, 2))
@settings(max_examples=examples(60))
def test_the_published_rules_are_algorithm_1_to_the_letter(data: st.DataObject, n_layer: int) -> None:
    ops = operators(n_layer)
    times = [(data.draw(st.floats(1e-4, 1e-2)), data.draw(st.floats(1e-5, 1e-2))) for _ in ops]
    problem = costs(ops, n_layer, times, rates(data.draw(st.floats(0, 3e-3))))
    budget = 1000 * data.draw(st.integers(0, len(ops)))
    found = search(problem, ops, lambda first: budget, affinity="paper", rule="paper")
    wanted = algorithm_1(problem, budget)
    assert found.converged == (wanted is not None)
    if wanted is not None:
        assert (list(found.on_device), found.iterations) == wanted


def test_the_published_loop_keeps_what_it_converged_to_though_it_met_something_faster() -> None:
    """Where the fill stops at the first that does not fit, another order may leave more of the memory unused."""
    slower = 0
    for seed in range(400):
        chance = random.Random(seed)
        ops = [replace(op, bytes=1000 * chance.randint(1, 5)) for op in operators(2)]
        times = [(chance.randint(1, 20) / 2, chance.randint(0, 12) / 2) for _ in ops]
        problem = costs(ops, 2, times, rates(chance.randint(0, 20) / 5))
        room, singles = 1000 * chance.randint(1, 3 * len(ops)), units(ops, "operator")
        paper = Transfers(problem, paper=True)
        fastest = iterate(problem, singles, room, 0, transfers=paper, rule="paper")
        published = iterate(problem, singles, room, 0, transfers=paper, rule="paper", published=True)
        assert published.seconds >= fastest.seconds
        if published.converged:
            again = iterate(problem, singles, room, 0, transfers=paper, rule="paper", start=published.on_device)
            assert (again.iterations, again.on_device) == (1, published.on_device)
            slower += published.seconds > fastest.seconds
    assert slower > 0


def test_transfer_of_a_lone_ffn_operator_is_an_excursion_and_of_a_closing_one_is_negative() -> None:
    # one layer, norms and KV on the host (first_device_layer 2), crossings cost 1 s each and nothing per byte
    ops = operators(1, output=False)
    problem = costs(ops, 1, [(1.0, 1.0)] * len(ops), rates(1.0))
    names = {op.role: i for i, op in enumerate(ops)}
    nothing = [False] * len(ops)
    # gate alone on the device: its input goes in, its output comes back
    assert Transfers(problem).of(nothing, 2, (names["ffn_gate"],)) == pytest.approx(2.0)
    # gate and down there, up missing: x in for gate, then up's result in, down's result out. GLU runs beside down.
    around = [op.role in ("ffn_gate", "ffn_down") for op in ops]
    # adding up removes the copy of its result and shares the copy of x with gate
    assert Transfers(problem).of(around, 2, (names["ffn_up"],)) < 0


def test_whole_ffn_block_costs_one_excursion() -> None:
    ops = operators(1, output=False)
    problem = costs(ops, 1, [(1.0, 1.0)] * len(ops), rates(1.0))
    block = tuple(i for i, op in enumerate(ops) if op.role.startswith("ffn_"))
    # x goes in for gate and up; the residual add follows down to the device, so the stream goes in too; the sum returns
    assert Transfers(problem).of([False] * len(ops), 2, block) == pytest.approx(3.0)


@given(st.data())
@settings(max_examples=examples(60))
def test_without_transfer_and_with_equal_sizes_the_fill_is_optimal(data: st.DataObject) -> None:
    ops = operators(1)
    times = [(data.draw(seconds), data.draw(seconds)) for _ in ops]
    budget = 1000 * data.draw(st.integers(0, len(ops)))
    problem = costs(ops, 1, times)
    found = iterate(problem, units(ops, "operator"), budget, 0)
    assert found.converged
    assert found.seconds == pytest.approx(best_by_brute_force(problem, budget, 0))


@given(st.data())
@settings(max_examples=examples(40))
def test_search_with_transfer_is_close_to_brute_force_and_never_worse_than_layers_or_cpu(data: st.DataObject) -> None:
    ops = operators(1)
    times = [(data.draw(st.floats(1e-4, 1e-2)), data.draw(st.floats(1e-5, 1e-3))) for _ in ops]
    budget = 1000 * data.draw(st.integers(0, len(ops)))
    problem = costs(ops, 1, times, rates(data.draw(st.floats(0, 1e-3))))
    found = search(problem, ops, lambda first: budget)
    assert found.seconds <= layers(problem, lambda first: budget).seconds + 1e-12
    assert found.seconds <= cpu(problem).seconds + 1e-12
    used = sum(c.bytes for c, device in zip(problem.operators, found.on_device, strict=True) if device)
    assert used <= budget
    exact = min(best_by_brute_force(problem, budget, first) for first in range(3))
    assert found.seconds <= 1.5 * exact + 1e-12


@given(st.data())
@settings(max_examples=examples(40))
def test_more_memory_is_never_predicted_slower(data: st.DataObject) -> None:
    ops = operators(2)
    times = [(data.draw(st.floats(1e-4, 1e-2)), data.draw(st.floats(1e-5, 1e-3))) for _ in ops]
    problem = costs(ops, 2, times)
    budgets = sorted(1000 * data.draw(st.integers(0, len(ops))) for _ in range(2))
    less, more = (search(problem, ops, lambda first, b=b: b).seconds for b in budgets)
    assert more <= less + 1e-12


@given(st.data(), st.sampled_from([0.5, 3.0, 1000.0]))
@settings(max_examples=examples(40))
def test_affinity_order_does_not_depend_on_the_unit_of_time(data: st.DataObject, scale: float) -> None:
    ops = operators(2)
    times = [(data.draw(st.integers(1, 1000)), data.draw(st.integers(1, 1000))) for _ in ops]
    alpha = data.draw(st.integers(0, 100))
    order = []
    for factor in (1.0, scale):
        problem = costs(ops, 2, [(c * factor, g * factor) for c, g in times], rates(alpha * factor))
        placed = search(problem, ops, lambda first: 5000)
        order.append([(row.name, row.backend) for row in affinities(problem, ops, placed)])
    assert order[0] == order[1]


def test_a_cycle_is_reported_and_the_best_placement_kept() -> None:
    # each of two operators is worth placing only while the other is not yet there, and the budget holds both: with T'
    # positive once the neighbour moved, the placements alternate
    ops = operators(1, roles=("ffn_up", "ffn_down"), output=False)
    problem = costs(ops, 1, [(3.0, 1.0), (3.0, 1.0)], rates(0.9))
    found = iterate(problem, units(ops, "operator"), 2000, 2)
    options = [placement_seconds(problem, choice, 2) for choice in ((False, False), (True, True))]
    assert found.seconds <= min(options) + 1e-12
    assert found.iterations <= 50


def test_operator_the_device_cannot_compute_stays_on_the_cpu() -> None:
    ops = operators(1)
    times: list[tuple[float, float | None]] = [(1.0, 0.1)] * len(ops)
    times[0] = (1.0, None)
    problem = costs(ops, 1, times)
    placed = search(problem, ops, lambda first: 10**9)
    assert not placed.on_device[0]
    assert all(placed.on_device[1:])
    rows = {row.name: row for row in affinities(problem, ops, placed)}
    row = rows[ops[0].name]
    assert (row.t_gpu_s, row.benefit_s_per_byte, row.affinity, row.backend) == (None, None, 0.0, "CPU")
    assert row.rank == len(ops)


def test_report_rows_follow_the_formula() -> None:
    ops = operators(2)
    times = [(float(2 + i % 5), 1.0) for i in range(len(ops))]
    problem = costs(ops, 2, times, rates(0.25))
    placed = search(problem, ops, lambda first: 6000)
    rows = affinities(problem, ops, placed)
    assert [row.rank for row in rows] == list(range(1, len(ops) + 1))
    for row in rows:
        assert row.t_gpu_s is not None and row.benefit_s_per_byte is not None
        expected = (row.t_cpu_s - row.t_gpu_s - row.t_transfer_s) / row.bytes
        assert math.isclose(row.benefit_s_per_byte, expected, rel_tol=1e-12)
    assert max(row.affinity for row in rows) == 1.0
    assert min(row.affinity for row in rows) == 0.0


def test_units_hold_every_operator_once() -> None:
    ops = operators(3)
    for granularity in GRANULARITIES:
        members = [i for unit in units(ops, granularity) for i in unit]
        assert sorted(members) == list(range(len(ops)))
    assert len(units(ops, "block")) == 3 * 2 + 1
    assert len(units(ops, "layer")) == 3 + 1


def test_layers_is_ngl_from_the_end() -> None:
    ops = operators(4)
    problem = costs(ops, 4, [(1.0, 0.1)] * len(ops))
    placed = layers(problem, lambda first: 1000 + 2 * 7000)  # output and two layers
    assert placed.first_device_layer == 2
    assert {op.layer for op, device in zip(ops, placed.on_device, strict=True) if device} == {2, 3, None}


def test_affinity_of_a_unit_is_the_joint_saving_per_byte() -> None:
    ops = operators(1)
    problem = costs(ops, 1, [(5.0, 1.0)] * len(ops))
    assert Transfers(problem).times((0, 1)) == (10.0, 2.0, 2000)
    assert affinity(10.0, 2.0, 2.0, 2000) == pytest.approx((4.0 + 4.0 - 2.0) / 2000)
    assert affinity(10.0, None, 2.0, 2000) == -math.inf


@settings(max_examples=examples(50))
@given(st.data())
def test_units_asked_together_have_the_transfers_they_have_alone(data: st.DataObject) -> None:
    n_layer = 5
    ops = operators(n_layer)
    problem = costs(ops, n_layer, [(1.0, 1.0)] * len(ops), rates(1e-3, 1e-9, 1e-4))
    together, alone = Transfers(problem), Transfers(problem)
    for _ in range(4):
        on_device = data.draw(st.lists(st.booleans(), min_size=len(ops), max_size=len(ops)))
        first, granularity = data.draw(st.integers(0, n_layer + 1)), data.draw(st.sampled_from(GRANULARITIES))
        asked = units(ops, granularity)
        expected = [alone.of(on_device, first, unit) for unit in asked]
        assert together.of_all(asked, on_device, first) == expected


def test_memory_may_be_full_with_the_output_alone() -> None:
    """Where norms and KV of no layer fit."""
    ops = operators(2)
    problem = costs(ops, 2, [(1.0, 0.1)] * len(ops))
    found = search(problem, ops, lambda first: 1000 if first == 2 else -1, rule="full")
    assert found.first_device_layer == 2 and found.on_device == (*[False] * (len(ops) - 1), True)


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(seconds, seconds, st.integers(100, 4000)), min_size=22, max_size=22),
    st.floats(0, 1),
    st.integers(0, 8000),
    st.floats(0, 1e-2),
    st.floats(0, 1e-3),
)
def test_no_choice_of_layers_that_was_left_out_is_better(
    drawn: list[tuple[float, float, int]], share: float, layer_bytes: int, rest_s: float, crossing_s: float
) -> None:
    n_layer = 3
    ops = [replace(op, bytes=size) for op, (*_, size) in zip(operators(n_layer), drawn, strict=True)]
    times = [(on_cpu, there) for on_cpu, there, _ in drawn]
    problem = replace(costs(ops, n_layer, times, rates(crossing_s, 1e-9, crossing_s / 10)), rest_cpu_s=rest_s)
    total = sum(cost.bytes for cost in problem.operators)

    def room(first: int) -> int:
        return int(share * total) - (n_layer - min(first, n_layer)) * layer_bytes

    every = [search(problem, ops, room, first_layers=(first,)) for first in range(n_layer + 2)]
    found = search(problem, ops, room, first_layers=range(n_layer + 2))
    assert found.seconds == pytest.approx(min(one.seconds for one in every), rel=1e-9)
