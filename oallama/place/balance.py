"""Splitting what a placement leaves on the host: how much of each block the device computes at the same time.

For each block the predicted time of every possible cut is a convex curve beyond the jump that the first element costs
(sending, launching, joining); its least value is where both sides are balanced over the passes of the workload. Where
the device has less memory than all blocks would like, allocate.py shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oallama.cost.blocks import SplitBlock, split_blocks
from oallama.cost.predict import Costs, placement_seconds
from oallama.cost.split_ffn import block_seconds
from oallama.place.allocate import Allocation, Menu, allocate
from oallama.place.baselines import Placed

STAGING_LEVELS = 8
"""Steps in which a smaller buffer for activations is tried where memory is short: it allows smaller slices only, but
leaves more memory for them."""


@dataclass(frozen=True, slots=True)
class Balanced:
    """A placement with slices, and whether more device memory would have changed it."""

    placed: Placed
    short: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A block and the sizes of GG worth looking at, ascending: from none, which is llama.cpp's whole operators on the
    host, to the one that would be the fastest."""

    block: SplitBlock
    cuts: tuple[int, ...]
    menu: Menu
    staging: tuple[int, ...]  # bytes of activations on the device

    def up_to(self, staging: int) -> _Candidate:
        """Without the cuts that need more for activations."""
        n = sum(needed <= staging for needed in self.staging)
        return _Candidate(self.block, self.cuts[:n], self.menu[:n], self.staging[:n])


def balance(costs: Costs, placed: Placed, room: int, weights_room: int, n_ubatch: int) -> Balanced:
    """`placed` with those operators split that it leaves on the host and that are then predicted to be faster.

    room: bytes of device memory for slices and for the activations beside them; weights_room: for slices alone.
    """
    if costs.split is None:
        return Balanced(placed, False)
    possible = [can and not there for can, there in zip(costs.split.splittable(), placed.on_device, strict=True)]
    blocks = split_blocks(costs.split.operators, possible)
    alike: dict[tuple[object, ...], _Candidate] = {}  # blocks of layers that are alike are looked at once
    candidates = []
    for block in blocks:
        members = [costs.split.sides[i] for i in block.operators]
        kind = (replace(block, operators=()), *map(id, members), *(costs.operators[i].t_cpu_s for i in block.operators))
        if kind not in alike:
            alike[kind] = _candidate(costs, block, n_ubatch)
        if len(alike[kind].cuts) > 1:
            candidates.append(replace(alike[kind], block=block))
    if not candidates:
        return Balanced(placed, False)
    chosen, short = _allocated(candidates, room, weights_room)
    gg = [0] * len(placed.on_device)
    for candidate, choice in chosen:
        for i in candidate.block.operators:
            gg[i] = candidate.cuts[choice]
    if not any(gg):
        return Balanced(placed, short)
    seconds = placement_seconds(costs, placed.on_device, placed.first_device_layer, gg)
    return Balanced(replace(placed, gg=tuple(gg), seconds=seconds), short)


def _candidate(costs: Costs, block: SplitBlock, n_ubatch: int) -> _Candidate:
    assert costs.split is not None
    cuts = tuple(block.cuts())
    seconds = block_seconds(costs.split, block, cuts)
    whole_s = sum(costs.operators[i].t_cpu_s for i in block.operators)
    fastest = min(range(len(cuts)), key=seconds.__getitem__) + 1 if min(seconds) < whole_s else 0
    return _Candidate(
        block,
        (0, *cuts[:fastest]),
        ((0, whole_s), *((block.weight_bytes(g), s) for g, s in zip(cuts[:fastest], seconds, strict=False))),
        (0, *(block.staging_bytes(g, n_ubatch) for g in cuts[:fastest])),
    )


def _allocated(
    candidates: Sequence[_Candidate], room: int, weights_room: int
) -> tuple[list[tuple[_Candidate, int]], bool]:
    """(each candidate and its choice, whether memory was short) with the least seconds over all sizes of the activation
    buffer, which is as large as the largest block needs."""
    wanted = {candidate.staging[-1] for candidate in candidates}
    levels = {max(wanted) * level // STAGING_LEVELS for level in range(1, STAGING_LEVELS)} | wanted
    best: Allocation | None = None
    chosen: list[tuple[_Candidate, int]] = []
    short = False
    for staging in sorted(levels, reverse=True):
        allowed = [candidate.up_to(staging) for candidate in candidates]
        found = allocate([candidate.menu for candidate in allowed], max(0, min(room - staging, weights_room)))
        if best is None or found.seconds < best.seconds:
            best, chosen = found, list(zip(allowed, found.chosen, strict=True))
        if not found.short:
            break
        short = True
    return chosen, short
