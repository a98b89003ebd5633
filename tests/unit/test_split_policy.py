"""The `split` policy: against brute force on small models, and as decisions and plans."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import GPU, LOAD, N_LAYER, PAIR, plan_of, problem
from seeds import examples
from split_cases import EMBD, FF, World, ffn, llama, model, operator

from oallama.core.profile import LinearFit
from oallama.core.types import Operator, Workload
from oallama.cost.blocks import split_blocks
from oallama.cost.slices import Cut
from oallama.model.cut import cut_extent, cut_granularity
from oallama.place.decide import decide
from oallama.place.memory import staging_bytes
from oallama.place.placement import Placement, cpu, n_gpu_layers, placed_by_plan
from oallama.place.price import price
from oallama.place.problem import LoadBytes, costs_of
from oallama.place.sharing import SlicePlan, Slicer
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts


def gg_of(placed: Placement) -> tuple[int, ...]:
    return placed.gg


def sliced(placed: Placement) -> bool:
    return any(gg_of(placed))


#
# cuts
#


def cut(world: World, ops: list[Operator], room: int, load: Workload = LOAD) -> tuple[SlicePlan, float]:
    """Slices alone within so many bytes, and the seconds with everything on the CPU."""
    made = problem(world, 10**9, ops)
    costs = costs_of(made, load, "mixed", llama_uses_device=False)
    plan = Slicer(made, load, streams=False).plan(cpu(costs), room, room)
    assert plan is not None
    return plan, cpu(costs).seconds


def gg_by_role(plan: SlicePlan, ops: list[Operator]) -> dict[str, int]:
    return {
        ops[block.operators[-1]].role: slices.gg for block, (_, slices) in zip(plan.blocks, plan.layers, strict=True)
    }


def test_both_sides_take_as_long() -> None:
    """One FFN, one token: the CPU three times as fast as the device, no costs beside: a quarter goes to the device."""
    ops = ffn(0)
    world = World(cpu_rate=3e9, device_rate=1e9, launch_s=0.0, link=LinearFit(0.0, 0.0, 1.0))
    plan, _ = cut(world, ops, 10**9, Workload(1, 64, 256))
    assert [slices.gg for _, slices in plan.layers] == [FF // 4]
    assert plan.decode_s == pytest.approx(sum(op.bytes for op in ops) / 4 / 1e9, rel=0.01)


@given(st.floats(1e8, 1e10), st.floats(0, 1e-3), st.floats(0, 1e-8), st.integers(0, 900_000))
@settings(max_examples=examples(25))
def test_cuts_are_close_to_brute_force(rate: float, launch_s: float, token_s: float, room: int) -> None:
    """Two FFNs and an output of a small model, every combination of their cuts within the memory."""
    ops = [*ffn(0, n_ff=256), *ffn(1, n_ff=256), operator("output", EMBD, 224, None)]
    world = World(device_rate=rate, launch_s=launch_s, token_s_per_byte=token_s)
    load = Workload(64, 32, 256, 16)
    made = problem(world, 10**9, ops)
    slicer = Slicer(made, load, streams=False)
    whole = cpu(costs_of(made, load, "mixed", llama_uses_device=False))
    found = slicer.blocks(whole)
    blocks = [block.types[0] for block in found]
    plan, start_s = cut(world, ops, room, load)
    assert plan.weights_bytes + plan.staging_bytes <= max(room, 0)

    def total_s(cuts: list[Cut]) -> float:
        return slicer.priced(found, list(zip(blocks, cuts, strict=True))).total_s(load)

    best, most = start_s, 0.0
    for choice in itertools.product(*((0, *of.block.cuts()) for of in blocks)):
        cuts = [Cut(of.block.extent - gg, 0, gg) for of, gg in zip(blocks, choice, strict=True)]
        layers, seconds = list(zip(blocks, cuts, strict=True)), total_s(cuts)
        n_bytes = sum(of.weight_bytes(cut) for of, cut in layers)
        if n_bytes + staging_bytes(layers, slicer.on.streaming, 16, 0) <= room:
            best = min(best, seconds)
        if sum(map(bool, choice)) == 1:  # what splitting one block saves at most
            most = max(most, start_s - seconds)
    assert plan.total_s(load) >= best * (1 - 1e-9)
    if not plan.short:
        assert plan.total_s(load) == pytest.approx(best)
    assert plan.total_s(load) <= best + most + 1e-12


@given(st.floats(1e8, 1e10), st.integers(0, 2_000_000), st.integers(0, 2_000_000))
@settings(max_examples=examples(15))
def test_more_memory_is_never_predicted_slower(rate: float, a: int, b: int) -> None:
    ops = llama(N_LAYER)
    made = [cut(World(device_rate=rate), ops, room) for room in sorted((a, b))]
    less, more = (plan.total_s(LOAD) for plan, _ in made)
    none = made[0][1]
    assert less <= none + 1e-12
    assert more <= less + 0.02 * none  # a greedy may end a little worse


def test_a_faster_device_takes_a_larger_slice() -> None:
    ops = llama(N_LAYER)
    down = [gg_by_role(cut(World(device_rate=rate), ops, 10**9)[0], ops)["ffn_down"] for rate in (1e8, 3e8, 1e9, 3e9)]
    assert down == sorted(set(down))


def test_a_slow_start_leaves_everything_where_it_is() -> None:
    plan, _ = cut(World(launch_s=1.0), llama(N_LAYER), 10**9)
    assert plan.is_empty


def test_what_is_whole_on_the_device_is_not_split() -> None:
    ops = llama(N_LAYER)
    on_device = tuple(op.layer == 1 and op.role.startswith("ffn_") for op in ops)
    slicer = Slicer(problem(PAIR, 10**9, ops), LOAD, streams=False)
    plan = slicer.plan(Placement.whole(on_device, 1), 10**9, 10**9)
    assert plan is not None
    cut_there = {
        (ops[i].layer, ops[i].role)
        for block, (_, slices) in zip(plan.blocks, plan.layers, strict=True)
        if slices.gg
        for i in block.operators
    }
    assert (0, "ffn_down") in cut_there
    assert not cut_there & {(1, role) for role in ("ffn_gate", "ffn_up", "ffn_down")}


#
# decisions
#


def test_slices_alone_need_nothing_of_llama_cpp_on_the_device() -> None:
    made = problem(PAIR, free=10**8)
    decision = decide(made, "split", LOAD, "mixed")
    placed, memory = decision.placement, decision.memory
    assert n_gpu_layers(N_LAYER, placed) == 0
    assert not any(placed.on_device)
    assert (memory.kv, memory.compute) == (0, 0)
    gg = gg_of(placed)
    blocks = [(block, gg[block.operators[0]]) for block in split_blocks(made.operators, gg)]
    assert memory.weights_gpu == sum(block.weight_bytes(elements) for block, elements in blocks)
    assert memory.staging == max(block.staging_bytes(elements, LOAD.n_ubatch) for block, elements in blocks)
    assert min(memory.weights_gpu, memory.staging) > 0
    assert memory.weights_gpu + memory.staging + memory.spare == memory.limit
    assert memory.weights_gpu + memory.weights_host == sum(op.bytes for op in made.operators)
    assert decision.predicted.total_s < decide(made, "cpu", LOAD, "mixed").predicted.total_s
    assert decision.predicted.total_s == pytest.approx(
        decision.predicted.ttft_s + LOAD.n_gen * decision.predicted.tpot_s
    )


@pytest.mark.parametrize("free", [10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**8])
@pytest.mark.parametrize("world", [PAIR, GPU])
def test_split_is_within_the_memory_and_never_predicted_slower_than_oato(world: World, free: int) -> None:
    made = problem(world, free, compute_per_token=100)
    split = decide(made, "split", LOAD, "mixed")
    assert split.memory.spare >= 0
    assert split.placement.seconds <= decide(made, "cpu", LOAD, "mixed").placement.seconds
    assert split.placement.seconds <= decide(made, "oato", LOAD, "mixed").placement.seconds + 1e-12
    assert decide(made, "auto", LOAD, "mixed").placement.seconds <= split.placement.seconds


def test_a_large_fast_device_takes_everything_whole() -> None:
    decision = decide(problem(GPU, free=10**8), "split", LOAD, "mixed")
    assert all(decision.placement.on_device)
    assert not decision.placement.is_sliced


def test_beside_whole_operators_slices_use_what_is_left() -> None:
    load = replace(LOAD, n_ubatch=8)
    made = problem(GPU, free=1_600_000, compute_per_token=100)
    decision = decide(made, "split", load, "mixed")
    assert any(decision.placement.on_device)
    assert sliced(decision.placement)
    assert decision.placement.seconds < decide(made, "oato", load, "mixed").placement.seconds
    assert decision.memory.kv > 0
    assert decision.memory.staging > 0


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_slices_count_in_the_cap_on_weights(share: float) -> None:
    made = problem(PAIR, free=10**8, gpu_weights=share)
    decision = decide(made, "split", LOAD, "mixed")
    assert 0 < decision.memory.weights_gpu <= share * sum(op.bytes for op in made.operators)


def test_the_micro_batch_is_lowered_where_activations_would_take_the_room_of_slices() -> None:
    load = replace(LOAD, n_ubatch=512, n_prompt=512, n_ctx=1024, n_gen=512)
    decision = decide(problem(PAIR, free=10**6), "split", load, "mixed")
    assert decision.workload.n_ubatch < 512
    assert "micro-batch lowered from 512" in decision.notes[0]
    assert sliced(decision.placement)


def test_where_nothing_gains_the_device_stays_empty_and_it_is_said() -> None:
    made = problem(replace(PAIR, launch_s=1.0, link=LinearFit(1.0, 0.0, 1.0)), free=10**8)
    decision = decide(made, "split", LOAD, "mixed")
    assert not decision.placement.uses_device(N_LAYER)
    assert "nothing is placed on RPC0" in decision.notes[0]
    assert plan_of(made, decision).device == "none"


def test_without_a_device_split_is_the_cpu() -> None:
    made = problem(PAIR, free=0)
    alone = replace(made, profile=replace(made.profile, device="CPU", link={}))
    assert decide(alone, "split", LOAD, "mixed").policy == "cpu"


def test_auto_says_nothing_of_memory_that_slices_do_not_need() -> None:
    """KV and compute buffers do not fit, slices do."""
    made = problem(PAIR, free=10**6, compute_per_token=10**6)
    decision = decide(made, "auto", LOAD, "mixed")
    assert decision.policy in ("split", "scheinfer")
    assert not any("stays on the CPU" in note for note in decision.notes)


#
# plans
#


def test_the_plan_names_fractions_layouts_and_the_device() -> None:
    made = problem(PAIR, free=10**8)
    made = replace(made, profile=replace(made.profile, fingerprint={"device_host_buffer": False}))
    decision = decide(made, "split", LOAD, "mixed")
    plan = plan_of(made, decision)
    plan.check(model(N_LAYER), made.operators)
    document = json.loads(json.dumps(plan.to_json()))
    assert (document["policy"], document["device"], document["n_gpu_layers"]) == ("split", "rpc-worker", 0)
    assert Plan.from_json(document) == plan
    rows = {row["name"]: row for row in document["operators"]}
    for op, elements in zip(made.operators, gg_of(decision.placement), strict=True):
        row = rows[op.name]
        assert row["gg"] == elements / cut_extent(op)
        assert row["gg"] + row["cg"] + row["cc"] == pytest.approx(1, abs=1e-12)
        assert row.get("layout") == ("CPU" if elements else None), "named only where our backend holds it"
        cc, _, gg = slice_counts(op, next(p for p in plan.operators if p.name == op.name))
        assert (gg, cc % cut_granularity(op)) == (elements, 0) if elements else (gg, cc) == (0, cut_extent(op))
    again = placed_by_plan(N_LAYER, made.operators, plan)
    assert (gg_of(again), again.on_device, again.first_device_layer) == (
        gg_of(decision.placement), decision.placement.on_device, decision.placement.first_device_layer
    )  # fmt: skip


@pytest.mark.parametrize("weight_type", ["Q4_K", "Q8_0", "F16"])
def test_gate_up_and_down_are_cut_at_the_same_element(weight_type: str) -> None:
    ops = llama(N_LAYER, weight_type)
    made = problem(PAIR, free=10**8, ops=ops)
    plan = plan_of(made, decide(made, "split", LOAD, "mixed"))
    plan.check(model(N_LAYER), ops)
    for layer in range(N_LAYER):
        counts = {
            slice_counts(op, p)
            for op, p in zip(ops, plan.operators, strict=True)
            if op.layer == layer and op.role.startswith("ffn_")
        }
        assert len(counts) == 1
        assert 0 < counts.pop()[2] < FF


def test_routed_and_shared_experts_are_blocks_of_their_own_and_mla_stacks_stay_whole() -> None:
    def layer(i: int) -> list[Operator]:
        routed = (("ffn_gate_exps", EMBD, FF), ("ffn_up_exps", EMBD, FF), ("ffn_down_exps", FF, EMBD))
        shared = (("ffn_gate_shexp", EMBD, FF), ("ffn_up_shexp", EMBD, FF), ("ffn_down_shexp", FF, EMBD))
        return [
            operator("attn_k_b", 64, EMBD, i, e=8),
            operator("ffn_gate_inp", EMBD, 8, i, weight_type="F32"),
            *(operator(role, k, n, i, e=8, used=2) for role, k, n in routed),
            *(operator(role, k, n, i) for role, k, n in shared),
        ]

    ops = [*layer(0), *layer(1)]
    made = problem(PAIR, free=10**8, ops=ops)
    decision = decide(made, "split", LOAD, "mixed")
    plan_of(made, decision).check(model(N_LAYER), ops)
    split = {op.role for op, elements in zip(ops, gg_of(decision.placement), strict=True) if elements}
    assert split == {op.role for op in ops if op.role.endswith(("_exps", "_shexp"))}


@pytest.mark.parametrize("policy", ["split", "scheinfer", "auto"])
def test_where_llama_cpp_cannot_use_the_device_only_slices_go_there(policy: str) -> None:
    """cpu-pair: the second CPU is faster, yet nothing lies there whole."""
    made = replace(problem(GPU, free=10**8), slices_only=True)
    decision = decide(made, policy, LOAD, "mixed")
    assert decision.policy in (("split", "scheinfer") if policy == "auto" else (policy,))
    assert n_gpu_layers(N_LAYER, decision.placement) == 0
    assert sliced(decision.placement)
    assert not any(decision.placement.on_device)


def test_what_a_load_takes_beside_whole_operators_is_taken_off_their_room() -> None:
    """Every load takes half a megabyte more on the device than what was said with nothing there."""
    made = problem(GPU, free=1_600_000, compute_per_token=100)

    def hiding(load: Workload, placed: Placement) -> LoadBytes:
        taken = made.probe(load, placed)
        return replace(taken, compute=taken.compute + 500_000 * any(placed.on_device))

    load = replace(LOAD, n_ubatch=8)
    exact, hidden = (decide(replace(made, probe=p), "split", load, "mixed") for p in (made.probe, hiding))
    assert hidden.memory.spare >= 0
    assert sum(hidden.placement.on_device) < sum(exact.placement.on_device)


def test_where_whole_operators_never_fit_slices_are_what_is_left() -> None:
    made = problem(GPU, free=1_000_000, compute_per_token=100)

    def insatiable(load: Workload, placed: Placement) -> LoadBytes:
        taken = made.probe(load, placed)
        return replace(taken, kv=taken.kv + 10**7 * any(placed.on_device))

    decision = decide(replace(made, probe=insatiable), "split", replace(LOAD, n_ubatch=8), "mixed")
    assert not any(decision.placement.on_device)
    assert sliced(decision.placement)
    assert decision.memory.spare >= 0


def test_a_plan_that_lost_its_prediction_is_priced_anew() -> None:
    """As the engine leaves it where a cut moved."""
    made = problem(PAIR, 10**8)
    decision = decide(made, "split", LOAD, "mixed")
    assert sliced(decision.placement)
    plan = replace(plan_of(made, decision), predicted=None)
    found = price(made, plan.workload, placed_by_plan(N_LAYER, made.operators, plan))
    assert found.ttft_s == pytest.approx(decision.predicted.ttft_s)
    assert found.tpot_s == pytest.approx(decision.predicted.tpot_s)
