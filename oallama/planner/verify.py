"""Verifies a placement: its memory by a no_alloc load, its price, its notes. Pure except for that load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oallama.core.types import Phase, Workload
from oallama.core.units import format_bytes
from oallama.planner.memory import memory_breakdown
from oallama.planner.placement import Placement, VerifiedPlan
from oallama.planner.price import price
from oallama.planner.problem import Problem, cpu_alone, memory_of, with_layouts


def verify(
    problem: Problem,
    policy: str,
    workload: Workload,
    placement: Placement,
    notes: Sequence[str] = (),
) -> VerifiedPlan:
    """The verified plan of a placement. Its `spare` memory may be negative. notes: what was lowered before the
    search."""
    placement = with_layouts(problem, workload, with_draft_block(problem, workload, placement))
    memory = memory_of(problem, workload, placement)
    predicted = price(problem, workload, placement)
    notes = (*notes, *placement.notes, *_streaming_notes(problem, placement))
    return VerifiedPlan(policy, workload, placement, memory, predicted, notes, problem.flash_attn)


def with_draft_block(problem: Problem, workload: Workload, placement: Placement) -> Placement:
    """The placement with the model's MTP layer on the device if that block makes drafts (MTP): it runs most often, and
    cannot be split."""
    last = problem.graph.n_layer - 1
    if not workload.step.mtp or placement.first_device_layer <= last or not placement.uses_device(last + 1):
        return placement
    return replace(placement, first_device_layer=last)


def on_cpu(problem: Problem, workload: Workload, phase: Phase) -> VerifiedPlan:
    """The verified plan with everything on the CPU."""
    placement = cpu_alone(problem, workload, phase)
    load = problem.no_alloc_load(workload, placement)
    memory = memory_breakdown(0, problem.vram_fill, 0, load.weights_host, 0, 0)
    predicted = price(problem, workload, placement)
    return VerifiedPlan(
        "cpu", workload, with_layouts(problem, workload, placement), memory, predicted, (), problem.flash_attn
    )


def nothing_placed(
    problem: Problem, policy: str, workload: Workload, phase: Phase, capacity: int, reason: str
) -> VerifiedPlan:
    """The verified plan with everything on the CPU, with a note that says why, and the device's memory breakdown."""
    verified = on_cpu(problem, workload, phase)
    empty = memory_breakdown(capacity, problem.vram_fill, 0, verified.memory.weights_host, 0, 0)
    note = f"nothing is placed on {problem.profile.device}: {reason}"
    return replace(verified, policy=policy, memory=empty, notes=(note,))


def _streaming_notes(problem: Problem, placement: Placement) -> tuple[str, ...]:
    """A note on the rate of streaming from pageable memory, for a device without pinned memory."""
    profile = problem.profile
    if not placement.streams or profile.is_pinned:
        return ()
    rate = format_bytes(1 / profile.link["h2d_pageable"].beta_s_per_byte)
    cost = f"{profile.device} has no pinned host memory: weights are streamed from pageable memory, at {rate}/s"
    return (cost + ", and the CPU waits for every copy" if profile.is_blocking else cost,)
