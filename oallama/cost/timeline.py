"""When sliced blocks begin and end, for a model block by block: rounds of what cost/streams.py does for one.

A block is run, its partial sums are joined, and then comes what lies between it and the next (attention).

What is streamed of a block lies in one slot of a ring. The thread asks for copies: with prefetch "ahead" those of later
blocks whenever a block has ended, as many as there are free slots, so that the link works across blocks and during
attention; with "layer" those of its own block, as the paper does. Routed weights are always asked for by their own
block, and llama.cpp copies those of a block that it offloads: before what was asked for ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oallama.core.types import StreamSettings
from oallama.cost.streams import BlockTimes, Drawing, Span, Stream, alone_seconds, left, run_block, run_gap

SETTLED = 1e-9  # how alike rounds are that are the same

MAX_ROUNDS = 40


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


def timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings, draws: bool = True) -> Timeline:
    """Run the blocks one after another. draws: whether spans are wanted."""
    run = _Run(blocks, streaming, n_rounds=1, draws=draws)
    ends = tuple(run.next_block() for _ in blocks)
    return Timeline(tuple(run.drawing.spans) if run.drawing else (), ends)


def cycle_seconds(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> float:
    """Seconds of one round through the blocks when rounds follow one another without end, as tokens do: copies for the
    first block then run during the last ones of the round before.

    The first round begins with a full ring. Rounds are run until one ends as it began, or two are alike. Where the link
    is too slow each leaves it with more to do, which the thread will have to wait for once the ring has run empty.
    """
    if len(blocks) > 1:
        return _cycle(_Run(blocks, streaming, n_rounds=None, draws=False), len(blocks), max_rounds)[0]
    block = blocks[0]
    if runs_ahead(blocks, streaming):
        return own_cycle_seconds(block, block.gap_s, block.gap_cpu_s, streaming, max_rounds)
    return block.gap_s + alone_seconds(block)


def runs_ahead(blocks: Sequence[BlockTimes], streaming: StreamSettings) -> bool:
    """Whether copies are asked for before their own block."""
    return streaming.prefetch == "ahead" and any(
        not block.routed and not block.offloaded and block.copy_s > 0 for block in blocks
    )


def own_cycle_seconds(
    block: BlockTimes, gap_s: float, gap_cpu_s: float, streaming: StreamSettings, max_rounds: int = MAX_ROUNDS
) -> float:
    """As cycle_seconds, of one block that follows itself behind this gap, and runs ahead. Most rounds begin with what
    the one before asked for at its end, all else having arrived; so does the first."""
    copy_s, after_s = block.copy_s, block.issue_s + block.join_s
    later_s = (streaming.n_slots - 1) * copy_s
    rounds = _Rounds(max_rounds)
    link_s = max(0.0, copy_s - after_s)
    while rounds.last is None:
        end_s, left_s = run_gap(gap_s, gap_cpu_s, block.interference, link_s, 0.0)
        end_s, left_s = run_block(block, copy_s, True, later_s, left_s, end_s)
        left_s = left(left_s + copy_s - after_s)
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


def cycle_timeline(blocks: Sequence[BlockTimes], streaming: StreamSettings, max_rounds: int = MAX_ROUNDS) -> Timeline:
    """The last round that cycle_seconds runs, from 0 s; blocks of the next one, which copies may be for, are numbered
    on. Where rounds do not come out alike it is drawn as long as they are on average."""
    run = _Run(blocks, streaming, n_rounds=None, draws=True)
    assert run.drawing is not None
    seconds, start_s, ends_s = _cycle(run, len(blocks), max_rounds)
    stretch = seconds / (run.now - start_s) if run.now > start_s else 1.0
    if abs(stretch - 1) <= SETTLED:
        stretch = 1.0
    first = run.ordinal - len(blocks)
    spans = (
        Span(s.stream, s.block - first, max(0.0, s.start_s - start_s) * stretch, (s.end_s - start_s) * stretch)
        for s in run.drawing.until(run.now)
        if s.end_s > start_s
    )
    return Timeline(tuple(spans), tuple((end_s - start_s) * stretch for end_s in ends_s))


def _cycle(run: _Run, n_blocks: int, max_rounds: int) -> tuple[float, float, list[float]]:
    """(seconds of a round, when the last one that was run began, when its blocks ended)."""
    if not run.ahead:
        ends_s = [run.next_block() for _ in range(n_blocks)]
        return run.now, 0.0, ends_s
    run.link_left_s = 0.0  # what was asked for has arrived: the ring is full
    if run.drawing is not None:
        run.drawing.copying.clear()
    rounds = _Rounds(max_rounds)
    while rounds.last is None:
        now, left_s, ring = run.now, run.link_left_s, run.ring
        ends_s = [run.next_block() for _ in range(n_blocks)]
        rounds.add(run.now - now, run.link_left_s - left_s, run.ring == ring)
    return rounds.last, now, ends_s


class _Run:
    """The state of the streams at `now`, which only moves forward. The link's work is one number, as copies are made in
    the order in which they were asked for."""

    def __init__(
        self, blocks: Sequence[BlockTimes], streaming: StreamSettings, n_rounds: int | None, draws: bool
    ) -> None:
        self.now = 0.0
        self.link_left_s = 0.0  # work of all copies that were asked for and are not done
        self.ordinal = 0  # of the next block, over all rounds
        self.drawing = Drawing() if draws else None
        self._blocks = blocks
        self._copies = [0.0 if block.offloaded else block.copy_s for block in blocks]  # into the ring
        self.ahead = runs_ahead(blocks, streaming)
        self._n_slots = streaming.n_slots
        self._end = None if n_rounds is None else n_rounds * len(blocks)
        self._asked = 0  # blocks whose copies were asked for, if they have any
        self._held = 0  # slots
        self._later_s = 0.0  # work of copies for blocks behind the present one
        if self.ahead:
            self._ask_ahead()

    @property
    def ring(self) -> tuple[int, int]:
        """For how many blocks ahead copies were asked for, and how many slots are held."""
        return self._asked - self.ordinal, self._held

    def next_block(self) -> float:
        """Run the next block to the end of its join; returns that time."""
        ordinal, index = self.ordinal, self.ordinal % len(self._blocks)
        block, copy_s, drawing = self._blocks[index], self._copies[index], self.drawing
        asked = self._asked > ordinal
        if asked:
            self._later_s -= copy_s
        else:
            self._asked = ordinal + 1
            self._held += copy_s > 0
        if drawing is not None:
            drawing.block = ordinal
        asked = asked and not block.offloaded
        now, left_s = run_gap(block.gap_s, block.gap_cpu_s, block.interference, self.link_left_s, self.now, drawing)
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
        return self.now

    def _ask_ahead(self) -> float:
        """Ask for copies for blocks to come; returns for how long that holds up the thread."""
        held_s = 0.0
        n = len(self._blocks)
        while self._held < self._n_slots and (self._end is None or self._asked < self._end):
            block, copy_s = self._blocks[self._asked % n], self._copies[self._asked % n]
            if copy_s > 0:
                if block.routed:
                    break
                self._held += 1
                self.link_left_s += copy_s
                self._later_s += copy_s
                held_s += block.issue_s
                if self.drawing is not None:
                    self.drawing.ask(block, self._asked, self.now)
            self._asked += 1
        return held_s if self.ordinal else 0.0  # the first are asked for while whatever came before was computed
