"""Seconds of the tasks of a split block, of a block with hot experts, and bytes beside them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from worlds import ATTENTION, linked, model_info, slow_cpu

from oallama.core.types import StreamSettings, Workload
from oallama.cost.blocks import F32
from oallama.cost.following import following
from oallama.cost.kernels import interpolate
from oallama.cost.rates import SliceRates
from oallama.cost.slices import BlockContext, BlockType, Cut, slice_times
from oallama.cost.timeline import BlockTimes, alone_seconds
from oallama.model.cut import cut_extent
from oallama.planner.placement import ON_DEVICE, Assignment, DeviceSlices, Placement
from oallama.planner.problem import operators_on_host
from oallama.planner.slicer import Slicer, pricing_of, slicer_of
from oallama.planner.staging import staging_bytes

PROMPT = 512


def ffn_block(**facts: object) -> tuple[BlockType, SliceRates]:
    """The first FFN of a model whose layers are on the host, and what its slices cost."""
    world = slow_cpu(**facts)
    placer = world.placer()
    problem = placer.problem("on")
    slicer = Slicer(problem, Workload(PROMPT, 32, 1024), pricing_of(problem), hot=bool(world.model.n_expert))
    blocks = slicer.blocks(operators_on_host(problem, slicer.workload))
    return next(cost for block in blocks for cost in block.types if len(cost.gemms) > 1), slicer.pricing.rates


def with_hot(n_used: int = 4) -> tuple[BlockType, SliceRates]:
    """Experts that follow the conversation, beside a card that reads three times as fast as the CPU."""
    card = replace(linked(10e9), bytes_per_s=60e9)
    model = model_info(n_embd=1024, n_ff=1024, n_expert=32, n_expert_used=n_used)
    cost, rates = ffn_block(model=model, card=card)
    assert cost.use is not None
    return replace(cost, use=following(cost.use)), rates


def token_s(cost: BlockType, rates: SliceRates, n_hot: int) -> float:
    return alone_seconds(slice_times(cost, rates, Cut(cost.block.extent, 0, 0, n_hot), 1))


def test_a_device_that_has_its_input_does_not_wait_for_the_cpus() -> None:
    """From pinned memory: the copy has a stream of its own, and the CPU alone waits for it."""
    cost, rates = ffn_block()
    cost = replace(cost, context=BlockContext(resident=True))
    extent = cost.block.extent
    cut = Cut(cost.block.step, 0, extent - cost.block.step)  # the device is the later side
    assert rates.staged

    def times(staged: bool) -> BlockTimes:
        return slice_times(cost, replace(rates, staged=staged), cut, PROMPT)

    beside, before = times(True), times(False)
    copied_s = rates.transfer.copy_out.seconds(cost.block.upload_bytes(extent, PROMPT, PROMPT))
    assert before.send_s == pytest.approx(beside.send_s + copied_s)
    assert beside.cpu_s == pytest.approx(before.cpu_s + copied_s - beside.send_s)
    assert alone_seconds(beside) <= alone_seconds(before)


def test_the_first_of_a_devices_layers_is_sent_what_it_reads_without_a_norm() -> None:
    """Attention reads what the layer before left on the host; that of later layers has its input on the device."""
    world = slow_cpu(model=model_info(n_layer=4))
    vars(world)["operators"] = tuple(replace(o, unnormed=o.role in ATTENTION[:3]) for o in world.operators)
    problem = world.placer().problem("on")
    half = [Cut(cut_extent(o) // 2, 0, cut_extent(o) // 2) for o in problem.operators]
    places = [
        Assignment(cut) if o.role in ATTENTION else ON_DEVICE for o, cut in zip(world.operators, half, strict=True)
    ]
    placement = Placement(tuple(places), first_device_layer=2, slices=(DeviceSlices(gg_bytes=1),))
    blocks, cuts = slicer_of(problem, world.workload, placement).cuts_of(placement)

    def staging(layer: int) -> int:
        own = [
            cut for block, cut in zip(blocks, cuts, strict=True) if world.operators[block.operators[0]].layer == layer
        ]
        return staging_bytes(own, StreamSettings(), PROMPT, 0)

    assert staging(2) == staging(3) + world.model.n_embd * PROMPT * F32


def test_each_part_of_experts_on_the_device_weights_and_adds_up_its_results() -> None:
    cost, rates = ffn_block(model=model_info(n_embd=1024, n_ff=1024, n_expert=32, n_expert_used=4))
    quarter = cost.block.extent // 4
    n_bytes = cost.block.weighed_bytes(PROMPT)[1] * PROMPT

    def added_s(cut: Cut) -> float:
        """Seconds that the device needs for it."""
        timed, free = (
            slice_times(cost, replace(rates, device_s_per_byte=s_per_byte), cut, PROMPT) for s_per_byte in (1e-9, 0.0)
        )
        return sum(step.gpu_s for step in timed.steps) - sum(step.gpu_s for step in free.steps)

    assert added_s(Cut(2 * quarter, 0, 2 * quarter)) == pytest.approx(1e-9 * n_bytes) != 0
    assert added_s(Cut(2 * quarter, quarter, quarter)) == pytest.approx(2e-9 * n_bytes)


def test_a_batch_above_those_that_were_timed_takes_time_in_proportion() -> None:
    """A small batch is limited by reading: the slope from there is too low."""
    assert interpolate(((1, 1.0), (32, 2.0), (512, 10.0)), 1024) == 20.0


@pytest.mark.parametrize("n_used", [2, 4, 8])
def test_more_experts_in_slots_never_cost_a_token(n_used: int) -> None:
    """Where the device has more hits than it computes in the CPU's time, the CPU computes some of them."""
    cost, rates = with_hot(n_used)
    seconds = [token_s(cost, rates, n_hot) for n_hot in range(2, cost.n_expert + 1)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(seconds))
    assert seconds[-1] < 0.7 * seconds[0]


def test_both_sides_compute_hits_where_all_experts_are_in_slots() -> None:
    cost, rates = with_hot()
    stays = replace(cost, use=replace(cost.use, spread=None))
    shared, alone = (slice_times(each, rates, Cut(cost.block.extent, 0, 0, 32), 1) for each in (cost, stays))
    assert alone.cpu_s == 0 < shared.cpu_s
    assert alone_seconds(shared) <= alone_seconds(alone)


def test_a_token_that_misses_leaves_the_device_less_to_do() -> None:
    """How many experts a token misses differs, and what one side has not to do the other has."""
    cost, rates = with_hot()
    assert cost.use is not None
    half = replace(cost.use, decode=tuple(0.5 for _ in cost.use.decode), spread=None)
    always, never = (replace(cost.use, decode=tuple(share for _ in half.decode), spread=None) for share in (1.0, 0.0))
    of = {
        share: token_s(replace(cost, use=use), rates, 16) for share, use in ((0.5, half), (1.0, always), (0.0, never))
    }
    assert min(of[1.0], of[0.0]) < of[0.5] < max(of[1.0], of[0.0])
