"""The order in which the weights of CG are copied, counted over rounds of blocks: that in which steps use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oallama.core.types import Contention
from oallama.cost.contention import contended

if TYPE_CHECKING:
    from oallama.cost.timeline import BlockTimes


class CopyOrder:
    """Copies 0, 1, ... of n_rounds rounds through the blocks; None: without end."""

    def __init__(self, blocks: Sequence[BlockTimes], n_rounds: int | None) -> None:
        self.blocks = blocks
        self._pattern = [
            (b, i) for b, block in enumerate(blocks) for i, step in enumerate(block.steps) if step.copy_s > 0
        ]
        self._n_copies = None if n_rounds is None else n_rounds * len(self._pattern)

    def __len__(self) -> int:
        """Copies of one round."""
        return len(self._pattern)

    def has(self, number: int) -> bool:
        return bool(self._pattern) and (self._n_copies is None or number < self._n_copies)

    def block(self, number: int) -> BlockTimes:
        return self.blocks[self._pattern[number % len(self._pattern)][0]]

    def step(self, number: int) -> int:
        """Which of its block's steps copy `number` is for."""
        return self._pattern[number % len(self._pattern)][1]

    def copy_s(self, number: int) -> float:
        return self.block(number).steps[self.step(number)].copy_s

    def ordinal(self, number: int) -> int:
        """The block that copy `number` is for, over all rounds."""
        finished_rounds, position = divmod(number, len(self._pattern))
        return finished_rounds * len(self.blocks) + self._pattern[position][0]

    def contended(self, contention: Contention | None, computing: BlockTimes, number: int) -> tuple[float, float]:
        """Of the CPU at CC of `computing` and of the link at copy `number`, as shares of what each does alone."""
        if contention is None or computing.cpu_s <= 0:
            return 1.0, 1.0
        cpu_bytes_per_s = computing.cpu_bytes / computing.cpu_s
        return contended(contention, cpu_bytes_per_s, self.block(number).copy_bytes_per_s)
