"""Plans and affinities through a Placer, whose no_alloc loads are counted: no file is read, and nothing is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from seeds import examples
from worlds import CARD, SMALL, World, bytes_of, first_come, own_policy, routed, total_s, worlds

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE, FlashAttention, Phase, Workload
from oallama.placer import Given, Placer
from oallama.placer.report import plan_report, search_report
from oallama.planner.decide import policy_named
from oallama.planner.knapsack import Selection, solve_knapsack
from oallama.planner.policies.registry import find_policy, policy_names

pytestmark = pytest.mark.usefixtures("small_cards")

LOAD = Workload(n_prompt=64, n_gen=32, n_ctx=512)


#
# policies by name, and one of a user's own
#


def test_a_policy_of_ones_own_is_planned_by_like_any_other() -> None:
    placer = World(model=SMALL).placer()
    with own_policy("first-come", first_come) as own:
        plan = placer.plan(own, workload=LOAD)
        assert plan.operators == placer.plan("first-come", workload=LOAD).operators
    assert plan.policy == "first-come" and plan.memory.spare >= 0
    first, *_, last = plan.operators
    assert (first.gg, last.gg) == (1, 0)


def test_policies_say_what_they_do_and_the_docs_name_each() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    for one in map(find_policy, policy_names()):
        assert one is not None and one.help and f"`{one.name}`" in page, one
    with pytest.raises(
        UsageError, match="choose from auto, oato, scheinfer, split, experts, layers, cpu, stock, atsinfer"
    ):
        policy_named("magic")


def test_auto_is_a_short_way_from_the_knapsack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is read by following calls: at most eight of them, whatever the trial."""
    depths = set()

    def counted(*given: object) -> Selection:
        frame, n_frames = sys._getframe(1), 1
        while frame.f_code is not Placer.plan.__code__:
            frame, n_frames = frame.f_back, n_frames + 1
        depths.add(n_frames)
        return solve_knapsack(*given)

    monkeypatch.setattr("oallama.planner.slicer.solve_knapsack", counted)
    world = World(model=SMALL, workload=replace(LOAD, n_prompt=512, n_ctx=1024), options=Options(flash_attn="auto"))
    for each in (world, routed(uses=(4000.0, 2000.0, 100.0, 50.0, 9.0, 9.0, 9.0, 9.0)), replace(world, repacked=1.5)):
        each.placer().plan(workload=each.workload)
    assert depths and max(depths) <= 8


#
# verified by no_alloc loads
#


@pytest.mark.parametrize("name", ["oato", "layers", "scheinfer", "split"])
@pytest.mark.parametrize(
    "hidden",
    [
        lambda placed, weights: weights // 8 if placed else 0,  # more than counted
        lambda placed, weights: 0 if placed else weights // 3,  # a buffer to stream from the host, and nothing is there
        lambda placed, weights: max(0, weights // 2 - placed) if placed > weights // 4 else 0,  # so, little by little
    ],
)
def test_what_a_no_alloc_load_adds_is_taken_off_and_what_it_does_not_need_is_used(
    name: str, hidden: Callable[[int, int], int]
) -> None:
    world = World(model=SMALL)
    weights = bytes_of(world.operators)
    plan = world.placer(lambda placed: hidden(placed, weights)).plan(name, workload=LOAD)
    assert 0 <= plan.memory.spare < weights // 4
    assert any(place.gg for place in plan.operators)


def test_auto_leaves_a_policy_alone_that_nothing_fits() -> None:
    """Whatever is taken off the device comes back as a buffer."""
    world = World(model=SMALL)
    placer = world.placer(lambda placed: max(0, 11 * bytes_of(world.operators) // 20 - placed) if placed else 0)
    with pytest.raises(DoesNotFit, match="the atsinfer placement"):
        placer.plan("atsinfer", workload=LOAD)
    assert placer.plan(workload=LOAD).memory.spare >= 0


#
# affinity: OATO's Eq. (1) and Algorithm 1
#


@given(world=worlds())
@settings(max_examples=examples(20))
def test_the_published_rules_are_algorithm_1_once_its_affinities_are_stable(world: World) -> None:
    """B = (T_c - T_g - T') / M (line 9), G is B from 0 to 1 (line 11); in that order the device is filled up to the
    first operator that does not fit (lines 16-24)."""
    world = replace(world, options=replace(world.options, gpu_weights=None))
    report = search_report(world.placer(), "decode", 64, 32, affinity="paper", fill="paper", n_ctx=1024)
    rows = report.operators
    by_hand = [(row.t_cpu_s - (row.t_gpu_s or 0.0) - row.t_transfer_s) / row.bytes for row in rows]
    assert [row.benefit_s_per_byte for row in rows] == pytest.approx(by_hand)
    assert by_hand == sorted(by_hand, reverse=True) and [row.rank for row in rows] == list(range(1, len(rows) + 1))
    assert [row.saved_s for row in rows] == pytest.approx([b * row.bytes for b, row in zip(by_hand, rows, strict=True)])
    high, low = by_hand[0], by_hand[-1]
    assert [row.affinity for row in rows] == pytest.approx([(b - low) / (high - low) for b in by_hand])
    assert all(row.t_transfer_s >= 0 for row in rows)
    if report.converged and report.plan.memory.kv:
        n_there = sum(row.backend == "GPU" for row in rows)
        assert all(row.backend == "GPU" for row in rows[:n_there])
        assert n_there == len(rows) or report.plan.memory.spare < rows[n_there].bytes


COUNTED = replace(
    CARD, kernel_s=0.0, launch_s=0.0, launch_node_s=0.0, synchronize_s=0.0, copy_issue_s=0.0, copy_s=1e-6,
    pinned_bytes_per_s=1e18, pageable_bytes_per_s=1e18,
)  # fmt: skip
"""Each device copy takes a microsecond, nothing else any time. Norms, attention and sums of layer 1 are on the
device."""


@pytest.mark.parametrize(
    ("placed", "role", "device_copies"),
    [
        ((), "ffn_gate", 1),  # its result is read on the host
        ((), "attn_output", -2),  # what it reads is there, and so is what reads its result
        (("ffn_gate", "ffn_down"), "ffn_up", -2),
    ],
)
def test_the_transfer_time_of_an_operator_is_what_device_copies_it_adds_or_spares(
    placed: tuple[str, ...], role: str, device_copies: int
) -> None:
    world = World(card=COUNTED, share=2.0)
    names = [f"blk.1.{one}.weight" for one in placed]
    placer = world.placer()
    plan = placer.plan(Given(names, gpu_layers=2), workload=LOAD)
    rows = plan_report(placer, plan, LOAD, "decode").operators
    row = next(row for row in rows if row.name == f"blk.1.{role}.weight")
    assert row.t_transfer_s == pytest.approx(device_copies * 1e-6, rel=1e-3)


def test_an_operator_that_the_device_cannot_compute_has_no_affinity() -> None:
    world = World(share=2.0)
    first = world.operators[0]
    known = (case for case in world.profile.cases if case.device == CPU_DEVICE or case.mul_mat != first.mul_mat)
    world = world.with_profile(cases=tuple(known))
    for row in world.placer().affinity(n_ctx=512, n_prompt=64):
        if row.type == first.type and row.shape == first.shape:
            assert row.t_gpu_s is row.saved_s is row.benefit_s_per_byte is None
            assert (row.affinity, row.backend) == (0.0, "CPU")
        else:
            assert row.backend == "GPU"


def test_a_report_is_of_a_phase_that_there_is() -> None:
    with pytest.raises(UsageError, match="unknown phase 'both'; choose from decode, prefill, mixed"):
        World().placer().affinity("both")


def test_a_report_of_a_full_device_says_how_the_search_ended() -> None:
    placer = World(model=SMALL, share=0.3).placer()
    gaining, full = (search_report(placer, fill=rule, n_prompt=64, n_gen=32) for rule in ("continue", "full"))
    assert (full.iterations, full.converged) == (gaining.iterations, gaining.converged) == (2, False)


@pytest.mark.parametrize(("phase", "n_prompt", "n_gen"), [("decode", 512, 1), ("prefill", 64, 200)])
def test_a_report_of_a_phase_has_the_attention_that_is_faster_in_it(phase: Phase, n_prompt: int, n_gen: int) -> None:
    """Flash attention is faster with batches, and slower with one token."""
    world = World()
    rest = tuple(
        replace(c, seconds=4 * c.seconds, samples=()) if c.shape.flash_attn == (c.n_tokens == 1) else c
        for c in world.profile.rest
    )

    def seconds(flash_attn: FlashAttention) -> float:
        placer = replace(world, options=Options(flash_attn=flash_attn)).with_profile(rest=rest).placer()
        report = search_report(placer, phase, n_prompt=n_prompt, n_gen=n_gen)
        assert report.plan.predicted is not None
        return report.plan.predicted.over(phase)

    assert seconds("on") != pytest.approx(seconds("off"))
    assert seconds("auto") == pytest.approx(min(seconds("on"), seconds("off")))


#
# what a plan is held against
#


@pytest.mark.parametrize("share", [0.4, 3.0])
def test_a_plan_is_held_against_stock_the_cpu_and_the_bound(share: float) -> None:
    world = World(share=share)
    placer = world.placer()
    report = search_report(placer, n_prompt=64, n_gen=32, n_ctx=512)
    stock, alone, bound = report.baselines
    assert (stock.name, alone.name, bound.name) == ("stock --fit", "all CPU", "physical bound")
    assert bound.predicted.total_s <= report.plan.predicted.total_s
    assert stock.predicted.total_s == pytest.approx(total_s(replace(world, workload=report.plan.workload).plan("fit")))
    assert alone.predicted.total_s == pytest.approx(total_s(placer.plan("cpu", workload=report.plan.workload)))
    assert stock.predicted.total_s < alone.predicted.total_s
    of_cpu = plan_report(placer, placer.plan("cpu", workload=report.plan.workload), report.plan.workload)
    assert of_cpu.baselines[:2] == report.baselines[:2]
    assert of_cpu.baselines[2].predicted.total_s <= stock.predicted.total_s, "which may use the device"


def test_where_stock_s_buffers_do_not_fit_it_is_the_cpu() -> None:
    world = World(room=-(2 << 20), compute_per_token=1 << 14)
    placer = world.placer()
    plan = placer.plan("cpu", workload=LOAD)
    stock, alone, _ = plan_report(placer, plan, LOAD).baselines
    assert stock.predicted == alone.predicted


#
# attention
#


def test_without_measuring_attention_is_what_is_asked_for_or_usual_at_that_depth() -> None:
    def way(depth: int, profile: bool = False, n_gen: int = 64, **asked: object) -> str:
        world = World(options=Options(**asked))
        placer = world.alone(world.profile if profile else None)
        plan = placer.plan("cpu", workload=Workload(n_prompt=1, n_gen=n_gen, n_ctx=8192, n_past=depth), measure=False)
        assert plan.predicted is None
        return plan.attention.flash_attn

    assert (way(0), way(4096)) == ("on", "off")
    assert way(0, n_gen=518) == "on", "half of them is a depth of 260, where a step of 512 is not filled"
    assert way(4096, type_v="q8_0") == "on", "a quantised V cache needs it"
    assert (way(0, flash_attn="off"), way(4096, flash_attn="on")) == ("off", "on")
    known = (
        World(workload=Workload(n_prompt=1, n_gen=64, n_ctx=8192, n_past=4096), options=Options()).plan("cpu").attention
    )
    assert way(4096, profile=True) == known.flash_attn
