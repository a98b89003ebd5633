"""The `scheinfer` policy as decisions and plans: never predicted slower than split or oato, within the memory, and with
what it streams written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from policy_cases import GPU, LOAD, N_LAYER, STREAMS, Table, plan_of, problem
from split_cases import model

from oallama.core.profile import LinearFit
from oallama.core.types import Workload
from oallama.model.cut import cut_granularity
from oallama.place.decide import decide
from oallama.place.placement import Candidate, placed_by_plan
from oallama.place.policies.registry import Rules
from oallama.place.price import price
from oallama.place.problem import Problem
from oallama.plan.patterns import split_names
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text
from oallama.plan.split import slice_counts


def cg_of(decision: Candidate) -> int:
    slices = decision.placement
    return sum(slices.cg) if slices else 0


def test_its_prediction_is_what_it_was_chosen_by() -> None:
    made = problem(STREAMS, free=10**7, gpu_weights=0.2)
    decision = decide(made, "scheinfer", LOAD, "mixed")
    assert cg_of(decision) > 0
    assert decision.predicted.total_s == pytest.approx(decision.placement.seconds)
    assert decision.predicted == price(made, decision.workload, decision.placement)


def test_the_ledger_counts_ring_and_second_copies() -> None:
    """A long prompt, and a repacked layout that is twice as fast: its CC is kept twice where the host has room."""
    load = Workload(n_prompt=512, n_gen=100, n_ctx=1024, n_ubatch=512)
    world = replace(STREAMS, cpu_rate=2e9, token_s_per_byte=2e-9, link=LinearFit(1e-6, 1e-9, 1.0))
    made = problem(world, free=10**7, gpu_weights=0.1)
    made = replace(made, profile=world.profile(made.operators, ("CPU_REPACK", "CPU")))
    for host_room in (0, 10**9):
        decision = decide(replace(made, host_room=host_room), "scheinfer", load, "mixed")
        slices, memory = decision.placement, decision.memory
        assert slices.is_sliced and slices.streaming is not None and memory.staging == slices.staging_bytes > 0
        assert memory.weights_gpu + memory.staging + memory.kv + memory.compute + memory.spare == memory.limit
        assert slices.streaming.kept_twice is (slices.twice_bytes > 0) is (host_room > 0)
        total, norms = sum(op.bytes for op in made.operators), 100 * N_LAYER
        assert 0 <= memory.weights_gpu + memory.weights_host - total - slices.twice_bytes <= norms


@pytest.mark.parametrize("prefetch", ["ahead", "layer"])
def test_the_plan_says_how_weights_are_streamed(prefetch: str) -> None:
    """A long prompt on a device with a fast link: some of its tokens go there (n_g)."""
    load = Workload(n_prompt=512, n_gen=1, n_ctx=1024, n_ubatch=512)
    made = problem(replace(STREAMS, cpu_rate=2e9, token_s_per_byte=1e-9), free=10**7, gpu_weights=0.2)
    decision = decide(made, "scheinfer", load, "mixed", Rules(prefetch=prefetch))  # type: ignore[arg-type]
    plan = plan_of(made, decision)
    plan.check(model(N_LAYER), made.operators)
    document = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(document) == plan
    assert (document["policy"], document["streaming"]["prefetch"]) == ("scheinfer", prefetch)
    table = [(row["n_tokens"], row["n_g"]) for row in document["token_assignment"]]
    assert table and table[-1][0] == 512 and 0 < table[-1][1] <= 512
    text = plugin_text(plan, made.operators, N_LAYER, "RPC0").splitlines()
    assert [line for line in text if line.startswith("tokens ")] == [f"tokens {n} {n_g}" for n, n_g in table]
    assert ("prefetch layer" in text) is (prefetch == "layer")
    given = split_names(plan, made.operators)
    for op, placement in zip(made.operators, plan.operators, strict=True):
        cc, cg, _ = slice_counts(op, placement)
        assert (cc % cut_granularity(op), cg % cut_granularity(op)) == (0, 0)
        if op.role.startswith("ffn_") and cc:
            assert op.name in given, "its CC is streamed for n_g"
            assert placement.layout == "CPU"
    again = placed_by_plan(N_LAYER, made.operators, plan)
    slices, kept = decision.placement, again
    assert slices.is_sliced and kept is not None
    assert again.on_device == decision.placement.on_device
    for field in ("gg", "cg", "token_assignment", "streaming"):
        assert getattr(kept, field) == getattr(slices, field)


def test_no_operator_that_is_all_gg_is_left_to_a_layer_on_the_host() -> None:
    """Slices alone: what the split backend does not hold would be llama.cpp's, which has no layers there."""
    made = replace(problem(GPU, free=10**8), slices_only=True)
    plan = plan_of(made, decide(made, "scheinfer", LOAD, "mixed"))
    assert plan.n_gpu_layers == 0 and any(p.gg > 0 for p in plan.operators)
    assert all(p.gg < 1 for p in plan.operators)


def test_pageable_memory_is_said_with_its_rate() -> None:
    made = problem(STREAMS, free=10**7, gpu_weights=0.2)
    slow = replace(made.profile, fingerprint={"device_host_buffer": False, "device_asynchronous": True})
    (note,) = decide(replace(made, profile=slow), "scheinfer", LOAD, "mixed").notes
    assert "no pinned host memory" in note and "4.66 GiB/s" in note
    fell_back = replace(made.profile, fingerprint={"device_host_buffer": True, "device_pins": False})
    (note,) = decide(replace(made, profile=fell_back), "scheinfer", LOAD, "mixed").notes
    assert "no pinned host memory" in note, "its buffer type gives plain memory"
    pinned = replace(made.profile, fingerprint={"device_host_buffer": True, "device_pins": True})
    assert decide(replace(made, profile=pinned), "scheinfer", LOAD, "mixed").notes == ()


def test_of_experts_a_token_streams_those_it_is_routed_to_where_that_pays() -> None:
    from policy_cases import experts

    ops = [
        op
        for layer in range(N_LAYER)
        for op in (replace(o, layer=layer, name=o.name.replace("blk.0", f"blk.{layer}")) for o in experts())
    ]
    token = Workload(1, 64, 256, 64)
    streamed = {}
    for alpha in (1e-6, 1.0):
        world = replace(STREAMS, link=LinearFit(alpha, 2e-10, 1.0))
        made = Problem(
            tuple(ops), problem(world, 10**8, ops).graph, world.profile(ops), Table(ops, 10**8), None, 0.9, 0.0
        )
        streamed[alpha] = cg_of(decide(replace(made, slices_only=True), "scheinfer", token, "mixed"))
    assert streamed[1e-6] > 0 == streamed[1.0]
