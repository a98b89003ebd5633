"""Device memory that slices need beside their weights: the ring for streamed weights, and activations."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import ceil

from oallama.core.types import StreamSettings
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.blocks import F32
from oallama.place.cuts import Layers, Table, linear_n_g

SLOT_PADDING = 512  # bytes that one weight may take in a slot beyond its own: alignment, and what kernels read past it


def most_n_g(table: Table, n_ubatch: int) -> int:
    """Of any batch. Not less than of one with rows that are left over, which n_g_at takes off."""
    return max((linear_n_g(table, n) for n in {n_ubatch, *(n for n, _ in table if n <= n_ubatch)}), default=0)


def ring_bytes(layers: Layers, streaming: StreamSettings, n_g: int) -> int:
    """Of the ring for what is streamed of these blocks, which are in the order in which they run. n_g: the most tokens
    of a batch that CC is streamed for. Two slots lie at the ring's two ends, so that it need not be longer than two
    blocks that follow one another, of which the last is followed by the first; any other number of slots as if each
    held the largest block."""
    size_of = {id(layer): slot_bytes(*layer, n_g) for layer in _distinct(layers)}
    sizes = [size for layer in layers if (size := size_of[id(layer)])]
    if not sizes:
        return 0
    if streaming.n_slots != 2:
        return streaming.n_slots * max(sizes)
    return sizes[0] if len(sizes) == 1 else max(map(sum, pairwise([*sizes, sizes[0]])))


def staging_bytes(layers: Layers, streaming: StreamSettings, n_ubatch: int, n_g: int) -> int:
    """Of the ring, and of activations for the largest part of a block that the device computes. layers, n_g: as
    ring_bytes. llama.cpp reserves as if the logits of all n_ubatch tokens were wanted, so the FFN behind the last
    attention counts like the others; of the logits themselves a few tokens' are computed at once."""
    activations = hot = beside = 0
    for of, cut in _distinct(layers):
        if cut.n_hot:
            biases = of.block.biases * cut.n_hot * F32
            hot = max(hot, biases + of.hot(cut.n_hot).staging_bytes(cut.extent, n_ubatch))
            continue
        if of.block.held_each and not of.routed and (cut.gg or cut.cg):
            beside = max(beside, of.block.staging_bytes(cut.gg, n_ubatch, cut.cg))
        streamed = _streamed(of, cut, n_g)
        if streamed or 0 < cut.gg < of.block.extent:
            computed = cut.cg + ceil((streamed - cut.cg) * n_g / n_ubatch)
            by_host = of.block.returned_each * cut.cc if of.around.resident else 0  # elements, beside it
            here = of.block.staging_bytes(cut.gg, n_ubatch, computed)
            activations = max(activations, by_host * n_ubatch * F32 + here)
    if hot:  # what slices of a shared expert were sent and made stays until the rows of the others are joined
        activations = max(activations, hot + beside)
    return ring_bytes(layers, streaming, n_g) + activations


def _distinct(layers: Layers) -> Iterable[tuple[BlockCost, Cut]]:
    """Without those that are the same object as one before, as most that are equal are."""
    return {id(layer): layer for layer in layers}.values()


def _streamed(of: BlockCost, cut: Cut, n_g: int) -> int:
    """Elements of CG, and of CG' for the largest batch. Blocks with hot experts stream nothing."""
    if cut.n_hot:
        return 0
    return cut.cg + (cut.cc if n_g and of.takes_n_g else 0)


def slot_bytes(of: BlockCost, cut: Cut, n_g: int) -> int:
    """Of a slot of the ring for what this block streams."""
    streamed = _streamed(of, cut, n_g)
    if not streamed:
        return 0
    return ceil(of.block.bytes * streamed / of.block.extent / SLOT_PADDING) * SLOT_PADDING + _padding(of)


def most_streamed(of: BlockCost, n_bytes: int) -> int:
    """Elements of the block whose weights a slot of so many bytes takes."""
    whole = max(0, n_bytes - _padding(of)) // SLOT_PADDING * SLOT_PADDING
    return whole * of.block.extent // of.block.bytes


def _padding(of: BlockCost) -> int:
    return len(of.gemms) * SLOT_PADDING * 2  # CG and CG' of each weight
