"""Device memory of slices beside their weights: the ring of streamed weights, and activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import ceil

from oallama.core.types import StreamSettings
from oallama.cost.activations import ComputedBlock, HotRows, activation_bytes
from oallama.cost.blocks import F32
from oallama.cost.slices import BlockType, Cut
from oallama.planner.cutting import CutBlocks, TokenTable, linear_n_g

SLOT_PADDING = 512  # bytes that one weight may take in a slot beyond its own: alignment, and what kernels read past it


def most_n_g(table: TokenTable, n_ubatch: int) -> int:
    """Largest n_g of any batch, before n_g_at lowers it to groups of rows."""
    return max((linear_n_g(table, n) for n in {n_ubatch, *(n for n, _ in table if n <= n_ubatch)}), default=0)


def ring_bytes(cut_blocks: CutBlocks, streaming: StreamSettings, n_ubatch: int, n_g: int) -> int:
    """Bytes of the ring for streamed weights. cut_blocks: in the order in which they run. n_g: most tokens of a batch
    that CC is streamed for. A slot holds what a segment streams. Two slots lie at the two ends of the ring, so the ring
    is as long as the largest two consecutive segments (the first follows the last). With any other number of slots,
    each is counted as large as the largest segment."""
    return _ring_bytes(_runs(cut_blocks, n_ubatch, n_g), streaming, n_g)


def _ring_bytes(runs: Sequence[Run], streaming: StreamSettings, n_g: int) -> int:
    slots = cache(
        lambda run: [sum(slot_bytes(*cut_block, n_g) for cut_block in segment) for segment in _by_segment(run)]
    )
    sizes = [size for run in runs for size in slots(run) if size]
    if not sizes:
        return 0
    if streaming.n_slots != 2:
        return streaming.n_slots * max(sizes)
    return sizes[0] if len(sizes) == 1 else max(map(sum, pairwise([*sizes, sizes[0]])))


def staging_bytes(cut_blocks: CutBlocks, streaming: StreamSettings, n_ubatch: int, n_g: int) -> int:
    """Bytes of the ring, of activations for the largest run of blocks that the device computes, and of the biases of
    experts in slots. cut_blocks, n_g: as in ring_bytes. llama.cpp may reserve memory for the logits of all n_ubatch
    tokens, so the FFN after the last attention counts like the others; the logits themselves are computed in chunks of
    tokens."""
    in_slots = sum(
        block_type.block.biases * cut.n_hot * F32 for block_type, cut in cut_blocks
    )  # outside the activations
    runs = _runs(cut_blocks, n_ubatch, n_g)
    segments = (
        tuple(tuple(_part(*cut_block, n_g) for cut_block in segment) for segment in _by_segment(run))
        for run in set(runs)
    )
    activations = max((activation_bytes(run, n_ubatch, n_g) for run in segments), default=0)
    return _ring_bytes(runs, streaming, n_g) + activations + in_slots


Run = tuple[tuple[BlockType, Cut], ...]
"""Blocks that the split back end computes together."""


def _runs(cut_blocks: CutBlocks, n_ubatch: int, n_g: int) -> list[Run]:
    """Group the blocks with a part on the device into runs. A run ends where llama.cpp computes between two blocks."""
    runs: list[Run] = []
    run: list[tuple[BlockType, Cut]] = []
    for block_type, cut in cut_blocks:
        on_device = cut.n_hot or _streamed(block_type, cut, n_g) or 0 < cut.gg < block_type.block.extent
        starts_run = not block_type.block.relation or (
            block_type.block.relation == "sum" and run and not _sums(*run[-1], n_ubatch)
        )
        if run and (starts_run or not on_device):
            runs.append(tuple(run))
            run.clear()
        if on_device:
            run.append((block_type, cut))
    return [*runs, tuple(run)] if run else runs


def _sums(block_type: BlockType, cut: Cut, n_ubatch: int) -> bool:
    """Whether the split back end adds up the results of a block's experts."""
    return block_type.block.summed > 1 if cut.n_hot else block_type.block.n_summed(n_ubatch) > 1


def _by_segment(run: Run) -> Iterator[Run]:
    """Yield the blocks of each segment of a run."""
    begins = [i for i, (block_type, _) in enumerate(run) if i == 0 or block_type.block.begins_segment]
    yield from (run[begin:end] for begin, end in pairwise([*begins, len(run)]))


def _part(block_type: BlockType, cut: Cut, n_g: int) -> ComputedBlock:
    """The device's part of a block."""
    ids = block_type.gemms[0].mul_mat.n_routed
    if cut.n_hot:
        follows = block_type.use is not None and block_type.use.follows and cut.n_hot > 1
        hot = HotRows(ids, min(ids, cut.n_hot - follows), block_type.n_expert, follows)
        return ComputedBlock(block_type.block, 0, resident=block_type.context.resident, hot=hot)
    late = _streamed(block_type, cut, n_g) - cut.cg
    context = block_type.context
    return ComputedBlock(block_type.block, cut.gg, cut.cg, late, cut.cc, context.resident, context.host_input, ids)


def _streamed(block_type: BlockType, cut: Cut, n_g: int) -> int:
    """Elements of CG, and of CG' for the largest batch. Blocks with hot experts stream nothing."""
    if cut.n_hot:
        return 0
    return cut.cg + (cut.cc if n_g and block_type.takes_n_g else 0)


def slot_bytes(block_type: BlockType, cut: Cut, n_g: int) -> int:
    """Bytes of a slot of the ring for what this block streams."""
    streamed = _streamed(block_type, cut, n_g)
    if not streamed:
        return 0
    return ceil(block_type.block.bytes * streamed / block_type.block.extent / SLOT_PADDING) * SLOT_PADDING + _padding(
        block_type
    )


def most_streamed(block_type: BlockType, n_bytes: int) -> int:
    """Elements of a block whose weights fit a slot of n_bytes."""
    whole = max(0, n_bytes - _padding(block_type)) // SLOT_PADDING * SLOT_PADDING
    return whole * block_type.block.extent // block_type.block.bytes


def _padding(block_type: BlockType) -> int:
    return len(block_type.gemms) * SLOT_PADDING * 2  # CG and CG' of each weight
