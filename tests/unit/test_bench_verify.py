"""Arms that are not what they say, and arms that are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_cases import N_LAYER, NAMES, OPERATORS, capped, planned, report, stock

from oallama.bench.records import ArmSpec
from oallama.bench.verify import problems, same_as
from oallama.core.types import Operator
from oallama.run.stock import Cap, StockPlacement, expected_places, expert_overrides, operator_bytes_on_device

LAST_LAYER = ("blk.1.attn_q.weight", "blk.1.ffn_down.weight", "output.weight")


def found(spec: ArmSpec, read_back: object, cap: Cap | None = None) -> tuple[str, ...]:
    return problems(capped(spec, cap or Cap()), read_back, OPERATORS, N_LAYER)  # type: ignore[arg-type]


def test_an_arm_that_did_what_it_says_has_no_problem() -> None:
    assert found(stock("stock-ngl", 2), report(*LAST_LAYER)) == ()
    assert found(stock("stock-cpu", 0), report()) == ()
    assert found(stock("stock-ngl", 99), report(*NAMES)) == ()
    assert found(planned("oato", {LAST_LAYER[0]: 1.0}), report(LAST_LAYER[0])) == ()


def test_a_layer_count_off_by_one_is_noticed() -> None:
    (problem,) = found(stock("stock-ngl", 2), report("output.weight"))
    assert "blk.1.attn_q.weight and 1 more is not where it says: 100%" in problem


def test_a_stock_arm_with_our_plugin_in_the_registry_is_noticed() -> None:
    (problem,) = found(stock("stock-ngl", 2), report(*LAST_LAYER, plugins=("OALLAMA",)))
    assert "stock arm but has OALLAMA" in problem


def test_a_split_is_compared_by_its_share() -> None:
    name = "blk.0.ffn_down.weight"
    spec = planned("split", {name: 0.5})
    split = report(places={**report().places, name: "split"}, device_share={name: 0.5})
    assert found(spec, split) == ()
    (moved,) = found(spec, replace(split, device_share={name: 0.25}))
    assert f"50% of {name} on the device, but 25% is there" in moved
    (unknown,) = found(spec, replace(split, device_share={}))
    assert "could not be read back" in unknown


@pytest.mark.parametrize(
    ("cap", "fits"),
    [
        (Cap(), True), (Cap(5000), True), (Cap(4900), False), (Cap(None, 5000), True), (Cap(None, 4900), False),
        (Cap(4960, 4960), True),  # within a hundredth
    ],
)  # fmt: skip
def test_the_cap_holds_for_bytes_and_for_weights(cap: Cap, fits: bool) -> None:
    assert (found(stock("stock-ngl", 2), report(*LAST_LAYER), cap) == ()) == fits


def test_arms_that_are_the_same_are_found_whatever_they_are_called() -> None:
    a, b = report(*LAST_LAYER), report(*LAST_LAYER, n_gpu_layers=7, facts={})
    assert same_as([("stock-ngl", a), ("auto", b), ("stock-cpu", report())]) == {"auto": "stock-ngl"}


@pytest.mark.parametrize(
    "change",
    [
        {"flash_attn": False}, {"n_threads": 2}, {"n_ubatch": 64}, {"type_k": "q8_0"}, {"buffers": {"CPU": (1, 2, 3)}},
        {"layouts": dict.fromkeys(NAMES, "CPU")}, {"device_share": {"output.weight": 0.5}},
    ],
    ids=str,
)  # fmt: skip
def test_arms_that_differ_in_anything_that_matters_are_not_the_same(change: dict[str, object]) -> None:
    assert same_as([("a", report()), ("b", report(**change))]) == {}


def test_overrides_go_before_layers() -> None:
    placement = StockPlacement(99, ((r"blk\.0\.ffn_down", "CPU"),))
    places = expected_places(OPERATORS, N_LAYER, placement)
    assert [name for name, place in places.items() if place == "host"] == ["blk.0.ffn_down.weight"]
    assert expected_places(OPERATORS, N_LAYER, StockPlacement(-1)) == dict.fromkeys(NAMES, "device")
    assert operator_bytes_on_device(OPERATORS, N_LAYER, placement) == 6000


def test_ncmoe_keeps_the_experts_of_the_first_layers_on_the_host_and_nothing_else() -> None:
    roles = ("ffn_up_exps", "ffn_gate_inp", "ffn_down_chexps", "ffn_up_shexp")
    layers = (0, 1, 10)
    operators = [
        Operator(f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT_ID", "Q4_0", (32, 32, 4), 100, 0.5)
        for layer in layers
        for role in roles
    ]
    places = expected_places(operators, 11, StockPlacement(99, expert_overrides(1), 1))
    assert {name for name, place in places.items() if place == "host"} == {
        "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_chexps.weight"
    }  # fmt: skip


def test_a_plan_that_the_engine_did_not_follow_is_noticed() -> None:
    (problem,) = found(planned("oato", dict.fromkeys(LAST_LAYER, 1.0)), report(*LAST_LAYER[:2]))
    assert "output.weight is not where it says" in problem


def test_what_was_not_seen_is_not_believed() -> None:
    (problem,) = found(stock("stock-cpu", 0), report(places={}))
    assert "could not be read back" in problem
