"""The blocks that may be sliced beside a placement of whole operators, with the prices of what surrounds them there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from oallama.core.types import PLAIN_LAYOUT, Operator, Workload
from oallama.cost.blocks import SplitBlock, is_ffn, residents, split_blocks, takes_n_g
from oallama.cost.graph import computes_outputs_only
from oallama.cost.kernels import NO_TIME, Curve
from oallama.cost.passes import Pass, passes
from oallama.cost.placement import Costs, cpu_seconds, placement_seconds, transfer_seconds
from oallama.cost.slices import BlockCost, block_costs
from oallama.place.placed import Placed
from oallama.place.problem import Problem, costs_of, costs_over

Layouts = Mapping[str, BlockCost]
"""A block by the host layout of its CC."""


class Sliceable:
    """Of a problem, at the batch sizes of a workload and of its profile."""

    def __init__(self, problem: Problem, load: Workload) -> None:
        self._problem, self._load = problem, load
        depth = load.n_prompt + max(1, load.n_gen) // 2
        self._over: dict[int, tuple[Pass, ...]] = {
            n_tokens: (Pass(n_tokens, depth, 1),)
            for n_tokens in {case.n_tokens for case in problem.profile.cases}
            if n_tokens <= load.n_ubatch
        }
        asked: dict[int, list[Pass]] = defaultdict(list)
        for one in (*passes(load, "prefill"), *passes(load, "decode")):
            asked[one.n_tokens].append(replace(one, count=load.n_gen or 1) if one.n_tokens == 1 else one)
        self._over |= {n_tokens: tuple(over) for n_tokens, over in asked.items()}
        self._costs: dict[tuple[int, bool], Costs] = {}
        self._held: dict[bool, tuple[str, ...]] = {}
        self._kinds: dict[Hashable, int] = {}

    def blocks(self, placed: Placed) -> list[Layouts]:
        """The blocks that may be sliced. What is in none stays where `placed` has it, and is spread evenly between
        them."""
        operators = self._problem.operators
        members = [can and not there for can, there in zip(self._problem.splittable, placed.on_device, strict=True)]
        found = split_blocks(operators, members)
        if not found:
            return []
        uses = placed.first_device_layer <= self._problem.graph.n_layer
        inside = frozenset(i for block in found for i in block.operators)
        on_device, first_layer = placed.on_device, placed.first_device_layer
        resident = residents(operators, on_device, first_layer)
        # the slices of these are between neighbours on the device, which they cross to and from by themselves
        at = (tuple(there or lives for there, lives in zip(on_device, resident, strict=True)), first_layer)
        gap = self._curve(uses, lambda costs: placement_seconds(costs, *at, inside) / len(found))
        gap_cpu = self._curve(uses, lambda costs: cpu_seconds(costs, *at, inside) / len(found))
        away = self._away(placed, resident, found)
        made: list[Layouts] = []
        whole: dict[Hashable, Curve] = {}
        for block in found:
            first = operators[block.operators[0]]
            outputs_only = computes_outputs_only(first, self._problem.graph.n_layer)
            by_layout = block_costs(self._problem.kernels, operators, block)
            streamable = takes_n_g(first) and PLAIN_LAYOUT in by_layout  # which the device can read
            lives = resident[block.operators[0]]
            crossings = away.get(_part(first), NO_TIME) if lives else NO_TIME
            kind = (*(operators[i].mul_mat for i in block.operators), block.extent, outputs_only, streamable, lives,
                    crossings)  # fmt: skip
            if kind not in whole:
                whole[kind] = self._curve(
                    uses,
                    lambda costs, block=block: sum(costs.operators[i].t_cpu_s for i in block.operators),  # type: ignore[misc]
                )
            made.append(
                {
                    layout: replace(
                        cost, gap=gap, gap_cpu=gap_cpu, whole=whole[kind], outputs_only=outputs_only,
                        resident=lives, away=crossings, takes_n_g=streamable, kind=self._kind(layout, kind),
                    )
                    for layout, cost in by_layout.items()
                }
            )  # fmt: skip
        return made

    def _away(
        self, placed: Placed, resident: Sequence[bool], found: Sequence[SplitBlock]
    ) -> dict[tuple[int | None, bool], Curve]:
        """By the part of a layer, attention or FFN: what crossings take, for each of its blocks, where these stay whole
        on the host between neighbours on the device."""
        operators, first_layer = self._problem.operators, placed.first_device_layer
        uses = first_layer <= self._problem.graph.n_layer
        lives = [there or one for there, one in zip(placed.on_device, resident, strict=True)]
        inside = frozenset(i for block in found for i in block.operators)
        parts: dict[tuple[int | None, bool], list[SplitBlock]] = defaultdict(list)
        for block in found:
            if resident[block.operators[0]]:
                parts[_part(operators[block.operators[0]])].append(block)

        def of_part(layer: int, blocks: Sequence[SplitBlock]) -> Callable[[Costs], float]:
            members = {i for block in blocks for i in block.operators}
            host = tuple(there and i not in members for i, there in enumerate(lives))
            window = (layer - 1, layer + 2)  # it changes nothing further away

            def seconds(costs: Costs) -> float:
                without = transfer_seconds(costs, host, first_layer, window, inside - members)
                return (without - transfer_seconds(costs, tuple(lives), first_layer, window, inside)) / len(blocks)

            return seconds

        return {
            part: self._curve(uses, of_part(part[0], blocks)) for part, blocks in parts.items() if part[0] is not None
        }

    def _kind(self, *of: Hashable) -> int:
        """A number for it, which is quicker to look up."""
        return self._kinds.setdefault(of, len(self._kinds))

    def _curve(self, llama_uses_device: bool, seconds: Callable[[Costs], float]) -> Curve:
        """Seconds of one pass by its batch size; where the workload has several of one size, their mean."""
        return tuple(
            (n_tokens, seconds(self.costs_at(n_tokens, llama_uses_device)) / sum(p.count for p in over))
            for n_tokens, over in sorted(self._over.items())
        )

    def costs_at(self, n_tokens: int, llama_uses_device: bool) -> Costs:
        """Of the workload's passes over so many tokens together."""
        key = (n_tokens, llama_uses_device)
        if key not in self._costs:
            layouts = self._layouts(llama_uses_device)
            self._costs[key] = costs_over(self._problem, self._over[n_tokens], llama_uses_device, layouts)
        return self._costs[key]

    def _layouts(self, llama_uses_device: bool) -> tuple[str, ...]:
        """In which the host holds what is not sliced."""
        if llama_uses_device not in self._held:
            self._held[llama_uses_device] = costs_of(self._problem, self._load, "mixed", llama_uses_device).layouts
        return self._held[llama_uses_device]


def _part(operator: Operator) -> tuple[int | None, bool]:
    """Of which layer it is, and whether of its FFN."""
    return operator.layer, is_ffn(operator)
