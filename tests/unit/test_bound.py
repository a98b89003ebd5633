"""What no placement can beat: held against every cut of small problems, and a case known in closed form."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import problem
from seeds import examples
from split_cases import EMBD, VOCAB, World, ffn, operator

from oallama.core.types import Workload
from oallama.cost.slices import Cut
from oallama.cost.timeline import cycle_seconds
from oallama.place.decide import decide
from oallama.place.explain import Work, baselines, least_seconds, physical_bound
from oallama.place.memory import ledger, staging_bytes
from oallama.place.placement import nothing_there
from oallama.place.sharing import Slicer

seconds = st.floats(0.1, 10)
works = st.builds(Work, st.integers(1, 100), seconds, st.one_of(st.none(), seconds), st.one_of(seconds, st.just(inf)))
STEPS = 10


def times(listed: list[Work], cuts: tuple[tuple[int, int, int], ...], dram: float) -> float:
    """Of cuts in tenths into cc, cg and gg: of whatever takes the longest."""
    cpu = link = device = 0.0
    for work, (cc, cg, gg) in zip(listed, cuts, strict=True):
        cpu += cc / STEPS * work.cpu_s
        link += cg / STEPS * work.link_s if cg else 0.0
        if cg or gg:
            device += inf if work.device_s is None else (cg + gg) / STEPS * work.device_s
    return max(cpu, link, device, (cpu + link) / dram)


@settings(max_examples=examples(60))
@given(st.lists(works, min_size=1, max_size=2), st.integers(0, 150), st.floats(1, 2))
def test_no_cut_takes_less_and_the_best_one_hardly_more(listed: list[Work], room: int, dram: float) -> None:
    bound = least_seconds(listed, room, dram)
    of_one = [(cc, cg, STEPS - cc - cg) for cc in range(STEPS + 1) for cg in range(STEPS + 1 - cc)]
    best = min(
        times(listed, cuts, dram)
        for cuts in product(of_one, repeat=len(listed))
        if sum(gg * work.bytes for work, (_, _, gg) in zip(listed, cuts, strict=True)) <= room * STEPS
    )
    assert bound <= best * (1 + 1e-9)
    # to the next tenth in each operator's cc and cg, whatever the best cut is
    rounding = sum(
        (max(t for t in (work.cpu_s, work.link_s, work.device_s or 0.0) if t < inf)) * 2 / STEPS for work in listed
    )
    assert best <= bound + 2 * rounding


def test_cpu_and_link_share_what_the_device_has_no_room_for() -> None:
    """300 of 400 bytes at 10 a second on the CPU and 5 over the link; the device waits."""
    layers = [Work(100, 10.0, 0.1, 20.0)] * 4
    assert least_seconds(layers, 100) == pytest.approx(300 / (10 + 5))
    assert least_seconds(layers, 400) == pytest.approx(0.4 * 10.0 / 10.1, rel=1e-3), (
        "all resident: the device and the CPU"
    )
    assert least_seconds([Work(100, 10.0, None, 20.0)] * 4, 400) == pytest.approx(40)


def test_a_memory_that_feeds_one_of_them_at_a_time() -> None:
    layers = [Work(100, 10.0, 0.1, 20.0)] * 4
    assert least_seconds(layers, 0, dram=1.0) == pytest.approx(40), "what the link carries the CPU could have read"


def test_what_stays_in_the_ring_is_not_under_a_cap_on_weights() -> None:
    """No weight may lie on the device, and two blocks are streamed whole: the ring holds both, so nothing is copied
    once it does."""
    listed = [*ffn(0), operator("output", EMBD, VOCAB, None)]
    made, load = problem(World(cpu_rate=2e8, device_rate=8e10), 10**8, listed, gpu_weights=0.0), Workload(1, 1, 256)
    slicer = Slicer(made, load)
    kinds = [slicer.fastest(block.types) for block in slicer.blocks(nothing_there(len(listed), 3))]
    layers = [(of, Cut(0, of.block.extent, 0)) for of in kinds]
    token = [slicer.on.block_times(of, cut, 1) for of, cut in layers]
    held = ledger(10**8, 0.9, 0, 0, 0, 0, staging_bytes(layers, slicer.on.streaming, 1, 0))
    there = [replace(times, steps=tuple(replace(s, copy_s=0.0) for s in times.steps)) for times in token]
    least_s = cycle_seconds(there, slicer.on.streaming)
    assert len(token) == 2 and least_s < cycle_seconds(token, slicer.on.streaming)
    assert physical_bound(made, load, held).tpot_s <= least_s
    assert physical_bound(made, load, replace(held, staging=0)).tpot_s > least_s


def test_beside_a_plan_of_the_cpu_the_bound_may_use_the_device() -> None:
    made, load = problem(World(cpu_rate=2e8, device_rate=8e10), 10**8), Workload(64, 32, 256)
    held = decide(made, "cpu", load, "mixed").memory
    assert held.limit == 0
    stock, _, bound = (one.predicted for one in baselines(made, load, held))
    assert bound.ttft_s <= stock.ttft_s and bound.tpot_s <= stock.tpot_s
