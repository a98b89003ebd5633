"""Draws the four streams of a machine (CPU, GPU, copies in and out) while a placement runs, as the cost model has it.

Whole operators follow one another in graph order (cost/whole.py). Sliced blocks run as cost/timeline.py says; what lies
between them, which it knows as so many seconds before each block, is drawn as whole operators in graph order again, as
much of it before one block as before another, the device's part first. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from oallama.core.types import Operator, Predicted, Workload
from oallama.cost.passes import Pass, decode_pass, passes
from oallama.cost.slices import Block
from oallama.cost.timeline import BlockTimes, Span, cycle_timeline, timeline
from oallama.cost.whole import HostCache, Resource, WholeTask, host_cache, whole_tasks
from oallama.planner.placement import Placement
from oallama.planner.price import host_layouts, price
from oallama.planner.problem import Problem, costs_over
from oallama.planner.slicer import MODEL_ROUNDS, Slicer, slicer_of

RESOURCES: tuple[Resource, ...] = ("cpu", "gpu", "in", "out")

KINDS = ("operator", "slice", "rest", "stream", "weights", "cache", "activations", "launch", "ask", "join")
"""operator: whole; slice: a block's CC, or its GG and CG; rest: what a layer computes beside operators; stream: CG and
CG' are copied; weights, cache: llama.cpp's own copies for a large batch; launch: of graphs on the device; ask: the
thread sends inputs and asks for copies; join: it adds partial sums."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Work of one stream for a while."""

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
    """A phase from 0 s on, and its price. Works are sorted by stream and start; no two of one stream overlap."""

    activities: tuple[Activity, ...]
    seconds: float

    def busy_s(self, stream: Resource) -> float:
        return sum(activity.seconds for activity in self.activities if activity.stream == stream)

    def parts(self) -> dict[tuple[Resource, str], tuple[float, int]]:
        """(seconds, works) by stream and kind, the longest first."""
        found: dict[tuple[Resource, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for activity in self.activities:
            seconds, n = found[activity.stream, activity.kind]
            found[activity.stream, activity.kind] = (seconds + activity.seconds, n + 1)
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))


@dataclass(frozen=True, slots=True)
class Simulation:
    """A prompt, and one decode step at the mean depth of the generation."""

    workload: Workload
    predicted: Predicted  # as planner/price.py prices it, which the courses draw
    prompt: PhaseTimeline
    token: PhaseTimeline


def simulate(problem: Problem, workload: Workload, placement: Placement) -> Simulation:
    """Draw what a placement does, for a workload.

    Raises PlanError for slices that are no blocks of ours, ProfileError if the profile has no link.
    """
    predicted = price(problem, workload, placement)
    if placement.is_sliced:
        return _sliced(problem, workload, placement, predicted)
    llama_uses_device = placement.llama_uses_device(problem.graph.n_layer)
    layouts = host_layouts(problem, workload, placement)
    cache = host_cache(problem.profile)

    def timeline_of(over: Sequence[Pass], seconds: float) -> PhaseTimeline:
        tasks: list[WholeTask] = []
        for p in over:
            costs = costs_over(problem, (p,), llama_uses_device, layouts)
            tasks += whole_tasks(costs, problem.operators, placement.on_device, placement.first_device_layer, cache)
        ends = list(accumulate(task.seconds for task in tasks))
        starts = [0.0, *ends]
        activities = (_activity(task, start, end) for task, start, end in zip(tasks, starts, ends, strict=False))
        return PhaseTimeline(_in_order(activities), seconds)

    prompt_s, step_s = _without_drafts(workload, predicted)
    prompt = timeline_of(passes(workload, "prefill"), prompt_s)
    token = timeline_of((replace(decode_pass(workload), count=1),), step_s)
    return Simulation(workload, predicted, prompt, token)


def _without_drafts(workload: Workload, predicted: Predicted) -> tuple[float, float]:
    """Seconds of the prompt and of one decode step without those of a draft model."""
    step = workload.step
    return predicted.ttft_s - step.draft_prompt_s, predicted.tpot_s * step.n_yielded - step.draft_s


def _activity(task: WholeTask, start_s: float, end_s: float) -> Activity:
    return Activity(task.stream, "activations" if task.kind == "crossing" else task.kind, task.name, start_s, end_s)


def _in_order(activities: Iterator[Activity]) -> tuple[Activity, ...]:
    return tuple(
        sorted((w for w in activities if w.end_s > w.start_s), key=lambda w: (RESOURCES.index(w.stream), w.start_s))
    )


#
# slices
#


def _sliced(problem: Problem, workload: Workload, placement: Placement, predicted: Predicted) -> Simulation:
    slicer = slicer_of(problem, workload, placement)
    streaming = slicer.on.streaming
    plan = slicer.priced(*slicer.cuts_of(placement), placement.token_assignment)
    names = [_block_name([problem.operators[i] for i in block.operators]) for block in plan.blocks]
    inter_block_times = _InterBlockTimes(problem, slicer, placement, plan.blocks, host_cache(problem.profile))

    def timeline_of(
        over: Sequence[Pass], spans: Sequence[Span], times: Sequence[BlockTimes], seconds: float
    ) -> PhaseTimeline:
        drawn = (activity for span in spans for activity in _activities(span, over, times, names, inter_block_times))
        return PhaseTimeline(_in_order(_apart(drawn)), seconds)

    prompt = passes(workload, "prefill")
    of_prompt = [times for p in prompt for times in slicer.pass_times(plan, p)]
    token, (prompt_s, step_s) = decode_pass(workload), _without_drafts(workload, predicted)
    of_token = slicer.pass_times(plan, token)
    return Simulation(
        workload,
        predicted,
        timeline_of(prompt, timeline(of_prompt, streaming), of_prompt, prompt_s),
        timeline_of((token,), cycle_timeline(of_token, streaming, MODEL_ROUNDS), of_token, step_s),
    )


def _block_name(members: Sequence[Operator]) -> str:
    return members[0].name if len(members) == 1 else f"layer {members[0].layer}: FFN"


class _InterBlockTimes:
    """Inter-block times, by the tokens of a pass: (tasks of the others, tasks of the host), and which share of
    them lies before each block."""

    def __init__(
        self, problem: Problem, slicer: Slicer, placement: Placement, blocks: Sequence[Block], cache: HostCache | None
    ) -> None:
        self._problem, self._slicer, self._placed, self._cache = problem, slicer, placement, cache
        self._inside = frozenset(i for block in blocks for i in block.operators)
        self._known: dict[int, tuple[list[WholeTask], list[WholeTask]]] = {}
        self._until = [0.0, *accumulate(block.inter_block_share / len(blocks) for block in blocks)]

    def _tasks(self, n_tokens: int) -> tuple[list[WholeTask], list[WholeTask]]:
        if n_tokens not in self._known:
            placement, graph = self._placed, self._problem.graph
            costs = self._slicer.contexts.costs_at(n_tokens, placement.llama_uses_device(graph.n_layer))
            at = (placement.on_device, placement.first_device_layer)
            tasks = whole_tasks(costs, self._problem.operators, *at, self._cache, self._inside)
            self._known[n_tokens] = ([t for t in tasks if not t.of_host], [t for t in tasks if t.of_host])
        return self._known[n_tokens]

    def activities(self, n_tokens: int, of_host: bool, number: int, start_s: float, end_s: float) -> Iterator[Activity]:
        """The part before block `number`, laid out from start_s to end_s. Where nothing lies before it, its
        inputs cross: it stays whole on the host between neighbours on the device."""
        tasks = self._tasks(n_tokens)[of_host]
        ends = list(accumulate((task.seconds for task in tasks), initial=0.0))
        low, high = (ends[-1] * until for until in self._until[number : number + 2])
        if high <= low:
            yield Activity("out", "activations", "activations", start_s, end_s)
            return
        scale = (end_s - start_s) / (high - low)
        for task, end in zip(tasks, ends[1:], strict=True):
            first, last = max(low, end - task.seconds), min(high, end)
            if last > first:
                yield _activity(task, start_s + (first - low) * scale, start_s + (last - low) * scale)


def _activities(
    span: Span,
    over: Sequence[Pass],
    times: Sequence[BlockTimes],
    names: Sequence[str],
    inter_block_times: _InterBlockTimes,
) -> Iterator[Activity]:
    """A span of the timeline on the streams it takes; activations lie over the send, join or gpu span that holds
    them."""
    number = span.block % len(times)
    n_tokens, block = over[number // len(names)].n_tokens, times[number]
    number %= len(names)
    name, start, end = names[number], span.start_s, span.end_s
    match span.kind:
        case "inter-block" | "inter-block cpu":
            yield from inter_block_times.activities(n_tokens, span.kind == "inter-block cpu", number, start, end)
        case "cpu":
            alone = not block.steps and not block.waited and not block.join_s
            yield Activity("cpu", "operator" if alone else "slice", name, start, end)
        case "gpu":
            yield Activity("gpu", "operator" if block.offloaded else "slice", name, start, end)
        case "copy":
            yield Activity("in", "weights" if block.offloaded else "stream", name, start, end)
        case "in" | "out":
            yield Activity(span.kind, "activations", name, start, end)
        case "ask":
            yield Activity("cpu", "ask", name, start, end)
        case "join":
            back = min(end, start + block.out_s)
            yield Activity("out", "activations", name, start, back)
            yield Activity("cpu", "join", name, back, end)
        case "send":
            yield from _sent(block, name, start, end)


def _sent(block: BlockTimes, name: str, start_s: float, end_s: float) -> Iterator[Activity]:
    """A send: the thread's own work, the inputs' copy, and what it waits for."""
    parts: list[tuple[Resource, str, float]] = [("in", "activations", block.in_s)]
    for step in block.waited:
        parts += [
            ("in", "stream", step.copy_s),
            ("cpu", "launch", step.launch_s),
            ("gpu", "slice", step.gpu_s),
        ]
    at = max(start_s, end_s - sum(seconds for *_, seconds in parts))
    yield Activity("cpu", "ask", name, start_s, at)
    for stream, kind, seconds in parts:
        until = min(end_s, at + seconds)
        yield Activity(stream, kind, name, at, until)
        at = until


def _apart(drawn: Iterator[Activity]) -> Iterator[Activity]:
    """A stream does one thing at a time, but the timeline lets other copies pass those of streamed weights, and counts
    results with the slice on the device that makes them: weights and slices are drawn around these."""
    activities = sorted(drawn, key=lambda w: w.start_s)
    passing = [w for w in activities if w.stream == "in" and w.kind != "stream"]
    returned = [w for w in activities if w.stream == "out"]
    for activity in activities:
        if activity.stream == "in" and activity.kind == "stream":
            yield from _around(activity, passing)
        elif activity.stream == "gpu":
            yield from _around(activity, returned)
        else:
            yield activity


def _around(activity: Activity, others: Sequence[Activity]) -> Iterator[Activity]:
    """Parts of the work outside of the others, which are sorted and do not overlap."""
    start_s = activity.start_s
    for other in others:
        if other.end_s <= start_s:
            continue
        if other.start_s >= activity.end_s:
            break
        if other.start_s > start_s:
            yield Activity(activity.stream, activity.kind, activity.name, start_s, other.start_s)
        start_s = max(start_s, other.end_s)
    if start_s < activity.end_s:
        yield Activity(activity.stream, activity.kind, activity.name, start_s, activity.end_s)
