"""The micro-batch: more tokens in one pass than the default, where a long prompt is predicted to gain by it.

A weight that is streamed, by the split back end or by llama.cpp itself, is read once a micro-batch, whatever its size
(ScheInfer computes a prompt of 1024 tokens in one pass). A larger one costs device memory: compute buffers and
activations grow with it. So a placement is searched for anew with it, but only where the one that was found would
already gain by such passes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from oallama.core.options import STOCK_BATCH, Options
from oallama.core.types import Phase, Workload
from oallama.cost.placement import placement_seconds
from oallama.place.budget import for_weights
from oallama.place.problem import Decision, Problem, costs_of, operators_limit, own_bytes
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


def seconds_recut(problem: Problem, decision: Decision, n_ubatch: int, phase: Phase) -> float:
    """As seconds_in, but what is sliced is cut as suits such micro-batches, in the memory that the decision has for it
    and compute buffers leave, which grow with the micro-batch. Infinite where nothing is sliced."""
    placed, load, slices = decision.placed, replace(decision.workload, n_ubatch=n_ubatch), decision.placed.slices
    if slices is None:
        return inf
    whole, held = replace(placed, slices=None), decision.memory
    more_compute = held.compute * (n_ubatch - decision.workload.n_ubatch) // decision.workload.n_ubatch
    room = slices.device_bytes + held.spare - more_compute
    weights_room = for_weights(room, operators_limit(problem), own_bytes(problem, whole))
    plan = slicer_of(problem, load, slices).plan(whole, room, weights_room)
    return inf if plan is None else plan.seconds(load, phase)


def with_larger_ubatch(
    found: Mapping[str, Decision],
    n_ubatches: Sequence[int],
    promised: Callable[[str, int], float],
    searched: Callable[[str, int, float], Decision | None],
) -> Decision:
    """The decision with the least seconds: the best of those found, or one with a larger micro-batch that takes at
    least LEAST_GAIN less.

    found: by policy. promised: seconds that a policy's decision would take in such micro-batches (seconds_in).
    searched: the policy's decision for them that takes less than so many seconds, None where there is none; asked for
    in the order of what is promised, and only where that would win.
    """
    best = first = min(found.values(), key=lambda decision: decision.placed.seconds)
    to_beat = (1 - LEAST_GAIN) * first.placed.seconds
    for promise, n_ubatch, policy in sorted((promised(policy, n), n, policy) for n in n_ubatches for policy in found):
        if promise >= to_beat:
            break
        decision = searched(policy, n_ubatch, to_beat)
        if decision is not None:
            best, to_beat = decision, decision.placed.seconds
    if best is first:
        return first
    gain = 1 - best.placed.seconds / first.placed.seconds
    change = f"raised from {first.workload.n_ubatch} to {best.workload.n_ubatch} tokens"
    return replace(best, notes=(f"micro-batch {change}: predicted to take {gain:.0%} less time", *best.notes))
