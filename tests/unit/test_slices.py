"""Seconds of one sliced block's tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import slow_cpu

from oallama.core.types import Workload
from oallama.cost.rates import SliceRates
from oallama.cost.slices import BlockContext, BlockType, Cut, slice_times
from oallama.cost.timeline import BlockTimes, alone_seconds
from oallama.planner.problem import operators_on_host
from oallama.planner.slicer import Slicer

PROMPT = 512


def ffn_block(**facts: object) -> tuple[BlockType, SliceRates]:
    """The first FFN of a model whose layers are on the host, and what its slices cost."""
    world = slow_cpu(**facts)
    placer = world.placer()
    problem = placer.problem("on")
    slicer = Slicer(problem, Workload(PROMPT, 32, 1024))
    blocks = slicer.blocks(operators_on_host(problem, slicer.workload))
    return next(cost for block in blocks for cost in block.types if len(cost.gemms) > 1), slicer.on.rates


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
