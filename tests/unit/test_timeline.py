"""The recursion of Eq. 5: against the paper's own formulas, against an independent recursion, and its invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.core.types import Contention
from oallama.cost.contention import contended
from oallama.cost.timeline import PAPER, BlockTimes, Prefetch, Step, Timeline, cycle_seconds, timeline

SECONDS = st.floats(1e-5, 1e-2)
MAYBE_SECONDS = st.one_of(st.just(0.0), SECONDS)
STEPS = st.lists(st.builds(Step, MAYBE_SECONDS, SECONDS, MAYBE_SECONDS), max_size=4).map(tuple)
BLOCKS = st.lists(
    st.builds(
        BlockTimes, MAYBE_SECONDS, MAYBE_SECONDS, MAYBE_SECONDS, STEPS, MAYBE_SECONDS, st.floats(1e5, 1e8),
        st.floats(1e9, 3e10), st.booleans(),
    ),
    min_size=1, max_size=5,
)  # fmt: skip
PREFETCH = st.builds(Prefetch, st.sampled_from(["layer", "continuous"]), st.sampled_from([1, 2, 3, None]))
SHARED = st.builds(Contention, st.floats(20, 60), st.floats(8, 30), st.floats(10, 60), st.floats(2, 30))


def equation_5(n: int, launch: float, copy: float, gpu: float, cpu: float) -> float:
    """t_fin as published, index by index."""
    tau_l = tau_c2g = tau_g = tau_c = 0.0
    for _ in range(n):
        tau_l = tau_l + launch
        tau_c2g = max(tau_l, tau_c2g) + copy
        tau_g = max(tau_c2g, tau_g) + gpu
        tau_c = tau_c + cpu
    return max(tau_g, tau_c)


def alone(launch: float, copy: float, gpu: float, cpu: float, n: int) -> BlockTimes:
    return BlockTimes(0.0, 0.0, n * cpu, (Step(copy, gpu, launch),) * n, 0.0)


@settings(deadline=None)
@given(st.integers(1, 6), MAYBE_SECONDS, MAYBE_SECONDS, SECONDS, MAYBE_SECONDS)
def test_one_block_is_equation_5(n: int, launch: float, copy: float, gpu: float, cpu: float) -> None:
    ours = timeline([alone(launch, copy, gpu, cpu, n)], PAPER).end_s
    assert ours == pytest.approx(equation_5(n, launch, copy, gpu, cpu))


@settings(deadline=None)
@given(st.integers(1, 6), SECONDS, SECONDS, SECONDS)
def test_the_three_cases_have_the_papers_closed_forms(n: int, launch: float, copy: float, gpu: float) -> None:
    end = timeline([alone(launch, copy, gpu, 0.0, n)], PAPER).end_s
    if launch <= copy and gpu <= copy:
        assert end == pytest.approx(launch + n * copy + gpu)  # Eq. 10
    elif max(launch, copy) <= gpu:
        assert end == pytest.approx(launch + copy + n * gpu)  # Eq. 11
    elif max(copy, gpu) <= launch:
        assert end == pytest.approx(n * launch + copy + gpu)  # Eq. 12


def recursion(blocks: list[BlockTimes], prefetch: Prefetch) -> float:
    """Without contention every time is a maximum of earlier ones plus a duration, in program order."""
    now = gpu = link = 0.0
    freed: list[float] = []
    for block in blocks:
        start = now + block.gap_s + block.send_s
        launch, done = start, start + block.cpu_s
        for step in block.steps:
            launch += step.launch_s
            ready = launch
            if step.copy_s > 0:
                begin = link
                if prefetch.n_slots is not None and len(freed) >= prefetch.n_slots:
                    begin = max(begin, freed[-prefetch.n_slots])
                if prefetch.ahead == "layer" or block.routed:
                    begin = max(begin, launch)
                link = begin + step.copy_s
                ready = max(ready, link)
            gpu = max(gpu, ready) + step.gpu_s
            done = max(done, gpu)
            if step.copy_s > 0:
                freed.append(gpu)
        now = done + block.join_s
    return now


@settings(deadline=None)
@given(BLOCKS, PREFETCH)
def test_events_agree_with_the_recursion_in_program_order(blocks: list[BlockTimes], prefetch: Prefetch) -> None:
    assert timeline(blocks, prefetch).end_s == pytest.approx(recursion(blocks, prefetch))


@settings(deadline=None)
@given(BLOCKS, PREFETCH, st.one_of(st.none(), SHARED))
def test_streams_do_one_thing_at_a_time_and_nothing_is_lost(
    blocks: list[BlockTimes], prefetch: Prefetch, shared: Contention | None
) -> None:
    ran = timeline(blocks, prefetch, shared)
    for stream in ("cpu", "gpu", "copy", "join"):
        spans = sorted((s.start_s, s.end_s) for s in ran.spans if s.stream == stream)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))
    steps = [step for block in blocks for step in block.steps]
    assert ran.busy_s("gpu") == pytest.approx(sum(step.gpu_s for step in steps))
    if shared is None:
        assert ran.busy_s("copy") == pytest.approx(sum(step.copy_s for step in steps))
        assert ran.busy_s("cpu") == pytest.approx(sum(block.cpu_s for block in blocks))
    else:
        assert ran.busy_s("copy") >= sum(step.copy_s for step in steps) * (1 - 1e-9)
    assert list(ran.block_ends_s) == sorted(ran.block_ends_s)
    assert max((span.end_s for span in ran.spans), default=0.0) <= ran.end_s * (1 + 1e-12)


@settings(deadline=None)
@given(BLOCKS, st.integers(1, 3))
def test_running_ahead_and_more_slots_never_take_longer(blocks: list[BlockTimes], n_slots: int) -> None:
    per_layer = timeline(blocks, Prefetch("layer", n_slots)).end_s
    ahead = timeline(blocks, Prefetch("continuous", n_slots)).end_s
    assert ahead <= per_layer * (1 + 1e-12)
    assert timeline(blocks, Prefetch("continuous", n_slots + 1)).end_s <= ahead * (1 + 1e-12)


def long_run(blocks: list[BlockTimes], prefetch: Prefetch, shared: Contention | None, rounds: int) -> float:
    ends = timeline(blocks * (2 * rounds), prefetch, shared).block_ends_s
    return (ends[-1 - len(blocks)] - ends[(rounds - 1) * len(blocks) - 1]) / rounds


@settings(deadline=None, max_examples=50)
@given(BLOCKS, st.integers(1, 3), st.one_of(st.none(), SHARED))
def test_a_cycle_is_what_a_long_run_takes_for_each_round(
    blocks: list[BlockTimes], n_slots: int, shared: Contention | None
) -> None:
    prefetch = Prefetch("continuous", n_slots)
    assert cycle_seconds(blocks, prefetch, shared) == pytest.approx(long_run(blocks, prefetch, shared, 200), rel=0.01)


def test_the_link_works_on_during_attention_when_it_may_run_ahead() -> None:
    block = BlockTimes(2.0, 0.0, 1.0, (Step(3.0, 0.1),), 0.0)
    assert cycle_seconds([block], Prefetch("layer", 2)) == pytest.approx(2.0 + 3.0 + 0.1)
    assert cycle_seconds([block], Prefetch("continuous", 2)) == pytest.approx(3.0)  # it never idles
    assert cycle_seconds([block], Prefetch("continuous", 1)) == pytest.approx(3.1)  # the slot is in use for a while


def test_routed_weights_are_not_copied_before_the_router_has_run() -> None:
    block = BlockTimes(2.0, 0.0, 1.0, (Step(3.0, 0.1),), 0.0, routed=True)
    assert cycle_seconds([block], Prefetch("continuous", 2)) == pytest.approx(5.1)


def test_a_cpu_and_a_link_at_once_get_what_was_measured_together() -> None:
    shared = Contention(40.0, 20.0, 30.0, 15.0)
    # 40 GB of CC and 20 GB of CG, each a second alone: both last 4/3 s together
    block = BlockTimes(0.0, 0.0, 1.0, (Step(1.0, 0.0),), 0.0, cpu_bytes=40e9, copy_bytes_per_s=20e9)
    ran = timeline([block], Prefetch("layer", 1), shared)
    assert ran.end_s == pytest.approx(4 / 3)
    # a copy of half the length: until 2/3 s both, then the CPU alone has half its work left
    shorter = replace(block, steps=(Step(0.5, 0.0),))
    assert timeline([shorter], Prefetch("layer", 1), shared).end_s == pytest.approx(2 / 3 + 0.5)


@settings(deadline=None)
@given(SHARED, st.floats(1e8, 8e10), st.floats(1e8, 4e10))
def test_the_two_together_never_read_more_than_was_measured(shared: Contention, cpu: float, link: float) -> None:
    cpu_factor, link_factor = contended(shared, cpu, link)
    assert 0 < cpu_factor <= 1 and 0 < link_factor <= 1
    measured = min(shared.cpu_with_link_gb_per_s, shared.cpu_alone_gb_per_s) + min(
        shared.link_with_cpu_gb_per_s, shared.link_alone_gb_per_s
    )
    assert cpu_factor * cpu + link_factor * link <= measured * 1e9 * (1 + 1e-9)


@settings(deadline=None)
@given(SHARED)
def test_at_full_speed_contention_is_the_measurement(shared: Contention) -> None:
    cpu, link = contended(shared, shared.cpu_alone_gb_per_s * 1e9, shared.link_alone_gb_per_s * 1e9)
    assert cpu == pytest.approx(min(1.0, shared.cpu_with_link_gb_per_s / shared.cpu_alone_gb_per_s))
    assert link == pytest.approx(min(1.0, shared.link_with_cpu_gb_per_s / shared.link_alone_gb_per_s))


def test_many_tokens_for_each_byte_leave_the_link_its_speed() -> None:
    assert contended(Contention(40.0, 20.0, 30.0, 15.0), 1e9, 20e9) == (1.0, 1.0)


def test_nothing_takes_no_time() -> None:
    assert timeline([], PAPER) == Timeline((), ())
    assert timeline([], PAPER).end_s == 0.0
