"""Cuts that are kept in host memory beside the plan's, as CC and as CG, so that a loaded model can change between them.

They are those that are best where the CPU, or the link and the device, take SLOWER times as long as was measured. What
lies between two cuts is then held twice: in the CPU's layout, and plain, where the device copies from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from oallama.core.types import MemoryLedger, Operator, PlanRecord, StreamSettings
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.slices import Pricing
from oallama.cost.streams import BlockTimes
from oallama.cost.timeline import cycle_seconds
from oallama.model.cut import cut_axis
from oallama.place.cuts import Layers, Table, best_cg, n_g_at
from oallama.place.placed import Placed
from oallama.place.problem import Problem
from oallama.place.slicer import slicer_of
from oallama.place.staging import most_n_g, ring_bytes, staging_bytes

SLOWER = 2.0


@dataclass(frozen=True, slots=True)
class Rates:
    """How many times as long as predicted the CPU takes for CC, the device and the link, and the thread for the rest:
    sending, asking, joining, and all of a device that does nothing by itself."""

    cpu: float = 1.0
    device: float = 1.0
    other: float = 1.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A block of the split back end, with the cuts that are kept of it."""

    operators: tuple[str, ...]
    cuts: tuple[Cut, ...]  # the plan's first; all with its GG
    times: tuple[BlockTimes, ...]  # of each, for one token
    twice_bytes: int = 0  # of the host, beside what the plan's cut needs


@dataclass(frozen=True, slots=True)
class Replan:
    """What a loaded model may move, and what that takes beside what its plan says."""

    blocks: tuple[Kept, ...]
    streaming: StreamSettings
    staging_bytes: int = 0  # of the device
    ring_bytes: int = 0  # of the ring that the largest of these cuts need, which is in the plan's staging and these
    notes: tuple[str, ...] = ()

    @property
    def twice_bytes(self) -> int:
        return sum(kept.twice_bytes for kept in self.blocks)

    @property
    def moves(self) -> bool:
        return any(len(kept.cuts) > 1 for kept in self.blocks)


def scaled(times: BlockTimes, rates: Rates) -> BlockTimes:
    """What a block's tasks take at these rates."""
    return replace(
        times,
        gap_s=times.gap_s + (rates.cpu - 1) * times.gap_cpu_s,
        gap_cpu_s=times.gap_cpu_s * rates.cpu,
        cpu_s=times.cpu_s * rates.cpu,
        send_s=times.send_s * rates.other,
        issue_s=times.issue_s * rates.other,
        join_s=times.join_s * rates.other,
        steps=tuple(
            replace(step, copy_s=step.copy_s * rates.device, gpu_s=step.gpu_s * rates.device) for step in times.steps
        ),
    )


def kept_cuts_of(problem: Problem, record: PlanRecord, placed: Placed) -> Replan:
    """The cuts to keep beside a plan's that slices something. placed: as it says."""
    load = record.workload
    assert placed.slices is not None
    slicer = slicer_of(problem, load, placed.slices)
    layers = [(of, cut) for of, cut in slicer.cuts_of(placed) if not cut.n_hot]
    on, table = slicer.on, record.token_assignment
    n_g = most_n_g(table, load.largest_batch)

    def staging(layers: Layers) -> int:
        return staging_bytes(layers, on.streaming, load.largest_batch, n_g)

    def ring(layers: Layers) -> int:
        return ring_bytes(layers, on.streaming, n_g)

    room = max(0, record.memory.spare)
    return kept_cuts(problem.operators, layers, table, on, problem.host_room, staging, room, ring)


def kept_cuts(
    operators: Sequence[Operator],
    layers: Layers,
    table: Table,
    on: Pricing,
    host_room: int,
    staging: Callable[[Layers], int],
    device_room: int,
    ring: Callable[[Layers], int],
) -> Replan:
    """The cuts to keep of a plan's blocks, as far as there is room.

    layers, table: the plan's blocks with their cuts, and its n_g. staging: bytes of the device that streaming takes for
    layers, and ring: those of the ring; device_room: how many more of them there may be. host_room: bytes for second
    copies.
    """
    held = [(of, cut) for of, cut in layers if not cut.is_whole or (table and of.takes_n_g)]
    known: dict[object, Cut] = {}

    def best(rates: Rates) -> list[Cut]:
        return [_best_at(of, cut, on, rates, table, known) for of, cut in held]

    slow_cpu, slow_link = best(Rates(cpu=SLOWER)), best(Rates(device=SLOWER))
    planned_bytes = staging(held)

    def toward(share: float) -> list[Cut]:
        """The cuts for a slow CPU, as far from the plan's as that share says."""
        return [_between(of, cut, slow, share) for (of, cut), slow in zip(held, slow_cpu, strict=True)]

    def widest(cuts: Sequence[Cut]) -> Layers:
        return [(of, max(cut, one, key=_streamed)) for (of, cut), one in zip(held, cuts, strict=True)]

    def more_bytes(cuts: Sequence[Cut]) -> int:
        return max(0, staging(widest(cuts)) - planned_bytes)

    share, notes = 1.0, []
    if more_bytes(toward(1.0)) > device_room:
        low, high = 0.0, 1.0
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if more_bytes(toward(middle)) <= device_room else (low, middle)
        share = low
        notes.append(f"the device has room for {share:.0%} of what is to be streamed in place of a slow CPU")
    for others in ([toward(share), slow_link], [toward(share)], []):
        blocks = tuple(
            _kept(operators, of, (cut, *(other[i] for other in others)), table, on) for i, (of, cut) in enumerate(held)
        )
        if sum(one.twice_bytes for one in blocks) <= host_room:
            break
        notes.append("host memory has no room for all cuts that were to be kept")
    most = [max(kept.cuts, key=_streamed) for kept in blocks]
    return Replan(blocks, on.streaming, more_bytes(most), ring(widest(most)), tuple(dict.fromkeys(notes)))


def with_kept(memory: MemoryLedger, replan: Replan) -> MemoryLedger:
    """A plan's ledger with what is kept beside it."""
    return replace(
        memory,
        weights_host=memory.weights_host + replan.twice_bytes,
        staging=memory.staging + replan.staging_bytes,
        spare=memory.spare - replan.staging_bytes,
    )


def _streamed(cut: Cut) -> int:
    return cut.cg


def _between(of: BlockCost, cut: Cut, other: Cut, share: float) -> Cut:
    """So far from a cut towards another that streams more."""
    step = of.block.step
    cc = max(other.cc, ceil((cut.cc - share * (cut.cc - other.cc)) / step) * step)
    return Cut(cc, cut.cc + cut.cg - cc, cut.gg) if other.cc < cc < cut.cc else other if cc == other.cc else cut


def _best_at(of: BlockCost, cut: Cut, on: Pricing, rates: Rates, table: Table, known: dict[object, Cut]) -> Cut:
    """The best cut beside this one's GG at these rates. Some CC is left: it tells how fast the CPU is."""
    key = None if of.kind is None else (of.kind, cut.gg, rates)
    if key in known:
        return known[key]

    def seconds(one: Cut) -> float:
        if one.cc < min(of.block.step, cut.cc + cut.cg):
            return float("inf")
        return cycle_seconds([scaled(on.block_times(of, one, 1, n_g_at(table, 1)), rates)], on.streaming)

    best, _ = best_cg(of, cut.gg, seconds)
    if key is not None:
        known[key] = best
    return best


def _kept(operators: Sequence[Operator], of: BlockCost, cuts: Sequence[Cut], table: Table, on: Pricing) -> Kept:
    members = [operators[j] for j in of.block.operators]
    distinct = tuple(dict.fromkeys(cuts))
    return Kept(
        tuple(operator.name for operator in members),
        distinct,
        tuple(on.block_times(of, one, 1, n_g_at(table, 1)) for one in distinct),
        sum(twice_bytes(operator, of.block.extent, distinct) for operator in members),
    )


def twice_bytes(operator: Operator, extent: int, cuts: Sequence[Cut]) -> int:
    """Host memory for the cuts of one weight beside what the first needs. Rows of one matrix lie there once as CC, as
    many as any cut has, and once as CG; any other weight is kept for each cut."""
    host = cuts[0].cc + cuts[0].cg
    if cut_axis(operator) == "rows" and operator.shape[2] == 1:
        elements = max(cut.cc for cut in cuts) + max(cut.cg for cut in cuts) - host
    else:
        elements = (len(cuts) - 1) * host
    return ceil(operator.bytes * elements / extent)
