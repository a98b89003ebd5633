"""Slices for all blocks that a placement of whole operators leaves on the host: r_GG, r_CG and n_g (ScheInfer, section
IV), under one memory limit.

Cuts are those that suit decode, as in the paper, or the workload: whichever its total time prefers. A host layout that
the device cannot read (repacked weights) rules out n_g, unless CC is kept a second time in the plain one; the total
decides again. Without streaming r_CG = n_g = 0: both sides compute, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

from oallama.core.types import PLAIN_LAYOUT, Phase, StreamSettings, Workload
from oallama.cost.passes import Pass, passes
from oallama.cost.slices import BlockCost, Cut, Pricing, slice_rates
from oallama.cost.timeline import BlockTimes, Prefetch, Timeline, cycle_seconds, timeline
from oallama.place.cuts import Layers, Table, best_cg, n_g_at, pass_seconds, solve_n_g, token_table
from oallama.place.knapsack import Menu, assign
from oallama.place.least import least
from oallama.place.placed import Placed, Slices
from oallama.place.problem import Problem
from oallama.place.sliceable import Layouts, Sliceable
from oallama.place.staging import most_n_g, staging_bytes

N_VALUES = 16
"""n_G of the paper: how many values of r_GG above 0 are looked at."""

STAGING_ROUNDS = 5
MODEL_ROUNDS = 10  # tokens that the exact timeline of decode may take to settle

Objective = Literal["decode", "workload"]
Choice = tuple[Cut, float]
"""A cut and the seconds of its block."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The cuts of every block, and what they take."""

    layers: tuple[tuple[BlockCost, Cut], ...]
    token_assignment: Table
    kept_twice: bool  # CC lies in its fast layout and in the plain one, which is streamed for n_g
    weights_bytes: int  # of GG
    staging_bytes: int  # the ring of slots for streamed weights, and activations
    prefill_s: float  # blocks, and what lies between them, over the workload's prompt
    decode_s: float  # of one token
    short: bool = False  # more device memory would have changed it

    def total_s(self, load: Workload) -> float:
        return self.prefill_s + load.n_gen * self.decode_s

    def seconds(self, load: Workload, phase: Phase) -> float:
        """Over the passes of a phase."""
        return {"decode": self.decode_s, "prefill": self.prefill_s, "mixed": self.total_s(load)}[phase]

    @property
    def streams(self) -> bool:
        return bool(self.token_assignment) or any(cut.cg for _, cut in self.layers)

    @property
    def is_empty(self) -> bool:
        """Nothing is sliced."""
        return not self.streams and all(cut.is_whole for _, cut in self.layers)

    @property
    def twice_bytes(self) -> int:
        """Host memory of the second copy of CC."""
        return _cc_bytes(self.layers) if self.kept_twice else 0


class Slicer:
    """Slices for a problem and a workload, whatever lies whole on the device."""

    def __init__(self, problem: Problem, load: Workload, prefetch: Prefetch = Prefetch(), streams: bool = True) -> None:  # noqa: B008 - frozen
        """streams: whether weights may be streamed. Raises ProfileError where the profile has no link."""
        self._problem, self.load, self._streams = problem, load, streams
        self.on = Pricing(slice_rates(problem.profile), prefetch)
        self.sliceable = Sliceable(problem, load)

    def blocks(self, placed: Placed) -> list[Layouts]:
        """The blocks that may be sliced beside `placed`."""
        return self.sliceable.blocks(placed)

    #
    # cuts
    #

    def plan(self, placed: Placed, room: int, weights_room: int, n_values: int = N_VALUES) -> SlicePlan | None:
        """The slices beside `placed` that take the workload the least time; an empty plan where nothing gains. None:
        there is nothing that could be sliced.

        room: bytes of device memory for slices and staging; weights_room: for slices alone. No block is all GG: that is
        for whole operators.
        """
        return self.plan_blocks(self.blocks(placed), room, weights_room, n_values)

    def plan_blocks(
        self, blocks: Sequence[Layouts], room: int, weights_room: int, n_values: int = N_VALUES
    ) -> SlicePlan | None:
        """As `plan`, of these blocks."""
        if not blocks:
            return None
        load = self.load
        cuts: dict[Hashable, tuple[tuple[Cut, ...], ...]] = {}
        choices: dict[tuple[Hashable, bool, Objective], tuple[Choice, ...]] = {}

        def choices_of(of: BlockCost, streams: bool, objective: Objective) -> tuple[Choice, ...]:
            kind = id(of) if of.kind is None else of.kind
            if kind not in cuts:
                cuts[kind] = self._cuts(of, n_values)
            if (kind, streams, objective) not in choices:
                choices[kind, streams, objective] = tuple(
                    self._best(of, objective, same_gg if streams else same_gg[:1]) for same_gg in cuts[kind]
                )
            return choices[kind, streams, objective]

        modes = self._modes(blocks)
        best = self.priced([(of, Cut(of.block.extent, 0, 0)) for of in modes[0].blocks], (), False, 0, 0)
        short = False
        for mode, objective, streams in product(modes, _objectives(load), {False, self._streams}):
            per_block = [choices_of(of, streams, objective) for of in mode.blocks]
            plan = self._solved(mode, per_block, room, weights_room)
            if plan is None or (mode.twice and _cc_bytes(plan.layers) > self._problem.host_room):
                short = short or not mode.with_n_g
                continue
            short = short or plan.short
            best = min(best, plan, key=lambda plan: plan.total_s(load))
        if best.token_assignment:
            known = {p.n_tokens for p in passes(load, "prefill")}
            table = token_table(best.layers, self.on, load.n_ubatch, known)
            staging = staging_bytes(best.layers, self.on.prefetch, load.n_ubatch, most_n_g(table, load.n_ubatch))
            if best.weights_bytes + staging <= room:  # else other batches get no more n_g than there is room for
                best = self.priced(best.layers, table, best.kept_twice, best.weights_bytes, staging)
        return replace(self.exact(best), short=short)

    def _cuts(self, kind: BlockCost, n_values: int) -> tuple[tuple[Cut, ...], ...]:
        """Cuts worth looking at, by GG, ascending: r_GG = i/n for i = 0..n, each rounded to what the backend can cut,
        and where both sides take as long. At least one step is left beside GG. Of each GG first nothing streamed, then,
        where weights may be streamed, the best r_CG in decode, in the prompt, and, where these differ, in the workload:
        that may lie between them or beyond."""
        extent, step = kind.block.extent, kind.block.step
        n_steps = ceil(extent / step)

        def resident(n: int) -> Cut:
            """With so many steps of CC, and the rest GG."""
            cc = min(n * step, extent)
            return Cut(cc, 0, extent - cc)

        balanced, _ = least(lambda n: self._best(kind, "workload", (resident(n),))[1], 1, n_steps)
        wanted = {max(1, round((1 - i / n_values) * extent / step)) for i in range(n_values)} | {1, balanced, n_steps}
        lengths = {1} if kind.outputs_only else {1, min(self.load.n_prompt, self.load.n_ubatch)}
        over = passes(self.load, "mixed")

        def streamed(gg: int) -> set[Cut]:
            cuts = {best_cg(kind, gg, lambda cut, n=n: self.on.seconds(kind, cut, n))[0] for n in lengths}  # type: ignore[misc]
            if len(cuts) > 1:
                cuts.add(best_cg(kind, gg, lambda cut: self._seconds(kind, cut, over))[0])
            return cuts

        found = []
        for n in sorted(wanted, reverse=True):
            cuts = {resident(n)} | (streamed(resident(n).gg) if self._streams else set())
            found.append(tuple(sorted(cuts, key=lambda cut: cut.cg)))
        return tuple(found)

    def _best(self, kind: BlockCost, objective: Objective, cuts: Sequence[Cut]) -> Choice:
        """Of these cuts, without n_g; of equals the one that streams the least."""
        over = (Pass(1, 0, 1),) if objective == "decode" else passes(self.load, "mixed")

        return min(((cut, self._seconds(kind, cut, over)) for cut in cuts), key=lambda choice: choice[1])

    def _seconds(self, kind: BlockCost, cut: Cut, over: Sequence[Pass]) -> float:
        """Of one block over these passes, without n_g."""
        return sum(p.count * self.on.seconds(kind, cut, p.n_tokens, 0, p.n_outputs) for p in over)

    def fastest(self, blocks: Sequence[Layouts]) -> tuple[BlockCost, ...]:
        """Each block in the layout in which the CPU takes the least time over the workload."""
        return tuple(map(self._fastest, blocks))

    def _modes(self, blocks: Sequence[Layouts]) -> list[_Mode]:
        """The layout that takes the workload the least time without n_g; with n_g the plain one, and the fastest with a
        second copy.

        With n_g every layer's block is in the split backend, and none as llama.cpp would run it whole; blocks whose CC
        is never streamed keep their layout.
        """
        fastest = self.fastest(blocks)
        without = _Mode(fastest, False, False)
        if not self._streams:
            return [without]
        once = tuple(held(of) if of.takes_n_g else of for of in fastest)
        plain = tuple(
            held(by_layout[PLAIN_LAYOUT]) if of.takes_n_g and not of.outputs_only else of
            for by_layout, of in zip(blocks, once, strict=True)
        )
        twice = [_Mode(once, True, True)] if plain != once else []
        return [without, _Mode(plain, True, False), *twice]

    def _fastest(self, by_layout: Layouts) -> BlockCost:
        over = passes(self.load, "mixed")
        return min(
            by_layout.values(), key=lambda of: (sum(p.count * of.cpu_s(1.0, p.n_tokens) for p in over), of.layout)
        )

    def _solved(
        self, mode: _Mode, per_block: Sequence[Sequence[Choice]], room: int, weights_room: int
    ) -> SlicePlan | None:
        """r_GG, then n_g; what staging then takes is taken off the room, and so on until both fit. None: it does not,
        or no prompt gains by n_g."""
        menus: list[Menu] = [
            tuple((of.block.weight_bytes(cut.gg), seconds) for cut, seconds in made)
            for of, made in zip(mode.blocks, per_block, strict=True)
        ]
        lengths = sorted({p.n_tokens for p in passes(self.load, "prefill")}) if mode.with_n_g else []
        staging = 0
        for _ in range(STAGING_ROUNDS):
            assigned = assign(menus, max(0, min(room - staging, weights_room)))
            layers = tuple(
                (of, made[i][0]) for of, made, i in zip(mode.blocks, per_block, assigned.chosen, strict=True)
            )
            table = tuple((n, solve_n_g(layers, self.on, n)[0]) for n in lengths)
            if mode.with_n_g and not any(n_g for _, n_g in table):
                return None
            n_ubatch = self.load.n_ubatch
            staging = staging_bytes(layers, self.on.prefetch, n_ubatch, most_n_g(table, n_ubatch))
            if assigned.bytes + staging <= max(room, 0):
                plan = self.priced(layers, table, mode.twice, assigned.bytes, staging)
                return replace(plan, short=assigned.short)
        return None

    #
    # prices
    #

    def again(self, placed: Placed) -> SlicePlan:
        """The slices of `placed`, which may have been made for another workload, with the prices of this one; n_g is
        solved anew where prompts have any. Bytes are those of `placed`."""
        slices = placed.slices
        assert slices is not None
        with_n_g = bool(slices.token_assignment)
        layers: list[tuple[BlockCost, Cut]] = []
        for by_layout in self.blocks(placed):
            of = self._fastest(by_layout)
            i = of.block.operators[0]
            of = by_layout.get(slices.layouts[i] or of.layout, of)
            gg, cg = slices.gg[i], slices.cg[i]
            layers.append((held(of) if with_n_g and of.takes_n_g else of, Cut(of.block.extent - cg - gg, cg, gg)))
        lengths = sorted({p.n_tokens for p in passes(self.load, "prefill")}) if with_n_g else []
        table = tuple((n, solve_n_g(layers, self.on, n)[0]) for n in lengths)
        twice = slices.settings is not None and slices.settings.kept_twice
        return self.exact(self.priced(layers, table, twice, slices.weights_bytes, slices.staging_bytes))

    def priced(self, layers: Layers, table: Table, twice: bool, weights_bytes: int, staging: int) -> SlicePlan:
        """Cuts with the times of their blocks, each as one among others like it."""
        prefill_s = sum(
            p.count * pass_seconds(layers, self.on, p.n_tokens, n_g_at(table, p.n_tokens), p.n_outputs)
            for p in passes(self.load, "prefill")
        )
        decode_s = pass_seconds(layers, self.on, 1, n_g_at(table, 1))
        return SlicePlan(tuple(layers), table, twice, weights_bytes, staging, prefill_s, decode_s)

    def exact(self, plan: SlicePlan) -> SlicePlan:
        """The plan with the times of its timeline, in which blocks of different kinds follow one another."""
        if not plan.streams:
            return plan  # nothing runs ahead, so these are exact
        prompt = [times for p in passes(self.load, "prefill") for times in self.pass_times(plan, p)]
        token = self.pass_times(plan, Pass(1, self.load.n_prompt, 1))
        decode_s = cycle_seconds(token, self.on.prefetch, MODEL_ROUNDS)
        return replace(plan, prefill_s=timeline(prompt, self.on.prefetch, draws=False).end_s, decode_s=decode_s)

    def pass_times(self, plan: SlicePlan, p: Pass) -> list[BlockTimes]:
        """Of the blocks in order."""
        n_g = n_g_at(plan.token_assignment, p.n_tokens)
        return [self.on.block_times(of, cut, p.n_tokens, n_g, p.n_outputs) for of, cut in plan.layers]

    def timeline(self, plan: SlicePlan, n_tokens: int, n_rounds: int = 1) -> Timeline:
        """Passes one after another over all blocks in order, with the plan's n_g."""
        return timeline(self.pass_times(plan, Pass(n_tokens, 0, 1)) * n_rounds, self.on.prefetch)

    def placed(self, placed: Placed, plan: SlicePlan, seconds: float = 0.0) -> Placed:
        """`placed` with the plan's slices; seconds: predicted over the passes of a phase."""
        n = len(self._problem.operators)
        gg, cg = [0] * n, [0] * n
        layouts: list[str | None] = [None] * n
        for of, cut in plan.layers:
            for i in of.block.operators:
                gg[i], cg[i] = cut.gg, cut.cg
                held = not cut.is_whole or (plan.token_assignment and of.takes_n_g)
                layouts[i] = of.layout if cut.cc and held else None
        settings = self._stream_settings(plan) if self._streams else None
        slices = Slices(
            tuple(gg), tuple(cg), tuple(layouts), plan.weights_bytes, plan.staging_bytes,
            settings, plan.token_assignment, plan.twice_bytes, plan.prefill_s, plan.decode_s,
        )  # fmt: skip
        return replace(placed, slices=slices, seconds=seconds)

    def _stream_settings(self, plan: SlicePlan) -> StreamSettings:
        """How the plan's weights are streamed. A device that does nothing by itself has no queue to keep short."""
        prefetch, rates = self.on.prefetch, self.on.rates
        settings = StreamSettings(prefetch.n_slots or 2, prefetch.mode, plan.kept_twice)
        if rates.blocking or not plan.streams or not rates.weights.beta_s_per_byte:
            return settings
        link_bytes_per_s = int(1 / rates.weights.beta_s_per_byte)
        return replace(settings, piece_bytes=rates.piece_bytes, link_bytes_per_s=link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Mode:
    """Every block in one layout, and whether its CC is streamed for n_g; it must be kept twice where the device cannot
    read that layout."""

    blocks: tuple[BlockCost, ...]
    with_n_g: bool
    twice: bool


def held(of: BlockCost) -> BlockCost:
    """In the split back end even where nothing of it is on the device."""
    return replace(of, whole=None, kind=None if of.kind is None else ("held", of.kind))


def _objectives(load: Workload) -> tuple[Objective, ...]:
    """What cuts are solved for."""
    return ("decode",) if load.n_prompt <= 1 else ("decode", "workload")


def _cc_bytes(layers: Layers) -> int:
    return sum(of.block.bytes * cut.cc // of.block.extent for of, cut in layers if of.takes_n_g)
