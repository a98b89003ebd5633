"""From a policy to a verified placement, with a probe that answers from a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from placement_cases import model, operators

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.profile import LinearFit, Profile, ProfileCase
from oallama.core.types import MulMat, Operator, Workload
from oallama.cost.graph import build_graph
from oallama.place.decide import decide
from oallama.place.explain import baselines
from oallama.place.placement import Placement
from oallama.place.problem import LoadBytes, Problem, device_memory

N_LAYER = 4
LOAD = Workload(n_prompt=64, n_gen=32, n_ctx=256)


def profile(device: str = "RPC0", t_gpu_s: float = 0.1) -> Profile:
    cases = []
    for shape in ((256, 256, 1), (256, 1000, 1)):
        for n_tokens in (1, 512):
            mul_mat = MulMat("MUL_MAT", "F16", shape)
            cases.append(ProfileCase("CPU", "CPU", mul_mat, n_tokens, 0, 1.0, (1.0,)))
            cases.append(ProfileCase("RPC0", "device", mul_mat, n_tokens, 0, t_gpu_s, (t_gpu_s,)))
    link = {key: LinearFit(1e-3, 0.0, 1.0) for key in ("h2d_pinned", "h2d_pageable", "d2h")}
    return Profile(1, {}, device, tuple(cases), (), link if device != "CPU" else {}, None, 0.0, ())


class Table:
    """A probe: KV 100 bytes a layer, norms 10 bytes a layer, compute as a share of the micro-batch; hidden: of the
    bytes of operators there, more bytes."""

    def __init__(
        self,
        ops: list[Operator],
        free: int,
        compute_per_token: float = 0.0,
        hidden: Callable[[int], int] = lambda placed_bytes: 0,
    ) -> None:
        self.ops, self.free, self.compute_per_token, self.hidden = ops, free, compute_per_token, hidden
        self.asked: list[tuple[Workload, Placement]] = []

    def __call__(self, load: Workload, placed: Placement) -> LoadBytes:
        self.asked.append((load, placed))
        n_device_layers = max(0, N_LAYER - placed.first_device_layer)
        placed_bytes = sum(op.bytes for op, there in zip(self.ops, placed.on_device, strict=True) if there)
        total = sum(op.bytes for op in self.ops)
        if placed.first_device_layer > N_LAYER:
            return LoadBytes(0, total, 0, 0, self.free)
        compute = int(self.compute_per_token * load.n_ubatch) + self.hidden(placed_bytes)
        return LoadBytes(
            10 * n_device_layers + placed_bytes, total - placed_bytes, 100 * n_device_layers, compute, self.free
        )


def problem(free: int, gpu_weights: float | None = None, **table: Any) -> tuple[Problem, Table]:
    ops = operators(N_LAYER)
    probe = Table(ops, free, **table)
    graph = build_graph(model(N_LAYER), ops)
    return Problem(tuple(ops), graph, profile(), probe, None, 0.9, gpu_weights), probe


def test_what_the_probe_adds_is_taken_off_the_budget_until_it_fits() -> None:
    made, probe = problem(free=20_000, hidden=lambda placed_bytes: 2_500 if placed_bytes else 0)
    decision = decide(made, "oato", LOAD, "mixed")
    assert decision.memory.spare >= 0
    assert len(probe.asked) >= 3  # all on the host, a first proposal that is too large, a smaller one


@pytest.mark.parametrize("policy", ["oato", "layers", "scheinfer", "split"])
def test_what_the_first_look_counted_too_much_is_used(policy: str) -> None:
    """With every operator on the host, llama.cpp needs room to stream them; what is on the device needs none."""
    made, _ = problem(free=20_000, hidden=lambda placed_bytes: 0 if placed_bytes else 8_000)
    decision = decide(made, policy, LOAD, "mixed")
    assert 0 <= decision.memory.spare < (4_500 if policy == "layers" else 1_000)


@pytest.mark.parametrize("policy", ["oato", "scheinfer", "split"])
def test_what_is_a_little_too_large_again_and_again_is_shrunk_until_it_fits(policy: str) -> None:
    """What is taken off the device comes back as a buffer to stream it to, until enough is gone."""
    made, _ = problem(free=20_000, hidden=lambda placed_bytes: max(0, 17_000 - placed_bytes) * (placed_bytes > 9_000))
    decision = decide(made, policy, LOAD, "mixed")
    assert decision.memory.spare >= 0 and any(decision.placement.on_device)


def test_does_not_fit_names_required_available_and_device() -> None:
    made, _ = problem(free=1_000, compute_per_token=100)
    with pytest.raises(DoesNotFit) as caught:
        decide(made, "oato", LOAD, "mixed")
    assert (caught.value.required, caught.value.available, caught.value.device) == (6_400 + 440, 900, "RPC0")
    memory, load, notes = device_memory(made, LOAD, required=False)
    assert memory is None and load == LOAD and "even at a micro-batch of 64 tokens" in notes[0]
    fallback = decide(made, "auto", LOAD, "mixed")
    assert fallback.policy == "cpu"
    assert "everything stays on the CPU" in fallback.notes[0]


def test_auto_leaves_a_policy_alone_that_nothing_fits() -> None:
    """Whatever is taken off the device comes back as a buffer, and 500 bytes are always too much."""
    made, _ = problem(free=20_000, hidden=lambda placed_bytes: max(0, 18_500 - placed_bytes) if placed_bytes else 0)
    for policy in ("oato", "atsinfer"):
        with pytest.raises(DoesNotFit, match=f"the {policy} placement"):
            decide(made, policy, LOAD, "mixed")
    decision = decide(made, "auto", LOAD, "mixed")
    assert decision.memory.spare >= 0


@pytest.mark.parametrize(("compute_per_token", "n_ubatch"), [(0.05, 512), (1.0, 128)])
def test_the_micro_batch_is_not_halved_for_a_kv_cache_that_does_not_fit_anyway(
    compute_per_token: float, n_ubatch: int
) -> None:
    made, _ = problem(free=250, compute_per_token=compute_per_token)  # KV takes 400
    memory, load, notes = device_memory(made, LOAD, required=True)
    assert memory is not None and memory.operator_room(N_LAYER) >= 0
    assert load.n_ubatch == n_ubatch
    assert "some layers keep theirs on the host" in notes[-1] and len(notes) == 1 + (n_ubatch < 512)


def test_without_a_device_every_policy_is_the_cpu() -> None:
    made, _ = problem(free=0)
    alone = replace(made, profile=profile(device="CPU"))
    for policy in ("auto", "oato", "layers", "cpu"):
        assert decide(alone, policy, LOAD, "mixed").policy == "cpu"


def test_a_plan_is_held_against_stock_and_the_cpu_at_the_same_prices() -> None:
    made, probe = problem(free=10**6)
    plan = decide(made, "oato", LOAD, "mixed")
    asked = len(probe.asked)
    stock, alone, bound = baselines(made, LOAD, plan.memory)
    assert (stock.name, alone.name, bound.name) == ("stock --fit", "all CPU", "physical bound")
    assert 0 < bound.predicted.total_s <= plan.predicted.total_s
    assert stock.predicted == plan.predicted, "all fits, so both have all on the device"
    assert alone.predicted == decide(made, "cpu", LOAD, "mixed").predicted
    assert alone.predicted.total_s > 5 * stock.predicted.total_s
    assert all(question in probe.asked[:asked] for question in probe.asked[asked:-1]), "no dry load of their own"
    half, _ = problem(free=16_000, gpu_weights=0.5)
    plan = decide(half, "oato", LOAD, "mixed")
    stock, alone, bound = baselines(half, LOAD, plan.memory)
    assert bound.predicted.total_s <= plan.predicted.total_s <= stock.predicted.total_s < alone.predicted.total_s


def test_without_a_device_a_plan_is_held_against_the_cpu() -> None:
    made, _ = problem(free=10**6)
    held = decide(made, "cpu", LOAD, "mixed").memory
    assert (held.weights_gpu, held.kv, held.compute, held.staging) == (0, 0, 0, 0)
    for without in (replace(made, profile=profile(device="CPU")), replace(made, slices_only=True)):
        assert [one.name for one in baselines(without, LOAD, held)] == ["all CPU", "physical bound"]
    stock, alone, _ = baselines(problem(free=0)[0], LOAD, held)
    assert stock.predicted == alone.predicted


def test_an_encoder_beside_a_decoder_is_refused_in_a_sentence() -> None:
    made, _ = problem(free=10**6)
    encoder = [replace(op, name=f"enc.{op.name}", role=f"enc.{op.role}") for op in operators(N_LAYER, output=False)]
    ops = (*encoder, *made.operators)
    with pytest.raises(UsageError, match="an encoder beside its decoder, and such models are not placed"):
        replace(made, operators=ops, graph=build_graph(model(N_LAYER), ops))
