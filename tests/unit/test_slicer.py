"""Slices of a whole model: within memory, no slower than without, and as a plan that can be written and read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from slicing_cases import SHARED_MACHINES, STREAMED, gemm, machine, streamed
from split_cases import FF, World, ffn, llama, model

from oallama.core.profile import LinearFit, RestCase, Sharing
from oallama.core.types import Operator, StreamSettings, Workload
from oallama.cost.blocks import residents
from oallama.cost.graph import build_graph
from oallama.cost.kernels import interpolate
from oallama.cost.passes import Pass, passes
from oallama.cost.slices import Block, BlockType, Cut, Pricing
from oallama.cost.timeline import Timeline, timeline
from oallama.cost.whole import cpu_seconds, placement_seconds
from oallama.place.memory import SLOT_PADDING, ledger, ring_bytes, staging_bytes
from oallama.place.placement import Placement, nothing_there, placed_by_plan
from oallama.place.placement import placements as as_placements
from oallama.place.price import price
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.place.sharing import SlicePlan, Slicer
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts
from oallama.profile.store import profile_from_json, profile_to_json

LOAD = Workload(n_prompt=512, n_gen=32, n_ctx=1024, n_ubatch=512)
SLOW_CPU = World(cpu_rate=2e8, device_rate=8e9, token_s_per_byte=5e-10, link=LinearFit(1e-6, 5e-10, 1.0))


def ran(slicer: Slicer, plan: SlicePlan, n_tokens: int, n_rounds: int = 1) -> Timeline:
    """Passes one after another over all blocks in order."""
    times = slicer.pass_times(plan, Pass(n_tokens, 0, 1))
    return timeline(times * n_rounds, slicer.on.streaming)


def without_gap(of: BlockType) -> BlockType:
    return replace(of, around=replace(of.around, gap=((1, 0.0),)))


class Probe:
    def __call__(self, load: Workload, placed: Placement) -> LoadBytes:
        return LoadBytes(0, 0, 0, 0, 10**9)


def problem(world: World, ops: list[Operator], *sharing: Sharing, host_room: int = 0) -> Problem:
    profile = replace(world.profile(ops), sharing=sharing)
    return Problem(tuple(ops), build_graph(model(2), ops), profile, Probe(), None, 0.9, None, host_room=host_room)


def slicer_on(on: Pricing, load: Workload = LOAD, host_room: int = 0) -> Slicer:
    """For blocks that are given, on a machine that is given."""
    made = Slicer(problem(World(), llama(2), host_room=host_room), load)
    made.on = on
    return made


def layered(block: BlockType, n: int) -> list[Block]:
    return [Block((i,), (block,)) for i in range(n)]


@settings(max_examples=examples(8))
@given(STREAMED, SHARED_MACHINES, st.integers(1, 4), st.floats(0, 1.2))
def test_a_plan_fits_and_is_not_slower_than_without_slices(
    block: BlockType, on: Pricing, n_layer: int, share: float
) -> None:
    load = replace(LOAD, n_prompt=64, n_ubatch=64)
    room = int(share * n_layer * block.block.bytes)
    slicer = slicer_on(on, load)
    plan = slicer.plan_blocks(layered(block, n_layer), room, room // 2, n_values=4)
    nothing = slicer.plan_blocks(layered(block, n_layer), -1, -1, n_values=4)
    assert plan is not None and nothing is not None
    assert plan.weights_bytes + plan.staging_bytes <= max(room, 0)
    assert plan.weights_bytes <= room // 2
    assert plan.total_s(load) <= nothing.total_s(load) * (1 + 1e-9)
    assert nothing.weights_bytes == nothing.staging_bytes == 0
    assert nothing.is_empty


def test_the_predicted_token_is_the_exact_timeline_of_equal_layers() -> None:
    block = streamed([gemm(1e-3, 1e-4)] * 3, gap_s=1e-4)
    slicer = slicer_on(machine(1e-9))
    plan = slicer.plan_blocks(layered(block, 6), 0, 0)
    assert plan is not None and plan.layers[0][1].cg == 0, "no room for staging"
    plan = slicer.plan_blocks(layered(block, 6), 10**9, 0)
    assert plan is not None and {cut.cg for _, cut in plan.layers} != {0}
    ends = ran(slicer, plan, 1, n_rounds=6).block_ends_s
    assert (ends[-1] - ends[-13]) / 2 == pytest.approx(plan.decode_s, rel=1e-3)
    assert ran(slicer, plan, 512).end_s == pytest.approx(plan.prefill_s, rel=0.1)


def test_the_ring_and_activations_are_counted() -> None:
    block = streamed([gemm(1e-3, 1e-4, n_bytes=1024_000), gemm(1e-3, 1e-4, n_bytes=2048_000)])
    ring = StreamSettings(3, "ahead")
    half = ((block, Cut(512, 256, 256)),)
    activations = (256 + 256 + 3 * 256) * 4  # input, GG's result, the hidden values of CG
    padding = 2 * 2 * SLOT_PADDING
    assert staging_bytes(half, ring, 1, 0) == 3 * (768_000 + padding) + activations
    assert staging_bytes(half, ring, 1, 1) == 3 * (2304_000 + padding) + (256 + 256 + 3 * 768) * 4
    assert staging_bytes(((block, Cut(1024, 0, 0)),), ring, 1, 0) == 0
    assert staging_bytes(((block, Cut(0, 0, 1024)),), ring, 1, 0) == 0


def test_two_slots_take_as_much_as_two_blocks_that_follow_one_another() -> None:
    large = streamed([gemm(1e-3, 1e-4, n_bytes=2048_000)])
    small = streamed([gemm(1e-3, 1e-4, n_bytes=1024_000)])
    all_streamed, padding = Cut(0, 1024, 0), 2 * SLOT_PADDING
    layers = [(of, all_streamed) for of in (large, small, small, large, small)]
    ring = StreamSettings(2, "ahead")
    assert ring_bytes(layers, ring, 0) == 3072_000 + 2 * padding
    assert ring_bytes(layers[:4], ring, 0) == 4096_000 + 2 * padding, "the last is followed by the first"
    between = [layers[0], (large, Cut(1024, 0, 0)), layers[1]]
    assert ring_bytes(between, ring, 0) == ring_bytes(layers[:2], ring, 0), "what is not streamed takes none"
    assert ring_bytes(layers[:1], ring, 0) == ring_bytes(layers, StreamSettings(1, "ahead"), 0) == 2048_000 + padding
    assert ring_bytes(layers, StreamSettings(3, "ahead"), 0) == 3 * (2048_000 + padding)


def test_a_repacked_layout_is_given_up_or_kept_twice_where_prompts_are_long() -> None:
    plain = streamed([gemm(2e-3, 1e-4, n_bytes=20_000_000, per_token=0.5)] * 3)
    repacked = replace(plain, gemms=(gemm(1e-3, 1e-4, n_bytes=20_000_000, per_token=0.5),) * 3, layout="CPU_REPACK")
    blocks = [Block((i,), (plain, repacked)) for i in range(4)]
    chat = replace(LOAD, n_prompt=1, n_gen=100)
    document = replace(LOAD, n_prompt=4096, n_gen=100)

    def plan(load: Workload, host_room: int):  # type: ignore[no-untyped-def]
        made = slicer_on(machine(1e-9), load, host_room).plan_blocks(blocks, 10**9, 0)
        assert made is not None
        return {block.layout for block, _ in made.layers}, bool(made.token_assignment), made.kept_twice

    assert plan(chat, 0) == ({"CPU_REPACK"}, False, False)
    assert plan(document, 0) == ({"CPU"}, True, False)
    assert plan(document, 10**9) == ({"CPU_REPACK"}, True, True)


#
# beside OATO's placement
#


def on_device(ops: list[Operator], *roles: str) -> Placement:
    return Placement.whole(tuple(op.role in roles for op in ops), 0)


ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output", "output")


def sliced(made: Problem, placed: Placement, room: int, weights_room: int) -> tuple[SlicePlan, Placement] | None:
    slicer = Slicer(made, LOAD)
    plan = slicer.plan(placed, room, weights_room)
    return None if plan is None else (plan, slicer.placed(placed, plan))


def solved(world: World, weights_room: int = 300_000, *sharing: Sharing) -> tuple[list[Operator], SlicePlan, Placement]:
    """With enough room for staging, and so many bytes for slices; both FFNs together have 884,736."""
    ops = llama(2)
    found = sliced(problem(world, ops, *sharing), on_device(ops, *ATTENTION), 10**8, weights_room)
    assert found is not None
    return ops, *found


def test_a_solved_plan_is_a_record_that_can_be_written_and_run() -> None:
    ops, plan, placed = solved(replace(SLOW_CPU, cpu_rate=4e8))
    assert placed.is_sliced
    placements = as_placements(ops, placed)
    assert [p.name for p in placements] == [op.name for op in ops]
    by_role = dict(zip((op.role for op in ops), placements, strict=False))
    assert by_role["attn_q"].gg == by_role["output"].gg == 1
    assert 0 < by_role["ffn_up"].cg < 1 and plan.token_assignment
    for op, placement in zip(ops, placements, strict=True):
        cc, cg, gg = slice_counts(op, placement)
        assert cc % 32 == cg % 32 == 0 and cc + cg + gg > 0
    assert len({(p.cc, p.cg, p.gg) for p in placements if "ffn" in p.name and "blk.0." in p.name}) == 1
    memory = ledger(10**9, 0.9, plan.weights_bytes, 0, 0, 0, plan.staging_bytes)
    record = Plan(
        "m.gguf", "f" * 64, "", "RPC0", "scheinfer", LOAD, placements, 3, memory, None, plan.token_assignment,
        placed.streaming,
    )  # fmt: skip
    assert Plan.from_json(record.to_json()) == record
    record.check(replace(model(2), fingerprint="f" * 64), ops)
    again = placed_by_plan(2, ops, record)
    assert (again.on_device, again.gg, again.cg, again.layouts) == (
        placed.on_device,
        placed.gg,
        placed.cg,
        placed.layouts,
    )
    assert (again.device_bytes, again.streaming) == (placed.device_bytes, placed.streaming)


def test_with_nothing_sliced_the_price_is_the_one_of_whole_operators() -> None:
    far = replace(SLOW_CPU, link=LinearFit(1.0, 1.0, 1.0))
    ops = llama(2)
    found = sliced(problem(far, ops), nothing_there(len(ops), 3), 10**8, 0)
    assert found is not None
    plan, placed = found
    assert plan.is_empty
    expected = price(problem(far, ops), LOAD, Placement.whole(placed.on_device, placed.first_device_layer))
    assert plan.prefill_s == pytest.approx(expected.ttft_s)
    assert plan.decode_s == pytest.approx(expected.tpot_s)


WORLDS = st.builds(
    World, st.floats(1e8, 1e10), st.floats(1e8, 1e11), st.floats(0, 1e-5), st.floats(0, 1e-5), st.floats(0, 1e-9),
    st.floats(0, 1e-4), st.builds(LinearFit, st.floats(0, 1e-4), st.floats(1e-11, 1e-8), st.just(1.0)),
)  # fmt: skip


@settings(max_examples=examples(60))
@given(
    WORLDS, st.lists(st.integers(0, FF // 32 - 1), min_size=2, max_size=2), st.booleans(),
    st.sampled_from([1, 7, 64, 600, 1100]), st.sampled_from([32, 512]),
)  # fmt: skip
def test_with_nothing_streamed_the_price_is_the_sum_of_blocks_and_all_else(
    world: World, cuts: list[int], attention_there: bool, n_prompt: int, n_ubatch: int
) -> None:
    """Any GG of both FFNs, the output whole: prompts in several micro-batches, of which only the last has logits."""
    ops = llama(2)
    made = problem(world, ops)
    load = Workload(n_prompt, 16, 4096, n_ubatch)
    whole = on_device(ops, *(ATTENTION if attention_there else ("output",)))
    slicer = Slicer(made, load, streams=False)
    gg = dict(zip((0, 1), (32 * cut for cut in cuts), strict=True))
    layers, blocks = [], slicer.blocks(whole)
    for block in blocks:
        of = block.types[0]
        first = ops[block.operators[0]]
        there = gg[first.layer] if "ffn" in first.role and first.layer is not None else 0
        layers.append((of, Cut(of.block.extent - there, 0, there)))
    plan = slicer.priced(blocks, layers)
    inside = frozenset(
        i for block, (_, cut) in zip(blocks, layers, strict=True) if not cut.is_whole for i in block.operators
    )
    there = [on or i in inside for i, on in enumerate(whole.on_device)]  # slices live with norms and KV
    for phase, found in (("prefill", plan.prefill_s), ("decode", plan.decode_s)):
        over = passes(load, phase)
        expected = placement_seconds(costs_over(made, over), there, 0, inside) + sum(
            p.count * slicer.on.seconds(without_gap(of), cut, p.n_tokens, 0, p.n_outputs)
            for p in over
            for of, cut in layers
            if not cut.is_whole
        )
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("first_device_layer", [0, 1, 2, 3])
def test_blocks_are_of_what_is_on_the_host_and_know_what_lies_between_them(first_device_layer: int) -> None:
    """Layers from some on on the device, their FFNs left out: what is in no block takes its time where it is."""
    ops = llama(2)
    profile = SLOW_CPU.profile(ops)
    rest = tuple(
        RestCase(device, n_tokens, 512, seconds, (seconds,))
        for device, seconds in (("CPU", 1e-3), ("RPC0", 1e-4))
        for n_tokens in (1, 512)
    )
    made = replace(problem(SLOW_CPU, ops), profile=replace(profile, rest=rest))
    there = tuple((2 if op.layer is None else op.layer) >= first_device_layer and "ffn" not in op.role for op in ops)
    whole = Placement.whole(there, first_device_layer)
    found = Slicer(made, LOAD).blocks(whole)
    members = [i for block in found for i in block.operators]
    assert sorted(members) == [i for i, on in enumerate(there) if not on]
    over = (Pass(1, 512 + 16, 1),)
    lives = residents(ops, there, first_device_layer)  # slices live with norms and KV
    beside = [on or lives[i] for i, on in enumerate(there)]
    for uses in (True, False):
        costs = costs_over(made, over, uses)
        expected = placement_seconds(costs, beside, first_device_layer, frozenset(members))
        gaps = sum(interpolate(block.types[0].around.gap, 1) for block in found)
        assert gaps == pytest.approx(expected)
        on_cpu = cpu_seconds(costs, beside, first_device_layer, frozenset(members))
        assert sum(interpolate(block.types[0].around.gap_cpu, 1) for block in found) == pytest.approx(on_cpu)


def test_tokens_of_a_prompt_are_assigned_in_all_blocks_but_the_output() -> None:
    ops = llama(2)
    found = Slicer(problem(SLOW_CPU, ops), LOAD).blocks(nothing_there(len(ops), 0))
    takes = {ops[i].role: block.types[0].takes_n_g for block in found for i in block.operators}
    assert takes.pop("output") is False and set(takes.values()) == {True}


def test_what_is_on_the_device_stays_there() -> None:
    ops = llama(2)
    made = problem(SLOW_CPU, ops)
    assert sliced(made, Placement.whole((True,) * len(ops), 0), 10**6, 10**6) is None
    found = sliced(made, nothing_there(len(ops), 0), 10**8, 10**6)
    assert found is not None
    cut = {
        ops[i].role
        for block, (_, slices) in zip(found[0].blocks, found[0].layers, strict=True)
        if not slices.is_whole
        for i in block.operators
    }
    assert {"ffn_gate", "ffn_up", "ffn_down", "output"} <= cut


def test_more_memory_on_the_device_is_never_worse() -> None:
    size = sum(op.bytes for op in ffn(0)) * 2
    seconds = [solved(SLOW_CPU, size * i // 8)[1].total_s(LOAD) for i in (0, 1, 2, 4, 8)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(seconds))
    assert seconds[-1] < 0.9 * seconds[0]


def shared(cpu_left: float, link_left: float) -> tuple[Sharing, ...]:
    """What CPU and link leave each other in decode; in large batches nothing is lost."""
    return (
        Sharing("cpu", "link", 1, 1.0, 1.0, cpu_left, link_left),
        Sharing("cpu", "link", 32, 1.0, 1.0, 1.0, 1.0),
    )


def test_what_was_measured_together_decides() -> None:
    free = solved(SLOW_CPU)[1]  # the CPU alone reads 0.2 GB/s, the link 2 GB/s
    poor = solved(SLOW_CPU, 300_000, *shared(0.1, 0.15))[1]
    assert poor.decode_s > free.decode_s
    assert sum(cut.cg for _, cut in free.layers) > 0


def test_where_the_cpu_alone_uses_all_of_dram_a_token_streams_nothing() -> None:
    """Together they read no more than the CPU alone did: what is streamed, the CPU reads later. (Copies that run ahead
    may still use the time of attention.)"""
    token = replace(LOAD, n_prompt=1, n_gen=100)
    ops = llama(2)
    world = replace(SLOW_CPU, link=LinearFit(1e-6, 1e-8, 1.0))
    for cpu_left, streams in ((0.5, False), (1.0, True)):
        slicer = Slicer(problem(world, ops, *shared(cpu_left, 1.0)), token, StreamSettings(prefetch="layer"))
        plan = slicer.plan(on_device(ops, *ATTENTION), 10**8, 0)
        assert plan is not None
        assert any(cut.cg for _, cut in plan.layers) is streams


def test_an_old_profiles_contention_counts_the_same() -> None:
    ops = llama(2)
    old = {"cpu_alone_gb_per_s": 1.0, "link_alone_gb_per_s": 1.0, "cpu_with_link_gb_per_s": 0.1,
           "link_with_cpu_gb_per_s": 0.15}  # fmt: skip
    document = {**profile_to_json(problem(SLOW_CPU, ops).profile), "contention": old}
    made = replace(problem(SLOW_CPU, ops), profile=profile_from_json(document))
    found = sliced(made, on_device(ops, *ATTENTION), 10**8, 300_000)
    assert found is not None
    assert found[0].decode_s == pytest.approx(solved(SLOW_CPU, 300_000, *shared(0.1, 0.15))[1].decode_s)


def test_a_slow_link_streams_nothing_and_a_fast_one_more() -> None:
    amounts = []
    for beta in (1e-7, 4e-9, 1e-9, 2e-10):
        world = replace(SLOW_CPU, device_rate=1e11, link=LinearFit(1e-6, beta, 1.0))
        amounts.append(sum(cut.cg for _, cut in solved(world, 0)[1].layers))
    assert amounts == sorted(amounts) and amounts[0] < amounts[-1]
    dead = replace(SLOW_CPU, link=LinearFit(1.0, 1e-6, 1.0))
    found = sliced(problem(dead, llama(2)), nothing_there(len(llama(2)), 3), 10**8, 0)
    assert found is not None and found[0].is_empty


def test_without_streaming_nothing_is_copied() -> None:
    ops = llama(2)
    slicer = Slicer(problem(SLOW_CPU, ops), LOAD, streams=False)
    plan = slicer.plan(on_device(ops, *ATTENTION), 10**8, 300_000)
    assert plan is not None and not plan.streams and not plan.is_empty
    placed = slicer.placed(on_device(ops, *ATTENTION), plan)
    assert placed.is_sliced and placed.streaming is None
