"""Hot experts: within the bytes, as good as the best of all choices there are, and none where T' is not worth it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.core.types import Operator
from oallama.cost.operators import OperatorCost
from oallama.place.experts import (
    ExpertPrice,
    break_even_coverage,
    expert_affinities,
    expert_prices,
    hot_experts,
    of_operators,
)

Case = tuple[dict[int, tuple[float, ...]], list[ExpertPrice], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    use, prices = {}, []
    for layer in range(draw(st.integers(1, 3))):
        n_expert = draw(st.integers(1, 4))
        use[layer] = tuple(draw(st.lists(st.floats(0, 1), min_size=n_expert, max_size=n_expert)))
        seconds = st.floats(0, 2)
        prices.append(
            ExpertPrice(
                layer, n_expert, draw(st.integers(1, 9)), draw(seconds), draw(seconds), draw(seconds), draw(seconds)
            )
        )
    return use, prices, draw(st.integers(0, 40))


def saved_s(price: ExpertPrice, use: Sequence[float], chosen: Sequence[int]) -> float:
    if not chosen:
        return 0.0
    crossing_s = price.whole_s if len(chosen) == price.n_expert else price.join_s
    return sum(use[expert] * (price.t_cpu_s - price.t_gpu_s) for expert in chosen) - crossing_s


def total(case: Case, chosen: dict[int, tuple[int, ...]]) -> tuple[int, float]:
    """(bytes, seconds saved) of a choice."""
    use, prices, _ = case
    n_bytes = sum(price.bytes * len(chosen.get(price.layer, ())) for price in prices)
    return n_bytes, sum(saved_s(price, use[price.layer], chosen.get(price.layer, ())) for price in prices)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_no_choice_there_is_saves_more(case: Case) -> None:
    use, prices, available = case
    subsets = [
        [chosen for n in range(price.n_expert + 1) for chosen in itertools.combinations(range(price.n_expert), n)]
        for price in prices
    ]
    choices = (total(case, dict(zip(use, choice, strict=True))) for choice in itertools.product(*subsets))
    best = max(seconds for n_bytes, seconds in choices if n_bytes <= available)
    found = hot_experts(use, prices, available)
    n_bytes, seconds = total(case, found)
    assert n_bytes <= available
    assert seconds == pytest.approx(best, abs=1e-9)
    assert all(experts == tuple(sorted(set(experts))) != () for experts in found.values())


PRICE = ExpertPrice(0, 8, 100, t_cpu_s=1.0, t_gpu_s=0.1, join_s=0.5)
USE = (0.05, 0.6, 0.05, 0.05, 0.7, 0.4, 0.1, 0.05)


def test_the_most_used_go_first() -> None:
    assert hot_experts({0: USE}, [PRICE], 250) == {0: (1, 4)}
    assert hot_experts({0: USE}, [PRICE], 300) == {0: (1, 4, 5)}


def test_a_layer_whose_hot_set_is_not_worth_the_join_has_none() -> None:
    dear = replace(PRICE, layer=1, join_s=1.2)
    assert hot_experts({0: USE, 1: USE}, [PRICE, dear], 400) == {0: (1, 4, 5, 6)}
    assert hot_experts({1: USE}, [dear], 200) == {}


def test_a_whole_layer_is_taken_where_it_saves_the_crossing() -> None:
    even = (0.25,) * 8
    assert hot_experts({0: even}, [replace(PRICE, join_s=1.6)], 700) == {}
    assert hot_experts({0: even}, [replace(PRICE, join_s=1.6)], 800) == {0: tuple(range(8))}


def test_layers_without_counts_and_without_room_have_none() -> None:
    assert hot_experts({}, [PRICE], 400) == {}
    assert hot_experts({0: USE}, [PRICE], 99) == {}


def test_sizes_with_a_small_divisor_are_rounded_and_still_fit() -> None:
    mib = 1 << 20
    prices = [replace(PRICE, layer=layer, bytes=4 * mib + layer, join_s=0.0) for layer in range(16)]
    available = 16 * 3 * (4 * mib + 15) + 1
    found = hot_experts(dict.fromkeys(range(16), USE), prices, available)
    n_bytes = sum(price.bytes * len(found.get(price.layer, ())) for price in prices)
    assert available - 2 * 5 * mib < n_bytes <= available


def test_affinities_follow_use_and_share_the_crossing() -> None:
    found = expert_affinities(PRICE, USE, 3)
    assert found[4] == pytest.approx((0.7 * 0.9 - 0.5 / 3) / 100)
    assert sorted(range(8), key=lambda expert: -found[expert])[:3] == [4, 1, 5]


def test_break_even_is_where_coverage_above_the_share_pays_the_join() -> None:
    assert break_even_coverage(PRICE, 2, 0.25) == pytest.approx(0.25 + 0.5 / 1.8)
    assert break_even_coverage(replace(PRICE, t_gpu_s=1.0), 2, 0.25) == float("inf")


def test_prices_come_from_the_costs_of_gate_up_and_down() -> None:
    operators, costs = [], []
    for role, n_bytes in (("ffn_gate_exps", 800), ("ffn_up_exps", 800), ("ffn_down_exps", 1600)):
        for layer in (1, 2):
            name = f"blk.{layer}.{role}.weight"
            operators.append(
                Operator(name, layer, role, "MUL_MAT_ID", "Q8_0", (32, 32, 8), n_bytes, 0.25, n_expert_used=2)
            )
            on_device = None if (layer, role) == (2, "ffn_up_exps") else 0.2
            costs.append(OperatorCost(name, n_bytes, 2.0, on_device, "CPU"))
    router = Operator("blk.1.ffn_gate_inp.weight", 1, "ffn_gate_inp", "MUL_MAT", "F32", (32, 8, 1), 1024, 1.0)
    prices = expert_prices([*operators, router], [*costs, OperatorCost(router.name, 1024, 1.0, 0.1, "CPU")], 10, 0.5)
    assert of_operators([*operators, router], {1: (2, 5)}) == ((2, 5), ()) * 3 + ((),)
    assert prices == (ExpertPrice(1, 8, 400, pytest.approx(6 / 20), pytest.approx(0.6 / 20), 0.5),)
