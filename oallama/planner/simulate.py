"""Draws the four streams of a machine (CPU, GPU, copies in and out) while a placement runs, by the cost model. Pure.

Sliced blocks are drawn as in cost/timeline.py. Whole operators are drawn in graph order with their prices; between
sliced blocks they are scaled to the priced inter-block time, which is the same before each block. Device copies of
activations are priced as a sum, so they are drawn in equal parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal

from oallama.core.types import Operator, Predicted, Workload
from oallama.cost.graph import AFTER_ATTENTION
from oallama.cost.passes import Pass, decode_pass, passes
from oallama.cost.timeline import BlockTimes, Span, cycle_timeline, timeline
from oallama.cost.whole import Costs, transfer_seconds
from oallama.planner.placement import Placement
from oallama.planner.price import host_layouts, price, whole_costs
from oallama.planner.problem import Problem
from oallama.planner.slicer import MODEL_ROUNDS, slicer_of

Resource = Literal["cpu", "gpu", "in", "out"]
"""One of the four streams: CPU, GPU, copies to the device, copies back."""

RESOURCES: tuple[Resource, ...] = ("cpu", "gpu", "in", "out")

KINDS = ("operator", "slice", "rest", "stream", "weights", "activations", "send", "join")
"""operator: a whole operator; slice: CC of a block, or its GG and CG; rest: a layer's non-matmul work; stream: copies
of CG and CG'; weights: llama.cpp's copies for offload and to its expert cache; activations: device copies; send: the
thread sends a block's inputs; join: the thread adds partial sums and requests copies."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One span on one stream."""

    stream: Resource
    kind: str
    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PhaseTimeline:
    """The activities of a phase, from 0 s on, and its price. Sorted by stream and start; those of one stream do not
    overlap."""

    activities: tuple[Activity, ...]
    seconds: float

    def busy_s(self, stream: Resource) -> float:
        return sum(activity.seconds for activity in self.activities if activity.stream == stream)

    def parts(self) -> dict[tuple[Resource, str], float]:
        """Seconds by stream and kind, the longest first."""
        seconds: dict[tuple[Resource, str], float] = defaultdict(float)
        for activity in self.activities:
            seconds[activity.stream, activity.kind] += activity.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class Simulation:
    """A prompt, and one decode step at the mean depth of the generation."""

    workload: Workload
    predicted: Predicted  # as planner/price.py prices it
    prompt: PhaseTimeline
    token: PhaseTimeline


def simulate(problem: Problem, workload: Workload, placement: Placement) -> Simulation:
    """Draw a placement's run of a workload.

    Raises PlanError for a slice of an operator that cannot be split, ProfileError if the profile has no link.
    """
    problem = problem.of_step(workload.step)
    predicted, step = price(problem, workload, placement), workload.step
    draw = _sliced if placement.is_sliced else _whole
    prompt, token = draw(problem, workload, placement)
    prompt_s = predicted.ttft_s - step.draft_prompt_s
    token_s = predicted.tpot_s * step.n_yielded - step.draft_s
    return Simulation(
        workload, predicted, PhaseTimeline(_in_order(prompt), prompt_s), PhaseTimeline(_in_order(token), token_s)
    )


def _in_order(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    return tuple(
        sorted((w for w in activities if w.end_s > w.start_s), key=lambda w: (RESOURCES.index(w.stream), w.start_s))
    )


def _in_sequence(tasks: Iterable[Activity]) -> Iterator[Activity]:
    start_s = 0.0
    for task in tasks:
        yield replace(task, start_s=start_s, end_s=start_s + task.seconds)
        start_s += task.seconds


#
# whole operators
#


def _whole(problem: Problem, workload: Workload, placement: Placement) -> tuple[Iterator[Activity], Iterator[Activity]]:
    layouts = host_layouts(problem, workload, placement)

    def tasks(p: Pass) -> Iterator[Activity]:
        costs, on_device, waits_s = whole_costs(problem, placement, layouts, (p,))
        yield Activity("in", "weights", "expert cache", 0.0, waits_s)
        yield from _pass(problem, costs, on_device, placement.first_device_layer)

    prompt = (task for p in passes(workload, "prefill") for task in tasks(p))
    return _in_sequence(prompt), _in_sequence(tasks(replace(decode_pass(workload), count=1)))


def _pass(
    problem: Problem, costs: Costs, on_device: Sequence[bool], first_device_layer: int, sliced: Collection[int] = ()
) -> Iterator[Activity]:
    """The tasks that placement_seconds (cost/whole.py) adds up, each from 0 s, in graph order."""
    graph, tasks, offloads = costs.graph, list[Activity](), bool(costs.offloaded) and not costs.small

    def add(stream: Resource, kind: str, name: str, seconds: float) -> None:
        if seconds > 0:
            tasks.append(Activity(stream, kind, name, 0.0, seconds))

    def add_non_matmul(layer: int) -> None:
        name, seconds = f"layer {layer}: attention, norms and other work", costs.non_matmul_cpu_s
        if layer >= first_device_layer:
            add("gpu", "rest", name, costs.non_matmul_device_s)
        elif offloads:  # by the device, which the host's KV cache is copied to
            add("in", "activations", f"layer {layer}: KV cache", seconds - costs.non_matmul_device_s)
            add("gpu", "rest", name, min(seconds, costs.non_matmul_device_s))
        else:
            add("cpu", "rest", name, seconds)

    for layer, (first, last) in enumerate(graph.layer_operators):
        needs_non_matmul = layer < graph.n_run
        for i in range(first, last):
            operator, seconds = problem.operators[i], costs.sides_s[i][on_device[i]]
            if needs_non_matmul and operator.role in AFTER_ATTENTION:
                add_non_matmul(layer)
                needs_non_matmul = False
            copied_s = 0.0 if on_device[i] else costs.operators[i].streamed_s
            if i not in sliced:
                add("in", "weights", operator.name, copied_s)
                add("gpu" if on_device[i] or copied_s else "cpu", "operator", operator.name, seconds - copied_s)
        if needs_non_matmul:
            add_non_matmul(layer)
    return _with_device_copies(tasks, transfer_seconds(costs, on_device, first_device_layer, sliced=sliced))


def _with_device_copies(tasks: Sequence[Activity], seconds: float) -> Iterator[Activity]:
    """Tasks of one pass with its device copies: an equal part of their seconds at each change of side. A pass begins
    and ends on the host."""
    sides = [(i, task.stream) for i, task in enumerate(tasks) if task.stream in ("cpu", "gpu")]
    ends = [(0, "cpu"), *sides, (len(tasks), "cpu")]
    changes = {i: side for (_, previous), (i, side) in pairwise(ends) if side != previous} or {len(tasks): "cpu"}
    for i in range(len(tasks) + 1):
        if i in changes:
            stream: Resource = "in" if changes[i] == "gpu" else "out"
            yield Activity(stream, "activations", "activations", 0.0, seconds / len(changes))
        yield from tasks[i : i + 1]


#
# slices
#


def _sliced(
    problem: Problem, workload: Workload, placement: Placement
) -> tuple[Iterator[Activity], Iterator[Activity]]:
    slicer = slicer_of(problem, workload, placement)
    slicing = slicer.priced(*slicer.cuts_of(placement), placement.first_slices.settings.token_assignment)
    names = [_block_name([problem.operators[i] for i in block.operators]) for block in slicing.blocks]
    sliced_operators = frozenset(i for block in slicing.blocks for i in block.operators)
    bounds = [0.0, *accumulate(block.inter_block_share / len(names) for block in slicing.blocks)]

    @cache
    def between(n_tokens: int) -> list[Activity]:
        """The tasks between blocks in a pass, in order."""
        costs = slicer.contexts.costs_at(n_tokens, placement.llama_uses_device(problem.graph.n_layer))
        tasks = _pass(problem, costs, placement.on_device, placement.first_device_layer, sliced_operators)
        return list(_in_sequence(tasks))

    def activities(
        phase_passes: Sequence[Pass], times: Sequence[BlockTimes], spans: Sequence[Span]
    ) -> Iterator[Activity]:
        for kind, number, start, end, _ in spans:
            number %= len(times)  # copies may be for blocks of the next token
            i, block = number % len(names), times[number]
            name = names[i]
            if kind == "inter-block":
                yield from _scaled(
                    between(phase_passes[number // len(names)].n_tokens), bounds[i], bounds[i + 1], start, end
                )
            elif kind == "cpu":
                yield Activity("cpu", "slice" if block.steps or block.join_s else "operator", name, start, end)
            elif kind == "gpu":
                yield Activity("gpu", "operator" if block.offloaded else "slice", name, start, end)
            elif kind == "copy":
                yield Activity("in", "weights" if block.offloaded else "stream", name, start, end)
            else:
                yield Activity("cpu", kind, name, start, end)

    prompt, token, streaming = passes(workload, "prefill"), decode_pass(workload), slicer.pricing.streaming
    of_prompt, of_token = (
        [times for p in prompt for times in slicer.pass_times(slicing, p)],
        slicer.pass_times(slicing, token),
    )
    return (
        _apart(activities(prompt, of_prompt, timeline(of_prompt, streaming))),
        _apart(activities((token,), of_token, cycle_timeline(of_token, streaming, MODEL_ROUNDS))),
    )


def _block_name(members: Sequence[Operator]) -> str:
    return members[0].name if len(members) == 1 else f"layer {members[0].layer}: FFN"


def _scaled(tasks: Sequence[Activity], first: float, last: float, start_s: float, end_s: float) -> Iterator[Activity]:
    """These shares of all tasks, drawn from start_s to end_s. Without tasks, a device copy: the inputs of an unsliced
    host block between neighbours on the device."""
    total_s = tasks[-1].end_s if tasks else 0.0
    low, high = first * total_s, last * total_s
    if high <= low:
        yield Activity("out", "activations", "activations", start_s, end_s)
        return
    scale = (end_s - start_s) / (high - low)
    for task in tasks:
        begin, end = max(low, task.start_s), min(high, task.end_s)
        if end > begin:
            yield replace(task, start_s=start_s + (begin - low) * scale, end_s=start_s + (end - low) * scale)


def _apart(drawn: Iterable[Activity]) -> Iterator[Activity]:
    """Split spans so that no two of one stream overlap: in the timeline other copies pass copies of streamed weights,
    which are drawn around them."""
    activities = sorted(drawn, key=lambda w: w.start_s)
    passing = [w for w in activities if w.stream == "in" and w.kind != "stream"]
    for activity in activities:
        start_s = activity.start_s
        for other in passing if activity.kind == "stream" else ():
            if other.start_s >= activity.end_s:
                break
            if other.end_s > start_s:
                yield replace(activity, start_s=start_s, end_s=max(start_s, other.start_s))
                start_s = other.end_s
        yield replace(activity, start_s=start_s, end_s=max(start_s, activity.end_s))
