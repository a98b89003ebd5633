"""The blocks that may be sliced beside a placement of whole operators, with their contexts.

Most layers are equal, so there are few kinds of blocks and few different surroundings; each is priced once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from oallama.core.types import PLAIN_LAYOUT, Operator, Workload
from oallama.cost.blocks import (
    Relation,
    SplitBlock,
    family_blocks,
    ffn_of,
    has_host_input,
    in_runs,
    is_biased_ffn,
    is_ffn,
    residents,
    takes_n_g,
)
from oallama.cost.graph import computes_outputs_only, first_within
from oallama.cost.kernels import NO_TIME, Curve
from oallama.cost.passes import Pass, decode_pass, mean_depth, passes
from oallama.cost.slices import Block, BlockContext, BlockType, block_types
from oallama.cost.whole import Costs, cpu_seconds, is_around_attention, placement_seconds, transfer_seconds
from oallama.model.cut import runs_alone
from oallama.planner.placement import Placement
from oallama.planner.problem import Problem, costs_of, costs_over

Types = tuple[BlockType, ...]
"""The types of a block, one for each host layout of its CC."""

Part = tuple[int | None, bool]
"""(layer, whether it is the layer's FFN)."""


class BlockContexts:
    """Blocks of a problem with their contexts, at the batch sizes of the workload and of the profile."""

    def __init__(self, problem: Problem, workload: Workload) -> None:
        self._problem, self._workload = problem, workload
        self._families: dict[Hashable, list[int]] = defaultdict(list)  # operators that may form one block
        for i, (operator, is_splittable) in enumerate(zip(problem.operators, problem.splittable, strict=True)):
            drafts = operator.is_last and workload.step.shares_output  # stays whole, as the MTP layer does
            if is_splittable and not drafts:
                self._families[ffn_of(i, operator)].append(i)
        n_layer = problem.graph.n_layer
        self._parts = [
            2 * operator.layer_in(n_layer) + (is_ffn(operator) or operator.is_last) for operator in problem.operators
        ]
        self.biased_ffns = _biased_ffns(problem.operators, problem.splittable)
        self._types: dict[Types, Types] = {}
        self._blocks_of = cache(self._blocks_in)
        self._types_related = cache(_types_related)
        self.costs_at, self._layouts = cache(self._costs_at), cache(self._layouts_for)
        self._passes_at: dict[int, tuple[Pass, ...]] = {
            n_tokens: (Pass(n_tokens, mean_depth(workload), 1),)
            for n_tokens in {case.n_tokens for case in problem.profile.cases}
            if n_tokens <= workload.largest_batch
        }
        workload_passes: dict[int, list[Pass]] = defaultdict(list)
        step = decode_pass(workload, workload.n_gen or 1)
        for p in (*passes(workload, "prefill"), step):
            workload_passes[p.n_tokens].append(replace(p, count=step.count) if p.n_tokens == step.n_tokens else p)
        self._passes_at |= {n_tokens: tuple(batch_passes) for n_tokens, batch_passes in workload_passes.items()}

    def blocks(
        self, placement: Placement, together: Collection[int] = (), cuts: Sequence[Hashable] | None = None
    ) -> list[Block]:
        """The blocks that may be sliced. Other operators stay where `placement` has them; their time is inter-block
        time.

        together: layers whose experts with biases form one block each (for hot experts; it has no slices), if all of
        them are on the host. cuts: of each operator; mul-mats of one FFN with equal cuts form one block. None: the
        placement's."""
        on_device, first_layer, operators = placement.on_device, placement.first_device_layer, self._problem.operators
        whole_ffns = [self.biased_ffns[layer] for layer in together if layer in self.biased_ffns]
        whole_ffns = [family for family in whole_ffns if not any(on_device[i] for i in family)]
        in_whole_ffns = {i for family in whole_ffns for i in family}
        families = [*whole_ffns, *(family for family in self._families.values() if family[0] not in in_whole_ffns)]
        typed_blocks = self._typed_blocks(families, on_device, _cuts_of(placement) if cuts is None else cuts)
        if not typed_blocks:
            return []
        uses_device = first_layer <= self._problem.graph.n_layer
        sliced_operators = frozenset(i for block, _ in typed_blocks for i in block.operators)
        takes_residents, is_later_device = self._problem.profile.takes_residents, self._problem.first is not None
        is_resident = residents(operators, on_device, first_layer, takes_residents, is_later_device, in_whole_ffns)
        # blocks that live on the device count as there; their own copies are priced with the slices
        sides = (
            tuple(is_device or resident for is_device, resident in zip(on_device, is_resident, strict=True)),
            first_layer,
        )
        inter_block = self._curve(
            uses_device, lambda costs: placement_seconds(costs, *sides, sliced_operators) / len(typed_blocks)
        )
        inter_block_cpu = self._curve(
            uses_device, lambda costs: cpu_seconds(costs, *sides, sliced_operators) / len(typed_blocks)
        )
        host_attention = NO_TIME
        around = {operators[i].layer or 0 for i in sliced_operators if is_around_attention(operators[i])}
        if n_layers := sum(layer < first_layer for layer in around):
            host_attention = self._curve(
                uses_device, lambda costs: n_layers * costs.host_attention_s / len(typed_blocks)
            )
        parts: dict[Part, list[SplitBlock]] = defaultdict(list)
        for block, _ in typed_blocks:
            if is_resident[block.operators[0]]:
                parts[_part(operators[block.operators[0]])].append(block)
        copies_if_whole = self._copies_if_whole(sides[0], first_layer, parts, sliced_operators)
        shares = self._inter_block_shares([block for block, _ in typed_blocks], *sides, sliced_operators)
        known: dict[Hashable, Types] = {}
        blocks: list[Block] = []
        for (block, types), share in zip(typed_blocks, shares, strict=True):
            first = operators[block.operators[0]]
            resident, host_input = is_resident[block.operators[0]], has_host_input(first, first_layer)
            device_copies = copies_if_whole.get(_part(first), NO_TIME) if resident else NO_TIME
            key = types, resident, host_input, device_copies
            if key not in known:
                context = BlockContext(
                    inter_block, inter_block_cpu, host_attention, *self._whole_curves(uses_device, block.operators),
                    resident, host_input, device_copies,
                )  # fmt: skip
                known[key] = tuple(replace(block_type, context=context) for block_type in types)
            blocks.append(Block(block.operators, known[key], share))
        return blocks

    def _typed_blocks(
        self, families: Iterable[Sequence[int]], on_device: Sequence[bool], cuts: Sequence[Hashable]
    ) -> list[tuple[SplitBlock, Types]]:
        """The blocks of the families' operators on the host in graph order, with their types, related to the block
        that llama.cpp computes right before them."""
        members = (tuple(i for i in family if not on_device[i]) for family in families)
        typed_blocks = sorted(
            (
                typed_block
                for indices in members
                if indices
                for typed_block in self._blocks_of(indices, _alike([cuts[i] for i in indices]))
            ),
            key=lambda typed_block: typed_block[0].operators,
        )
        runs = in_runs(self._problem.operators, (block for block, _ in typed_blocks))
        return [
            (block, self._types_related(types, block.relation) if block.relation else types)
            for block, (_, types) in zip(runs, typed_blocks, strict=True)
        ]

    def _whole_curves(self, uses_device: bool, members: Sequence[int]) -> tuple[Curve, Curve]:
        """Seconds of a block that llama.cpp runs on the host, and the part of them that copies weights to the
        device."""
        return (
            self._curve(uses_device, lambda costs: sum(costs.operators[i].t_cpu_s for i in members)),
            self._curve(uses_device, lambda costs: sum(costs.operators[i].streamed_s for i in members)),
        )

    def _inter_block_shares(
        self,
        blocks: Sequence[SplitBlock],
        on_device: Sequence[bool],
        first_layer: int,
        sliced_operators: frozenset[int],
    ) -> list[float]:
        """Inter-block time before each block in decode, relative to the mean of all blocks. Work after the last block
        counts before the first block of the next token. Device copies are assumed to be spread in the same way."""
        n_layer = self._problem.graph.n_layer
        costs = self.costs_at(min(self._passes_at), first_layer <= n_layer)
        inter_block_s = [0.0] * (2 * n_layer + 2)  # by layer, attention before FFN; the output comes last
        for i, (is_device, sides) in enumerate(zip(on_device, costs.sides_s, strict=True)):
            if i not in sliced_operators:
                inter_block_s[self._parts[i]] += sides[is_device]
        for layer in range(self._problem.graph.n_computed):
            inter_block_s[2 * layer] += costs.non_matmul_device_s if layer >= first_layer else costs.non_matmul_cpu_s
        total, begin, seconds_before = sum(inter_block_s), 0, []
        for block in blocks:
            end = self._parts[block.operators[0]] + 1
            seconds_before.append(sum(inter_block_s[begin:end]))
            begin = max(begin, end)
        seconds_before[0] += sum(inter_block_s[begin:])
        return [len(blocks) * seconds / total if total > 0 else 1.0 for seconds in seconds_before]

    def _blocks_in(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> list[tuple[SplitBlock, Types]]:
        """Blocks that these operators of one family form, without contexts. Equal types are one object."""
        operators, n_run, blocks = self._problem.operators, self._problem.graph.n_run, []
        for block in family_blocks(operators, members, cuts):
            first, types = operators[block.operators[0]], block_types(self._problem.kernels, operators, block)
            outputs_only = computes_outputs_only(first, n_run)
            has_plain = any(block_type.layout == PLAIN_LAYOUT for block_type in types)  # which the device reads
            streamable = takes_n_g(first) and not block.biases and has_plain
            types = tuple(replace(block_type, outputs_only=outputs_only, takes_n_g=streamable) for block_type in types)
            blocks.append((block, self._types.setdefault(types, types)))
        return blocks

    def _copies_if_whole(
        self,
        resident: Sequence[bool],
        first_layer: int,
        parts: Mapping[Part, Sequence[SplitBlock]],
        sliced_operators: frozenset[int],
    ) -> dict[Part, Curve]:
        """Seconds of device copies for each block of a part of a layer (attention or FFN) that stays whole on the host
        between neighbours on the device."""
        graph = self._problem.graph
        uses_device = first_layer <= graph.n_layer
        curves: dict[Part, Curve] = {}
        known: dict[Hashable, Curve] = {}
        for part, blocks in parts.items():
            layer = part[0]
            if layer is None:
                continue
            members = {i for block in blocks for i in block.operators}
            window = low, high = graph.with_neighbours(layer, layer + 1)
            sides = ((resident[i], i in sliced_operators, i in members) for i in range(*graph.operators_of(window)))
            kind = (graph.layers[low:high], first_within(first_layer, window), len(blocks), tuple(sides))
            if kind not in known:
                host = tuple(is_resident and i not in members for i, is_resident in enumerate(resident))
                neighbours, n = sliced_operators - members, len(blocks)

                def seconds(costs: Costs) -> float:
                    without_s = transfer_seconds(costs, host, first_layer, window, neighbours)  # noqa: B023 - called here
                    return (without_s - transfer_seconds(costs, resident, first_layer, window, sliced_operators)) / n  # noqa: B023

                known[kind] = self._curve(uses_device, seconds)
            curves[part] = known[kind]
        return curves

    def _curve(self, llama_uses_device: bool, seconds: Callable[[Costs], float]) -> Curve:
        """Seconds of a pass by batch size: the mean over the workload's passes of that size."""
        return tuple(
            (n_tokens, seconds(self.costs_at(n_tokens, llama_uses_device)) / sum(p.count for p in batch_passes))
            for n_tokens, batch_passes in sorted(self._passes_at.items())
        )

    def _costs_at(self, n_tokens: int, llama_uses_device: bool) -> Costs:
        """Costs of the workload's passes over n_tokens tokens, added up."""
        layouts = self._layouts(llama_uses_device)
        return costs_over(self._problem, self._passes_at[n_tokens], llama_uses_device, layouts, mapped=False)

    def _layouts_for(self, llama_uses_device: bool) -> tuple[str, ...]:
        """Host layouts of operators that are not cut."""
        return costs_of(self._problem, self._workload, "mixed", llama_uses_device).layouts


def _biased_ffns(operators: Sequence[Operator], splittable: Sequence[bool]) -> dict[int, tuple[int, ...]]:
    """Operators of FFNs of experts with biases, by layer."""
    members_of: dict[int, list[int]] = defaultdict(list)
    for i, (operator, is_splittable) in enumerate(zip(operators, splittable, strict=True)):
        if is_splittable and operator.layer is not None and runs_alone(operator):
            members_of[operator.layer].append(i)
    return {
        layer: tuple(members) for layer, members in members_of.items() if is_biased_ffn([operators[i] for i in members])
    }


def _alike(cuts: Sequence[Hashable]) -> tuple[int, ...]:
    """Return for each cut the index of the first equal one: many cuts have few such patterns."""
    return tuple(map(cuts.index, cuts))


def _types_related(types: Types, relation: Relation) -> Types:
    return tuple(block_type.with_relation(relation) for block_type in types)


def _cuts_of(placement: Placement) -> Sequence[Hashable]:
    """Return the cut of each operator; one value for all where nothing is cut."""
    if not placement.is_sliced:
        return [()] * len(placement.assignments)
    return [(assignment.cut.gg, assignment.cut.cg, assignment.hot_experts) for assignment in placement.assignments]


def _part(operator: Operator) -> Part:
    return operator.layer, is_ffn(operator)
