"""The recursion of timeline.py where streams slow each other down, or wait for each other: a Beside that is not ALONE,
or copies that hold up the thread that asks for them.

The thread that computes CC asks for copies where the split backend does: of the blocks to come when a block has
ended, as many as there are free slots; of its own block, where that was not done, before it sends the inputs. From the
asking on a copy is under way. Where the device has one queue, what is computed waits for copies that were asked for
before, and a block ends when these are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oallama.core.types import Contention
from oallama.cost.copy_order import CopyOrder

if TYPE_CHECKING:
    from oallama.cost.timeline import BlockTimes, Prefetch, Stream


class Turns:
    """The state of the streams at `now`, which only moves forward. Copies are counted over all rounds; steps use them
    in the order in which they were asked for."""

    def __init__(
        self, blocks: Sequence[BlockTimes], prefetch: Prefetch, contention: Contention | None, n_rounds: int | None
    ) -> None:
        self.blocks = blocks
        self.prefetch = prefetch
        self.contention = contention
        self.copies = CopyOrder(blocks, n_rounds)
        self.spans: list[tuple[Stream, int, float, float]] = []
        self.now = 0.0
        self.ordinal = -1  # of the block whose inputs are there, over all rounds
        self.asked = 0  # copies
        self.arrived = 0
        self.used = 0  # copies whose slots are free again
        self.copy_left_s = 0.0  # work of the copy under way
        self.copy_began_s = 0.0
        self.launches: list[float] = []  # of the block's steps
        self.step = 0  # the first that is not done
        self.gpu_left_s = 0.0  # work of it
        self.gpu_began_s: float | None = None
        self.unused = 0  # copies of the block whose steps are not done
        self._ask_ahead()  # while whatever came before was computed

    def next_block(self) -> float:
        """Run the next block to the end of its join; returns that time."""
        ordinal = self.ordinal + 1
        block = self._block(ordinal)
        self._advance(0.0, self.now + block.gap_s - block.gap_cpu_s)
        self._advance(block.gap_cpu_s, None, others=False)
        self.ordinal = ordinal
        self._advance(0.0, self.now + self._ask_own())
        start = at = self.now + block.send_s
        self.launches, self.step, self.gpu_began_s = [], 0, None
        for step in block.steps:
            at += step.launch_s
            self.launches.append(at)
        self.gpu_left_s = block.steps[0].gpu_s if block.steps else 0.0
        self._advance(0.0, start)
        cpu_end = self._advance(block.cpu_s, None)
        if block.cpu_s > 0:
            self.spans.append(("cpu", ordinal, start, cpu_end))
        self.used += self._copies_of(block)
        self.step, self.launches = 0, []
        self._advance(0.0, self.now + self._ask_ahead())
        ready = self.now
        self._advance(0.0, ready + block.join_s)
        if block.join_s > 0:
            self.spans.append(("join", ordinal, ready, self.now))
        return self.now

    def lead(self) -> tuple[int, float]:
        """Between blocks: how many copies are ahead of their use, and the work left of the one under way. As many are
        asked for as the ring holds, so this is the whole state."""
        return self.arrived - self.used, self.copy_left_s

    def _block(self, ordinal: int) -> BlockTimes:
        return self.blocks[ordinal % len(self.blocks)]

    @staticmethod
    def _copies_of(block: BlockTimes) -> int:
        return sum(step.copy_s > 0 for step in block.steps)

    #
    # asking for copies
    #

    def _may_ask(self) -> bool:
        if not self.copies.has(self.asked):
            return False
        n_slots = len(self.copies) if self.prefetch.n_slots is None else self.prefetch.n_slots
        return self.asked < self._free_again() + n_slots

    def _free_again(self) -> int:
        """Copies whose slots are free, those of the block's steps that are done included."""
        steps = self._block(self.ordinal).steps[: self.step] if self.launches else ()
        return self.used + sum(step.copy_s > 0 for step in steps)

    def _ask_ahead(self) -> float:
        """Of blocks to come; returns for how long that holds up the caller."""
        held_s = 0.0
        while self.prefetch.ahead != "layer" and self._may_ask():
            ordinal = self.copies.ordinal(self.asked)
            if self._block(ordinal).routed:
                break
            held_s += self._ask(ordinal)
        return held_s if self.ordinal >= 0 else 0.0

    def _ask_own(self) -> float:
        held_s = 0.0
        while self._may_ask() and self.copies.ordinal(self.asked) <= self.ordinal:
            held_s += self._ask(self.ordinal)
        return held_s

    def _ask(self, ordinal: int) -> float:
        """A block's seconds for asking are spread evenly over its copies."""
        if self.asked == self.arrived:
            self._begin_copy()
        self.asked += 1
        block = self._block(ordinal)
        return block.issue_s / self._copies_of(block)

    def _begin_copy(self) -> None:
        self.copy_left_s, self.copy_began_s = self.copies.copy_s(self.arrived), self.now

    #
    # the streams
    #

    def _advance(self, cpu_left_s: float, until: float | None, others: bool = True) -> float:
        """Let the streams run to `until`; None: until cpu_left_s of CPU work is done, and with `others` every step of
        the block and, with one queue, all copies that were asked for. Returns when the CPU work ended."""
        cpu_end = self.now
        while True:
            self._skip_empty_steps()
            copying = self.asked > self.arrived
            done = self.step >= len(self.launches)
            if until is not None and self.now >= until:
                return cpu_end
            waiting = others and (not done or (copying and self._one_queue()))
            if until is None and cpu_left_s <= 0 and not waiting:
                return cpu_end
            computing = not done and self._is_ready(copying)
            if computing and self.gpu_began_s is None:
                self.gpu_began_s = self.now
            cpu_speed, link_speed, gpu_speed = self._speeds(cpu_left_s > 0, copying, computing)
            cpu_done = self.now + cpu_left_s / cpu_speed if cpu_left_s > 0 else None
            copy_done = self.now + self.copy_left_s / link_speed if copying else None
            gpu_done = self.now + self.gpu_left_s / gpu_speed if computing else None
            launched = None if done or self.launches[self.step] <= self.now else self.launches[self.step]
            then = min(at for at in (cpu_done, copy_done, gpu_done, launched, until) if at is not None)
            elapsed_s = then - self.now
            self.now = then
            if cpu_done is not None:
                cpu_left_s = 0.0 if then == cpu_done else max(0.0, cpu_left_s - elapsed_s * cpu_speed)
                cpu_end = then
            if computing:
                self.gpu_left_s = 0.0 if then == gpu_done else max(0.0, self.gpu_left_s - elapsed_s * gpu_speed)
                if then == gpu_done:
                    self._end_step()
            if copying:
                self.copy_left_s = 0.0 if then == copy_done else max(0.0, self.copy_left_s - elapsed_s * link_speed)
                if then == copy_done:
                    self._copy_arrives()

    def _one_queue(self) -> bool:
        return self._block(max(0, self.ordinal)).beside.one_queue

    def _is_ready(self, copying: bool) -> bool:
        """Whether the next step can run."""
        if self.launches[self.step] > self.now or (copying and self._one_queue()):
            return False
        steps = self._block(self.ordinal).steps
        needed = self.used + sum(step.copy_s > 0 for step in steps[: self.step + 1])
        return self.arrived >= needed

    def _skip_empty_steps(self) -> None:
        """Steps of no work are done as soon as they could run."""
        while self.step < len(self.launches) and self.gpu_left_s <= 0 and self._is_ready(self.asked > self.arrived):
            self._end_step()

    def _end_step(self) -> None:
        if self.gpu_began_s is not None:
            self.spans.append(("gpu", self.ordinal, self.gpu_began_s, self.now))
        self.step, self.gpu_began_s = self.step + 1, None
        if self.step < len(self.launches):
            self.gpu_left_s = self._block(self.ordinal).steps[self.step].gpu_s
        self._ask_own()  # a block of more copies than slots: as slots get free

    def _copy_arrives(self) -> None:
        self.spans.append(("copy", self.copies.ordinal(self.arrived), self.copy_began_s, self.now))
        self.arrived += 1
        if self.asked > self.arrived:
            self._begin_copy()

    def _speeds(self, cpu: bool, copying: bool, gpu: bool) -> tuple[float, float, float]:
        """Of CPU, link and device, as shares of what each does alone."""
        block = self._block(max(0, self.ordinal))
        beside = block.beside
        cpu_speed = link_speed = gpu_speed = 1.0
        if cpu and copying:
            cpu_speed, link_speed = beside.cpu_beside_copy, beside.copy_beside_cpu
            cpu_left, link_left = self.copies.contended(self.contention, block, self.arrived)
            cpu_speed, link_speed = min(cpu_speed, cpu_left), min(link_speed, link_left)
        if cpu and gpu:
            cpu_speed, gpu_speed = min(cpu_speed, beside.cpu_beside_gpu), beside.gpu_beside_cpu
        if copying and gpu:
            link_speed, gpu_speed = min(link_speed, beside.copy_beside_gpu), min(gpu_speed, beside.gpu_beside_copy)
        return cpu_speed, link_speed, gpu_speed
