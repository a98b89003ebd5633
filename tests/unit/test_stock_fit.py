"""What stock --fit is taken to place: whole layers of dense models, experts last where there are some."""

from __future__ import annotations

import pytest
from described_cases import CARD, HOST, model, operators

from oallama.core.types import Operator
from oallama.cost.graph import build_graph
from oallama.cost.kernels import Kernels
from oallama.cost.passes import Pass
from oallama.cost.rates import transfer_rates
from oallama.cost.whole import Costs, operator_costs
from oallama.place.placement import Placement
from oallama.place.policies.stock import stock_fit
from oallama.profile.described import described

DECODE = (Pass(1, 256, 1),)


def fitted(n_expert: int, room: int, share_of_layer: float = 0.0) -> tuple[Placement, list[Operator]]:
    """The placement in `room` bytes, of which each layer on the device takes a share beside its operators."""
    of = model(n_expert=n_expert, n_expert_used=2 if n_expert else 0)
    ops = operators(of, "Q4_0")
    profile = described(HOST, CARD, of, ops, (1,))
    priced = operator_costs(Kernels(profile), ops, of.n_layer, DECODE)
    costs = Costs(priced, build_graph(of, ops), transfer_rates(profile), DECODE, 1e-5, 1e-6)
    return stock_fit(costs, ops, lambda first: room - int(share_of_layer * (of.n_layer - min(first, of.n_layer)))), ops


def there(placed: Placement, ops: list[Operator]) -> list[Operator]:
    return [op for op, on in zip(ops, placed.on_device, strict=True) if on]


def bytes_of(ops: list[Operator]) -> int:
    return sum(op.bytes for op in ops)


@pytest.mark.parametrize("n_expert", [0, 8])
def test_with_room_for_all_everything_is_there(n_expert):
    placed, ops = fitted(n_expert, 10**12)
    assert placed.first_device_layer == 0 and there(placed, ops) == ops


@pytest.mark.parametrize("n_expert", [0, 8])
def test_without_room_nothing_is_there(n_expert):
    placed, ops = fitted(n_expert, 0)
    assert there(placed, ops) == [] and placed.first_device_layer > max(op.layer or 0 for op in ops)


def test_a_dense_model_has_whole_layers_from_the_end():
    _, ops = fitted(0, 0)
    output = [op for op in ops if op.layer is None]
    last = [op for op in ops if op.layer == 3]
    room = bytes_of(output) + bytes_of(last) + min(op.bytes for op in ops)
    placed, _ = fitted(0, room)
    assert there(placed, ops) == last + output and placed.first_device_layer == 3


def test_what_a_layer_takes_besides_counts():
    _, ops = fitted(0, 0)
    room = bytes_of(ops)
    assert fitted(0, room)[0].first_device_layer == 0
    assert fitted(0, room, share_of_layer=1.0)[0].first_device_layer == 1


def test_experts_come_after_all_other_weights_and_from_the_end():
    _, ops = fitted(8, 0)
    others = [op for op in ops if op.op == "MUL_MAT"]
    experts = [op for op in ops if op.op == "MUL_MAT_ID" and op.layer == 3]
    placed, _ = fitted(8, bytes_of(others))
    assert placed.first_device_layer == 0 and there(placed, ops) == others
    placed, _ = fitted(8, bytes_of(others) + bytes_of(experts))
    assert set(there(placed, ops)) == {*others, *experts}


@pytest.mark.parametrize(("roles"), [("ffn_up_exps",), ("ffn_up_exps", "ffn_gate_exps")])
def test_one_layer_more_has_a_part_of_its_experts(roles):
    _, ops = fitted(8, 0)
    others = [op for op in ops if op.op == "MUL_MAT"]
    part = [op for op in ops if op.layer == 3 and op.role in roles]
    placed, _ = fitted(8, bytes_of(others) + bytes_of(part))
    assert set(there(placed, ops)) == {*others, *part}


def test_where_not_even_the_other_weights_fit_the_last_layers_have_theirs():
    _, ops = fitted(8, 0)
    tail = [op for op in ops if op.op == "MUL_MAT" and (op.layer is None or op.layer >= 2)]
    placed, _ = fitted(8, bytes_of(tail))
    assert placed.first_device_layer == 2 and there(placed, ops) == tail
