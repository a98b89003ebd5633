"""One block on its streams: ScheInfer Eq. 5, from event to event.

The streams are the thread that computes CC, the device (GG and CG), and the link. The thread sends the block's inputs,
computes CC while the device runs its steps in order, and waits for them. A step waits for its launch and for its
weights. While two streams are busy they slow each other down as was measured (cost/interference.py). The link's work is
one number, as copies are made in the order in which they were asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal

from oallama.cost.interference import NO_INTERFERENCE, Interference

Stream = Literal["gap", "gap cpu", "send", "cpu", "gpu", "copy", "in", "out", "ask", "join"]
"""Of spans. gap and gap cpu are the parts of gap_s; send, ask and join the thread's, before and behind CC; in and out
are activations, which a send, a join or the end of a gpu span holds."""

DONE_S = 1e-12
"""Less work than this is none: what rounding leaves."""


@dataclass(frozen=True, slots=True)
class Step:
    """Work on the device that may need weights first, seconds."""

    copy_s: float  # 0: its weights are there
    gpu_s: float
    launch_s: float = 0.0  # before it, on a stream of their own; launches follow one another
    in_s: float = 0.0  # of launch_s, its end: inputs are copied
    out_s: float = 0.0  # of gpu_s, its end: results are copied


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Durations of one block's tasks, each as if alone, seconds."""

    gap_s: float  # from the end of the block before to this one's inputs
    send_s: float  # on the thread that then computes CC
    cpu_s: float
    steps: tuple[Step, ...]
    join_s: float
    routed: bool = False  # what to copy is only known when the inputs are there
    issue_s: float = 0.0  # that asking for its copies takes the thread
    gap_cpu_s: float = 0.0  # of gap_s, in which the CPU works; the last part of it
    interference: Interference = NO_INTERFERENCE
    in_s: float = 0.0  # of send_s, its end but for `waited`: inputs are copied
    waited: tuple[Step, ...] = ()  # of send_s, its end: steps of a device that does nothing by itself
    out_s: float = 0.0  # of join_s, its beginning: results are copied
    offloaded: bool = False  # llama.cpp runs it, and copies its weights before it computes: they lie in no slot

    @property
    def copy_s(self) -> float:
        seconds = 0.0
        for step in self.steps:
            seconds += step.copy_s
        return seconds

    def behind(self, gap_s: float, gap_cpu_s: float) -> BlockTimes:
        """The same with so much more time before it, in whose last part the CPU works."""
        return BlockTimes(
            self.gap_s + gap_s, self.send_s, self.cpu_s, self.steps, self.join_s, self.routed, self.issue_s,
            self.gap_cpu_s + gap_cpu_s, self.interference, self.in_s, self.waited, self.out_s, self.offloaded,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """One task as it ran."""

    stream: Stream
    block: int
    start_s: float
    end_s: float


class Drawing:
    """The spans of a run, and the copies under way. block: the ordinal of the block that runs."""

    def __init__(self) -> None:
        self.block = 0
        self.spans: list[Span] = []
        self.copying: deque[list[float]] = deque()  # [ordinal, work left, start]

    def draw(self, stream: Stream, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(stream, self.block, start_s, end_s))

    def ask(self, block: BlockTimes, ordinal: int, at_s: float) -> None:
        """Copies that the link makes behind all others, or, of an offloaded block, before them."""
        asked = [[ordinal, step.copy_s, at_s] for step in block.steps if step.copy_s > 0]
        if block.offloaded:
            self.copying.extendleft(reversed(asked))
        else:
            self.copying.extend(asked)

    def copies(self, at_s: float, elapsed_s: float, speed: float) -> None:
        """The link works for so long at this speed."""
        work_s = elapsed_s * speed
        while self.copying and self.copying[0][1] <= work_s + DONE_S:
            ordinal, left_s, start = self.copying.popleft()
            work_s -= left_s
            at_s += left_s / speed
            self.spans.append(Span("copy", int(ordinal), start, at_s))
            if self.copying:
                self.copying[0][2] = max(self.copying[0][2], at_s)
        if self.copying:
            self.copying[0][1] -= work_s

    def until(self, now: float) -> list[Span]:
        """All spans, and the copy that is not done, as far as it is."""
        return [*self.spans, *(Span("copy", int(ordinal), start, now) for ordinal, _, start in list(self.copying)[:1])]


def run_gap(
    gap_s: float, gap_cpu_s: float, beside: Interference, link_s: float, now: float, drawing: Drawing | None = None
) -> tuple[float, float]:
    """(when a block's inputs are there, work that the link then has left). gap_s: what lies before the block, in whose
    last part, gap_cpu_s, the CPU works. link_s: the link's work at `now`."""
    alone_s = gap_s - gap_cpu_s
    if drawing is not None:
        drawing.draw("gap", now, now + alone_s)
        drawing.copies(now, min(alone_s, link_s), 1.0)
    now, link_s = now + alone_s, left(link_s - alone_s)
    if gap_cpu_s > 0:
        start = now
        now, link_s = _cpu_alone(gap_cpu_s, beside, link_s, now, drawing)
        if drawing is not None:
            drawing.draw("gap cpu", start, now)
    return now, link_s


def run_block(
    block: BlockTimes, copy_s: float, asked: bool, later_s: float, link_s: float, now: float,
    drawing: Drawing | None = None,
) -> tuple[float, float]:  # fmt: skip
    """(when both sides of a block are done, work that the link then has left), behind its gap and before the join.

    copy_s: of the block's own weights; asked: whether they were asked for before it. link_s: the link's work when it
    begins, at `now`, of which later_s are for blocks behind it.
    """
    send_s = block.send_s
    if not asked:
        later_s = min(later_s, link_s)  # some of it may have been copied
        link_s, send_s = link_s + copy_s, send_s + block.issue_s
        if drawing is not None:
            drawing.ask(block, drawing.block, now)
    if drawing is not None:
        drawing.draw("send", now, now + send_s)
        drawing.copies(now, min(send_s, link_s), 1.0)
    now, link_s = now + send_s, left(link_s - send_s)
    if block.steps:
        return _both_sides(block, later_s + copy_s, link_s, now, drawing)
    if block.cpu_s > 0:
        start = now
        now, link_s = _cpu_alone(block.cpu_s, block.interference, link_s, now, drawing)
        if drawing is not None:
            drawing.draw("cpu", start, now)
    return now, link_s


def alone_seconds(block: BlockTimes) -> float:
    """Of one block without its gap, nothing being copied but for itself."""
    copy_s = block.copy_s
    return run_block(block, copy_s, not copy_s, 0.0, 0.0, 0.0)[0] + block.join_s


def left(seconds: float) -> float:
    """Of work: what rounding leaves of none is none."""
    return seconds if seconds > DONE_S else 0.0


def _cpu_alone(
    cpu_s: float, beside: Interference, link_s: float, now: float, drawing: Drawing | None
) -> tuple[float, float]:
    """The CPU computes, and the device does not."""
    if link_s > 0:
        together_s = min(cpu_s / beside.cpu_with_link, link_s / beside.link_with_cpu)
        if drawing is not None:
            drawing.copies(now, together_s, beside.link_with_cpu)
        link_s = left(link_s - together_s * beside.link_with_cpu)
        now += together_s
        cpu_s -= together_s * beside.cpu_with_link
        if cpu_s <= 0:
            return now, link_s
        if drawing is not None:
            drawing.copies(now, min(cpu_s, link_s), 1.0)
        link_s = left(link_s - cpu_s)
    return now + cpu_s, link_s


def _both_sides(
    block: BlockTimes, behind_s: float, link_s: float, now: float, drawing: Drawing | None
) -> tuple[float, float]:
    """CC, and the device's steps beside it, until both are done. behind_s: of the link's work, all that is for this
    block or those behind it."""
    steps, cpu_s, speeds, one_queue = block.steps, block.cpu_s, block.interference.speeds, block.interference.one_queue
    number, step, start = 0, steps[0], now
    launched, gpu_s, began = start + step.launch_s, step.gpu_s, start
    behind_s -= step.copy_s  # what follows the copy that the step needs
    if drawing is not None:
        drawing.draw("in", launched - step.in_s, launched)
    pending = True
    while pending or cpu_s > 0 or (one_queue and link_s > 0):
        to_arrive_s = 0.0
        if one_queue:
            to_arrive_s = link_s
        elif pending and step.copy_s > 0:
            to_arrive_s = link_s - behind_s
        cpu, link = cpu_s > 0, link_s > 0
        launching = pending and now < launched - DONE_S
        computing = pending and not launching and to_arrive_s <= DONE_S
        cpu_speed, link_speed, gpu_speed = speeds[cpu + 2 * link + 4 * computing]
        elapsed_s = cpu_s / cpu_speed if cpu else inf
        if computing:
            other_s = gpu_s / gpu_speed
        elif launching:
            other_s = launched - now
        else:
            other_s = to_arrive_s / link_speed if pending else inf
        if other_s < elapsed_s:
            elapsed_s = other_s
        if link:
            other_s = link_s / link_speed
            if other_s < elapsed_s:
                elapsed_s = other_s
            if drawing is not None:
                drawing.copies(now, elapsed_s, link_speed)
            link_s = left(link_s - elapsed_s * link_speed)
        now += elapsed_s
        if cpu:
            cpu_s = left(cpu_s - elapsed_s * cpu_speed)
            if drawing is not None and not cpu_s:
                drawing.draw("cpu", start, now)
        if not computing:
            began = now
            continue
        gpu_s = left(gpu_s - elapsed_s * gpu_speed)
        if gpu_s:
            continue
        if drawing is not None and step.gpu_s > 0:
            drawing.draw("gpu", began, now)
            drawing.draw("out", now - (now - began) * step.out_s / step.gpu_s, now)
        number, began, pending = number + 1, now, number + 1 < len(steps)
        if pending:
            step = steps[number]
            launched, gpu_s = launched + step.launch_s, step.gpu_s
            behind_s -= step.copy_s
    return now, link_s
