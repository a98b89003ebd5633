"""Slices of a whole model: within memory, no slower than without, and as a plan that can be written and read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import SHARED_MACHINES, STREAMED, gemm, machine, streamed
from split_cases import FF, World, ffn, llama, model

from oallama.core.types import Contention, LinearFit, Operator, PlanRecord, Workload
from oallama.cost.graph import build_graph
from oallama.cost.slice_times import StreamedBlock
from oallama.cost.timeline import Prefetch
from oallama.place.baselines import Placed
from oallama.place.budget import ledger
from oallama.place.problem import LoadBytes, Problem, predicted_of
from oallama.place.record import placed_by_plan
from oallama.place.record import placements as as_placements
from oallama.place.slice_plan import SLOT_PADDING, SlicePlan, model_timeline, plan_slices, priced, staging_bytes
from oallama.place.slice_rest import Slicer, streamed_placement
from oallama.place.slicing import Slices, Streaming
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts

LOAD = Workload(n_prompt=512, n_gen=32, n_ctx=1024, n_ubatch=512)
SLOW_CPU = World(cpu_rate=2e8, device_rate=8e9, token_s_per_byte=5e-10, link=LinearFit(1e-6, 5e-10, 1.0))


def layered(block: StreamedBlock, n: int) -> list[dict[str, StreamedBlock]]:
    return [{"CPU": replace(block, block=replace(block.block, operators=(i,)))} for i in range(n)]


@settings(deadline=None, max_examples=8)
@given(STREAMED, SHARED_MACHINES, st.integers(1, 4), st.floats(0, 1.2))
def test_a_plan_fits_and_is_not_slower_than_without_slices(
    block: StreamedBlock, on: Streaming, n_layer: int, share: float
) -> None:
    load = replace(LOAD, n_prompt=64, n_ubatch=64)
    room = int(share * n_layer * block.block.bytes)
    plan = plan_slices(layered(block, n_layer), on, room, room // 2, load, n_values=4)
    nothing = plan_slices(layered(block, n_layer), on, -1, -1, load, n_values=4)
    assert plan.weights_bytes + plan.staging_bytes <= max(room, 0)
    assert plan.weights_bytes <= room // 2
    assert plan.total_s(load) <= nothing.total_s(load) * (1 + 1e-12)
    assert nothing.weights_bytes == nothing.staging_bytes == 0
    assert all(made.cc == block.block.extent for _, made in nothing.layers)


def test_the_predicted_token_is_the_exact_timeline_of_equal_layers() -> None:
    block = streamed([gemm(1e-3, 1e-4)] * 3, gap_s=1e-4)
    on = machine(1e-9)
    plan = plan_slices(layered(block, 6), on, 0, 0, LOAD)
    assert plan.layers[0][1].cg == 0, "no room for staging"
    plan = plan_slices(layered(block, 6), on, 10**9, 0, LOAD)
    assert {made.cg for _, made in plan.layers} != {0}
    ends = model_timeline(plan, on, 1, n_rounds=6).block_ends_s
    assert (ends[-1] - ends[-13]) / 2 == pytest.approx(plan.decode_s, rel=1e-3)
    assert model_timeline(plan, on, 512).end_s == pytest.approx(plan.prefill_s, rel=0.1)


def test_the_ring_and_activations_are_counted() -> None:
    block = streamed([gemm(1e-3, 1e-4, n_bytes=1024_000), gemm(1e-3, 1e-4, n_bytes=2048_000)])
    on = machine(1e-9, Prefetch("continuous", 3))
    half = ((block, Slices(512, 256, 256, 0.0)),)
    activations = (256 + 256 + 3 * 512) * 4
    padding = 2 * 2 * SLOT_PADDING
    assert staging_bytes(half, on, 1, False) == 3 * (768_000 + padding) + activations
    assert staging_bytes(half, on, 1, True) == 3 * (2304_000 + padding) + (256 + 256 + 3 * 1024) * 4
    assert staging_bytes(((block, Slices(1024, 0, 0, 0.0)),), on, 1, False) == 0
    assert staging_bytes(((block, Slices(0, 0, 1024, 0.0)),), on, 1, False) == 0


def test_a_repacked_layout_is_given_up_or_kept_twice_where_prompts_are_long() -> None:
    plain = streamed([gemm(2e-3, 1e-4, n_bytes=20_000_000, per_token=0.5)] * 3)
    repacked = replace(plain, gemms=(gemm(1e-3, 1e-4, n_bytes=20_000_000, per_token=0.5),) * 3, layout="CPU_REPACK")
    blocks = [{"CPU": plain, "CPU_REPACK": repacked}] * 4
    on = machine(1e-9)
    chat = replace(LOAD, n_prompt=1, n_gen=100)
    document = replace(LOAD, n_prompt=4096, n_gen=100)

    def plan(load: Workload, host_room: int):  # type: ignore[no-untyped-def]
        made = plan_slices(blocks, on, 10**9, 0, load, host_room)
        return {block.layout for block, _ in made.layers}, bool(made.token_assignment), made.kept_twice

    assert plan(chat, 0) == ({"CPU_REPACK"}, False, False)
    assert plan(document, 0) == ({"CPU"}, True, False)
    assert plan(document, 10**9) == ({"CPU_REPACK"}, True, True)


#
# beside OATO's placement
#


class Probe:
    def __call__(self, load: Workload, placed: Placed) -> LoadBytes:
        return LoadBytes(0, 0, 0, 0, 10**9)


def problem(world: World, ops: list[Operator], contention: Contention | None = None) -> Problem:
    profile = replace(world.profile(ops), contention=contention)
    return Problem(tuple(ops), build_graph(model(2), ops), profile, Probe(), None, 0.9, None)


def on_device(ops: list[Operator], *roles: str) -> Placed:
    return Placed(tuple(op.role in roles for op in ops), 0, 0, True, 0.0)


ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output", "output")


def sliced(made: Problem, placed: Placed, room: int, weights_room: int) -> tuple[SlicePlan, Placed] | None:
    slicer = Slicer(made, LOAD)
    plan = slicer.rest(placed, room, weights_room)
    return None if plan is None else (plan, streamed_placement(made, placed, plan, slicer.on))


def solved(
    world: World, weights_room: int = 300_000, contention: Contention | None = None
) -> tuple[list[Operator], SlicePlan, Placed]:
    """With enough room for staging, and so many bytes for slices; both FFNs together have 884,736."""
    ops = llama(2)
    found = sliced(problem(world, ops, contention), on_device(ops, *ATTENTION), 10**8, weights_room)
    assert found is not None
    return ops, *found


def test_a_solved_plan_is_a_record_that_can_be_written_and_run() -> None:
    ops, plan, placed = solved(SLOW_CPU)
    placements = as_placements(ops, placed, placed.streams.layouts if placed.streams else ())
    assert [p.name for p in placements] == [op.name for op in ops]
    by_role = dict(zip((op.role for op in ops), placements, strict=False))
    assert by_role["attn_q"].gg == by_role["output"].gg == 1
    assert 0 < by_role["ffn_up"].cg < 1 and plan.token_assignment
    for op, placement in zip(ops, placements, strict=True):
        cc, cg, gg = slice_counts(op, placement)
        assert cc % 32 == cg % 32 == 0 and cc + cg + gg > 0
    assert len({(p.cc, p.cg, p.gg) for p in placements if "ffn" in p.name and "blk.0." in p.name}) == 1
    memory = ledger(10**9, 0.9, plan.weights_bytes, 0, 0, 0, plan.staging_bytes)
    assert placed.streams is not None
    record = PlanRecord(
        "m.gguf", "f" * 64, "", "RPC0", "scheinfer", LOAD, placements, 3, memory, None, plan.token_assignment,
        placed.streams.settings,
    )  # fmt: skip
    assert Plan.from_json(Plan(record).to_json()).record == record
    Plan(record).check(replace(model(2), fingerprint="f" * 64), ops)
    again = placed_by_plan(2, ops, record)
    assert (again.gg, again.on_device, again.streams) == (
        placed.gg, placed.on_device, replace(placed.streams, ttft_s=0.0, tpot_s=0.0),
    )  # fmt: skip


def test_with_nothing_sliced_the_price_is_the_one_of_whole_operators() -> None:
    far = replace(SLOW_CPU, link=LinearFit(1.0, 1.0, 1.0))
    ops, plan, placed = solved(far, 0)
    assert placed.streams is not None and not any(placed.streams.cg) and not any(placed.gg)
    expected = predicted_of(problem(far, ops), LOAD, replace(placed, streams=None))
    assert plan.prefill_s == pytest.approx(expected.ttft_s)
    assert plan.decode_s == pytest.approx(expected.tpot_s)


WORLDS = st.builds(
    World, st.floats(1e8, 1e10), st.floats(1e8, 1e11), st.floats(0, 1e-5), st.floats(0, 1e-5), st.floats(0, 1e-9),
    st.floats(0, 1e-4), st.builds(LinearFit, st.floats(0, 1e-4), st.floats(1e-11, 1e-8), st.just(1.0)),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    WORLDS, st.lists(st.integers(0, FF // 32 - 1), min_size=2, max_size=2), st.booleans(),
    st.sampled_from([1, 7, 64, 600, 1100]), st.sampled_from([32, 512]),
)  # fmt: skip
def test_with_nothing_streamed_the_price_is_the_one_of_the_split_policy(
    world: World, cuts: list[int], attention_there: bool, n_prompt: int, n_ubatch: int
) -> None:
    """Any GG of both FFNs, the output whole: prompts in several micro-batches, of which only the last has logits."""
    ops = llama(2)
    made = problem(world, ops)
    load = Workload(n_prompt, 16, 4096, n_ubatch)
    whole = on_device(ops, *(ATTENTION if attention_there else ("output",)))
    split = replace(whole, gg=tuple(32 * cuts[op.layer] if "ffn" in op.role else 0 for op in ops))
    slicer = Slicer(made, load)
    blocks = slicer.blocks(whole)
    layers = tuple(
        (layouts["CPU"], Slices(FF - 32 * cut, 0, 32 * cut, 0.0)) for layouts, cut in zip(blocks, cuts, strict=True)
    )
    plan = priced(layers, slicer.on, load, (), False, 0, 0)
    expected = predicted_of(made, load, split)
    assert plan.prefill_s == pytest.approx(expected.ttft_s)
    assert plan.decode_s == pytest.approx(expected.tpot_s)


def test_what_is_on_the_device_and_what_is_no_ffn_stays_there() -> None:
    ops = llama(2)
    made = problem(SLOW_CPU, ops)
    all_there = Placed((True,) * len(ops), 0, 0, True, 0.0)
    assert sliced(made, all_there, 10**6, 10**6) is None
    nothing_there = Placed((False,) * len(ops), 0, 0, True, 0.0)
    found = sliced(made, nothing_there, 10**6, 10**6)
    assert found is not None
    cut = {ops[i].role for streamed, _ in found[0].layers for i in streamed.block.operators}
    assert cut == {"ffn_gate", "ffn_up", "ffn_down", "output"}, "attention stays"


def test_more_memory_on_the_device_is_never_worse() -> None:
    size = sum(op.bytes for op in ffn(0)) * 2
    seconds = [solved(SLOW_CPU, size * i // 8)[1].total_s(LOAD) for i in (0, 1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.9 * seconds[0]


def test_what_was_measured_together_decides() -> None:
    free = solved(SLOW_CPU)[1]  # the CPU alone reads 0.2 GB/s, the link 2 GB/s
    poor = solved(SLOW_CPU, contention=Contention(0.2, 2.0, 0.02, 0.3))[1]
    assert poor.decode_s > free.decode_s
    assert sum(s.cg for _, s in free.layers) > 0


def test_where_the_cpu_alone_uses_all_of_dram_a_token_streams_nothing() -> None:
    """Together they read no more than the CPU alone did: what is streamed, the CPU reads later. (Copies that run ahead
    may still use the time of attention.)"""
    token = replace(LOAD, n_prompt=1, n_gen=100)
    ops = llama(2)
    world = replace(SLOW_CPU, link=LinearFit(1e-6, 1e-8, 1.0))
    for together, streams in ((Contention(0.2, 0.1, 0.1, 0.1), False), (Contention(0.2, 0.1, 0.2, 0.1), True)):
        slicer = Slicer(problem(world, ops, together), token, Prefetch("layer"))
        plan = slicer.rest(on_device(ops, *ATTENTION), 10**8, 0)
        assert plan is not None
        assert any(slices.cg for _, slices in plan.layers) is streams


def test_a_slow_link_streams_nothing_and_a_fast_one_more() -> None:
    streamed = []
    for beta in (1e-7, 4e-9, 1e-9, 2e-10):
        world = replace(SLOW_CPU, device_rate=1e11, link=LinearFit(1e-6, beta, 1.0))
        streamed.append(sum(slices.cg for _, slices in solved(world, 0)[1].layers))
    assert streamed == sorted(streamed) and streamed[0] < streamed[-1]
    dead = replace(SLOW_CPU, link=LinearFit(1.0, 1e-6, 1.0))
    plan = solved(dead, 0)[1]
    assert plan.token_assignment == () and all(slices.cg == 0 for _, slices in plan.layers)
