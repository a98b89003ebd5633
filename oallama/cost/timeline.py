"""When the tasks of sliced blocks begin and end: ScheInfer Eq. 5, from event to event, block by block.

The streams are the thread that computes CC, the device (GG and CG), and the link. Of each block the thread sends the
inputs, computes CC while the device runs its steps in order, waits for the device, and joins the partial sums. A step
waits for its launch and for its weights. Busy streams slow each other down by the measured contention (cost/rates.py).
The inter-block time (attention) follows.

CG of a block is copied to one slot of a ring. The thread requests the copies: with prefetch "ahead", when a block has
ended, those of the next blocks, as many as there are free slots, so that the link is busy across blocks and during
attention; with "layer" those of the present block, as in the paper. Experts that only the router determines are always
requested by their own block. llama.cpp copies the weights of a block that it offloads before the copies that were
requested ahead. Copies are made in the order of their requests, so the link's remaining work is one number.

Every run appends spans. Its price is the end of the last span; `oallama simulate` draws all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal, NamedTuple

from oallama.core.types import StreamSettings
from oallama.cost.rates import NO_INTERFERENCE, Interference

Span = tuple[Literal["inter-block", "send", "cpu", "gpu", "join", "asked", "link", "copy"], int, float, float, float]
"""(kind, number of its block, start, end, seconds of copies alone). send, join: of the thread, before and after CC;
gpu: a step with its launch and with copies of activations that the thread does not wait for; asked: copies of the block
were requested; link: copies of any block; copy: copies of this block, derived from these two by `with_copies`. A plain
tuple, since a search makes many."""

DONE_S = 1e-12
"""Seconds of work below this are a rounding error."""


class DeviceTask(NamedTuple):
    """A step of the device: GG or CG, seconds."""

    copy_s: float  # of its weights; 0: they are on the device
    gpu_s: float  # with the copy of its results back
    # of its launch, with the copy of its inputs; launches run one after another, beside the steps
    launch_s: float = 0.0


class BlockTimes(NamedTuple):
    """Durations of one block's tasks without contention, seconds."""

    inter_block_s: float = 0.0  # from the end of the last block to this one's inputs
    send_s: float = 0.0  # of the thread, before CC
    cpu_s: float = 0.0  # of CC; of a block that lives on the device also the wait for its input
    steps: tuple[DeviceTask, ...] = ()
    join_s: float = 0.0
    late_s: float = 0.0  # the part of its copies that is known only once the inputs are there
    issue_s: float = 0.0  # of the thread, to request its copies
    inter_block_cpu_s: float = 0.0  # the last part of inter_block_s, in which the CPU works
    interference: Interference = NO_INTERFERENCE
    wait_s: float = 0.0  # of the thread before CC, for a device whose calls are synchronous
    offloaded: bool = False  # llama.cpp runs it, and first copies its weights, which take no slot

    @property
    def copy_s(self) -> float:
        seconds = 0.0
        for step in self.steps:
            seconds += step.copy_s
        return seconds

    @property
    def ahead_s(self) -> float:
        """Seconds of the copies that may be requested before its turn."""
        return without_rounding(self.copy_s - self.late_s)

    def with_inter_block_time(self, inter_block_s: float, inter_block_cpu_s: float) -> BlockTimes:
        """The same block with more inter-block time before it; inter_block_cpu_s: the part in which the CPU works."""
        return self._replace(
            inter_block_s=self.inter_block_s + inter_block_s,
            inter_block_cpu_s=self.inter_block_cpu_s + inter_block_cpu_s,
        )


NO_TASKS = BlockTimes()


def without_rounding(seconds: float) -> float:
    """Remaining work, with rounding errors as zero."""
    return seconds if seconds > DONE_S else 0.0


def alone_seconds(block: BlockTimes) -> float:
    """Seconds of one block without its inter-block time, without copies for other blocks."""
    return _run_block(block, 0, block.copy_s, False, 0.0, 0.0, 0.0, [])[0] + block.join_s


def _run_inter_block(
    inter_block_s: float, cpu_s: float, interference: Interference, link_s: float, now: float, spans: list[Span]
) -> tuple[float, float]:
    """(time at which a block's inputs are there, the link's remaining work then). cpu_s: the last part of
    inter_block_s, in which the CPU works. link_s: the link's remaining work at `now`."""
    alone_s = inter_block_s - cpu_s
    if link_s:
        link_s = _copy(link_s, alone_s, 1.0, now, spans)
    now += alone_s
    if cpu_s > 0:
        return _cpu_alone(cpu_s, interference, link_s, now, spans)
    return now, link_s


def _run_block(
    block: BlockTimes, number: int, copy_s: float, requested: bool, later_s: float, link_s: float, now: float,
    spans: list[Span],
) -> tuple[float, float]:  # fmt: skip
    """(time at which both sides of a block are done, the link's remaining work then). Begins at `now`, after the
    inter-block time; ends before the join.

    copy_s: block.copy_s; requested: whether its copies were requested ahead. link_s: the link's remaining work at
    `now`; later_s: the part of it for later blocks.
    """
    send_s, missing_s = block.send_s, min(block.late_s, copy_s) if requested else copy_s
    if missing_s > 0:
        later_s = min(later_s, link_s)  # a part may be copied already
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
    """The link's remaining work after `seconds` at this speed."""
    done_s = min(link_s, seconds * speed)
    spans.append(("link", 0, now, now + done_s / speed, done_s))
    return without_rounding(link_s - seconds * speed)


def _cpu_alone(
    cpu_s: float, interference: Interference, link_s: float, now: float, spans: list[Span]
) -> tuple[float, float]:
    """(time at which the CPU is done, the link's remaining work then), with an idle device."""
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
    block: BlockTimes, number: int, queued_s: float, link_s: float, now: float, spans: list[Span]
) -> tuple[float, float]:
    """Run CC and the device's steps concurrently until both are done; returns as _run_block. queued_s: the part of the
    link's work that is for this block or later ones."""
    steps, cpu_s, speeds, one_queue = block.steps, block.cpu_s, block.interference.speeds, block.interference.one_queue
    index, step, start = 0, steps[0], now
    launched, gpu_s, began = start + step.launch_s, step.gpu_s, start
    queued_s -= step.copy_s  # now: the work after the copy that the step needs
    pending = True
    while pending or cpu_s > 0 or (one_queue and link_s > 0):
        to_arrive_s = 0.0
        if one_queue:
            to_arrive_s = link_s
        elif pending and step.copy_s > 0:
            to_arrive_s = link_s - queued_s
        cpu, link, launching = cpu_s > 0, link_s > 0, pending and now < launched - DONE_S
        computing = pending and not launching and to_arrive_s <= DONE_S
        cpu_speed, link_speed, gpu_speed = speeds[cpu + 2 * link + 4 * computing]
        elapsed_s = cpu_s / cpu_speed if cpu else inf
        if computing:
            event_s = gpu_s / gpu_speed
        elif launching:
            event_s = launched - now
        else:
            event_s = to_arrive_s / link_speed if pending else inf
        if event_s < elapsed_s:
            elapsed_s = event_s
        if link:
            event_s = link_s / link_speed
            if event_s < elapsed_s:
                elapsed_s = event_s
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
        index, began, pending = index + 1, now, index + 1 < len(steps)
        if pending:
            step = steps[index]
            launched, gpu_s = launched + step.launch_s, step.gpu_s
            queued_s -= step.copy_s
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
    """Steady-state seconds of one round through the blocks, as of one token among many: copies for the first blocks run
    during the last blocks of the round before."""
    return _cycle(blocks, streaming, max_rounds)[0]


def cycle_timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> list[Span]:
    """Spans of the last round that cycle_seconds runs, from 0 s. Copies may be for blocks of the next round, whose
    numbers continue. If rounds differ, the last one is stretched to their mean length."""
    seconds, run, start_s = _cycle(blocks, streaming, max_rounds)
    stretch, first = seconds / (run.now - start_s) if run.now > start_s else 1.0, run.number - len(blocks)
    return [
        (kind, number - first, max(0.0, start - start_s) * stretch, (end - start_s) * stretch, copy_s)
        for kind, number, start, end, copy_s in with_copies(blocks, run.spans)
        if end > start_s
    ]


def with_copies(blocks: Sequence[BlockTimes], spans: Sequence[Span]) -> Iterator[Span]:
    """Replace the link's spans by one span for each block's copy. Copies are made in the order of their requests; those
    of an offloaded block come first."""
    queue: deque[list[float]] = deque()  # [block, work left, start]
    time_s = 0.0
    for span in spans:
        kind, number, start, end, work_s = span
        if kind == "asked":
            (queue.appendleft if blocks[number % len(blocks)].offloaded else queue.append)([number, work_s, start])
        elif kind == "link":
            time_s, done_s = start, 0.0
            while queue and done_s < work_s:
                head = queue[0]
                head[1], done_s = without_rounding(head[1] - (work_s - done_s)), min(work_s, done_s + head[1])
                if not head[1]:
                    time_s = start + (end - start) * done_s / work_s
                    yield "copy", int(head[0]), head[2], time_s, 0.0
                    queue.popleft()
                    if queue:
                        queue[0][2] = max(queue[0][2], time_s)
            time_s = end
        else:
            yield span
    if queue and queue[0][2] < time_s:
        yield "copy", int(queue[0][0]), queue[0][2], time_s, 0.0


def runs_ahead(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> bool:
    """Whether copies are requested before their block's turn."""
    return streaming.prefetch == "ahead" and any(not block.offloaded and block.ahead_s > 0 for block in blocks)


SETTLED = 1e-9  # relative difference below which two rounds are equal


def _cycle(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int) -> tuple[float, _Run, float]:
    """(steady-state seconds of a round, the run, the time at which its last round began).

    The first round begins with a full ring. Runs rounds until one ends in the state in which it began, or two in a row
    are equal. If the link is too slow, each round adds to its remaining work; that work is added to the round's
    seconds, since the thread waits for it once the ring is empty.
    """
    run = _Run(blocks, streaming, None)
    if not run.ahead:
        for _ in blocks:
            run.next_block()
        return run.now, run, 0.0
    run.fill_ring()
    rounds = _Rounds(max_rounds)
    while rounds.steady_s is None:
        now, link_s, ring = run.now, run.link_s, run.ring
        for _ in blocks:
            run.next_block()
        rounds.add(run.now - now, run.link_s - link_s, run.ring == ring)
    return rounds.steady_s, run, now


def single_block_cycle_seconds(
    block: BlockTimes, inter_block_s: float, inter_block_cpu_s: float, streaming: StreamSettings
) -> float:
    """cycle_seconds of one block whose copies run ahead, after this inter-block time. Assumes that the ring is always
    full, which makes it twice as fast: a search calls it thousands of times."""
    copy_s, spans = block.copy_s, list[Span]()
    ahead_s = without_rounding(copy_s - block.late_s)
    after_s = block.issue_s * ahead_s / copy_s + block.join_s
    later_s = (streaming.n_slots - 1) * ahead_s
    rounds, link_s = _Rounds(MAX_ROUNDS), max(0.0, ahead_s - after_s)
    while rounds.steady_s is None:
        now, end_link_s = _run_inter_block(inter_block_s, inter_block_cpu_s, block.interference, link_s, 0.0, spans)
        now, end_link_s = _run_block(block, 0, copy_s, True, later_s, end_link_s, now, spans)
        end_link_s = without_rounding(end_link_s + ahead_s - after_s)
        rounds.add(now + after_s, end_link_s - link_s, True)
        link_s = end_link_s
    return rounds.steady_s


class _Rounds:
    """Detects when rounds are steady."""

    def __init__(self, most: int) -> None:
        self.steady_s: float | None = None  # steady-state seconds of a round; None: not known yet
        self._most = most
        self._rounds: list[tuple[float, float]] = []  # (seconds, work added to the link's)
        self._total_s = 0.0

    def add(self, seconds: float, added_s: float, same_ring: bool) -> None:
        """Add a round. same_ring: whether the ring was in the same state at its end as at its begin."""
        self._total_s += seconds
        rounds, near = self._rounds, SETTLED * self._total_s
        if (same_ring and abs(added_s) <= near) or (
            rounds and abs(seconds - rounds[-1][0]) <= near and abs(added_s - rounds[-1][1]) <= near
        ):
            self.steady_s = seconds + max(0.0, added_s)
            return
        rounds.append((seconds, added_s))
        if len(rounds) == self._most:
            rounds = rounds[self._most // 2 :]
            self.steady_s = (sum(s for s, _ in rounds) + max(0.0, sum(added for _, added in rounds))) / len(rounds)


class _Run:
    """The state of the streams at `now`, which only moves forward."""

    def __init__(self, blocks: Sequence[BlockTimes], streaming: StreamSettings, end: int | None) -> None:
        """end: number of blocks to run; None: rounds repeat without end."""
        self.now = 0.0
        self.spans: list[Span] = []
        self.link_s = 0.0  # work of all requested copies that are not done
        self.number = 0  # of the next block, counted over all rounds
        self._blocks = blocks
        self._copies = [0.0 if block.offloaded else block.copy_s for block in blocks]  # into the ring
        self._ahead = [0.0 if block.offloaded else block.ahead_s for block in blocks]
        self.ahead = streaming.prefetch == "ahead" and any(self._ahead)
        self._n_slots = streaming.n_slots
        self._end = end
        self._n_requested = 0  # number of blocks whose copies were requested, counted over all rounds
        self._used_slots = 0  # slots in use
        self._later_s = 0.0  # work of copies for blocks after the present one
        if self.ahead:
            self._request_ahead()

    def fill_ring(self) -> None:
        """Mark all requested copies as done. With a single block, which follows itself, the copy that it requested at
        its end is still under way, as in most rounds."""
        self.link_s = 0.0
        self.spans.clear()
        if len(self._blocks) == 1:
            block, ahead_s = self._blocks[0], self._ahead[0]
            self.link_s = max(0.0, ahead_s - block.issue_s * ahead_s / self._copies[0] - block.join_s)
            self.spans.append(("asked", self._n_requested - 1, 0.0, 0.0, self.link_s))

    @property
    def ring(self) -> tuple[int, int]:
        """Number of blocks ahead whose copies were requested, and of slots in use."""
        return self._n_requested - self.number, self._used_slots

    def next_block(self) -> None:
        """Run the next block to the end of its join."""
        number, index = self.number, self.number % len(self._blocks)
        block, copy_s = self._blocks[index], self._copies[index]
        requested = self._n_requested > number
        if requested:
            self._later_s -= self._ahead[index]
        else:
            self._n_requested = number + 1
            self._used_slots += copy_s > 0
        requested = requested and not block.offloaded
        inter_block_s, inter_block_cpu_s, spans = block.inter_block_s, block.inter_block_cpu_s, self.spans
        now, link_s = _run_inter_block(
            inter_block_s, inter_block_cpu_s, block.interference, self.link_s, self.now, spans
        )
        spans.append(("inter-block", number, self.now, now, 0.0))
        now, self.link_s = _run_block(block, number, block.copy_s, requested, self._later_s, link_s, now, spans)
        self.now = now
        self.number = number + 1
        self._used_slots -= copy_s > 0
        join_s = self._request_ahead() + block.join_s if self.ahead else block.join_s
        if self.link_s:
            self.link_s = _copy(self.link_s, join_s, 1.0, now, self.spans)
        self.now = now + join_s
        spans.append(("join", number, now, self.now, 0.0))

    def _request_ahead(self) -> float:
        """Request copies for later blocks; returns the seconds that this takes the thread."""
        request_s = 0.0
        n = len(self._blocks)
        while self._used_slots < self._n_slots and (self._end is None or self._n_requested < self._end):
            index = self._n_requested % n
            copy_s, ahead_s = self._copies[index], self._ahead[index]
            if copy_s > 0:
                if not ahead_s:
                    break
                self._used_slots += 1
                self.link_s += ahead_s
                self._later_s += ahead_s
                request_s += self._blocks[index].issue_s * ahead_s / copy_s
                self.spans.append(("asked", self._n_requested, self.now, self.now, ahead_s))
            self._n_requested += 1
        return request_s if self.number else 0.0  # the first requests are made before the first block begins
