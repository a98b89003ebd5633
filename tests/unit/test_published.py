"""Policies of other systems as decisions and plans: `flexgen` and `fiddler`, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import LOAD, N_LAYER, SLOW, plan_of, problem, with_experts
from seeds import examples
from split_cases import World

from oallama.core.errors import UsageError
from oallama.core.profile import LinearFit
from oallama.core.types import Operator, Workload
from oallama.cost.slices import Cut
from oallama.place.decide import decide
from oallama.place.policies.fiddler import token_table
from oallama.place.policies.flexgen import order
from oallama.place.policies.modules import Module
from oallama.place.policies.registry import POLICIES
from oallama.place.problem import Problem
from oallama.plan.split import slice_counts

FAST_CPU = World(cpu_rate=1e10, device_rate=8e9, link=LinearFit(1e-4, 1e-8, 1.0))
PUBLISHED = {one.name: one.published for one in POLICIES.values() if one.published}
DENSE = tuple(policy for policy in PUBLISHED if policy != "fiddler")


#
# all of them
#


@settings(max_examples=examples(25))
@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.sampled_from([SLOW, FAST_CPU, World()]),
    st.integers(5_000, 3_000_000),
    st.sampled_from([None, 0.0, 0.3]),
)
def test_they_keep_to_the_memory_and_their_plans_are_legal(
    policy: str, world: World, free: int, gpu_weights: float | None
) -> None:
    made = with_experts(world, free) if policy == "fiddler" else problem(world, free)
    made = replace(made, gpu_weights=gpu_weights)
    decision = decide(made, policy, LOAD, "mixed")
    memory = decision.memory
    assert memory.spare >= 0
    assert memory.weights_gpu + memory.kv + memory.compute + memory.staging + memory.spare == memory.limit
    plan = plan_of(made, decision)
    for op, placement in zip(made.operators, plan.operators, strict=True):
        assert sum(slice_counts(op, placement)) > 0
    if gpu_weights is not None:
        whole = sum(op.bytes for op, there in zip(made.operators, decision.placement.on_device, strict=True) if there)
        assert whole <= gpu_weights * sum(op.bytes for op in made.operators)


@pytest.mark.parametrize("policy", [policy for policy in DENSE if policy != "twinpilots"])
def test_with_room_for_all_everything_is_on_a_fast_device(policy: str) -> None:
    decision = decide(problem(SLOW, free=10**8), policy, LOAD, "mixed")
    assert all(decision.placement.on_device) and not decision.placement.is_sliced


@pytest.mark.parametrize("policy", sorted(PUBLISHED))
def test_plans_say_what_of_the_published_system_is_not_there(policy: str) -> None:
    made = with_experts(SLOW, 10**8) if policy == "fiddler" else problem(SLOW, free=10**6)
    decision = decide(made, policy, LOAD, "mixed")
    assert decision.policy == policy and PUBLISHED[policy] in decision.notes


@pytest.mark.parametrize("policy", sorted(PUBLISHED))
def test_a_device_that_llama_cpp_cannot_use_is_refused(policy: str) -> None:
    made = replace(problem(SLOW, free=10**6), slices_only=True)
    with pytest.raises(UsageError, match="use split or scheinfer"):
        decide(made, policy, LOAD, "mixed")


def test_the_prediction_is_what_it_was_chosen_by() -> None:
    decision = decide(problem(SLOW, free=10**7, gpu_weights=0.0), "hetegen", LOAD, "mixed")
    assert decision.predicted.total_s == pytest.approx(decision.placement.seconds)


#
# flexgen
#


def test_flexgen_streams_whatever_is_not_on_the_device() -> None:
    made = problem(SLOW, free=1_500_000)
    decision = decide(made, "flexgen", replace(LOAD, n_ubatch=8), "mixed")
    plan = plan_of(made, decision)
    fractions = {op.name: (p.gg, p.cg, p.cc) for op, p in zip(made.operators, plan.operators, strict=True)}
    in_layers = {fractions[op.name] for op in made.operators if op.layer is not None}
    assert in_layers == {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)}


def test_flexgen_spreads_the_share_over_layers_from_their_ends() -> None:
    def module(layer: int | None, cut: bool = True) -> Module:
        return Module((0,), layer, 10, 1.0, (None, Cut(0, 1, 0)) if cut else None)  # type: ignore[arg-type]

    found = [*(module(layer) for layer in range(8) for _ in range(2)), module(None, cut=False)]
    ranked = order(found)
    assert ranked[0] == 16, "what cannot be streamed"
    layers = [found[i].layer for i in ranked[1:]]
    assert all(i % 2 == 1 for i in ranked[1:9]) and all(i % 2 == 0 for i in ranked[9:])
    assert layers[:8] == [0, 4, 2, 6, 1, 5, 3, 7]


#
# fiddler
#


def roles_there(made: Problem, placed: tuple[bool, ...]) -> set[str]:
    return {op.role for op, there in zip(made.operators, placed, strict=True) if there}


def expert_bytes(made: Problem) -> tuple[int, int]:
    """(bytes of one layer's experts, bytes of everything else)."""
    routed = [op for op in made.operators if op.op == "MUL_MAT_ID"]
    return sum(op.bytes for op in routed) // N_LAYER, sum(op.bytes for op in made.operators) - sum(
        op.bytes for op in routed
    )


def test_fiddler_keeps_experts_on_the_host_and_the_rest_on_the_device() -> None:
    made = with_experts(FAST_CPU, 10**8)
    layer, others = expert_bytes(made)
    small = replace(made, vram=int((others + layer // 2 + 5_000) / 0.9))
    placed = decide(small, "fiddler", LOAD, "mixed").placement
    wanted: list[Operator] = [op for op in made.operators if op.op == "MUL_MAT"]
    assert [op for op, there in zip(made.operators, placed.on_device, strict=True) if there] == wanted
    one_layer = replace(made, vram=int((others + layer + 5_000) / 0.9))
    placed = decide(one_layer, "fiddler", LOAD, "mixed").placement
    there = {(op.layer, op.op) for op, on in zip(made.operators, placed.on_device, strict=True) if on}
    assert (N_LAYER - 1, "MUL_MAT_ID") in there and (0, "MUL_MAT_ID") not in there


def test_fiddler_copies_experts_for_the_batches_for_which_that_pays() -> None:
    """Long prompts, where the CPU takes ever longer and a copy always the same."""
    load = Workload(n_prompt=512, n_gen=8, n_ctx=1024, n_ubatch=512)
    made = with_experts(replace(SLOW, token_s_per_byte=2e-9, link=LinearFit(1e-6, 4e-8, 1.0)), 10**8)
    layer, others = expert_bytes(made)
    made = replace(made, gpu_weights=(others + 1) / (others + N_LAYER * layer))
    slices = decide(made, "fiddler", load, "mixed").placement
    assert slices.is_sliced and not any(slices.cg) and not any(slices.gg)
    table = dict(slices.token_assignment)
    assert table[512] == 512 and min(table) > 1
    assert table[min(table)] == 0


def test_fiddler_computes_experts_on_the_cpu_where_copying_never_pays() -> None:
    """In the split back end, as llama.cpp would copy what it has for every large batch."""
    load = Workload(n_prompt=512, n_gen=8, n_ctx=1024, n_ubatch=512)
    made = with_experts(World(cpu_rate=1e10, device_rate=1e10, link=LinearFit(1e-3, 1e-6, 1.0)), 10**8)
    layer, others = expert_bytes(made)
    made = replace(made, gpu_weights=(others + 1) / (others + N_LAYER * layer))
    placed = decide(made, "fiddler", load, "mixed").placement
    assert placed.is_sliced and placed.token_assignment == ((512, 0),)
    assert placed.device_bytes == 0, "nothing is copied, so there is no ring"


def test_fiddler_tables_are_all_or_nothing() -> None:
    from oallama.place.cutting import n_g_at

    table = token_table(20, 512)
    assert [n_g_at(table, n) for n in (1, 19, 20, 100, 512, 600)] == [0, 0, 20, 100, 512, 600]
    assert [n_g_at(token_table(1, 64), n) for n in (1, 64)] == [1, 64]
    assert [n_g_at(token_table(None, 512), n) for n in (1, 511, 512, 600)] == [0] * 4
    assert [n_g_at(token_table(512, 512), n) for n in (511, 512)] == [0, 512]


def test_fiddler_is_for_experts() -> None:
    with pytest.raises(UsageError, match="models with experts"):
        decide(problem(SLOW, free=10**6), "fiddler", LOAD, "mixed")
