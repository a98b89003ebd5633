"""The micro-batch: more tokens in one pass than the default, where a long prompt is predicted to gain by it.

A weight that is streamed, by the split back end or by llama.cpp itself, is read once a micro-batch, whatever its size
(ScheInfer computes a prompt of 1024 tokens in one pass). A larger one costs device memory: compute buffers and
activations grow with it. So a placement is searched for anew with it, but only where the one that was found would
already gain by such passes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oallama.core.errors import DoesNotFit
from oallama.core.options import STOCK_BATCH, Options
from oallama.core.types import Phase, Workload
from oallama.cost.placement import placement_seconds
from oallama.place.policies.registry import Asked, Policy
from oallama.place.problem import Decision, Problem, costs_of
from oallama.place.slicer import slicer_of

LEAST_GAIN = 0.03
"""Of the predicted time: by less the micro-batch is not raised. Profiles have no batch as large, so its time is
extrapolated from theirs."""

PROMPT_STEP = 256
"""Tokens that a prompt is rounded up to: those of `oallama run` are estimated from its bytes."""


def larger_ubatches(load: Workload, asked: Options) -> tuple[int, ...]:
    """Micro-batches above the workload's that may suit it, ascending: doubled, and the whole prompt at once, up to
    n_batch. None where the user fixed it with -ub."""
    if asked.n_ubatch is not None:
        return ()
    whole = -(-load.n_prompt // PROMPT_STEP) * PROMPT_STEP
    most = min(whole, load.n_ctx, asked.n_batch or STOCK_BATCH)
    sizes = []
    n_ubatch = 2 * load.n_ubatch
    while n_ubatch < most:
        sizes.append(n_ubatch)
        n_ubatch *= 2
    return (*sizes, most) if most > load.n_ubatch else ()


def seconds_in(problem: Problem, decision: Decision, n_ubatch: int, phase: Phase) -> float:
    """Predicted seconds of a phase with the decision's placement as it is, in micro-batches of n_ubatch, whatever
    memory these need."""
    placed, load = decision.placed, replace(decision.workload, n_ubatch=n_ubatch)
    if placed.slices is not None:
        return slicer_of(problem, load, placed.slices).again(placed).seconds(load, phase)
    costs = costs_of(problem, load, phase, placed.llama_uses_device(problem.graph.n_layer))
    return placement_seconds(costs, placed.on_device, placed.first_device_layer)


def with_larger_ubatch(
    problem: Problem, asked: Asked, found: Mapping[str, Decision], policies: Sequence[Policy], n_ubatches: Sequence[int]
) -> Decision:
    """The decision with the least seconds: the best of those found, or one with a larger micro-batch that takes at
    least LEAST_GAIN less.

    found: by policy. Another system's policy keeps its micro-batch; so does a placement whose memory was short already,
    and one with nothing on the device, where nothing is streamed. The others are searched for anew in the order of what
    they promise, and only where that would win.
    """
    best = first = min(found.values(), key=lambda decision: decision.placed.seconds)
    to_beat, n_layer = (1 - LEAST_GAIN) * first.placed.seconds, problem.graph.n_layer
    grow = [
        policy for policy in policies
        if not policy.published and (made := found[policy.name]).workload == asked.load
        and made.placed.uses_device(n_layer)
    ]  # fmt: skip
    promises = [
        (seconds_in(problem, found[one.name], n, asked.phase), n, i) for n in n_ubatches for i, one in enumerate(grow)
    ]
    for promised_s, n_ubatch, i in sorted(promises):
        if promised_s >= to_beat:
            break
        larger = replace(asked, load=replace(asked.load, n_ubatch=n_ubatch), lowers_ubatch=False)
        try:
            made = grow[i].decide(problem, larger)
        except DoesNotFit:
            continue
        fits = made.workload == larger.load and made.placed.uses_device(n_layer)
        if fits and made.placed.seconds < to_beat:
            best, to_beat = made, made.placed.seconds
    if best is first:
        return first
    gain = 1 - best.placed.seconds / first.placed.seconds
    change = f"raised from {first.workload.n_ubatch} to {best.workload.n_ubatch} tokens"
    return replace(best, notes=(f"micro-batch {change}: predicted to take {gain:.0%} less time", *best.notes))
