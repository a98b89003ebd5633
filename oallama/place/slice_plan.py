"""Slices for all blocks of a model together: r_GG, r_CG and n_g (ScheInfer, section IV), under one memory limit.

Rates are those that suit decode, as in the paper, or those that suit the prompt: whichever the workload's total time
prefers. A host layout that the device cannot read (repacked weights) rules out n_g, unless CC is kept a second time in
the plain one; what is faster is again a matter of the total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from oallama.core.types import Workload
from oallama.cost.operator_cost import PLAIN_LAYOUT, passes
from oallama.cost.slice_times import Rates, StreamedBlock
from oallama.cost.timeline import Timeline, timeline
from oallama.place.gg_assignment import N_VALUES, assign_gg, gg_choices, menu_of
from oallama.place.slicing import Slices, Streaming
from oallama.place.token_assignment import Layers, Table, n_g_at, pass_seconds, token_table

Layouts = Mapping[str, StreamedBlock]
"""A block by the host layout of its CC."""

STAGING_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The slices of every block, and what they take."""

    layers: tuple[tuple[StreamedBlock, Slices], ...]
    token_assignment: Table
    kept_twice: bool  # CC lies in its fast layout and in the plain one, which is streamed for n_g
    weights_bytes: int  # of GG
    staging_bytes: int  # the ring of slots for streamed weights, and activations
    prefill_s: float  # blocks, and what lies between them, over the workload's prompt
    decode_s: float  # of one token

    def total_s(self, load: Workload) -> float:
        return self.prefill_s + load.n_gen * self.decode_s


def plan_slices(
    blocks: Sequence[Layouts],
    on: Streaming,
    room: int,
    weights_room: int,
    load: Workload,
    host_room: int = 0,
    n_values: int = N_VALUES,
) -> SlicePlan:
    """The plan that takes the workload the least time; with nothing sliced, if that is the fastest.

    room: bytes of device memory for slices and staging; weights_room: for slices alone; host_room: for a second copy of
    CC. Every block needs the plain layout among its own.
    """

    @cache
    def choices(kind: StreamedBlock, for_tokens: int) -> tuple[Slices, ...]:
        return gg_choices(kind, on, n_values, for_tokens)

    modes = _layout_modes(blocks)
    found = [_unsliced(modes[-1].blocks, on, load)]
    for mode in modes:
        for for_tokens in _objectives(load):
            per_block = [choices(block.kind(), for_tokens) for block in mode.blocks]
            plan = _solved(mode, per_block, on, room, weights_room, load)
            if plan is not None and (not mode.twice or _cc_bytes(plan.layers) <= host_room):
                found.append(plan)
    return min(found, key=lambda plan: plan.total_s(load))


@dataclass(frozen=True, slots=True)
class _Mode:
    """Every block in one layout, whether its CC can be streamed, and whether it must be kept twice for that."""

    blocks: tuple[StreamedBlock, ...]
    streamable: bool
    twice: bool


def _layout_modes(blocks: Sequence[Layouts]) -> list[_Mode]:
    """Plain; and where another layout is faster in decode, that one without n_g, and with a second copy."""
    plain = tuple(layouts[PLAIN_LAYOUT] for layouts in blocks)
    fastest = tuple(min(layouts.values(), key=_cpu_s) for layouts in blocks)
    modes = [_Mode(plain, True, False)]
    return modes if fastest == plain else [*modes, _Mode(fastest, True, True), _Mode(fastest, False, False)]


def _cpu_s(block: StreamedBlock) -> tuple[float, str]:
    return sum(gemm.cpu_s(1.0, 1) for gemm in block.gemms), block.layout


def _objectives(load: Workload) -> tuple[int, ...]:
    """Batch sizes that rates are solved for."""
    prompt = min(load.n_prompt, load.n_ubatch)
    return (1,) if prompt <= 1 else (1, prompt)


def _solved(
    mode: _Mode, per_block: Sequence[Sequence[Slices]], on: Streaming, room: int, weights_room: int, load: Workload
) -> SlicePlan | None:
    """r_GG, then n_g; what staging then takes is taken off the room, and so on until both fit. Streaming CC for n_g
    needs larger slots, so where that does not fit, n_g is given up. None: nothing fits."""
    menus = [menu_of(block, made) for block, made in zip(mode.blocks, per_block, strict=True)]
    for with_n_g in (True, False) if mode.streamable else (False,):
        staging = 0
        for _ in range(STAGING_ROUNDS):
            assigned = assign_gg(menus, max(0, min(room - staging, weights_room)))
            chosen = [made[i] for made, i in zip(per_block, assigned.chosen, strict=True)]
            layers = tuple(zip(mode.blocks, chosen, strict=True))
            table = token_table(layers, on, load.n_ubatch) if with_n_g else ()
            staging = staging_bytes(layers, on, load.n_ubatch, bool(table))
            if assigned.bytes + staging <= room:
                return _priced(layers, on, load, table, mode.twice and bool(table), assigned.bytes, staging)
    return None


def _unsliced(blocks: Sequence[StreamedBlock], on: Streaming, load: Workload) -> SlicePlan:
    seconds = {kind: on.seconds(kind, Rates(1.0, 0.0, 0.0), 1) for kind in {block.kind() for block in blocks}}
    layers = tuple((block, Slices(block.block.extent, 0, 0, seconds[block.kind()])) for block in blocks)
    return _priced(layers, on, load, (), False, 0, 0)


def _priced(
    layers: tuple[tuple[StreamedBlock, Slices], ...],
    on: Streaming,
    load: Workload,
    table: Table,
    twice: bool,
    weights: int,
    staging: int,
) -> SlicePlan:
    prefill = [(p.count, p.n_tokens) for p in passes(load, "prefill")]
    prefill_s = sum(count * pass_seconds(layers, on, n, n_g_at(table, n)) for count, n in prefill)
    return SlicePlan(layers, table, twice, weights, staging, prefill_s, pass_seconds(layers, on, 1, 0))


def staging_bytes(layers: Layers, on: Streaming, n_ubatch: int, with_n_g: bool) -> int:
    """Of the ring, whose slots hold the largest streamed slice of a mul-mat, and of activations for the largest part of
    a block that the device computes. with_n_g: CC is streamed too."""
    slot = activations = 0
    for block, made in layers:
        streamed = made.cg + made.cc * with_n_g
        whole = max(gemm.signature.bytes for gemm in block.gemms)
        slot = max(slot, ceil(whole * streamed / block.block.extent))
        computed = streamed + made.gg
        if streamed or 0 < made.gg < block.block.extent:
            activations = max(activations, block.block.staging_bytes(computed, n_ubatch))
    n_slots = on.prefetch.n_slots or max((len(block.gemms) for block, _ in layers), default=0)
    return n_slots * slot + activations


def _cc_bytes(layers: Layers) -> int:
    return sum(block.block.bytes * made.cc // block.block.extent for block, made in layers)


def model_timeline(plan: SlicePlan, on: Streaming, n_tokens: int, n_rounds: int = 1) -> Timeline:
    """Passes one after another over all blocks in order, with the plan's n_g. This is the exact timeline; prefill_s and
    decode_s take each block as one among others like it."""
    n_g = n_g_at(plan.token_assignment, n_tokens)
    blocks = [on.times(block, on.rates, made.rates, n_tokens, n_g) for block, made in plan.layers]
    return timeline(blocks * n_rounds, on.prefetch, on.contention)
