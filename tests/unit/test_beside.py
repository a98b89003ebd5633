"""What the CPU, the device and the link leave each other: from a profile, between batch sizes, as seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_cases import FF, World, ffn

from oallama.core.types import LinearFit, Profile, Sharing
from oallama.cost.beside import ALONE, Beside, beside_at, beside_curve, both_seconds
from oallama.cost.blocks import split_blocks
from oallama.cost.linear import kernel_times, stream_rates, streamed_block
from oallama.cost.operator_cost import Pass
from oallama.cost.slice_times import Rates, slice_times
from oallama.cost.split_ffn import block_seconds, split_costs
from oallama.cost.timeline import BlockTimes, Prefetch, Step, timeline

SECONDS = st.one_of(st.just(0.0), st.floats(1e-5, 1e-2))
SHARES = st.floats(0.1, 1.0)


def profile(*sharing: Sharing, copy_wait: float | None = None) -> Profile:
    return replace(World().profile(ffn(0)), sharing=sharing, copy_wait=copy_wait)


def test_a_profile_from_before_slows_nobody_down() -> None:
    assert beside_curve(profile()) == () and beside_at((), 17) == ALONE


def test_shares_are_speeds_together_over_speeds_alone() -> None:
    curve = beside_curve(
        profile(
            Sharing("cpu", "device", 1, 20.0, 50.0, 15.0, 40.0),
            Sharing("device", "link", 1, 50.0, 10.0, 25.0, 12.0),  # nothing lost by the link
            Sharing("cpu", "link", 32, 2.0, 10.0, 1.0, 0.0),
        )
    )
    assert [n_tokens for n_tokens, _ in curve] == [1, 32]
    assert curve[0][1] == Beside(0.75, 0.8, gpu_beside_copy=0.5, copy_beside_gpu=1.0)
    assert curve[1][1].cpu_beside_copy == 0.5
    assert 0 < curve[1][1].copy_beside_cpu <= 0.01, "starved while it was watched, but not for ever"


@pytest.mark.parametrize(("wait", "one_queue"), [(None, False), (0.0, False), (0.2, False), (0.9, True), (1.0, True)])
def test_one_queue_is_what_makes_results_wait_for_copies(wait: float | None, one_queue: bool) -> None:
    assert beside_at(beside_curve(profile(copy_wait=wait)), 8).one_queue is one_queue
    shared = profile(Sharing("cpu", "link", 1, 2.0, 2.0, 1.0, 1.0), copy_wait=wait)
    assert beside_at(beside_curve(shared), 8).one_queue is one_queue


def test_between_batch_sizes_it_is_linear_and_beyond_them_constant() -> None:
    curve = ((2, Beside(cpu_beside_gpu=0.5, one_queue=True)), (6, Beside(cpu_beside_gpu=1.0, one_queue=True)))
    found = [beside_at(curve, n).cpu_beside_gpu for n in (1, 2, 3, 4, 6, 512)]
    assert found == [0.5, 0.5, 0.625, 0.75, 1.0, 1.0]
    assert all(beside_at(curve, n).one_queue for n in (1, 4, 512))


@given(SECONDS, SECONDS, SECONDS, SHARES, SHARES)
def test_both_sides_are_the_timelines(cpu: float, launch: float, gpu: float, first: float, second: float) -> None:
    beside = Beside(cpu_beside_gpu=first, gpu_beside_cpu=second)
    block = BlockTimes(0.0, 0.0, cpu, (Step(0.0, gpu, launch),), 0.0, beside=beside)
    assert both_seconds(cpu, launch, gpu, beside) == pytest.approx(timeline([block], Prefetch()).end_s, abs=1e-15)


@given(SECONDS, SECONDS, SECONDS, SHARES, SHARES)
def test_slowing_each_other_down_is_never_faster_nor_slower_than_the_shares_say(
    cpu: float, launch: float, gpu: float, first: float, second: float
) -> None:
    alone = max(cpu, launch + gpu)
    found = both_seconds(cpu, launch, gpu, Beside(cpu_beside_gpu=first, gpu_beside_cpu=second))
    assert alone * (1 - 1e-12) <= found <= max(launch + cpu / first, launch + gpu / second) * (1 + 1e-12)
    assert both_seconds(cpu, launch, gpu, ALONE) == alone


def test_a_cpu_and_a_device_each_at_half_speed_take_as_long_as_one_after_the_other() -> None:
    half = Beside(cpu_beside_gpu=0.5, gpu_beside_cpu=0.5)
    assert both_seconds(2.0, 0.0, 2.0, half) == pytest.approx(4.0)
    assert both_seconds(1.0, 0.0, 3.0, half) == pytest.approx(4.0)
    assert both_seconds(2.0, 1.0, 1.0, half) == pytest.approx(3.0)


def test_the_prices_of_split_and_of_slices_stay_the_same_price() -> None:
    ops = ffn(0)
    measured = profile(Sharing("cpu", "device", 1, 20.0, 50.0, 12.0, 30.0), copy_wait=1.0)
    measured = replace(measured, launch_issue_s=4e-6)
    (block,) = split_blocks(ops, [FF] * 3)
    costs = split_costs(measured, ops, 2, (Pass(1, 1, 1),))
    streamed = streamed_block(kernel_times(measured), ops, block, "CPU")
    rates = stream_rates(costs, measured.link)
    half = block.extent // 2
    times = slice_times(streamed, rates, Rates(0.5, 0.0, 0.5), 1)
    assert timeline([times], Prefetch()).end_s == pytest.approx(block_seconds(costs, block, (half,))[0])
    undisturbed = split_costs(replace(measured, sharing=()), ops, 2, (Pass(1, 1, 1),))
    assert block_seconds(costs, block, (half,)) > block_seconds(undisturbed, block, (half,))


def test_what_a_copy_holds_up_is_counted_for_what_is_copied() -> None:
    ops = ffn(0)
    world = profile()
    (block,) = split_blocks(ops, [FF] * 3)
    costs = split_costs(world, ops, 2, (Pass(1, 1, 1),))
    streamed = streamed_block(kernel_times(world), ops, block, "CPU")
    held = LinearFit(1e-6, 1e-10, 1.0)
    link = {**world.link, "issue_pinned": held, "issue_pageable": LinearFit(1e-3, 0.0, 1.0)}
    pinned = slice_times(streamed, stream_rates(costs, link), Rates(0.5, 0.25, 0.25), 1)
    assert pinned.issue_s == pytest.approx(3e-6 + 0.25 * block.bytes * 1e-10)
    pageable = stream_rates(costs, link, pinned=False)
    assert slice_times(streamed, pageable, Rates(0.5, 0.25, 0.25), 1).issue_s == pytest.approx(3e-3)
    assert slice_times(streamed, pageable, Rates(0.5, 0.0, 0.5), 1).issue_s == 0
    blocking = replace(stream_rates(costs, link), blocking=True)
    assert slice_times(streamed, blocking, Rates(0.5, 0.25, 0.25), 1).issue_s == 0, "the whole copy is counted already"
    before = stream_rates(costs, world.link)
    assert slice_times(streamed, before, Rates(0.5, 0.25, 0.25), 1) == replace(pinned, issue_s=0.0)


def test_streamed_weights_are_priced_by_the_line_of_large_copies() -> None:
    ops = ffn(0)
    world = profile()
    costs = split_costs(world, ops, 2, (Pass(1, 1, 1),))
    small = ((4096, 1e-6), (65536, 3e-6))
    large = tuple((n, 2e-5 + n / 2e9) for n in (1 << 18, 1 << 20, 1 << 22))
    line = LinearFit(5e-6, 1 / 8e9, 0.7, small + large)
    for name in ("h2d_pinned", "issue_pinned"):
        rates = stream_rates(costs, {**world.link, "h2d_pinned": line, name: line})
        found = rates.weights if name == "h2d_pinned" else rates.issue
        assert found is not None
        assert (found.alpha_s, found.beta_s_per_byte) == (pytest.approx(2e-5), pytest.approx(1 / 2e9))
    few = replace(line, points=small + large[:1])
    assert stream_rates(costs, {**world.link, "h2d_pinned": few}).weights == few
