"""Slices for all blocks that a placement of whole operators leaves on the host: r_GG, r_CG and n_g (ScheInfer, section
IV), or a hot set of experts, under one memory limit.

Two searches compete by the workload's total time: one without n_g, whose cuts minimise that time; and one with n_g,
whose cuts minimise decode and whose n_g minimises the prompt, as in the paper. A device cannot read repacked weights,
so n_g needs CC in the plain layout: instead of the fastest one, or as a second copy; total time decides that too.
Without streaming r_CG = n_g = 0. If expert counts are known, an FFN of experts also has sets of its most used experts
as options: more bytes, fewer seconds, like any larger slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from oallama.core.errors import PlanError
from oallama.core.types import PLAIN_LAYOUT, Operator, Phase, Predicted, SplitSettings, StreamSettings, Workload
from oallama.cost.experts import ExpertCoverage, expert_use, experts_alike, of_step
from oallama.cost.following import FEWEST_EXPERTS, following
from oallama.cost.passes import Pass, decode_pass, passes
from oallama.cost.rates import slice_rates
from oallama.cost.slices import Block, BlockType, Cut, Pricing
from oallama.cost.timeline import BlockTimes, cycle_seconds, run_seconds
from oallama.planner.block_contexts import BlockContexts
from oallama.planner.cutting import (
    BlockChoices,
    Counted,
    CutBlocks,
    TokenTable,
    count_blocks,
    counted_seconds,
    least_n_g,
    n_g_at,
    token_table,
)
from oallama.planner.knapsack import OptionCosts, solve_knapsack
from oallama.planner.placement import Assignment, DeviceSlices, Placement
from oallama.planner.problem import Problem
from oallama.planner.staging import most_n_g, most_streamed, ring_bytes, slot_bytes, staging_bytes


@dataclass(frozen=True, slots=True)
class Slicing:
    """The cuts of every block, with their memory and predicted times."""

    blocks: tuple[Block, ...]
    cut_blocks: tuple[tuple[BlockType, Cut], ...]  # for each block its type, in the layout that it gets, and its cut
    token_assignment: TokenTable
    kept_twice: bool  # CC is kept in its fast layout and in the plain one, which is streamed for n_g
    staging_bytes: int  # the ring of slots for streamed weights, and activations
    prefill_s: float  # of the workload's prompt: blocks and inter-block times
    decode_s: float  # of one token of an answer
    budget_limited: bool = False  # more device memory would change the cuts

    def predicted(self, workload: Workload) -> Predicted:
        return Predicted.with_drafts(self.prefill_s, self.decode_s, workload)

    def total_s(self, workload: Workload) -> float:
        return self.predicted(workload).total_s

    @property
    def weights_bytes(self) -> int:
        """Bytes of GG and of hot experts."""
        return sum(block_type.weight_bytes(cut) for block_type, cut in self.cut_blocks)

    @property
    def streams(self) -> bool:
        return bool(self.token_assignment) or any(cut.cg for _, cut in self.cut_blocks)

    @property
    def exchanges(self) -> bool:
        """Hot experts follow the conversation."""
        return any(
            cut.n_hot and block_type.use is not None and block_type.use.follows for block_type, cut in self.cut_blocks
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is sliced."""
        return not self.streams and all(cut.is_uncut for _, cut in self.cut_blocks)

    @property
    def twice_bytes(self) -> int:
        """Host memory of the second copy of CC: of what may be streamed for n_g, or exchanged."""
        return sum(
            block_type.block.bytes * cut.cc // block_type.block.extent
            for block_type, cut in (self.cut_blocks if self.kept_twice else ())
            if (block_type.use is not None and block_type.use.follows if cut.n_hot else block_type.takes_n_g)
        )


NO_SLICES = Slicing((), (), (), False, 0, prefill_s=inf, decode_s=0.0)
"""The slicing of a model without blocks that can be sliced."""

N_VALUES = 16
"""n_G of the paper: number of values of r_GG above 0 that are tried. With eight, five of 29 plans of the corpus are
slower, by up to 15.6 %."""

MODEL_ROUNDS = 10  # most tokens that the exact timeline of decode runs until it is steady


class Slicer:
    """Finds and prices slices for a problem and a workload, beside any placement of whole operators."""

    def __init__(
        self,
        problem: Problem,
        workload: Workload,
        pricing: Pricing,
        streams: bool = True,
        hot: bool = False,
    ) -> None:
        """pricing: of the problem's device; problems of one device may share it. streams: whether weights may be
        streamed; hot: whether the device may have the most used experts of a layer."""
        self._problem, self.workload, self._streams, self._hot = problem, workload, streams, hot
        self._follows = streams and hot and experts_may_follow(problem)
        known_uses = {} if problem.routing is None else expert_use(problem.routing)
        routed = {o.layer: o.mul_mat for o in problem.operators if o.layer is not None and o.routed}
        self._uses = {
            layer: of_step(known_uses.get(layer) or experts_alike(mul_mat.shape[2]), mul_mat, problem.step)
            for layer, mul_mat in routed.items()
            if layer in known_uses or self._follows
        }
        self.pricing = pricing
        self.contexts = BlockContexts(problem, workload)

    def with_workload_and_slots(self, workload: Workload, n_slots: int) -> Slicer:
        """A slicer for another workload and a ring of n_slots slots, which shares the cached tasks of sliced blocks."""
        variant = copy(self)
        variant.pricing = self.pricing.with_slots(n_slots)
        if workload != self.workload:
            variant.workload, variant.contexts = workload, BlockContexts(self._problem, workload)
        return variant

    def blocks(
        self, placement: Placement, together: Collection[int] | None = None, cuts: Sequence[Hashable] | None = None
    ) -> list[Block]:
        """The blocks that may be sliced beside `placement`; those that may have hot experts with the use of experts.
        together, cuts: as in BlockContexts.blocks; together None: the layers with hot experts in `placement`."""
        if together is None:
            together = _hot_layers(self._problem.operators, placement)
        blocks = self.contexts.blocks(placement, together, cuts)
        return [self._with_use(block) for block in blocks]

    def _with_use(self, block: Block) -> Block:
        """Add the use of experts to a block of experts. Only a whole FFN may have hot experts."""
        layer, block_type = self._problem.operators[block.operators[0]].layer, block.types[0]
        use = None if layer is None else self._uses.get(layer)
        if use is None or not all(gemm.mul_mat.routed for gemm in block_type.gemms):
            return block
        may_be_hot = self._hot and block_type.block.hidden_each and block_type.block.returned
        types = (replace(block_type, gaps=use.gaps, use=use if may_be_hot else None) for block_type in block.types)
        return replace(block, types=tuple(types))

    #
    # cuts
    #

    def solve(self, placement: Placement, budget: int, weights_budget: int, n_values: int = N_VALUES) -> Slicing:
        """The slices beside `placement` with the least time for the workload; an empty one if no slice gains.

        budget: bytes of device memory for slices and staging; weights_budget: for slices alone. No block is all GG:
        such operators are placed whole.
        """
        workload = self.workload
        best = NO_SLICES
        biased = self.contexts.biased_ffns.keys() & self._uses.keys() if self._hot else ()
        sets: list[Collection[int]] = [(), biased] if biased else [()]
        for blocks in filter(None, (self.blocks(placement, together) for together in sets)):
            numbers = {types: number for number, types in enumerate(dict.fromkeys(block.types for block in blocks))}
            kinds, kind_of = list(numbers), [numbers[block.types] for block in blocks]
            # anew for each placement: blocks of the same matrices share cuts, found in the first one's context
            options, modes = BlockChoices(self.pricing, workload, self._streams, n_values), self._modes(kinds)
            uncut = [(modes[0].kinds[number], modes[0].kinds[number].all_host) for number in kind_of]
            set_best, set_mode, budget_limited = self.priced(blocks, uncut), modes[0], False
            most_cg: list[int | None] = [None] * len(kinds)
            for mode in modes:
                for most in (0, None) if self._streams and not mode.with_n_g else (None,):
                    limits = [most] * len(kinds)
                    slicing = self._solved(blocks, mode, options, limits, kind_of, budget, weights_budget)
                    budget_limited |= slicing.budget_limited if slicing is not None else not mode.with_n_g
                    if slicing is not None and slicing.total_s(workload) < set_best.total_s(workload):
                        set_best, set_mode = slicing, mode
            set_best = self._with_timeline(set_best)
            while (narrower := self._shrink_slot(set_best, kind_of)) is not None:  # leaves more for GG
                most_cg[narrower[0]] = narrower[1]
                slicing = self._solved(blocks, set_mode, options, most_cg, kind_of, budget, weights_budget)
                slicing = slicing and self._with_timeline(slicing)
                if slicing is None or slicing.total_s(workload) >= set_best.total_s(workload):
                    break
                set_best = slicing
            if set_best.total_s(workload) < best.total_s(workload):
                best = replace(set_best, budget_limited=budget_limited)
        return best

    def _shrink_slot(self, slicing: Slicing, kind_of: Sequence[int]) -> tuple[int, int] | None:
        """(the kind of blocks with the largest slot in the ring, elements of CG with which its slot shrinks to the next
        largest). None: no slot can shrink. kind_of: the kind of each block."""
        n_g = most_n_g(slicing.token_assignment, self.workload.largest_batch)
        slots: dict[int, int] = {}
        for number, (block_type, cut) in zip(kind_of, slicing.cut_blocks, strict=True):
            slots[number] = max(slots.get(number, 0), slot_bytes(block_type, cut, n_g))
        if len(slots) < 2:
            return None
        (largest, number), (following, _) = sorted(((size, number) for number, size in slots.items()), reverse=True)[:2]
        block_type, _ = slicing.cut_blocks[kind_of.index(number)]
        if largest == following or not following or (n_g and block_type.takes_n_g):
            return None
        return number, most_streamed(block_type, following)

    def with_table(self, slicing: Slicing, budget: int) -> Slicing:
        """The slicing with n_g for all batch sizes; the same slicing if their staging does not fit the budget."""
        workload = self.workload
        known = {p.n_tokens for p in passes(workload, "prefill")}
        table = token_table(slicing.cut_blocks, self.pricing, workload.largest_batch, known)
        staging = staging_bytes(
            slicing.cut_blocks, self.pricing.streaming, workload.largest_batch, most_n_g(table, workload.largest_batch)
        )
        if slicing.weights_bytes + staging > budget:
            return slicing
        return self.priced(slicing.blocks, slicing.cut_blocks, table, slicing.kept_twice, staging)

    def fastest(self, types: Sequence[BlockType]) -> BlockType:
        """The type in whose layout the CPU takes the least time over the workload."""
        workload_passes = passes(self.workload, "mixed")
        return min(
            types,
            key=lambda block_type: (
                sum(p.count * block_type.gemms.cpu_s(1.0, p.n_tokens) for p in workload_passes),
                block_type.layout,
            ),
        )

    def _modes(self, kinds: Sequence[tuple[BlockType, ...]]) -> list[_Mode]:
        """The modes to try: without n_g in the fastest layout; with n_g in the plain layout, and in the fastest one
        with a second copy.

        With n_g the split back end runs the blocks of every layer, also those that llama.cpp would run whole. Blocks
        whose CC is never streamed keep their layout.
        """
        fastest = tuple(map(self.fastest, kinds))
        without_n_g = _Mode(fastest, with_n_g=False, twice=False)
        if not self._streams:
            return [without_n_g]
        once = tuple(block_type.in_split if block_type.takes_n_g else block_type for block_type in fastest)
        plain = tuple(
            next(block_type.in_split for block_type in types if block_type.layout == PLAIN_LAYOUT)
            if fast.takes_n_g and not fast.outputs_only
            else fast
            for types, fast in zip(kinds, once, strict=True)
        )
        with_n_g = [_Mode(plain, with_n_g=True, twice=False)]
        if plain != once:
            with_n_g.append(_Mode(once, with_n_g=True, twice=True))
        return [without_n_g, *self._following_modes(kinds, fastest), *with_n_g]

    def _following_modes(self, kinds: Sequence[tuple[BlockType, ...]], fastest: Sequence[BlockType]) -> Iterator[_Mode]:
        """Yield modes in which hot experts follow the conversation: blocks with experts in the plain layout, and in the
        fastest one with a second copy."""
        if not self._follows or all(block_type.use is None for block_type in fastest):
            return
        followed = {block_type.use: following(block_type.use) for block_type in fastest if block_type.use is not None}

        def follows(block_type: BlockType) -> BlockType:
            return block_type if block_type.use is None else replace(block_type, use=followed[block_type.use])

        def plain(types: Sequence[BlockType], fast: BlockType) -> BlockType:
            return (
                fast
                if fast.use is None
                else next(block_type for block_type in types if block_type.layout == PLAIN_LAYOUT)
            )

        followed_kinds = tuple(follows(plain(types, fast)) for types, fast in zip(kinds, fastest, strict=True))
        yield _Mode(followed_kinds, with_n_g=False, twice=False)
        if any(block_type.layout != fast.layout for block_type, fast in zip(followed_kinds, fastest, strict=True)):
            yield _Mode(tuple(map(follows, fastest)), with_n_g=False, twice=True)

    def _solved(
        self,
        blocks: Sequence[Block],
        mode: _Mode,
        options: BlockChoices,
        most_cg: Sequence[int | None],
        kind_of: Sequence[int],
        budget: int,
        weights_budget: int,
    ) -> Slicing | None:
        """Solve r_GG by the knapsack, then n_g; subtract the staging that these need from the budget, and repeat until
        both fit. None: they do not fit, no prompt gains by n_g, or the host has no room for a second copy.

        most_cg: most elements of CG of each kind of block in the mode; kind_of: the kind of each block.
        """
        objective: Phase = "decode" if mode.with_n_g and self.workload.n_gen else "mixed"
        choices = [
            options.choices(block_type, objective, most) for block_type, most in zip(mode.kinds, most_cg, strict=True)
        ]
        costs: list[OptionCosts] = [
            tuple((block_type.weight_bytes(cut), seconds) for cut, seconds in kind_choices)
            for block_type, kind_choices in zip(mode.kinds, choices, strict=True)
        ]
        n_batch = self.workload.largest_batch
        staging, needed = -1, 0
        while needed > staging:  # ends when the staging that was subtracted suffices
            staging = needed
            selection = solve_knapsack(costs, max(0, min(budget - staging, weights_budget)), kind_of)
            counts = Counter(zip(kind_of, selection.chosen, strict=True))
            cut_block_of = {(k, i): (mode.kinds[k], choices[k][i][0]) for k, i in counts}
            counted = [(*cut_block_of[choice], count) for choice, count in counts.items()]
            table = self._n_g_of_prompt(counted) if mode.with_n_g else ()
            if mode.with_n_g and not any(n_g for _, n_g in table):
                return None
            cut_blocks = tuple(cut_block_of[choice] for choice in zip(kind_of, selection.chosen, strict=True))
            needed = staging_bytes(cut_blocks, self.pricing.streaming, n_batch, most_n_g(table, n_batch))
            if selection.bytes + needed <= max(budget, 0):
                seconds = self._phases(counted, table)
                slicing = Slicing(
                    tuple(blocks), cut_blocks, table, mode.twice, needed, *seconds, selection.budget_limited
                )
                return slicing if slicing.twice_bytes <= self._problem.host_copies_limit else None
        return None

    def _n_g_of_prompt(self, counted: Counted) -> TokenTable:
        """The best n_g for each batch size of the workload's prompt."""
        sizes = sorted({p.n_tokens for p in passes(self.workload, "prefill")})
        return tuple((n, least_n_g(counted, self.pricing, n)[0]) for n in sizes)

    #
    # prices
    #

    def with_n_g(self, placement: Placement) -> Placement:
        """The same slices with n_g solved for this slicer's workload. placement: with n_g."""
        slices = placement.first_slices
        table = self._n_g_of_prompt(count_blocks(self.cuts_of(placement)[1]))
        slices = replace(slices, settings=replace(slices.settings, token_assignment=table))
        return replace(placement, slices=(slices, *placement.slices[1:]))

    def cuts_of(self, placement: Placement) -> tuple[list[Block], CutBlocks]:
        """The blocks of a placement with its cuts. Raises PlanError for a cut operator that this profile's device
        cannot compute."""
        blocks, split = (
            self.blocks(placement),
            {i for i, assignment in enumerate(placement.assignments) if assignment.is_split},
        )
        if unsupported := split.difference(*(block.operators for block in blocks)):
            name = self._problem.operators[min(unsupported)].name
            raise PlanError(f"the plan splits {name}, which this profile's device cannot compute")
        return blocks, [self._as_cut(block, placement) for block in blocks]

    def _as_cut(self, block: Block, placement: Placement) -> tuple[BlockType, Cut]:
        """The type and the cut of a block, as the placement has its first operator."""
        i = block.operators[0]
        assignment, settings = placement.assignments[i], placement.first_slices.settings
        block_type = block.in_layout(assignment.layout) or self.fastest(block.types)
        cut, n_hot = assignment.cut if assignment.is_split else block_type.all_host, len(assignment.hot_experts)
        if n_hot:
            alike = of_step(experts_alike(block_type.n_expert), block_type.gemms[0].mul_mat, self._problem.step)
            use: ExpertCoverage = self._uses.get(self._problem.operators[i].layer or 0) or alike
            follows = settings.streaming is not None and settings.streaming.exchange != "off" and n_hot > 1
            block_type = replace(block_type, use=following(use) if follows else use)
        holds = settings.token_assignment and block_type.takes_n_g
        return block_type.in_split if holds else block_type, cut._replace(n_hot=n_hot)

    def priced(
        self,
        blocks: Sequence[Block],
        cut_blocks: CutBlocks,
        table: TokenTable = (),
        twice: bool = False,
        staging: int = 0,
    ) -> Slicing:
        """The slicing of given cuts, with the times of their timeline."""
        seconds = self._phases(count_blocks(cut_blocks), table)
        return self._with_timeline(Slicing(tuple(blocks), tuple(cut_blocks), table, twice, staging, *seconds))

    def _phases(self, counted: Counted, table: TokenTable) -> tuple[float, float]:
        """(seconds of the prompt, of a token) as a sum of steady-state seconds per block."""
        prefill_s = sum(
            p.count * counted_seconds(counted, self.pricing, p.n_tokens, n_g_at(table, p.n_tokens), p.n_outputs)
            for p in passes(self.workload, "prefill")
        )
        step = decode_pass(self.workload)
        n_g = n_g_at(table, step.n_tokens)
        return prefill_s, step.count * counted_seconds(counted, self.pricing, step.n_tokens, n_g, step.n_outputs)

    def _with_timeline(self, slicing: Slicing) -> Slicing:
        """The slicing with the times of its timeline, in which blocks of different kinds alternate."""
        if not slicing.streams:
            return slicing  # no copy runs ahead of its block, so the sums are exact
        prompt = [times for p in passes(self.workload, "prefill") for times in self.pass_times(slicing, p)]
        step = decode_pass(self.workload)
        decode_s = step.count * cycle_seconds(self.pass_times(slicing, step), self.pricing.streaming, MODEL_ROUNDS)
        return replace(slicing, prefill_s=run_seconds(prompt, self.pricing.streaming), decode_s=decode_s)

    def pass_times(self, slicing: Slicing, p: Pass) -> list[BlockTimes]:
        """BlockTimes in execution order, each with the inter-block time before it."""
        n_g, block_times = n_g_at(slicing.token_assignment, p.n_tokens), cache(self.pricing.block_times)
        return [
            block_times(*cut_block, p.n_tokens, n_g, p.n_outputs, block.inter_block_share)
            for block, cut_block in zip(slicing.blocks, slicing.cut_blocks, strict=True)
        ]

    def placed(self, placement: Placement, slicing: Slicing, phase: Phase = "mixed") -> Placement:
        """The placement with these slices, and its predicted seconds over the passes of a phase."""
        assignments, hot_bytes = list(placement.assignments), 0
        for block, (block_type, cut) in zip(slicing.blocks, slicing.cut_blocks, strict=True):
            experts = tuple(sorted(block_type.use.order[: cut.n_hot])) if block_type.use is not None else ()
            split = not cut.is_uncut or (slicing.token_assignment and block_type.takes_n_g)
            layout = block_type.layout if cut.cc and split else None
            hot_bytes += block_type.weight_bytes(cut) if cut.n_hot else 0
            for i in block.operators:
                assignments[i] = Assignment(cut._replace(n_hot=0), layout, experts)
        slice_bytes = slicing.weights_bytes - hot_bytes
        streaming = self._stream_settings(slicing) if self._streams else None
        settings = SplitSettings(slicing.token_assignment, streaming, self._problem.profile.takes_residents)
        return replace(
            placement,
            assignments=tuple(assignments),
            seconds=slicing.predicted(self.workload).over(phase),
            slices=(DeviceSlices(slice_bytes, hot_bytes, slicing.staging_bytes, slicing.twice_bytes, settings),),
        )

    def _stream_settings(self, slicing: Slicing) -> StreamSettings:
        """Settings of the streams. With a device whose calls are synchronous no copies are queued, so pieces and the
        link's speed do not matter."""
        streaming, rates = self.pricing.streaming, self.pricing.rates
        n_batch = self.workload.largest_batch
        ring = ring_bytes(slicing.cut_blocks, streaming, n_batch, most_n_g(slicing.token_assignment, n_batch))
        settings = StreamSettings(streaming.n_slots, streaming.prefetch, slicing.kept_twice, ring_bytes=ring)
        if rates.blocking or not (slicing.streams or slicing.exchanges) or not rates.weights.beta_s_per_byte:
            return settings
        link_bytes_per_s = int(1 / rates.weights.beta_s_per_byte)
        return replace(
            settings,
            piece_bytes=rates.piece_bytes,
            link_bytes_per_s=link_bytes_per_s,
            exchange="idle" if slicing.exchanges else "off",
        )


def experts_may_follow(problem: Problem) -> bool:
    """Whether hot experts can follow the conversation: pinned memory is copied while the device computes, and layers
    have enough experts (FEWEST_EXPERTS) that some are used more for a time."""
    profile = problem.profile
    rates = profile.is_pinned and "h2d_pinned" in profile.link and not profile.is_blocking
    return rates and any(o.routed and o.shape[2] >= FEWEST_EXPERTS for o in problem.operators)


def pricing_of(problem: Problem, streaming: StreamSettings = StreamSettings()) -> Pricing:  # noqa: B008 - frozen
    """Prices of slices on the problem's device. Raises ProfileError if the profile has no link."""
    return Pricing(slice_rates(problem.profile), streaming)


def slicer_of(problem: Problem, workload: Workload, placement: Placement) -> Slicer:
    """A Slicer for a workload, with the settings of the search that found the placement's slices."""
    streaming = placement.first_slices.settings.streaming
    return Slicer(
        problem,
        workload,
        pricing_of(problem, streaming or StreamSettings()),
        streaming is not None,
        any(a.hot_experts for a in placement.assignments),
    )


@dataclass(frozen=True, slots=True)
class _Mode:
    """Conditions of one search: the layout of each kind of block, and whether CC is streamed for n_g. twice: CC is also
    kept in the plain layout."""

    kinds: tuple[BlockType, ...]
    with_n_g: bool
    twice: bool


def _hot_layers(operators: Sequence[Operator], placement: Placement) -> frozenset[int]:
    pairs = zip(operators, placement.assignments, strict=True)
    return frozenset(o.layer for o, assignment in pairs if assignment.hot_experts and o.layer is not None)
