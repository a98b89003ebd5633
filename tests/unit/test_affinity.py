"""OATO: affinity, the iteration and the fill, against hand arithmetic and brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import costs, operators, rates
from seeds import examples

from oallama.cost.whole import Costs
from oallama.place.affinity import affinity, fill, normalise, rank
from oallama.place.transfers import Transfers
from oallama.place.whole import search
from oallama.placer.affinity import affinities


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


def test_affinity_of_a_unit_is_the_joint_saving_per_byte() -> None:
    ops = operators(1)
    problem = costs(ops, 1, [(5.0, 1.0)] * len(ops))
    assert Transfers(problem).times((0, 1)) == (10.0, 2.0, 2000)
    assert affinity(10.0, 2.0, 2.0, 2000) == pytest.approx((4.0 + 4.0 - 2.0) / 2000)
    assert affinity(10.0, None, 2.0, 2000) == -math.inf
