"""Slices for all blocks of a model together: r_GG, r_CG and n_g (ScheInfer, section IV), under one memory limit.

Rates are those that suit decode, as in the paper, those that suit the prompt, or the best of these for both together:
whichever the workload's total time prefers. A host layout that the device cannot read (repacked weights) rules out
n_g, unless CC is kept a second time in the plain one; what is faster is again a matter of the total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Literal

from oallama.core.types import Workload
from oallama.cost.operator_cost import PLAIN_LAYOUT, Pass, passes
from oallama.cost.slice_times import Rates, StreamedBlock
from oallama.cost.timeline import BlockTimes, Timeline, cycle_seconds, timeline
from oallama.place.gg_assignment import N_VALUES, assign_gg, gg_choices, menu_of
from oallama.place.slicing import Slices, Streaming
from oallama.place.token_assignment import Layers, Table, n_g_at, pass_seconds, solve_n_g, token_table

Layouts = Mapping[str, StreamedBlock]
"""A block by the host layout of its CC."""

STAGING_ROUNDS = 4
SLOT_PADDING = 512  # bytes that one weight may take in a slot beyond its own: alignment, and what kernels read past it
MODEL_ROUNDS = 10  # tokens that the exact timeline of decode may take to settle

Objective = Literal["decode", "prompt", "both"]


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

    @property
    def twice_bytes(self) -> int:
        """Host memory of the second copy of CC."""
        return _cc_bytes(self.layers) if self.kept_twice else 0


def plan_slices(
    blocks: Sequence[Layouts],
    on: Streaming,
    room: int,
    weights_room: int,
    load: Workload,
    host_room: int = 0,
    n_values: int = N_VALUES,
    any_length: bool = True,
) -> SlicePlan:
    """The plan that takes the workload the least time; with nothing sliced, if that is the fastest.

    room: bytes of device memory for slices and staging; weights_room: for slices alone; host_room: for a second copy of
    CC; any_length: n_g for prompts of other lengths too. Every block needs the plain layout among its own. No block is
    all GG: that is for whole operators.
    """

    @cache
    def choices(kind: StreamedBlock, objective: Objective) -> tuple[Slices, ...]:
        if objective == "prompt" and kind.outputs_only:
            return choices(kind, "decode")  # a prompt has one token there
        if kind.whole is not None:  # the same slices, but one of them may be llama.cpp's whole operators
            return _or_whole(kind, choices(replace(kind, whole=None), objective), objective, on, load)
        if objective != "both":
            return gg_choices(kind, on, n_values, _tokens(objective, load), up_to_all=False)
        either = [choices(kind, each) for each in _objectives(load) if each != "both"]
        priced = ([_over_workload(kind, made, on, load) for made in same_gg] for same_gg in zip(*either, strict=True))
        return tuple(min(made, key=lambda slices: slices.seconds) for made in priced)

    modes = _layout_modes(blocks)
    found = [_unsliced(modes[-1].blocks, on, load)]
    for mode in modes:
        for objective in _objectives(load):
            per_block = [choices(block.kind(), objective) for block in mode.blocks]
            plan = _solved(mode, per_block, on, room, weights_room, load)
            if plan is not None and (not mode.twice or _cc_bytes(plan.layers) <= host_room):
                found.append(plan)
    best = min(found, key=lambda plan: plan.total_s(load))
    return _with_table(best, on, load) if any_length else best


@dataclass(frozen=True, slots=True)
class _Mode:
    """Every block in one layout, and whether its CC is streamed for n_g; it must be kept twice where the device cannot
    read that layout."""

    blocks: tuple[StreamedBlock, ...]
    with_n_g: bool
    twice: bool


def _layout_modes(blocks: Sequence[Layouts]) -> list[_Mode]:
    """The layout that is fastest in decode without n_g; with n_g the plain one, and the fastest with a second copy.

    With n_g every FFN is in the split backend, and none as llama.cpp would run it whole; blocks whose CC is never
    streamed keep their layout.
    """
    fastest = tuple(min(layouts.values(), key=_cpu_s) for layouts in blocks)
    split = tuple(replace(block, whole=None) if block.takes_n_g else block for block in fastest)
    plain = tuple(
        replace(layouts[PLAIN_LAYOUT], whole=None) if block.takes_n_g and not block.outputs_only else block
        for layouts, block in zip(blocks, split, strict=True)
    )
    twice = [_Mode(split, True, True)] if plain != split else []
    return [_Mode(plain, True, False), *twice, _Mode(fastest, False, False)]


def _cpu_s(block: StreamedBlock) -> tuple[float, str]:
    return sum(gemm.cpu_s(1.0, 1) for gemm in block.gemms), block.layout


def _objectives(load: Workload) -> tuple[Objective, ...]:
    """What rates are solved for."""
    return ("decode",) if _tokens("prompt", load) <= 1 else ("decode", "prompt", "both")


def _tokens(objective: Objective, load: Workload) -> int:
    return 1 if objective == "decode" else min(load.n_prompt, load.n_ubatch)


def _or_whole(
    kind: StreamedBlock, made: Sequence[Slices], objective: Objective, on: Streaming, load: Workload
) -> tuple[Slices, ...]:
    """The choices with llama.cpp's whole operators in the place of the first, which takes no device memory, where these
    are faster."""
    whole = Slices(kind.block.extent, 0, 0, 0.0)
    if objective == "both":
        whole = _over_workload(kind, whole, on, load)
    else:
        whole = replace(whole, seconds=on.seconds(kind, whole.rates, _tokens(objective, load)))
    return (min(whole, made[0], key=lambda slices: slices.seconds), *made[1:])


def _over_workload(kind: StreamedBlock, made: Slices, on: Streaming, load: Workload) -> Slices:
    """The slices with their seconds over the whole workload, without n_g."""
    over = passes(load, "mixed")
    return replace(made, seconds=sum(p.count * on.seconds(kind, made.rates, p.n_tokens, 0, p.n_outputs) for p in over))


def _solved(
    mode: _Mode, per_block: Sequence[Sequence[Slices]], on: Streaming, room: int, weights_room: int, load: Workload
) -> SlicePlan | None:
    """r_GG, then n_g; what staging then takes is taken off the room, and so on until both fit. None: it does not, or
    no prompt gains by n_g."""
    menus = [menu_of(block, made) for block, made in zip(mode.blocks, per_block, strict=True)]
    lengths = sorted({p.n_tokens for p in passes(load, "prefill")}) if mode.with_n_g else []
    staging = 0
    for _ in range(STAGING_ROUNDS):
        assigned = assign_gg(menus, max(0, min(room - staging, weights_room)))
        chosen = [made[i] for made, i in zip(per_block, assigned.chosen, strict=True)]
        layers = tuple(zip(mode.blocks, chosen, strict=True))
        table = tuple((n, solve_n_g(layers, on, n)[0]) for n in lengths)
        if mode.with_n_g and not any(n_g for _, n_g in table):
            return None
        staging = staging_bytes(layers, on, load.n_ubatch, mode.with_n_g)
        if assigned.bytes + staging <= room:
            return priced(layers, on, load, table, mode.twice, assigned.bytes, staging)
    return None


def _with_table(plan: SlicePlan, on: Streaming, load: Workload) -> SlicePlan:
    """With n_g for prompts of any length, where it has any for the workload's."""
    if not plan.token_assignment:
        return plan
    known = {p.n_tokens for p in passes(load, "prefill")}
    table = token_table(plan.layers, on, load.n_ubatch, known)
    return priced(plan.layers, on, load, table, plan.kept_twice, plan.weights_bytes, plan.staging_bytes)


def _unsliced(blocks: Sequence[StreamedBlock], on: Streaming, load: Workload) -> SlicePlan:
    seconds = {kind: on.seconds(kind, Rates(1.0, 0.0, 0.0), 1) for kind in {block.kind() for block in blocks}}
    layers = tuple((block, Slices(block.block.extent, 0, 0, seconds[block.kind()])) for block in blocks)
    return priced(layers, on, load, (), False, 0, 0)


def priced(
    layers: tuple[tuple[StreamedBlock, Slices], ...],
    on: Streaming,
    load: Workload,
    table: Table,
    twice: bool,
    weights: int,
    staging: int,
) -> SlicePlan:
    """Slices with the times of their blocks, each as one among others like it; weights, staging: bytes they take."""
    prefill_s = sum(
        p.count * pass_seconds(layers, on, p.n_tokens, n_g_at(table, p.n_tokens), p.n_outputs)
        for p in passes(load, "prefill")
    )
    return SlicePlan(layers, table, twice, weights, staging, prefill_s, pass_seconds(layers, on, 1, n_g_at(table, 1)))


def staging_bytes(layers: Layers, on: Streaming, n_ubatch: int, with_n_g: bool) -> int:
    """Of the ring, whose slots hold what is streamed of the largest block, and of activations for the largest part of a
    block that the device computes. with_n_g: CC is streamed too. llama.cpp reserves as if the logits of all n_ubatch
    tokens were wanted, so the blocks behind the last attention count like the others."""
    slot = activations = 0
    for block, made in layers:
        streamed = made.cg + made.cc * (with_n_g and block.takes_n_g)
        if streamed:
            padding = len(block.gemms) * SLOT_PADDING * 2  # CG and CG' of each weight
            slot = max(slot, ceil(block.block.bytes * streamed / block.block.extent) + padding)
        computed = streamed + made.gg
        if streamed or 0 < made.gg < block.block.extent:
            activations = max(activations, block.block.staging_bytes(computed, n_ubatch))
    n_slots = 2 if on.prefetch.n_slots is None else on.prefetch.n_slots
    return n_slots * slot + activations


def _cc_bytes(layers: Layers) -> int:
    return sum(block.block.bytes * made.cc // block.block.extent for block, made in layers if block.takes_n_g)


#
# the exact timeline, in which blocks of different kinds follow one another
#


def exact(plan: SlicePlan, on: Streaming, load: Workload) -> SlicePlan:
    """The plan with the times of its exact timeline; its own take each block as one among others like it."""
    if not plan.token_assignment and not any(made.cg for _, made in plan.layers):
        return plan  # nothing runs ahead, so these are exact
    prompt = [block for p in passes(load, "prefill") for block in _pass_times(plan, on, p)]
    token = _pass_times(plan, on, Pass(1, load.n_prompt, 1))
    decode_s = cycle_seconds(token, on.prefetch, on.contention, MODEL_ROUNDS)
    return replace(plan, prefill_s=timeline(prompt, on.prefetch, on.contention).end_s, decode_s=decode_s)


def _pass_times(plan: SlicePlan, on: Streaming, p: Pass) -> list[BlockTimes]:
    n_g = n_g_at(plan.token_assignment, p.n_tokens)
    return [on.times(block, on.rates, made.rates, p.n_tokens, n_g, p.n_outputs) for block, made in plan.layers]


def model_timeline(plan: SlicePlan, on: Streaming, n_tokens: int, n_rounds: int = 1) -> Timeline:
    """Passes one after another over all blocks in order, with the plan's n_g."""
    return timeline(_pass_times(plan, on, Pass(n_tokens, 0, 1)) * n_rounds, on.prefetch, on.contention)
