"""When the tasks of sliced blocks begin and end: ScheInfer Eq. 5 as an exact recursion over blocks and four streams.

The streams are the CPU (CC), the device (GG and CG), the copies of CG to it, and the joins. Within a block the
device's steps run in order, a step waits for its launch and for its copy, and copies follow one another through a ring
of staging slots: a slot is free again when the step that used it is done. The next block begins after the join and what
lies between (attention). The paper starts copies with their block; `continuous` lets the link run ahead across blocks.

With a contention, CPU and link slow each other down while both are busy; times then follow from event to event. What
else streams take from each other (a device that receives and computes in turns) is in turns.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.core.types import Contention
from oallama.cost.beside import ALONE, Beside
from oallama.cost.copy_order import CopyOrder
from oallama.cost.turns import Turns

Stream = Literal["cpu", "gpu", "copy", "join"]
Ahead = Literal["layer", "continuous"]

MAX_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Step:
    """Work on the device that may need weights first, seconds."""

    copy_s: float  # 0: its weights are there, and it needs no slot
    gpu_s: float
    launch_s: float = 0.0  # before it, on a stream of their own; launches follow one another


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Durations of one block's tasks, each as if alone, seconds."""

    gap_s: float  # from the end of the block before to this one's inputs
    send_s: float  # on the thread that then computes CC
    cpu_s: float
    steps: tuple[Step, ...]
    join_s: float
    cpu_bytes: float = 0.0  # that the CPU reads in cpu_s
    copy_bytes_per_s: float = 0.0  # speed of the link alone; 0: copies and CPU do not share memory
    routed: bool = False  # what to copy is only known when the inputs are there
    issue_s: float = 0.0  # that asking for its copies takes the thread that computes CC
    beside: Beside = ALONE
    gap_cpu_s: float = 0.0  # of gap_s, in which the CPU works; told apart only where streams work in turns

    @property
    def in_turns(self) -> bool:
        """Whether streams take more from each other than a Contention says."""
        return self.beside != ALONE or self.issue_s > 0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How copies run ahead. n_slots: steps' weights that the staging ring holds; None: as many as there are."""

    ahead: Ahead = "continuous"
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


def timeline(blocks: Sequence[BlockTimes], prefetch: Prefetch, contention: Contention | None = None) -> Timeline:
    """Run the blocks one after another. contention: None where CPU and link do not slow each other down."""
    if any(block.in_turns for block in blocks):
        turns = Turns(blocks, prefetch, contention, n_rounds=1)
        ends = [turns.next_block() for _ in blocks]
        return Timeline(tuple(Span(*span) for span in turns.spans), tuple(ends))
    run = _Run(blocks, prefetch, contention, n_rounds=1)
    ends = [run.next_block() for _ in blocks]
    return Timeline(tuple(run.spans), tuple(ends))


def cycle_seconds(
    blocks: Sequence[BlockTimes],
    prefetch: Prefetch,
    contention: Contention | None = None,
    max_rounds: int = MAX_ROUNDS,
) -> float:
    """Seconds of one round through the blocks when rounds follow one another without end, as tokens do: copies for the
    first block then run during the last ones of the round before.

    Rounds are run until one ends with the link where it was at the end of an earlier one. From a link that is only just
    too slow this takes long; after max_rounds the lead that is left is less than a round's share of it.
    """
    if prefetch.ahead == "layer" or not any(step.copy_s for block in blocks for step in block.steps):
        return timeline(blocks, prefetch, contention).end_s
    kind = Turns if any(block.in_turns for block in blocks) else _Run
    run = kind(blocks, prefetch, contention, n_rounds=None)
    seen: list[tuple[int, float, float]] = []  # (copies ahead, work left of the one under way, when) after each round
    while True:
        for _ in blocks:
            run.next_block()
        ahead, left_s = run.lead()
        for rounds_ago, (n, left_before_s, when) in enumerate(reversed(seen), start=1):
            as_before = n == ahead and abs(left_before_s - left_s) <= 1e-9 * (run.now - when)
            if as_before or rounds_ago == max_rounds:
                return (run.now - when) / rounds_ago
        seen.append((ahead, left_s, run.now))


class _Run:
    """The state of the streams at `now`, which only moves forward. Copies are counted over all rounds; a step of the
    current block takes the first copy that no step has used, because both go in order."""

    def __init__(
        self, blocks: Sequence[BlockTimes], prefetch: Prefetch, contention: Contention | None, n_rounds: int | None
    ) -> None:
        self.blocks = blocks
        self.prefetch = prefetch
        self.contention = contention
        self.copies = CopyOrder(blocks, n_rounds)
        self.spans: list[Span] = []
        self.now = 0.0
        self.ordinal = -1  # of the block whose inputs are there, over all rounds
        self.launches: list[float] = []  # of its steps
        self.scheduled = 0  # how many of its steps have their times
        self.gpu_free = 0.0
        self.arrived: list[float] = []  # of each copy
        self.slot_free: list[float] = []  # of the slot of each copy that a step has used
        self.copy_left_s: float | None = None  # work of the copy under way
        self.copy_began_s = 0.0

    def next_block(self) -> float:
        """Run the next block to the end of its join; returns that time."""
        ordinal = self.ordinal + 1
        block = self.blocks[ordinal % len(self.blocks)]
        self._advance(0.0, self.now + block.gap_s)
        self.ordinal, self.scheduled = ordinal, 0
        start = at = self.now + block.send_s
        self.launches = []
        for step in block.steps:
            at += step.launch_s
            self.launches.append(at)
        self._advance(0.0, start)
        cpu_end = self._advance(block.cpu_s, None)
        if block.cpu_s > 0:
            self.spans.append(Span("cpu", ordinal, start, cpu_end))
        ready = max(cpu_end, self.gpu_free) if block.steps else cpu_end
        end = ready + block.join_s
        self._advance(0.0, end)
        if block.join_s > 0:
            self.spans.append(Span("join", ordinal, ready, end))
        return end

    def lead(self) -> tuple[int, float]:
        """Between blocks: how many copies are ahead of their use, and the work left of the one under way. Together the
        whole state, because all steps are done and so all slots that were used are free."""
        return len(self.arrived) - len(self.slot_free), self.copy_left_s or 0.0

    def _advance(self, cpu_left_s: float, until: float | None) -> float:
        """Let the streams run to `until`; None: until cpu_left_s of CPU work is done and every step of the current
        block has its time. Returns when the CPU work ended."""
        cpu_end = self.now
        while True:
            self._schedule_steps()
            if until is None:
                if cpu_left_s <= 0 and self.scheduled == len(self.launches):
                    return cpu_end
            elif self.now >= until:
                return cpu_end
            may_copy = self._copy_start()
            copying = may_copy is not None and may_copy <= self.now
            if copying and self.copy_left_s is None:
                self.copy_left_s, self.copy_began_s = self.copies.copy_s(len(self.arrived)), self.now
            cpu_speed, link_speed = self._speeds(cpu_left_s > 0, copying)
            cpu_done = self.now + cpu_left_s / cpu_speed if cpu_left_s > 0 else None
            copy_done = self.now + self.copy_left_s / link_speed if self.copy_left_s is not None else may_copy
            then = min(at for at in (cpu_done, copy_done, until) if at is not None)
            elapsed_s = then - self.now
            if cpu_done is not None:
                cpu_left_s = 0.0 if then == cpu_done else max(0.0, cpu_left_s - elapsed_s * cpu_speed)
                cpu_end = then
            if self.copy_left_s is not None:
                self.copy_left_s = max(0.0, self.copy_left_s - elapsed_s * link_speed)
                if then == copy_done:
                    self._copy_arrives(then)
            self.now = then

    def _copy_arrives(self, then: float) -> None:
        self.spans.append(Span("copy", self.copies.ordinal(len(self.arrived)), self.copy_began_s, then))
        self.arrived.append(then)
        self.copy_left_s = None

    def _schedule_steps(self) -> None:
        """Give the current block's steps their times, as far as their copies have arrived."""
        block = self.ordinal % len(self.blocks)
        while self.scheduled < len(self.launches):
            step = self.blocks[block].steps[self.scheduled]
            ready = max(self.launches[self.scheduled], self.gpu_free)
            if step.copy_s > 0:
                copy = len(self.slot_free)
                if copy >= len(self.arrived):
                    return
                ready = max(ready, self.arrived[copy])
            self.gpu_free = ready + step.gpu_s
            if step.gpu_s > 0:
                self.spans.append(Span("gpu", self.ordinal, ready, self.gpu_free))
            if step.copy_s > 0:
                self.slot_free.append(self.gpu_free)
            self.scheduled += 1

    def _copy_start(self) -> float | None:
        """When the copy under way began or the next one may begin; None: not known yet, or there is none left."""
        if self.copy_left_s is not None:
            return self.copy_began_s
        number = len(self.arrived)
        if not self.copies.has(number):
            return None
        start = self.arrived[-1] if self.arrived else 0.0
        if self.prefetch.n_slots is not None and number >= self.prefetch.n_slots:
            if number - self.prefetch.n_slots >= len(self.slot_free):
                return None
            start = max(start, self.slot_free[number - self.prefetch.n_slots])
        if self.prefetch.ahead == "layer" or self.copies.block(number).routed:
            if self.copies.ordinal(number) > self.ordinal:
                return None
            start = max(start, self.launches[self.copies.step(number)])
        return start

    def _speeds(self, computing: bool, copying: bool) -> tuple[float, float]:
        """Of CPU and link, as shares of what each does alone."""
        if not (computing and copying):
            return 1.0, 1.0
        return self.copies.contended(self.contention, self.blocks[self.ordinal % len(self.blocks)], len(self.arrived))
