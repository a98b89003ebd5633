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

All of it is spans: a price is the end of the last one, `oallama simulate` draws them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal, NamedTuple

from oallama.core.types import StreamSettings
from oallama.cost.rates import NO_INTERFERENCE, Interference

Span = tuple[Literal["inter-block", "send", "cpu", "gpu", "join", "asked", "link", "copy"], int, float, float, float]
"""(kind, number of its block, start, end, seconds of copies alone). send and join: the thread's, before and behind CC;
gpu: a step with its launch, and with copies of activations that the thread does not wait for; asked: when copies of the
block were asked for; link: copies were made, of whichever block; copy: of this block, which `with_copies` finds from
these two. A plain tuple, as a search makes many."""

DONE_S = 1e-12
"""Less work than this is rounding error."""


class DeviceStep(NamedTuple):
    """Work on the device that may need weights first, seconds."""

    copy_s: float  # 0: its weights are there
    gpu_s: float
    launch_s: float = 0.0  # before it, on a stream of their own; launches follow one another


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
    wait_s: float = 0.0  # for a device whose calls are synchronous, before CC
    offloaded: bool = False  # llama.cpp runs it, and copies its weights before it computes: they lie in no slot

    @property
    def copy_s(self) -> float:
        seconds = 0.0
        for step in self.steps:
            seconds += step.copy_s
        return seconds

    @property
    def ahead_s(self) -> float:
        """Seconds of those of its copies that may be asked for before its turn."""
        return left(self.copy_s - self.late_s)

    def behind(self, inter_block_s: float, inter_block_cpu_s: float) -> BlockTimes:
        """The same with so much more time before it, in whose last part the CPU works."""
        return self._replace(
            inter_block_s=self.inter_block_s + inter_block_s,
            inter_block_cpu_s=self.inter_block_cpu_s + inter_block_cpu_s,
        )


def left(seconds: float) -> float:
    """Treat work below rounding error as zero."""
    return seconds if seconds > DONE_S else 0.0


def alone_seconds(block: BlockTimes) -> float:
    """Seconds of one block without its inter-block time, while nothing is copied for other blocks."""
    return _run_block(block, 0, block.copy_s, False, 0.0, 0.0, 0.0, [])[0] + block.join_s


def _run_inter_block(
    inter_block_s: float, cpu_s: float, interference: Interference, link_s: float, now: float, spans: list[Span]
) -> tuple[float, float]:
    """(when a block's inputs are there, work that the link then has left). cpu_s: of inter_block_s, the last part, in
    which the CPU works. link_s: the link's work at `now`."""
    alone_s = inter_block_s - cpu_s
    if link_s:
        link_s = _copy(link_s, alone_s, 1.0, now, spans)
    now += alone_s
    if cpu_s > 0:
        return _cpu_alone(cpu_s, interference, link_s, now, spans)
    return now, link_s


def _run_block(
    block: BlockTimes, number: int, copy_s: float, asked: bool, later_s: float, link_s: float, now: float,
    spans: list[Span],
) -> tuple[float, float]:  # fmt: skip
    """(when both sides of a block are done, work that the link then has left), behind its inter-block time and before
    the join.

    copy_s: block.copy_s; asked: whether what could be was asked for before it. link_s: the link's work when it begins,
    at `now`, of which later_s are for blocks behind it.
    """
    send_s, missing_s = block.send_s, min(block.late_s, copy_s) if asked else copy_s
    if missing_s > 0:
        later_s = min(later_s, link_s)  # some of it may have been copied
        link_s, send_s = link_s + missing_s, send_s + block.issue_s * missing_s / copy_s
        spans.append(("asked", number, now, now, missing_s))
    sent = now + send_s
    spans.append(("send", number, now, sent, 0.0))
    if block.wait_s:
        send_s += block.wait_s
        spans.append(("gpu", number, sent, now + send_s, 0.0))
    if link_s:
        link_s = _copy(link_s, send_s, 1.0, now, spans)
    now += send_s
    if block.steps:
        return _both_sides(block, number, later_s + copy_s, link_s, now, spans)
    if block.cpu_s > 0:
        start = now
        now, link_s = _cpu_alone(block.cpu_s, block.interference, link_s, now, spans)
        spans.append(("cpu", number, start, now, 0.0))
    return now, link_s


def _copy(link_s: float, seconds: float, speed: float, now: float, spans: list[Span]) -> float:
    """The work that the link has left after so many seconds at this speed."""
    done_s = min(link_s, seconds * speed)
    spans.append(("link", 0, now, now + done_s / speed, done_s))
    return left(link_s - seconds * speed)


def _cpu_alone(
    cpu_s: float, interference: Interference, link_s: float, now: float, spans: list[Span]
) -> tuple[float, float]:
    """The CPU computes while the device is idle."""
    if link_s > 0:
        together_s = min(cpu_s / interference.cpu_with_link, link_s / interference.link_with_cpu)
        link_s = _copy(link_s, together_s, interference.link_with_cpu, now, spans)
        now += together_s
        cpu_s -= together_s * interference.cpu_with_link
        if cpu_s <= 0:
            return now, link_s
        if link_s:
            link_s = _copy(link_s, cpu_s, 1.0, now, spans)
    return now + cpu_s, link_s


def _both_sides(
    block: BlockTimes, number: int, behind_s: float, link_s: float, now: float, spans: list[Span]
) -> tuple[float, float]:
    """CC, and the device's steps beside it, until both are done. behind_s: of the link's work, all that is for this
    block or those behind it."""
    steps, cpu_s, speeds, one_queue = block.steps, block.cpu_s, block.interference.speeds, block.interference.one_queue
    at, step, start = 0, steps[0], now
    launched, gpu_s, began = start + step.launch_s, step.gpu_s, start
    behind_s -= step.copy_s  # what follows the copy that the step needs
    pending = True
    while pending or cpu_s > 0 or (one_queue and link_s > 0):
        to_arrive_s = 0.0
        if one_queue:
            to_arrive_s = link_s
        elif pending and step.copy_s > 0:
            to_arrive_s = link_s - behind_s
        cpu, link, launching = cpu_s > 0, link_s > 0, pending and now < launched - DONE_S
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
            done_s = elapsed_s * link_speed
            spans.append(("link", 0, now, now + elapsed_s, done_s))
            link_s -= done_s
            if link_s <= DONE_S:
                link_s = 0.0
        now += elapsed_s
        if cpu:
            cpu_s -= elapsed_s * cpu_speed
            if cpu_s <= DONE_S:
                cpu_s = 0.0
                spans.append(("cpu", number, start, now, 0.0))
        if not computing:
            if not launching:
                began = now
            continue
        gpu_s -= elapsed_s * gpu_speed
        if gpu_s > DONE_S:
            continue
        spans.append(("gpu", number, began, now, 0.0))
        at, began, pending = at + 1, now, at + 1 < len(steps)
        if pending:
            step = steps[at]
            launched, gpu_s = launched + step.launch_s, step.gpu_s
            behind_s -= step.copy_s
    return now, link_s


def run_seconds(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> float:
    """Seconds of the blocks in sequence."""
    return _run_once(blocks, streaming).now


def timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> list[Span]:
    """Spans of the blocks in sequence."""
    return list(with_copies(blocks, _run_once(blocks, streaming).spans))


def _run_once(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> _Run:
    run = _Run(blocks, streaming, len(blocks))
    for _ in blocks:
        run.next_block()
    return run


MAX_ROUNDS = 40


def cycle_seconds(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> float:
    """Seconds of one round through the blocks when rounds follow one another without end, as tokens do: copies for the
    first block then run during the last ones of the round before."""
    return _cycle(blocks, streaming, max_rounds)[0]


def cycle_timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> list[Span]:
    """Spans of the last round that cycle_seconds runs, from 0 s; blocks of the next one, which copies may be for, are
    numbered on. Where rounds do not come out alike it is drawn as long as they are on average."""
    seconds, run, start_s = _cycle(blocks, streaming, max_rounds)
    stretch, first = seconds / (run.now - start_s) if run.now > start_s else 1.0, run.number - len(blocks)
    return [
        (kind, number - first, max(0.0, start - start_s) * stretch, (end - start_s) * stretch, copy_s)
        for kind, number, start, end, copy_s in with_copies(blocks, run.spans)
        if end > start_s
    ]


def with_copies(blocks: Sequence[BlockTimes], spans: Sequence[Span]) -> Iterator[Span]:
    """The spans with one for each block's copy, in place of the link's: copies are made in the order in which they were
    asked for, and of an offloaded block before all others."""
    queue: deque[list[float]] = deque()  # [block, work left, start]
    at = 0.0
    for span in spans:
        kind, number, start, end, work_s = span
        if kind == "asked":
            (queue.appendleft if blocks[number % len(blocks)].offloaded else queue.append)([number, work_s, start])
        elif kind == "link":
            at, done_s = start, 0.0
            while queue and done_s < work_s:
                head = queue[0]
                head[1], done_s = left(head[1] - (work_s - done_s)), min(work_s, done_s + head[1])
                if not head[1]:
                    at = start + (end - start) * done_s / work_s
                    yield "copy", int(head[0]), head[2], at, 0.0
                    queue.popleft()
                    if queue:
                        queue[0][2] = max(queue[0][2], at)
            at = end
        else:
            yield span
    if queue and queue[0][2] < at:
        yield "copy", int(queue[0][0]), queue[0][2], at, 0.0


def runs_ahead(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> bool:
    """Whether copies are asked for before their own block."""
    return streaming.prefetch == "ahead" and any(not block.offloaded and block.ahead_s > 0 for block in blocks)


SETTLED = 1e-9  # how alike rounds are that are the same


def _cycle(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int) -> tuple[float, _Run, float]:
    """(seconds of a round, what ran, when its last round began).

    The first round begins with a full ring. Rounds are run until one ends as it began, or two are alike. Where the link
    is too slow each leaves it with more to do, which the thread will have to wait for once the ring has run empty.
    """
    run = _Run(blocks, streaming, None)
    if not run.ahead:
        for _ in blocks:
            run.next_block()
        return run.now, run, 0.0
    run.fill_ring()
    rounds = _Rounds(max_rounds)
    while rounds.last is None:
        now, link_s, ring = run.now, run.link_s, run.ring
        for _ in blocks:
            run.next_block()
        rounds.add(run.now - now, run.link_s - link_s, run.ring == ring)
    return rounds.last, run, now


def own_cycle_seconds(
    block: BlockTimes, inter_block_s: float, inter_block_cpu_s: float, streaming: StreamSettings
) -> float:
    """cycle_seconds of one block that runs ahead, behind this inter-block time. A search asks for thousands of these,
    and with a ring that is always full they take half the time."""
    copy_s, spans = block.copy_s, list[Span]()
    ahead_s = left(copy_s - block.late_s)
    after_s = block.issue_s * ahead_s / copy_s + block.join_s
    later_s = (streaming.n_slots - 1) * ahead_s
    rounds, link_s = _Rounds(MAX_ROUNDS), max(0.0, ahead_s - after_s)
    while rounds.last is None:
        now, left_s = _run_inter_block(inter_block_s, inter_block_cpu_s, block.interference, link_s, 0.0, spans)
        now, left_s = _run_block(block, 0, copy_s, True, later_s, left_s, now, spans)
        left_s = left(left_s + ahead_s - after_s)
        rounds.add(now + after_s, left_s - link_s, True)
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
        self._total_s += seconds
        ran, near = self._ran, SETTLED * self._total_s
        if (same_ring and abs(added_s) <= near) or (
            ran and abs(seconds - ran[-1][0]) <= near and abs(added_s - ran[-1][1]) <= near
        ):
            self.last = seconds + max(0.0, added_s)
            return
        ran.append((seconds, added_s))
        if len(ran) == self._most:
            ran = ran[self._most // 2 :]
            self.last = (sum(s for s, _ in ran) + max(0.0, sum(added for _, added in ran))) / len(ran)


class _Run:
    """The state of the streams at `now`, which only moves forward. The link's work is one number, as copies are made in
    the order in which they were asked for."""

    def __init__(self, blocks: Sequence[BlockTimes], streaming: StreamSettings, end: int | None) -> None:
        """end: blocks after which nothing follows; None: rounds follow one another without end."""
        self.now = 0.0
        self.spans: list[Span] = []
        self.link_s = 0.0  # work of all copies that were asked for and are not done
        self.number = 0  # of the next block, over all rounds
        self._blocks = blocks
        self._copies = [0.0 if block.offloaded else block.copy_s for block in blocks]  # into the ring
        self._ahead = [0.0 if block.offloaded else block.ahead_s for block in blocks]
        self.ahead = streaming.prefetch == "ahead" and any(self._ahead)
        self._n_slots = streaming.n_slots
        self._end = end
        self._asked = 0  # blocks whose copies were asked for, if they have any
        self._held = 0  # slots
        self._later_s = 0.0  # work of copies for blocks behind the present one
        if self.ahead:
            self._ask_ahead()

    def fill_ring(self) -> None:
        """What was asked for has arrived; but of a block that follows itself, what it asked for at its end is under
        way, as in most rounds."""
        self.link_s = 0.0
        self.spans.clear()
        if len(self._blocks) == 1:
            block, ahead_s = self._blocks[0], self._ahead[0]
            self.link_s = max(0.0, ahead_s - block.issue_s * ahead_s / self._copies[0] - block.join_s)
            self.spans.append(("asked", self._asked - 1, 0.0, 0.0, self.link_s))

    @property
    def ring(self) -> tuple[int, int]:
        """Number of blocks ahead whose copies were requested, and of slots in use."""
        return self._asked - self.number, self._held

    def next_block(self) -> None:
        """Run the next block to the end of its join."""
        number, index = self.number, self.number % len(self._blocks)
        block, copy_s = self._blocks[index], self._copies[index]
        asked = self._asked > number
        if asked:
            self._later_s -= self._ahead[index]
        else:
            self._asked = number + 1
            self._held += copy_s > 0
        asked = asked and not block.offloaded
        inter_block_s, inter_block_cpu_s, spans = block.inter_block_s, block.inter_block_cpu_s, self.spans
        now, link_s = _run_inter_block(
            inter_block_s, inter_block_cpu_s, block.interference, self.link_s, self.now, spans
        )
        spans.append(("inter-block", number, self.now, now, 0.0))
        now, self.link_s = _run_block(block, number, block.copy_s, asked, self._later_s, link_s, now, spans)
        self.now = now
        self.number = number + 1
        self._held -= copy_s > 0
        join_s = self._ask_ahead() + block.join_s if self.ahead else block.join_s
        if self.link_s:
            self.link_s = _copy(self.link_s, join_s, 1.0, now, self.spans)
        self.now = now + join_s
        spans.append(("join", number, now, self.now, 0.0))

    def _ask_ahead(self) -> float:
        """Request copies for later blocks; returns the time that this takes the thread."""
        held_s = 0.0
        n = len(self._blocks)
        while self._held < self._n_slots and (self._end is None or self._asked < self._end):
            index = self._asked % n
            copy_s, ahead_s = self._copies[index], self._ahead[index]
            if copy_s > 0:
                if not ahead_s:
                    break
                self._held += 1
                self.link_s += ahead_s
                self._later_s += ahead_s
                held_s += self._blocks[index].issue_s * ahead_s / copy_s
                self.spans.append(("asked", self._asked, self.now, self.now, ahead_s))
            self._asked += 1
        return held_s if self.number else 0.0  # the first are asked for while whatever came before was computed
