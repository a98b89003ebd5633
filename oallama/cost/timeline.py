"""When the tasks of sliced blocks begin and end: ScheInfer Eq. 5, from event to event, for a model block by block.

The streams are the thread that computes CC, the device (GG and CG), and the link. The thread sends a block's inputs,
computes CC while the device runs its steps in order, waits for them and joins the partial sums; then comes what lies
between this block and the next (attention). A step waits for its launch and for its weights.

What is streamed of a block lies in one slot of a ring. The thread asks for copies: with prefetch "ahead" those of later
blocks whenever a block has ended, as many as there are free slots, so that the link works across blocks and during
attention; with "layer" those of its own block, as the paper does. Routed weights are always asked for by their own
block. While two streams are busy they slow each other down as was measured (cost/interference.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.core.types import PrefetchMode
from oallama.cost.interference import NO_INTERFERENCE, Interference

Stream = Literal["gap", "gap cpu", "send", "cpu", "gpu", "copy", "in", "out", "ask", "join"]
"""Of spans. gap and gap cpu are the parts of gap_s; send, ask and join the thread's, before and behind CC; in and out
are activations, which a send, a join or the end of a gpu span holds."""

SETTLED = 1e-9  # how alike rounds are that are the same

MAX_ROUNDS = 40
_DONE_S = 1e-12  # less work than this is none: what rounding leaves


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

    @property
    def copy_s(self) -> float:
        return sum(step.copy_s for step in self.steps)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How copies run ahead. n_slots: blocks' weights that the ring holds; None: as many as there are."""

    mode: PrefetchMode = "ahead"
    n_slots: int | None = 2


PAPER = Prefetch("layer", None)


@dataclass(frozen=True, slots=True)
class Span:
    """One task as it ran."""

    stream: Stream
    block: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run of blocks from 0 s to end_s."""

    spans: tuple[Span, ...]
    block_ends_s: tuple[float, ...]

    @property
    def end_s(self) -> float:
        return self.block_ends_s[-1] if self.block_ends_s else 0.0

    def busy_s(self, stream: Stream) -> float:
        return sum(span.end_s - span.start_s for span in self.spans if span.stream == stream)


def timeline(blocks: Sequence[BlockTimes], prefetch: Prefetch, draws: bool = True) -> Timeline:
    """Run the blocks one after another. draws: whether spans are wanted."""
    run = _Run(blocks, prefetch, n_rounds=1, draws=draws)
    ends = tuple(run.next_block() for _ in blocks)
    return Timeline(tuple(run.spans), ends)


def cycle_seconds(blocks: Sequence[BlockTimes], prefetch: Prefetch, max_rounds: int = MAX_ROUNDS) -> float:
    """Seconds of one round through the blocks when rounds follow one another without end, as tokens do: copies for the
    first block then run during the last ones of the round before.

    The first round begins with a full ring. Rounds are run until two are alike. Where the link is too slow each leaves
    it with more to do, which the thread will have to wait for once the ring has run empty.
    """
    return _cycle(_Run(blocks, prefetch, n_rounds=None, draws=False), len(blocks), max_rounds)[0]


def cycle_timeline(blocks: Sequence[BlockTimes], prefetch: Prefetch, max_rounds: int = MAX_ROUNDS) -> Timeline:
    """The last round that cycle_seconds runs, from 0 s; blocks of the next one, which copies may be for, are numbered
    on. Where rounds do not come out alike it is drawn as long as they are on average."""
    run = _Run(blocks, prefetch, n_rounds=None, draws=True)
    seconds, start_s, ends_s = _cycle(run, len(blocks), max_rounds)
    stretch = seconds / (run.now - start_s) if run.now > start_s else 1.0
    if abs(stretch - 1) <= SETTLED:
        stretch = 1.0
    first = run.ordinal - len(blocks)
    spans = (
        Span(s.stream, s.block - first, max(0.0, s.start_s - start_s) * stretch, (s.end_s - start_s) * stretch)
        for s in (*run.spans, *run.under_way())
        if s.end_s > start_s
    )
    return Timeline(tuple(spans), tuple((end_s - start_s) * stretch for end_s in ends_s))


def _cycle(run: _Run, n_blocks: int, max_rounds: int) -> tuple[float, float, list[float]]:
    """(seconds of a round, when the last one that was run began, when its blocks ended)."""
    if not run.ahead:
        ends_s = [run.next_block() for _ in range(n_blocks)]
        return run.now, 0.0, ends_s
    run.fill_ring()
    rounds: list[tuple[float, float]] = []  # (seconds, work that it added to the link's)
    for _ in range(max_rounds):
        now, left_s = run.now, run.link_left_s
        ends_s = [run.next_block() for _ in range(n_blocks)]
        rounds.append((run.now - now, run.link_left_s - left_s))
        if len(rounds) > 1 and all(abs(a - b) <= SETTLED * run.now for a, b in zip(*rounds[-2:], strict=True)):
            break
    else:
        rounds = rounds[max_rounds // 2 :]
        total_s = sum(s for s, _ in rounds) + max(0.0, sum(added for _, added in rounds))
        return total_s / len(rounds), now, ends_s
    seconds, added = rounds[-1]
    return seconds + max(0.0, added), now, ends_s


class _Run:
    """The state of the streams at `now`, which only moves forward. The link's work is one number, as copies are made in
    the order in which they were asked for."""

    def __init__(self, blocks: Sequence[BlockTimes], prefetch: Prefetch, n_rounds: int | None, draws: bool) -> None:
        self.spans: list[Span] = []
        self.now = 0.0
        self.link_left_s = 0.0  # work of all copies that were asked for and are not done
        self.ahead = prefetch.mode == "ahead" and any(block.copy_s > 0 and not block.routed for block in blocks)
        self.ordinal = 0  # of the next block, over all rounds
        self._blocks = blocks
        self._copies = [block.copy_s for block in blocks]
        self._n_slots = len(blocks) if prefetch.n_slots is None else prefetch.n_slots
        self._end = None if n_rounds is None else n_rounds * len(blocks)
        self._draws = draws
        self._asked = 0  # blocks whose copies were asked for, if they have any
        self._held = 0  # slots
        self._later_s = 0.0  # work of copies for blocks behind the present one
        self._queue: deque[list[float]] = deque()  # of copies under way, for spans: [ordinal, work left, start]
        self._ask_ahead()

    def fill_ring(self) -> None:
        """What was asked for has arrived."""
        self.link_left_s = 0.0
        self._queue.clear()

    def under_way(self) -> list[Span]:
        """The copy that is not done, as far as it is."""
        return [Span("copy", int(ordinal), start, self.now) for ordinal, _, start in list(self._queue)[:1]]

    def next_block(self) -> float:
        """Run the next block to the end of its join; returns that time."""
        ordinal = self.ordinal
        index = ordinal % len(self._blocks)
        block, copy_s = self._blocks[index], self._copies[index]
        gap_at = self.now
        self._wait(block.gap_s - block.gap_cpu_s)
        gap_cpu_at = self.now
        self._work(block.gap_cpu_s, block.interference)
        send_at = self.now
        issue_s = 0.0
        if self._asked > ordinal:
            self._later_s -= copy_s
        else:
            self._asked = ordinal + 1
            if copy_s > 0:
                self._ask(ordinal, copy_s)
                issue_s = block.issue_s
        self._wait(issue_s + block.send_s)
        if self._draws:
            self._draw("gap", ordinal, gap_at, gap_cpu_at)
            self._draw("gap cpu", ordinal, gap_cpu_at, send_at)
            self._draw("send", ordinal, send_at, self.now)
        self._compute(ordinal, block)
        self.ordinal = ordinal + 1
        self._held -= copy_s > 0
        asked_at = self.now
        self._wait(self._ask_ahead())
        self._draw("ask", ordinal, asked_at, self.now)
        if block.join_s > 0:
            self._draw("join", ordinal, self.now, self.now + block.join_s)
            self._wait(block.join_s)
        return self.now

    #
    # copies
    #

    def _ask_ahead(self) -> float:
        """For blocks to come; returns for how long that holds up the thread."""
        held_s = 0.0
        n = len(self._blocks)
        while self.ahead and self._held < self._n_slots and (self._end is None or self._asked < self._end):
            block, copy_s = self._blocks[self._asked % n], self._copies[self._asked % n]
            if copy_s > 0:
                if block.routed:
                    break
                self._ask(self._asked, copy_s)
                self._later_s += copy_s
                held_s += block.issue_s
            self._asked += 1
        return held_s if self.ordinal else 0.0  # the first are asked for while whatever came before was computed

    def _ask(self, ordinal: int, copy_s: float) -> None:
        self._held += 1
        self.link_left_s += copy_s
        if self._draws:
            for step in self._blocks[ordinal % len(self._blocks)].steps:
                if step.copy_s > 0:
                    self._queue.append([ordinal, step.copy_s, self.now])

    def _copy(self, elapsed_s: float, speed: float) -> None:
        """Let the link work."""
        work_s = elapsed_s * speed
        self.link_left_s -= work_s
        if self.link_left_s < _DONE_S:
            self.link_left_s = 0.0
        if self._draws:
            at = self.now
            while self._queue and self._queue[0][1] <= work_s + _DONE_S:
                ordinal, left_s, start = self._queue.popleft()
                work_s -= left_s
                at += left_s / speed
                self._draw("copy", int(ordinal), start, at)
                if self._queue:
                    self._queue[0][2] = max(self._queue[0][2], at)
            if self._queue:
                self._queue[0][1] -= work_s

    #
    # the thread
    #

    def _wait(self, seconds: float) -> None:
        """The thread does what takes nothing of the link."""
        if seconds > 0:
            if self.link_left_s > 0:
                self._copy(min(seconds, self.link_left_s), 1.0)
            self.now += seconds

    def _work(self, cpu_s: float, beside: Interference) -> None:
        """The CPU computes, and the device does not."""
        if cpu_s > 0 and self.link_left_s > 0:
            together_s = min(cpu_s / beside.cpu_with_link, self.link_left_s / beside.link_with_cpu)
            self._copy(together_s, beside.link_with_cpu)
            self.now += together_s
            cpu_s -= together_s * beside.cpu_with_link
        self._wait(cpu_s)

    def _compute(self, ordinal: int, block: BlockTimes) -> None:
        """CC, and the device's steps beside it, until both are done."""
        beside, steps, start = block.interference, block.steps, self.now
        if not steps:
            self._work(block.cpu_s, beside)
            if block.cpu_s > 0:
                self._draw("cpu", ordinal, start, self.now)
            return
        cpu_s, own_s = block.cpu_s, self._copies[ordinal % len(self._copies)]
        number, launched, gpu_s, began = 0, start + steps[0].launch_s, steps[0].gpu_s, start
        if steps[0].in_s > 0:
            self._draw("in", ordinal, launched - steps[0].in_s, launched)
        own_s -= steps[0].copy_s  # of the block's own copies, behind the one that the step needs
        while cpu_s > 0 or number < len(steps) or (beside.one_queue and self.link_left_s > 0):
            pending = number < len(steps)
            to_arrive_s = 0.0
            if beside.one_queue:
                to_arrive_s = self.link_left_s
            elif pending and steps[number].copy_s > 0:
                to_arrive_s = self.link_left_s - self._later_s - own_s
            computing = pending and self.now >= launched - _DONE_S and to_arrive_s <= _DONE_S
            cpu, link = cpu_s > 0, self.link_left_s > 0
            cpu_speed, link_speed, gpu_speed = _speeds(beside, cpu, link, computing)
            elapsed_s = float("inf")
            if cpu:
                elapsed_s = cpu_s / cpu_speed
            if computing:
                elapsed_s = min(elapsed_s, gpu_s / gpu_speed)
            elif pending and self.now < launched - _DONE_S:
                elapsed_s = min(elapsed_s, launched - self.now)
            elif pending and to_arrive_s > 0:
                elapsed_s = min(elapsed_s, to_arrive_s / link_speed)
            if link:
                elapsed_s = min(elapsed_s, self.link_left_s / link_speed)
                self._copy(elapsed_s, link_speed)
            self.now += elapsed_s
            if cpu:
                cpu_s -= elapsed_s * cpu_speed
                if cpu_s <= _DONE_S:
                    cpu_s = 0.0
                    self._draw("cpu", ordinal, start, self.now)
            if computing:
                gpu_s -= elapsed_s * gpu_speed
                if gpu_s <= _DONE_S:
                    step = steps[number]
                    if step.gpu_s > 0:
                        self._draw("gpu", ordinal, began, self.now)
                    if step.out_s > 0:
                        self._draw("out", ordinal, self.now - (self.now - began) * step.out_s / step.gpu_s, self.now)
                    number, began = number + 1, self.now
                    if number < len(steps):
                        launched += steps[number].launch_s
                        gpu_s = steps[number].gpu_s
                        own_s -= steps[number].copy_s
            else:
                began = self.now

    def _draw(self, stream: Stream, ordinal: int, start_s: float, end_s: float) -> None:
        if self._draws and end_s > start_s:
            self.spans.append(Span(stream, ordinal, start_s, end_s))


def _speeds(beside: Interference, cpu: bool, link: bool, gpu: bool) -> tuple[float, float, float]:
    """Of CPU, link and device, as shares of what each does alone."""
    cpu_speed = link_speed = gpu_speed = 1.0
    if cpu and link:
        cpu_speed, link_speed = beside.cpu_with_link, beside.link_with_cpu
    if cpu and gpu:
        cpu_speed, gpu_speed = min(cpu_speed, beside.cpu_with_device), beside.device_with_cpu
    if link and gpu:
        link_speed, gpu_speed = min(link_speed, beside.link_with_device), min(gpu_speed, beside.device_with_link)
    return cpu_speed, link_speed, gpu_speed
