"""Slices of a whole model: within memory, no slower than without, and as a plan that can be written and read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import SHARED_MACHINES, STREAMED, gemm, machine, streamed
from split_cases import World, ffn, llama, model

from oallama.core.types import Contention, LinearFit, Operator, PlanRecord, Workload
from oallama.cost.graph import build_graph
from oallama.cost.operator_cost import index_cases, operator_costs, passes
from oallama.cost.predict import Costs, placement_seconds
from oallama.cost.slice_times import StreamedBlock
from oallama.cost.timeline import Prefetch
from oallama.cost.transfer import transfer_rates
from oallama.place.baselines import Placed
from oallama.place.budget import ledger
from oallama.place.problem import LoadBytes, Problem
from oallama.place.slice_plan import model_timeline, plan_slices, staging_bytes
from oallama.place.slice_rest import SlicedRest, slice_rest, sliced_placements
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
    assert staging_bytes(half, on, 1, False) == 3 * 512_000 + activations
    assert staging_bytes(half, on, 1, True) == 3 * 1536_000 + (256 + 256 + 3 * 1024) * 4
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


def solved(
    world: World, weights_room: int = 300_000, contention: Contention | None = None
) -> tuple[list[Operator], SlicedRest]:
    """With enough room for staging, and so many bytes for slices; both FFNs together have 884,736."""
    ops = llama(2)
    rest = slice_rest(problem(world, ops, contention), on_device(ops, *ATTENTION), LOAD, 10**8, weights_room)
    assert rest is not None
    return ops, rest


def test_a_solved_plan_is_a_record_that_can_be_written_and_run() -> None:
    ops, rest = solved(SLOW_CPU)
    placements = sliced_placements(ops, rest)
    assert [p.name for p in placements] == [op.name for op in ops]
    by_role = dict(zip((op.role for op in ops), placements, strict=False))
    assert by_role["attn_q"].gg == by_role["output"].gg == 1
    assert 0 < by_role["ffn_up"].cg < 1 and rest.plan.token_assignment
    for op, placement in zip(ops, placements, strict=True):
        cc, cg, gg = slice_counts(op, placement)
        assert cc % 32 == cg % 32 == 0 and cc + cg + gg > 0
    assert len({(p.cc, p.cg, p.gg) for p in placements if "ffn" in p.name and "blk.0." in p.name}) == 1
    memory = ledger(10**9, 0.9, rest.plan.weights_bytes, 0, 0, 0, rest.plan.staging_bytes)
    record = PlanRecord(
        "m.gguf", "f" * 64, "", "RPC0", "scheinfer", LOAD, placements, 3, memory, None, rest.plan.token_assignment
    )
    assert Plan.from_json(Plan(record).to_json()).record == record
    Plan(record).check(replace(model(2), fingerprint="f" * 64), ops)


def test_with_nothing_sliced_the_price_is_the_one_of_whole_operators() -> None:
    ops, rest = solved(replace(SLOW_CPU, link=LinearFit(1.0, 1.0, 1.0)), 0)
    placed = on_device(ops, *ATTENTION)
    made = problem(replace(SLOW_CPU, link=LinearFit(1.0, 1.0, 1.0)), ops)
    costs = [
        Costs(operator_costs(index_cases(made.profile), ops, 2, "RPC0", over), made.graph, transfer_rates(made.profile),
              over, 0.0, 0.0)
        for over in (passes(LOAD, "decode"),)
    ]  # fmt: skip
    assert rest.tpot_s == pytest.approx(placement_seconds(costs[0], placed.on_device, 0))
    assert all(slices.cg == slices.gg == 0 for _, slices in rest.plan.layers)


def test_what_is_on_the_device_and_what_is_no_ffn_stays_there() -> None:
    ops = llama(2)
    made = problem(SLOW_CPU, ops)
    all_there = Placed((True,) * len(ops), 0, 0, True, 0.0)
    assert slice_rest(made, all_there, LOAD, 10**6, 10**6) is None
    nothing_there = Placed((False,) * len(ops), 0, 0, True, 0.0)
    rest = slice_rest(made, nothing_there, LOAD, 10**6, 10**6)
    assert rest is not None
    sliced = {ops[i].role for streamed, _ in rest.plan.layers for i in streamed.block.operators}
    assert sliced == {"ffn_gate", "ffn_up", "ffn_down"}
    by_name = {p.name: p for p in sliced_placements(ops, rest, ["CPU_REPACK"] * len(ops))}
    assert (by_name["output.weight"].cc, by_name["output.weight"].layout) == (1, "CPU_REPACK")


def test_more_memory_on_the_device_is_never_worse() -> None:
    size = sum(op.bytes for op in ffn(0)) * 2
    seconds = [solved(SLOW_CPU, size * i // 8)[1].predicted_s for i in (0, 1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.5 * seconds[0]


def test_what_was_measured_together_decides() -> None:
    free = solved(SLOW_CPU)[1]  # the CPU alone reads 0.2 GB/s, the link 2 GB/s
    poor = solved(SLOW_CPU, contention=Contention(0.2, 2.0, 0.02, 0.3))[1]
    assert poor.tpot_s > free.tpot_s
    assert sum(s.cg for _, s in free.plan.layers) > 0
