"""How many slots the ring of streamed weights has: a part of the search, against brute force and against two alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import problem
from split_cases import World, ffn

from oallama.core.profile import LinearFit
from oallama.core.types import StreamSettings, Workload
from oallama.cost.passes import Pass
from oallama.cost.slices import BlockType, Cut
from oallama.cost.timeline import cycle_seconds
from oallama.place.decide import decide
from oallama.place.memory import SLOT_PADDING, most_streamed, slot_bytes, staging_bytes
from oallama.place.placement import Candidate, nothing_there
from oallama.place.policies.registry import Rules
from oallama.place.problem import Problem
from oallama.place.sharing import SlicePlan, Slicer

TOKEN = Workload(n_prompt=1, n_gen=64, n_ctx=256, n_ubatch=1)
PROMPT = Workload(n_prompt=600, n_gen=16, n_ctx=1024, n_ubatch=512)
SMALL = [*ffn(0, n_ff=256), *ffn(1, n_ff=128)]


def streams(link_s_per_byte: float, device_rate: float = 8e9) -> World:
    """A CPU so slow that most of a block is better streamed."""
    link = LinearFit(1e-6, link_s_per_byte, 1.0)
    return World(cpu_rate=2e8, device_rate=device_rate, token_s_per_byte=5e-10, launch_s=1e-6, link=link)


def slots_of(decision: Candidate) -> int | None:
    """None: nothing is streamed."""
    slices = decision.placement
    return slices.streaming.n_slots if slices.is_sliced and slices.streaming is not None and slices.streams else None


def least_token_s(made: Problem, room: int, weights_room: int, n_slots: int) -> float:
    """Of all cuts that fit beside a ring of so many slots, by the exact timeline."""
    slicer = Slicer(made, TOKEN, StreamSettings(n_slots, "ahead"))
    blocks = slicer.blocks(nothing_there(len(made.operators), 3))
    kinds, least_s = [slicer.fastest(block.types) for block in blocks], float("inf")
    for layers in product(*([(of, cut) for cut in all_cuts(of)] for of in kinds)):
        weights = sum(of.weight_bytes(cut) for of, cut in layers)
        staging = staging_bytes(layers, slicer.on.streaming, TOKEN.n_ubatch, 0)
        if weights <= weights_room and weights + staging <= room:
            token = slicer.pass_times(SlicePlan(tuple(blocks), layers, (), False, 0, 0.0, 0.0), Pass(1, 1, 1))
            least_s = min(least_s, cycle_seconds(token, slicer.on.streaming))
    return least_s


def all_cuts(of: BlockType) -> list[Cut]:
    """But all GG."""
    extent, steps = of.block.extent, range(0, of.block.extent + 1, of.block.step)
    return [Cut(extent - cg - gg, cg, gg) for cg, gg in product(steps, steps) if cg + gg <= extent and gg < extent]


@pytest.mark.parametrize("link_s_per_byte", [1e-9, 3e-9])
@pytest.mark.parametrize(("free", "share", "n_slots"), [(130_000, None, 1), (150_000, None, 1), (10**6, 0.2, 2)])
def test_where_memory_is_short_one_slot_beats_any_cut_with_two(
    link_s_per_byte: float, free: int, share: float | None, n_slots: int
) -> None:
    """Where weights may not take what the ring leaves, two are better."""
    more = {} if share is None else {"gpu_weights": share}
    made = replace(problem(streams(link_s_per_byte, 1e9), free, SMALL, **more), slices_only=True)
    decision = decide(made, "scheinfer", TOKEN, "decode")
    assert slots_of(decision) == n_slots and decision.memory.spare >= 0
    room = decision.memory.limit
    weights_room = room if share is None else int(share * sum(op.bytes for op in SMALL))
    least_s = {n: least_token_s(made, room, weights_room, n) for n in (1, 2)}
    assert least_s[n_slots] * (1 - 1e-9) <= decision.placement.seconds <= least_s[n_slots] * 1.15
    assert decision.placement.seconds < least_s[3 - n_slots]


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_what_a_slot_holds_is_the_most_that_fits_it(n_bytes: int, part: int) -> None:
    made = problem(streams(1e-9), 10**7, SMALL)
    slicer = Slicer(made, TOKEN)
    for of in (slicer.fastest(block.types) for block in slicer.blocks(nothing_there(len(made.operators), 3))):
        extent = of.block.extent
        most = min(most_streamed(of, n_bytes), extent)
        assert slot_bytes(of, Cut(extent - most, most, 0), 0) <= n_bytes or most == 0
        more = most + max(1, extent // part)
        assert more > extent or slot_bytes(of, Cut(extent - more, more, 0), 0) > n_bytes - SLOT_PADDING


@pytest.mark.parametrize("ahead", [True, False])
def test_where_nothing_is_copied_ahead_the_ring_has_one_slot(ahead: bool) -> None:
    """It is as long as the largest block; a device that does nothing by itself copies nothing ahead either."""
    made = problem(streams(1e-9), 10**7, gpu_weights=0.0)
    if ahead:
        made = replace(made, profile=replace(made.profile, fingerprint={"device_asynchronous": False}))
    decision = decide(made, "scheinfer", TOKEN, "decode", Rules(prefetch="ahead" if ahead else "layer"))
    slices = decision.placement
    assert slots_of(decision) == 1 and slices.is_sliced and slices.streaming is not None
    largest = max(
        sum(op.bytes for op, cg in zip(made.operators, slices.cg, strict=True) if cg and op.role.startswith(role))
        for role in ("ffn", "output")
    )
    assert 0 < slices.streaming.ring_bytes <= largest + 3 * 2 * SLOT_PADDING + SLOT_PADDING
