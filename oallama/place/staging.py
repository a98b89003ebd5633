"""Device memory that slices need beside their weights: the ring for streamed weights, and activations."""

from __future__ import annotations

from math import ceil

from oallama.cost.blocks import F32
from oallama.cost.timeline import Prefetch
from oallama.place.cuts import Layers, Table, n_g_at

SLOT_PADDING = 512  # bytes that one weight may take in a slot beyond its own: alignment, and what kernels read past it


def most_n_g(table: Table, n_ubatch: int) -> int:
    """Of any batch."""
    return max((n_g_at(table, n) for n in {n_ubatch, *(n for n, _ in table if n <= n_ubatch)}), default=0)


def staging_bytes(layers: Layers, prefetch: Prefetch, n_ubatch: int, n_g: int) -> int:
    """Of the ring, whose slots hold what is streamed of the largest block, and of activations for the largest part of a
    block that the device computes. n_g: the most tokens of a batch that CC is streamed for. llama.cpp reserves as if
    the logits of all n_ubatch tokens were wanted, so the blocks behind the last attention count like the others."""
    slot = activations = hot = beside = 0
    for of, cut in layers:
        if cut.n_hot:
            hot = max(hot, of.hot(cut.n_hot).staging_bytes(cut.extent, n_ubatch))
            continue
        if of.block.held_each and not of.routed and (cut.gg or cut.cg):
            beside = max(beside, of.block.download_bytes(cut.gg, n_ubatch))
        primed = cut.cc if n_g and of.takes_n_g else 0
        streamed = cut.cg + primed
        if streamed:
            padding = len(of.gemms) * SLOT_PADDING * 2  # CG and CG' of each weight
            slot = max(slot, ceil(of.block.bytes * streamed / of.block.extent) + padding)
        if streamed or 0 < cut.gg < of.block.extent:
            computed = cut.cg + ceil(primed * n_g / n_ubatch)
            sent = of.block.returned_each * cut.cc * n_ubatch * F32 if of.resident else 0  # by the host, beside it
            activations = max(activations, sent + of.block.staging_bytes(cut.gg, n_ubatch, computed))
    if hot:  # what slices of a shared expert made stays until the rows of the others are joined
        activations = max(activations, hot + beside)
    n_slots = 2 if prefetch.n_slots is None else prefetch.n_slots
    return n_slots * slot + activations
