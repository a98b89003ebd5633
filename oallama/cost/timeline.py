"""When the tasks of sliced blocks begin and end: ScheInfer Eq. 5, from event to event, block by block.

The streams are the thread that computes CC, the device (GG and CG), and the link. The thread sends a block's inputs,
computes CC while the device runs its steps in order, waits for them, and joins the partial sums. A step waits for its
launch and for its weights. While two streams are busy they slow each other down as was measured (cost/rates.py). Then
comes what lies between a block and the next (attention).

What is streamed of a block lies in one slot of a ring. The thread asks for copies: with prefetch "ahead" those of later
blocks whenever a block has ended, as many as there are free slots, so that the link works across blocks and during
attention; with "layer" those of its own block, as the paper does. What only the router knows of is always asked for by
its own block, and llama.cpp copies the weights of a block that it offloads: before what was asked for ahead. The link's
work is one number, as copies are made in the order in which they were asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from oallama.core.types import StreamSettings
from oallama.cost.rates import NO_INTERFERENCE, Interference

SpanKind = Literal["inter-block", "inter-block cpu", "send", "cpu", "gpu", "copy", "in", "out", "ask", "join"]
"""Streams of spans. inter-block and inter-block cpu are the parts of inter_block_s; send, ask and join the thread's,
before and behind CC; in and out are activations, which a send, a join or the end of a gpu span holds."""

DONE_S = 1e-12
"""Less work than this is rounding error."""


class DeviceStep(NamedTuple):
    """Work on the device that may need weights first, seconds."""

    copy_s: float  # 0: its weights are there
    gpu_s: float
    launch_s: float = 0.0  # before it, on a stream of their own; launches follow one another
    in_s: float = 0.0  # of launch_s, its end: inputs are copied
    out_s: float = 0.0  # of gpu_s, its end: results are copied


class BlockTimes(NamedTuple):
    """Durations of one block's tasks, each as if alone, seconds."""

    inter_block_s: float  # from the end of the block before to this one's inputs
    send_s: float  # on the thread that then computes CC
    cpu_s: float
    steps: tuple[DeviceStep, ...]
    join_s: float
    late_s: float = 0.0  # of its copies, those of which nobody knows before the inputs are there
    issue_s: float = 0.0  # that asking for its copies takes the thread
    inter_block_cpu_s: float = 0.0  # of inter_block_s, in which the CPU works; the last part of it
    interference: Interference = NO_INTERFERENCE
    in_s: float = 0.0  # of send_s, its end but for `waited`: inputs are copied
    waited: tuple[DeviceStep, ...] = ()  # of send_s, its end: steps of a device that does nothing by itself
    out_s: float = 0.0  # of join_s, its beginning: results are copied
    offloaded: bool = False  # llama.cpp runs it, and copies its weights before it computes: they lie in no slot

    @property
    def copy_s(self) -> float:
        seconds = 0.0
        for step in self.steps:
            seconds += step.copy_s
        return seconds

    @property
    def ahead_s(self) -> float:
        """Of its copies, those that may be asked for before its turn."""
        return left(self.copy_s - self.late_s)

    def behind(self, inter_block_s: float, inter_block_cpu_s: float) -> BlockTimes:
        """The same with so much more time before it, in whose last part the CPU works."""
        return self._replace(
            inter_block_s=self.inter_block_s + inter_block_s,
            inter_block_cpu_s=self.inter_block_cpu_s + inter_block_cpu_s,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """One span on one stream."""

    kind: SpanKind
    block: int
    start_s: float
    end_s: float


class Drawing:
    """The spans of a run, and the copies under way. block: the ordinal of the block that runs."""

    def __init__(self) -> None:
        self.block = 0
        self.spans: list[Span] = []
        self.copying: deque[list[float]] = deque()  # [ordinal, work left, start]

    def draw(self, kind: SpanKind, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(kind, self.block, start_s, end_s))

    def ask(self, block: BlockTimes, ordinal: int, share: float, at_s: float) -> None:
        """A share of the block's copies, which the link makes behind all others, or, of an offloaded block, before
        them."""
        asked = [[ordinal, step.copy_s * share, at_s] for step in block.steps if step.copy_s > 0]
        if block.offloaded:
            self.copying.extendleft(reversed(asked))
        else:
            self.copying.extend(asked)

    def copies(self, at_s: float, elapsed_s: float, speed: float) -> None:
        """Advance the link by this time at this speed."""
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
        """All spans, including the finished part of an unfinished copy."""
        return [*self.spans, *(Span("copy", int(ordinal), start, now) for ordinal, _, start in list(self.copying)[:1])]


def run_inter_block(
    inter_block_s: float,
    inter_block_cpu_s: float,
    beside: Interference,
    link_s: float,
    now: float,
    drawing: Drawing | None = None,
) -> tuple[float, float]:
    """(when a block's inputs are there, work that the link then has left). inter_block_s: what lies before the block,
    in whose last part, inter_block_cpu_s, the CPU works. link_s: the link's work at `now`."""
    alone_s = inter_block_s - inter_block_cpu_s
    if drawing is not None:
        drawing.draw("inter-block", now, now + alone_s)
        drawing.copies(now, min(alone_s, link_s), 1.0)
    now, link_s = now + alone_s, left(link_s - alone_s)
    if inter_block_cpu_s > 0:
        start = now
        now, link_s = _cpu_alone(inter_block_cpu_s, beside, link_s, now, drawing)
        if drawing is not None:
            drawing.draw("inter-block cpu", start, now)
    return now, link_s


def run_block(
    block: BlockTimes, copy_s: float, asked: bool, later_s: float, link_s: float, now: float,
    drawing: Drawing | None = None,
) -> tuple[float, float]:  # fmt: skip
    """(when both sides of a block are done, work that the link then has left), behind its inter-block time and before
    the join.

    copy_s: of the block's own weights; asked: whether those that could be were asked for before it. link_s: the link's
    work when it begins, at `now`, of which later_s are for blocks behind it.
    """
    send_s, missing_s = block.send_s, min(block.late_s, copy_s) if asked else copy_s
    if missing_s > 0:
        later_s = min(later_s, link_s)  # some of it may have been copied
        link_s, send_s = link_s + missing_s, send_s + block.issue_s * missing_s / copy_s
        if drawing is not None:
            drawing.ask(block, drawing.block, missing_s / copy_s, now)
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
    """Seconds of one block without its inter-block time, while nothing is copied for other blocks."""
    copy_s = block.copy_s
    return run_block(block, copy_s, not copy_s, 0.0, 0.0, 0.0)[0] + block.join_s


def left(seconds: float) -> float:
    """Treat work below rounding error as zero."""
    return seconds if seconds > DONE_S else 0.0


def _cpu_alone(
    cpu_s: float, beside: Interference, link_s: float, now: float, drawing: Drawing | None
) -> tuple[float, float]:
    """The CPU computes while the device is idle."""
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


SETTLED = 1e-9  # how alike rounds are that are the same

MAX_ROUNDS = 40


def timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> list[Span]:
    """Spans of each stream while the blocks run in sequence."""
    drawing = Drawing()
    _run_once(blocks, streaming, drawing)
    return drawing.spans


def run_seconds(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> float:
    """Seconds of the blocks in sequence."""
    return _run_once(blocks, streaming, None)


def _run_once(blocks: Sequence[BlockTimes], streaming: StreamSettings, drawing: Drawing | None) -> float:
    run = _Run(blocks, streaming, len(blocks), drawing)
    for _ in blocks:
        run.next_block()
    return run.now


def cycle_seconds(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> float:
    """Seconds of one round through the blocks when rounds follow one another without end, as tokens do: copies for the
    first block then run during the last ones of the round before.

    The first round begins with a full ring. Rounds are run until one ends as it began, or two are alike. Where the link
    is too slow each leaves it with more to do, which the thread will have to wait for once the ring has run empty.
    """
    if len(blocks) > 1:
        return _cycle(_Run(blocks, streaming, None, None), len(blocks), max_rounds)[0]
    block = blocks[0]
    if runs_ahead(blocks, streaming):
        return own_cycle_seconds(block, block.inter_block_s, block.inter_block_cpu_s, streaming, max_rounds)
    return block.inter_block_s + alone_seconds(block)


def runs_ahead(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> bool:
    """Whether copies are asked for before their own block."""
    return streaming.prefetch == "ahead" and any(not block.offloaded and block.ahead_s > 0 for block in blocks)


def own_cycle_seconds(
    block: BlockTimes,
    inter_block_s: float,
    inter_block_cpu_s: float,
    streaming: StreamSettings,
    max_rounds: int = MAX_ROUNDS,
) -> float:
    """Seconds of a cycle of one block that follows itself behind this inter-block time, and runs ahead. Most rounds
    begin with what the one before asked for at its end, all else having arrived; so does the first."""
    copy_s, ahead_s = block.copy_s, block.ahead_s
    after_s = block.issue_s * ahead_s / copy_s + block.join_s
    later_s = (streaming.n_slots - 1) * ahead_s
    rounds = _Rounds(max_rounds)
    link_s = max(0.0, ahead_s - after_s)
    while rounds.last is None:
        end_s, left_s = run_inter_block(inter_block_s, inter_block_cpu_s, block.interference, link_s, 0.0)
        end_s, left_s = run_block(block, copy_s, True, later_s, left_s, end_s)
        left_s = left(left_s + ahead_s - after_s)
        rounds.add(end_s + after_s, left_s - link_s, True)
        link_s = left_s
    return rounds.last


class _Rounds:
    """Rounds of one and the same, until it is known what each takes in the long run."""

    def __init__(self, most: int) -> None:
        self.last: float | None = None  # seconds of a round, once known
        self._most = most
        self._ran: list[tuple[float, float]] = []  # (seconds, work that it added to the link's)
        self._total_s = 0.0

    def add(self, seconds: float, added_s: float, same_ring: bool) -> None:
        """same_ring: whether as much was asked for ahead when it ended as when it began."""
        self._ran.append((seconds, added_s))
        self._total_s += seconds
        near = SETTLED * self._total_s
        if (same_ring and abs(added_s) <= near) or (
            len(self._ran) > 1 and all(abs(a - b) <= near for a, b in zip(*self._ran[-2:], strict=True))
        ):
            self.last = seconds + max(0.0, added_s)
        elif len(self._ran) == self._most:
            ran = self._ran[self._most // 2 :]
            self.last = (sum(s for s, _ in ran) + max(0.0, sum(added for _, added in ran))) / len(ran)


def cycle_timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> list[Span]:
    """The last round that cycle_seconds runs, from 0 s; blocks of the next one, which copies may be for, are numbered
    on. Where rounds do not come out alike it is drawn as long as they are on average."""
    drawing = Drawing()
    run = _Run(blocks, streaming, None, drawing)
    seconds, start_s = _cycle(run, len(blocks), max_rounds)
    stretch = seconds / (run.now - start_s) if run.now > start_s else 1.0
    if abs(stretch - 1) <= SETTLED:
        stretch = 1.0
    first = run.ordinal - len(blocks)
    return [
        Span(s.kind, s.block - first, max(0.0, s.start_s - start_s) * stretch, (s.end_s - start_s) * stretch)
        for s in drawing.until(run.now)
        if s.end_s > start_s
    ]


def _cycle(run: _Run, n_blocks: int, max_rounds: int) -> tuple[float, float]:
    """(seconds of a round, when the last one that was run began)."""
    if not run.ahead:
        for _ in range(n_blocks):
            run.next_block()
        return run.now, 0.0
    run.link_left_s = 0.0  # what was asked for has arrived: the ring is full
    if run.drawing is not None:
        run.drawing.copying.clear()
    rounds = _Rounds(max_rounds)
    while rounds.last is None:
        now, left_s, ring = run.now, run.link_left_s, run.ring
        for _ in range(n_blocks):
            run.next_block()
        rounds.add(run.now - now, run.link_left_s - left_s, run.ring == ring)
    return rounds.last, now


class _Run:
    """The state of the streams at `now`, which only moves forward. The link's work is one number, as copies are made in
    the order in which they were asked for."""

    def __init__(
        self, blocks: Sequence[BlockTimes], streaming: StreamSettings, end: int | None, drawing: Drawing | None
    ) -> None:
        """end: blocks after which nothing follows; None: rounds follow one another without end."""
        self.now = 0.0
        self.link_left_s = 0.0  # work of all copies that were asked for and are not done
        self.ordinal = 0  # of the next block, over all rounds
        self.drawing = drawing
        self._blocks = blocks
        self._copies = [0.0 if block.offloaded else block.copy_s for block in blocks]  # into the ring
        self._ahead = [0.0 if block.offloaded else block.ahead_s for block in blocks]
        self.ahead = runs_ahead(blocks, streaming)
        self._n_slots = streaming.n_slots
        self._end = end
        self._asked = 0  # blocks whose copies were asked for, if they have any
        self._held = 0  # slots
        self._later_s = 0.0  # work of copies for blocks behind the present one
        if self.ahead:
            self._ask_ahead()

    @property
    def ring(self) -> tuple[int, int]:
        """Number of blocks ahead whose copies were requested, and of slots in use."""
        return self._asked - self.ordinal, self._held

    def next_block(self) -> None:
        """Run the next block to the end of its join."""
        ordinal, index = self.ordinal, self.ordinal % len(self._blocks)
        block, copy_s, drawing = self._blocks[index], self._copies[index], self.drawing
        asked = self._asked > ordinal
        if asked:
            self._later_s -= self._ahead[index]
        else:
            self._asked = ordinal + 1
            self._held += copy_s > 0
        if drawing is not None:
            drawing.block = ordinal
        asked = asked and not block.offloaded
        now, left_s = run_inter_block(
            block.inter_block_s, block.inter_block_cpu_s, block.interference, self.link_left_s, self.now, drawing
        )
        self.now, self.link_left_s = run_block(block, block.copy_s, asked, self._later_s, left_s, now, drawing)
        self.ordinal = ordinal + 1
        self._held -= copy_s > 0
        ask_s = self._ask_ahead() if self.ahead else 0.0
        if drawing is not None:
            drawing.draw("ask", self.now, self.now + ask_s)
            drawing.draw("join", self.now + ask_s, self.now + ask_s + block.join_s)
            drawing.copies(self.now, min(self.link_left_s, ask_s + block.join_s), 1.0)
        self.link_left_s = left(self.link_left_s - ask_s - block.join_s)
        self.now += ask_s + block.join_s

    def _ask_ahead(self) -> float:
        """Request copies for later blocks; returns the time that this takes the thread."""
        held_s = 0.0
        n = len(self._blocks)
        while self._held < self._n_slots and (self._end is None or self._asked < self._end):
            index = self._asked % n
            block, copy_s, ahead_s = self._blocks[index], self._copies[index], self._ahead[index]
            if copy_s > 0:
                if not ahead_s:
                    break
                self._held += 1
                self.link_left_s += ahead_s
                self._later_s += ahead_s
                held_s += block.issue_s * ahead_s / copy_s
                if self.drawing is not None:
                    self.drawing.ask(block, self._asked, ahead_s / copy_s, self.now)
            self._asked += 1
        return held_s if self.ordinal else 0.0  # the first are asked for while whatever came before was computed
