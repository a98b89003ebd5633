"""The recursion of Eq. 5: against the paper's own formulas, against independent recursions, and its invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import INTERFERENCE

from oallama.core.types import StreamSettings
from oallama.cost.rates import NO_INTERFERENCE, Interference
from oallama.cost.timeline import BlockTimes, Step, cycle_seconds, cycle_timeline, timeline

PAPER = StreamSettings(prefetch="layer")  # as ScheInfer copies
SECONDS = st.floats(1e-5, 1e-2)
MAYBE_SECONDS = st.one_of(st.just(0.0), SECONDS)
ONE_QUEUE = Interference(one_queue=True)
MODES = st.sampled_from(["layer", "ahead"])
PREFETCH = st.builds(StreamSettings, st.sampled_from([1, 2, 3]), MODES)


@st.composite
def our_blocks(draw: st.DrawFn, beside: Interference | None = None) -> BlockTimes:
    """As slice_times makes them: GG, if there is some, first; at most one copy."""
    launch_s = draw(MAYBE_SECONDS)
    streamed = Step(draw(SECONDS), draw(MAYBE_SECONDS), launch_s)
    resident = Step(0.0, draw(SECONDS), launch_s)
    steps = draw(st.sampled_from([(), (streamed,), (resident,), (resident, replace(streamed, launch_s=0.0))]))
    issue_s = draw(MAYBE_SECONDS) if any(step.copy_s for step in steps) else 0.0
    gap_s = draw(MAYBE_SECONDS)
    return BlockTimes(
        gap_s, draw(MAYBE_SECONDS), draw(MAYBE_SECONDS), steps, draw(MAYBE_SECONDS), draw(st.booleans()), issue_s,
        gap_s * draw(st.sampled_from([0.0, 0.5, 1.0])), draw(INTERFERENCE) if beside is None else beside,
    )  # fmt: skip


def in_program_order(blocks: list[BlockTimes], streaming: StreamSettings) -> float:
    """Without interference every time is a maximum of earlier ones plus a duration; with one queue, whatever the device
    does is appended to it, and a block ends when it is empty."""
    copying = [b for b in range(len(blocks)) if any(step.copy_s for step in blocks[b].steps)]
    ring = streaming.n_slots
    arrives: dict[int, float] = {}
    now = link = device = 0.0

    def ask(b: int) -> None:
        nonlocal link, device
        one_queue = blocks[b].interference.one_queue
        link = max(link, device if one_queue else 0.0, now) + sum(step.copy_s for step in blocks[b].steps)
        arrives[b] = link
        device = link if one_queue else device

    def ahead(done: int) -> list[int]:
        """What may be asked for, in order, when blocks up to `done` are over."""
        found: list[int] = []
        for b in [b for b in copying if b not in arrives]:
            held = [other for other in [*arrives, *found] if other > done]
            if streaming.prefetch == "layer" or blocks[b].routed or len(held) >= ring:
                break
            found.append(b)
        return found

    for b in ahead(-1):
        ask(b)
    for b, block in enumerate(blocks):
        now += block.gap_s
        if b in copying and b not in arrives:
            ask(b)
            now += block.issue_s
        now += block.send_s
        launched, cpu_end = now, now + block.cpu_s
        device = max(device, now)
        for step in block.steps:
            launched += step.launch_s
            device = max(device, launched, arrives[b] if step.copy_s else 0.0) + step.gpu_s
        now = max(cpu_end, device) if block.steps or block.interference.one_queue else cpu_end
        link = max(link, now) if block.interference.one_queue else link
        held_s = 0.0
        for other in ahead(b):
            ask(other)
            held_s += blocks[other].issue_s
        now += held_s + block.join_s
    return now


@settings(deadline=None)
@given(st.lists(our_blocks(NO_INTERFERENCE), min_size=1, max_size=5), PREFETCH)
def test_events_agree_with_the_recursion_in_program_order(blocks: list[BlockTimes], streaming: StreamSettings) -> None:
    assert timeline(blocks, streaming).end_s == pytest.approx(in_program_order(blocks, streaming))


@settings(deadline=None)
@given(st.lists(our_blocks(ONE_QUEUE).filter(lambda b: b.steps), min_size=1, max_size=5), PREFETCH)
def test_one_queue_is_the_recursion_in_program_order(blocks: list[BlockTimes], streaming: StreamSettings) -> None:
    assert timeline(blocks, streaming).end_s == pytest.approx(in_program_order(blocks, streaming))


@settings(deadline=None)
@given(st.lists(our_blocks(ONE_QUEUE), min_size=1, max_size=4), PREFETCH)
def test_a_device_with_one_queue_never_computes_while_it_receives(
    blocks: list[BlockTimes], streaming: StreamSettings
) -> None:
    ran = timeline(blocks, streaming)
    busy = sorted((s.start_s, s.end_s) for s in ran.spans if s.stream in ("gpu", "copy"))
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(busy))


@settings(deadline=None)
@given(st.lists(our_blocks(), min_size=1, max_size=4), PREFETCH, st.integers(2, 6))
def test_a_round_is_drawn_as_long_as_it_takes(blocks: list[BlockTimes], streaming: StreamSettings, most: int) -> None:
    drawn = cycle_timeline(blocks, streaming, most)
    assert drawn.end_s == pytest.approx(cycle_seconds(blocks, streaming, most))


@settings(deadline=None)
@given(st.lists(our_blocks(), min_size=1, max_size=5), PREFETCH)
def test_streams_do_one_thing_at_a_time_and_nothing_is_lost(
    blocks: list[BlockTimes], streaming: StreamSettings
) -> None:
    ran = timeline(blocks, streaming)
    for stream in ("cpu", "gpu", "copy", "join"):
        spans = sorted((s.start_s, s.end_s) for s in ran.spans if s.stream == stream)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
    steps = [step for block in blocks for step in block.steps]
    least = {
        "cpu": sum(block.cpu_s for block in blocks),
        "gpu": sum(step.gpu_s for step in steps),
        "copy": sum(step.copy_s for step in steps),
        "join": sum(block.join_s for block in blocks),
    }
    for stream, seconds in least.items():
        assert ran.busy_s(stream) >= seconds * (1 - 1e-6)  # type: ignore[arg-type]
    assert list(ran.block_ends_s) == sorted(ran.block_ends_s)
    assert {s.block for s in ran.spans if s.stream == "copy"} == {i for i, b in enumerate(blocks) if b.copy_s}
    for join in (s for s in ran.spans if s.stream == "join"):
        end_s = ran.block_ends_s[join.block]
        assert (join.start_s, join.end_s) == pytest.approx((end_s - blocks[join.block].join_s, end_s))
    assert max((span.end_s for span in ran.spans), default=0.0) <= ran.end_s * (1 + 1e-9) + 1e-12


@settings(deadline=None)
@given(st.lists(our_blocks(NO_INTERFERENCE), min_size=1, max_size=5), MODES, st.integers(1, 3))
def test_more_slots_never_take_longer_where_asking_takes_no_time(
    blocks: list[BlockTimes], mode: str, n_slots: int
) -> None:
    free = [replace(block, issue_s=0.0) for block in blocks]
    few, more = (timeline(free, StreamSettings(n, mode)).end_s for n in (n_slots, n_slots + 1))  # type: ignore[arg-type]
    assert more <= few * (1 + 1e-9)
    assert timeline(free, StreamSettings(n_slots, "ahead")).end_s <= timeline(
        free, StreamSettings(n_slots, "layer")
    ).end_s * (1 + 1e-9)


def long_run(blocks: list[BlockTimes], streaming: StreamSettings, rounds: int) -> float:
    ends = timeline(blocks * (2 * rounds), streaming).block_ends_s
    return (ends[-1 - len(blocks)] - ends[(rounds - 1) * len(blocks) - 1]) / rounds


@settings(deadline=None, max_examples=50)
@given(st.lists(our_blocks(), min_size=1, max_size=4), st.integers(1, 3))
def test_a_cycle_is_what_a_long_run_takes_for_each_round(blocks: list[BlockTimes], n_slots: int) -> None:
    streaming = StreamSettings(n_slots, "ahead")
    assert cycle_seconds(blocks, streaming) == pytest.approx(long_run(blocks, streaming, 100), rel=0.02)


def test_what_llama_cpp_offloads_takes_the_link_from_what_is_streamed() -> None:
    """Its copy goes before the others', lies in no slot, and is never asked for ahead."""
    streamed = BlockTimes(0.0, 0.0, 0.0, (Step(4.0, 1.0),), 0.0)
    offloaded = BlockTimes(0.0, 0.0, 0.0, (Step(3.0, 2.0),), 0.0, offloaded=True)
    made = timeline([offloaded, streamed], StreamSettings(1, "ahead"))
    assert made.block_ends_s == (5.0, 8.0)  # 3 and 2 of the first, beside which 2 of the second's 4 are copied
    assert timeline([streamed, offloaded], StreamSettings(1, "ahead")).block_ends_s == (5.0, 10.0)
    assert timeline([offloaded], StreamSettings(1, "ahead")).end_s == 5.0
    assert cycle_seconds([streamed, offloaded], StreamSettings(2, "ahead")) == pytest.approx(7.0)  # never rests


def test_a_cpu_and_a_link_at_once_get_what_was_measured_together() -> None:
    shared = Interference(cpu_with_link=0.75, link_with_cpu=0.75)
    block = BlockTimes(0.0, 0.0, 1.0, (Step(1.0, 0.0),), 0.0, interference=shared)
    assert timeline([block], StreamSettings(1, "layer")).end_s == pytest.approx(4 / 3)
    # a copy of half the length: until 2/3 s both, then the CPU alone has half its work left
    shorter = replace(block, steps=(Step(0.5, 0.0),))
    assert timeline([shorter], StreamSettings(1, "layer")).end_s == pytest.approx(2 / 3 + 0.5)


def test_a_device_that_receives_and_computes_in_turns() -> None:
    block = BlockTimes(0.0, 0.0, 1.0, (Step(3.0, 2.0),), 0.0, interference=ONE_QUEUE)
    assert cycle_seconds([replace(block, interference=NO_INTERFERENCE)], StreamSettings()) == pytest.approx(3.0)
    assert cycle_seconds([block], StreamSettings()) == pytest.approx(5.0)
    attention = replace(block, gap_s=1.0)
    assert cycle_seconds([attention], StreamSettings()) == pytest.approx(5.0), "it receives during attention"
    assert cycle_seconds([replace(attention, issue_s=0.5)], StreamSettings()) == pytest.approx(5.0)
    assert cycle_seconds([replace(attention, gap_s=4.0, issue_s=0.5)], StreamSettings()) == pytest.approx(6.5)


def test_attention_on_the_cpu_is_held_up_by_copies_and_holds_them_up() -> None:
    half = Interference(cpu_with_link=0.5, link_with_cpu=0.5)
    first = BlockTimes(0.0, 0.0, 1.0, (), 0.0, interference=half)
    second = BlockTimes(4.0, 0.0, 0.0, (Step(4.0, 1.0),), 0.0, interference=half)
    # of the copy 1 s is done beside CC, which takes 2 s; then 3 s are left
    assert timeline([first, second], StreamSettings()).end_s == pytest.approx(2.0 + 4.0 + 1.0), (
        "attention on the device"
    )
    there = replace(second, gap_cpu_s=4.0)  # beside it they take 6 s, in which the CPU does 3 s of its work
    assert timeline([first, there], StreamSettings()).end_s == pytest.approx(2.0 + 6.0 + 1.0 + 1.0)
    partly = replace(second, gap_cpu_s=2.0)  # 2 s of them alone; the last one takes 2 s, as does half of the CPU's work
    assert timeline([first, partly], StreamSettings()).end_s == pytest.approx(2.0 + 2.0 + 2.0 + 1.0 + 1.0)
