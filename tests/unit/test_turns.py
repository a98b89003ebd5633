"""Streams that wait for each other: against an independent recursion, against the timeline without, and invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import GEMMS, contentions, gemm, machine, streamed

from oallama.core.types import Contention
from oallama.cost.beside import ALONE, Beside
from oallama.cost.slice_times import Rates, StreamedBlock
from oallama.cost.steady import steady_seconds
from oallama.cost.timeline import BlockTimes, Prefetch, Step, cycle_seconds, timeline
from oallama.place.slicing import solve_cg

SECONDS = st.floats(1e-5, 1e-2)
MAYBE_SECONDS = st.one_of(st.just(0.0), SECONDS)
SHARES = st.floats(0.1, 1.0)
ONE_QUEUE = Beside(one_queue=True)
BESIDE = st.builds(Beside, *[SHARES] * 6, st.booleans())


@st.composite
def our_blocks(draw: st.DrawFn, beside: Beside | None = None) -> BlockTimes:
    """As slice_times makes them: GG, if there is some, first; at most one copy."""
    launch_s = draw(MAYBE_SECONDS)
    streamed = Step(draw(SECONDS), draw(MAYBE_SECONDS), launch_s)
    resident = Step(0.0, draw(SECONDS), launch_s)
    steps = draw(st.sampled_from([(), (streamed,), (resident,), (resident, replace(streamed, launch_s=0.0))]))
    cpu_s = draw(MAYBE_SECONDS)
    issue_s = draw(MAYBE_SECONDS) if any(step.copy_s for step in steps) else 0.0
    return BlockTimes(
        draw(MAYBE_SECONDS), draw(MAYBE_SECONDS), cpu_s, steps, draw(MAYBE_SECONDS), cpu_s * 20e9, 10e9,
        draw(st.booleans()), issue_s, beside or draw(BESIDE),
    )  # fmt: skip


AHEAD = st.sampled_from(["layer", "continuous"])
PREFETCH = st.builds(Prefetch, AHEAD, st.sampled_from([1, 2, 3, None]))
RING = st.builds(Prefetch, AHEAD, st.sampled_from([1, 2, 3]))


def one_queue(blocks: list[BlockTimes], prefetch: Prefetch) -> float:
    """In program order: everything that the device does is appended to one queue, and a block ends when it is empty."""
    copying = [b for b in range(len(blocks)) if any(step.copy_s for step in blocks[b].steps)]
    ring = prefetch.n_slots or len(blocks)
    asked: set[int] = set()
    now = queue = 0.0

    def ask(b: int) -> None:
        nonlocal queue
        asked.add(b)
        queue = max(queue, now) + next(step.copy_s for step in blocks[b].steps if step.copy_s)

    def ahead(done: int) -> list[int]:
        """What may be asked for, in order, when blocks up to `done` are over."""
        found = []
        for b in [b for b in copying if b not in asked]:
            held = [other for other in asked | set(found) if other > done]
            if prefetch.ahead == "layer" or blocks[b].routed or len(held) >= ring:
                break
            found.append(b)
        return found

    for b in ahead(-1):
        ask(b)
    for b, block in enumerate(blocks):
        now += block.gap_s
        if b in copying and b not in asked:
            ask(b)
            now += block.issue_s
        now += block.send_s
        launched, cpu_end = now, now + block.cpu_s
        for step in block.steps:
            launched += step.launch_s
            queue = max(queue, launched) + step.gpu_s
        now = max(cpu_end, queue)
        held_s = 0.0
        for other in ahead(b):
            ask(other)
            held_s += blocks[other].issue_s
        now += held_s + block.join_s
    return now


@settings(deadline=None)
@given(st.lists(our_blocks(ONE_QUEUE), min_size=1, max_size=5), PREFETCH)
def test_one_queue_is_the_recursion_in_program_order(blocks: list[BlockTimes], prefetch: Prefetch) -> None:
    assert timeline(blocks, prefetch).end_s == pytest.approx(one_queue(blocks, prefetch))


@settings(deadline=None)
@given(st.lists(our_blocks(), min_size=1, max_size=5), PREFETCH, st.none() | contentions())
def test_streams_do_one_thing_at_a_time_and_nothing_is_lost(
    blocks: list[BlockTimes], prefetch: Prefetch, shared: Contention | None
) -> None:
    ran = timeline(blocks, prefetch, shared)
    spans = {
        s: sorted((x.start_s, x.end_s) for x in ran.spans if x.stream == s) for s in ("cpu", "gpu", "copy", "join")
    }
    for of_stream in spans.values():
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(of_stream))
    steps = [step for block in blocks for step in block.steps]
    least = {
        "cpu": sum(block.cpu_s for block in blocks),
        "gpu": sum(step.gpu_s for step in steps),
        "copy": sum(step.copy_s for step in steps),
        "join": sum(block.join_s for block in blocks),
    }
    for stream, seconds in least.items():
        assert ran.busy_s(stream) >= seconds * (1 - 1e-9)  # type: ignore[arg-type]
    assert list(ran.block_ends_s) == sorted(ran.block_ends_s)
    assert max((span.end_s for span in ran.spans), default=0.0) <= ran.end_s * (1 + 1e-12)


@settings(deadline=None)
@given(st.lists(our_blocks(ONE_QUEUE), min_size=1, max_size=4), PREFETCH)
def test_a_device_with_one_queue_never_computes_while_it_receives(blocks: list[BlockTimes], prefetch: Prefetch) -> None:
    ran = timeline(blocks, prefetch)
    busy = sorted((s.start_s, s.end_s) for s in ran.spans if s.stream in ("gpu", "copy"))
    assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(busy))


@settings(deadline=None)
@given(our_blocks(ALONE), st.sampled_from([2, 4]))
def test_with_copies_that_hold_up_nobody_a_cycle_is_the_one_without_turns(block: BlockTimes, n_slots: int) -> None:
    """The limit of full overlap: two slots and more hide that a copy is asked for at a block's end only."""
    prefetch = Prefetch("continuous", n_slots)
    free = replace(block, issue_s=0.0)
    expected = cycle_seconds([free], prefetch)
    held = replace(block, issue_s=1e-12 if any(step.copy_s for step in block.steps) else 0.0)
    if block.routed and any(step.copy_s for step in block.steps):
        return  # asked for before the inputs are sent, not after
    assert cycle_seconds([held], prefetch) == pytest.approx(expected, rel=1e-3)


@settings(deadline=None)
@given(our_blocks(), PREFETCH, st.none() | contentions())
def test_the_closed_form_leaves_turns_to_the_recursion(
    block: BlockTimes, prefetch: Prefetch, shared: Contention | None
) -> None:
    expected = cycle_seconds([block], prefetch, shared, 200)
    assert steady_seconds(block, prefetch, shared) == pytest.approx(expected, rel=0.05)


@settings(deadline=None)
@given(our_blocks(ONE_QUEUE), RING)
def test_with_one_queue_a_round_is_soon_like_every_other(block: BlockTimes, prefetch: Prefetch) -> None:
    ends = timeline([block] * 40, prefetch).block_ends_s
    assert steady_seconds(block, prefetch, None) == pytest.approx((ends[-11] - ends[9]) / 20, rel=1e-6)


def test_a_device_that_receives_and_computes_in_turns() -> None:
    block = BlockTimes(0.0, 0.0, 1.0, (Step(3.0, 2.0),), 0.0, beside=ONE_QUEUE)
    assert cycle_seconds([replace(block, beside=ALONE)], Prefetch()) == pytest.approx(3.0)
    assert cycle_seconds([block], Prefetch()) == pytest.approx(5.0)
    attention = replace(block, gap_s=1.0)
    assert cycle_seconds([attention], Prefetch()) == pytest.approx(5.0), "it receives during attention"
    assert cycle_seconds([replace(attention, issue_s=0.5)], Prefetch()) == pytest.approx(5.0)
    assert cycle_seconds([replace(attention, gap_s=4.0, issue_s=0.5)], Prefetch()) == pytest.approx(6.5)


def test_attention_on_the_cpu_is_held_up_by_copies_and_holds_them_up() -> None:
    half = Beside(cpu_beside_copy=0.5, copy_beside_cpu=0.5)
    first = BlockTimes(0.0, 0.0, 1.0, (), 0.0, beside=half)
    second = BlockTimes(4.0, 0.0, 0.0, (Step(4.0, 1.0),), 0.0, beside=half)
    # of the copy 1 s is done beside CC, which takes 2 s; then 3 s are left
    assert timeline([first, second], Prefetch()).end_s == pytest.approx(2.0 + 4.0 + 1.0), "attention on the device"
    there = replace(second, gap_cpu_s=4.0)  # beside it they take 6 s, in which the CPU does 3 s of its work
    assert timeline([first, there], Prefetch()).end_s == pytest.approx(2.0 + 6.0 + 1.0 + 1.0)
    partly = replace(second, gap_cpu_s=2.0)  # 2 s of them alone; the last one takes 2 s, as does half of the CPU's work
    assert timeline([first, partly], Prefetch()).end_s == pytest.approx(2.0 + 2.0 + 2.0 + 1.0 + 1.0)


def test_asking_for_copies_holds_up_the_cpu() -> None:
    block = BlockTimes(0.0, 0.0, 5.0, (Step(3.0, 0.5),), 0.0)
    for ahead in ("layer", "continuous"):
        free, held = (cycle_seconds([replace(block, issue_s=s)], Prefetch(ahead, 2)) for s in (0.0, 1.0))  # type: ignore[arg-type]
        assert (free, held) == (pytest.approx(5.0), pytest.approx(6.0))


def test_a_cpu_beside_copies_has_what_is_left() -> None:
    block = BlockTimes(0.0, 0.0, 2.0, (Step(1.0, 0.0),), 0.0, beside=Beside(cpu_beside_copy=0.5, copy_beside_cpu=0.8))
    # the copy takes 1.25 s, in which the CPU does 0.625 s of its work
    assert timeline([block], Prefetch("layer", 1)).end_s == pytest.approx(1.25 + 2.0 - 0.625)
    poor = Contention(40.0, 20.0, 10.0, 16.0)  # DRAM leaves the CPU less than cores do
    drained = replace(block, cpu_bytes=80e9, copy_bytes_per_s=20e9)
    assert timeline([drained], Prefetch("layer", 1), poor).end_s == pytest.approx(1.25 + 2.0 - 1.25 * 0.25)


@settings(deadline=None, max_examples=25)
@given(st.lists(GEMMS, min_size=1, max_size=2), SHARES, st.booleans())
def test_the_solver_finds_the_best_cut_with_turns_too(gemms: list, share: float, queue: bool) -> None:  # type: ignore[type-arg]
    """Within what one granule is worth, as with contention."""
    block: StreamedBlock = streamed(gemms, extent=320, step=32)
    beside = Beside(share, share, share, share, share, share, queue)
    on = machine(1e-9)
    on = replace(on, rates=replace(on.rates, beside=((1, beside),)))
    every = {cc: on.seconds(block, Rates(cc / 320, 1 - cc / 320, 0.0), 1) for cc in range(0, 321, 32)}
    found = solve_cg(block, on, 0)
    assert found.seconds == pytest.approx(every[found.cc])
    granule = max(abs(a - b) for a, b in pairwise(every.values()))
    assert found.seconds <= min(every.values()) + granule


def test_a_device_that_cannot_do_both_is_streamed_less() -> None:
    block = streamed([gemm(4e-3, 1e-3, n_bytes=4_000_000)] * 3)
    free = machine(5e-10)
    turns = replace(free, rates=replace(free.rates, beside=((1, ONE_QUEUE),)))
    assert 0 < solve_cg(block, turns, 256).cg < solve_cg(block, free, 256).cg
