"""Layers that are alike, spread over the model."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_cases import World, llama, model

from oallama.core.profile import LinearFit
from oallama.core.types import StreamSettings, Workload
from oallama.cost.graph import build_graph
from oallama.place.placed import Placed
from oallama.place.problem import LoadBytes, Problem
from oallama.place.slicer import Slicer
from oallama.place.spread import evenly, spread


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_the_same_items_come_back(items: list[str]) -> None:
    assert Counter(evenly(items)) == Counter(items)


@given(st.integers(1, 12), st.integers(1, 12))
def test_two_kinds_are_as_far_apart_as_they_can_be(n: int, m: int) -> None:
    found = evenly("a" * n + "b" * m)
    at = [i for i, item in enumerate(found * 2) if item == "b"]
    gaps = {after - before for before, after in pairwise(at)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1, "round the model, as one token follows another"


@pytest.mark.parametrize("first_device_layer", [0, 2])
def test_layers_exchange_their_sides_among_those_that_are_alike(first_device_layer: int) -> None:
    ops = llama(6)
    graph = build_graph(model(6), ops)
    there = [op.layer is not None and op.layer >= 3 and op.role.startswith("ffn") for op in ops]
    found = spread(ops, graph, Placed(tuple(there), first_device_layer))
    whole = [{op.layer for op, on in zip(ops, found.on_device, strict=True) if on}]
    assert sum(found.on_device) == sum(there)
    for layer in whole[0]:
        assert all(on for op, on in zip(ops, found.on_device, strict=True) if op.layer == layer and "ffn" in op.role)
    if first_device_layer == 2:
        assert min(layer for layer in whole[0] if layer is not None) >= 2, "others have their norms on the host"
    assert whole[0] != {3, 4, 5}


def token_s(n_layer: int, whole: tuple[int, ...]) -> float:
    """Predicted seconds of a token with these layers' FFNs whole on the device and the others' streamed through a ring
    of one slot: a copy begins where the streamed layer before it has ended."""
    world = World(cpu_rate=1e7, link=LinearFit(1e-6, 2e-9, 1.0))
    ops = llama(n_layer)
    probe = lambda load, placed: LoadBytes(0, 0, 0, 0, 10**9)  # noqa: E731
    made = Problem(tuple(ops), build_graph(model(n_layer), ops), world.profile(ops), probe, None, 0.9, None)
    on_device = tuple(op.layer in whole or not op.role.startswith("ffn") for op in ops)
    slicer = Slicer(made, Workload(64, 32, 128, 64), StreamSettings(1, "ahead"))
    blocks = slicer.blocks(Placed(on_device, 0))
    assert sum(of["CPU"].gap_share for of in blocks) == pytest.approx(len(blocks))
    plan = slicer.plan_blocks(blocks, 10**9, 0)
    assert plan is not None and plan.streams
    return plan.decode_s


def test_what_lies_before_a_block_is_its_own() -> None:
    world, n_layer = World(), 5
    ops = llama(n_layer)
    probe = lambda load, placed: LoadBytes(0, 0, 0, 0, 10**9)  # noqa: E731
    made = Problem(tuple(ops), build_graph(model(n_layer), ops), world.profile(ops), probe, None, 0.9, None)
    on_device = tuple(op.layer not in (0, 3) or not op.role.startswith("ffn") for op in ops)
    shares = [of["CPU"].gap_share for of in Slicer(made, Workload(64, 32, 128, 64)).blocks(Placed(on_device, 0))]
    assert len(shares) == 2 and sum(shares) == pytest.approx(2)
    assert shares[1] > shares[0], "three layers' attention and two FFNs against two, one and the output"


def test_a_token_is_fastest_where_streamed_layers_are_spread() -> None:
    seconds = {whole: token_s(6, whole) for whole in {tuple(sorted(p[:4])) for p in permutations(range(6))}}
    best = min(seconds.values())
    assert seconds[0, 1, 2, 3] > best * (1 + 1e-9)
    assert seconds[0, 1, 3, 4] == pytest.approx(best, rel=0.02), "layers 2 and 5 are streamed"
