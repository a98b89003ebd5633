"""The `scheinfer` policy's slices: of the FFNs, and of the output matrix, that a placement of whole operators leaves on
the host. Attention stays where that placement has it (ScheInfer slices nothing else)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from oallama.core.types import StreamSettings, Workload
from oallama.cost.blocks import SplitBlock, is_ffn, split_blocks
from oallama.cost.graph import computes_outputs_only
from oallama.cost.linear import kernel_times, stream_rates, streamed_block
from oallama.cost.operator_cost import PLAIN_LAYOUT, Curve, Pass, passes
from oallama.cost.predict import Costs, placement_seconds
from oallama.cost.split_ffn import split_costs
from oallama.cost.timeline import Prefetch
from oallama.place.baselines import Placed, Streams
from oallama.place.gg_assignment import N_VALUES
from oallama.place.problem import Problem, costs_over
from oallama.place.slice_plan import Layouts, SlicePlan, exact, plan_slices
from oallama.place.slicing import PROBES, Streaming

OUTPUT_ROLE = "output"


class Slicer:
    """Slices for a problem and a workload, whatever lies whole on the device."""

    def __init__(
        self,
        problem: Problem,
        load: Workload,
        prefetch: Prefetch = Prefetch(),  # noqa: B008 - frozen
        n_probes: int = PROBES,
    ) -> None:
        """Raises ProfileError where the profile lacks an operator or has no link."""
        self._problem, self._load = problem, load
        profile = problem.profile
        depth = load.n_prompt + max(1, load.n_gen) // 2
        self._over: dict[int, tuple[Pass, ...]] = {
            n_tokens: (Pass(n_tokens, depth, 1),)
            for n_tokens in {case.n_tokens for case in profile.cases}
            if n_tokens <= load.n_ubatch
        }
        asked: dict[int, list[Pass]] = defaultdict(list)
        for one in (*passes(load, "prefill"), *passes(load, "decode")):
            asked[one.n_tokens].append(replace(one, count=load.n_gen or 1) if one.n_tokens == 1 else one)
        self._over |= {n_tokens: tuple(over) for n_tokens, over in asked.items()}
        self._costs: dict[tuple[int, bool], Costs] = {}
        self._kernels = kernel_times(profile)
        sides = split_costs(profile, problem.operators, problem.graph.n_layer, passes(load, "decode"))
        self._splittable = sides.splittable()
        rates = stream_rates(sides, profile.link, profile.is_pinned)
        self.on = Streaming(rates, prefetch, profile.contention, n_probes=n_probes)

    def rest(
        self, placed: Placed, room: int, weights_room: int, n_values: int = N_VALUES, any_length: bool = True
    ) -> SlicePlan | None:
        """Slices for what `placed` leaves whole on the host, within `room` bytes of the device (weights_room: of slices
        alone). any_length: n_g for prompts of other lengths too. None: there is nothing that could be sliced."""
        blocks = self.blocks(placed)
        if not blocks:
            return None
        plan = plan_slices(
            blocks, self.on, room, weights_room, self._load, self._problem.host_room, n_values, any_length
        )
        return exact(plan, self.on, self._load)

    def blocks(self, placed: Placed) -> list[Layouts]:
        """The blocks that may be sliced. What is in none stays where `placed` has it, and is spread evenly between
        them."""
        operators = self._problem.operators
        members = [
            can and not there and (is_ffn(operator) or operator.role == OUTPUT_ROLE)
            for operator, can, there in zip(operators, self._splittable, placed.on_device, strict=True)
        ]
        blocks = [block for block in split_blocks(operators, members) if self._is_measured(block)]
        if not blocks:
            return []
        uses = placed.first_device_layer <= self._problem.graph.n_layer
        inside = frozenset(i for block in blocks for i in block.operators)
        gap = self._curve(uses, lambda costs: _others_s(costs, placed, inside) / len(blocks))
        gap_cpu = self._curve(uses, lambda costs: _others_cpu_s(costs, placed, inside) / len(blocks))
        return [self._layouts(block, gap, gap_cpu, uses) for block in blocks]

    def _is_measured(self, block: SplitBlock) -> bool:
        return PLAIN_LAYOUT in self._kernels.layouts([self._problem.operators[i] for i in block.operators])

    def _layouts(self, block: SplitBlock, gap: Curve, gap_cpu: Curve, llama_uses_device: bool) -> Layouts:
        operators = self._problem.operators
        members = [operators[i] for i in block.operators]
        whole = self._curve(llama_uses_device, lambda costs: sum(costs.operators[i].t_cpu_s for i in block.operators))
        return {
            layout: replace(
                streamed_block(self._kernels, operators, block, layout, gap),
                gap_cpu=gap_cpu,
                whole=whole,
                outputs_only=computes_outputs_only(members[0], self._problem.graph.n_layer),
                takes_n_g=is_ffn(members[0]),
            )
            for layout in self._kernels.layouts(members)
        }

    def _curve(self, llama_uses_device: bool, seconds: Callable[[Costs], float]) -> Curve:
        """Seconds of one pass by its batch size; where the workload has several of one size, their mean."""
        return tuple(
            (n_tokens, seconds(self._costs_at(n_tokens, llama_uses_device)) / sum(p.count for p in over))
            for n_tokens, over in sorted(self._over.items())
        )

    def _costs_at(self, n_tokens: int, llama_uses_device: bool) -> Costs:
        key = (n_tokens, llama_uses_device)
        if key not in self._costs:
            self._costs[key] = costs_over(self._problem, self._over[n_tokens], llama_uses_device)
        return self._costs[key]


def _others_s(costs: Costs, placed: Placed, inside: frozenset[int]) -> float:
    """Seconds of all that is in no block: other operators, attention and norms, crossings."""
    others = tuple(replace(cost, t_cpu_s=0.0) if i in inside else cost for i, cost in enumerate(costs.operators))
    left = tuple(off and i not in inside for i, off in enumerate(costs.offloaded))
    costs = replace(costs, operators=others, offloaded=left)
    return placement_seconds(costs, placed.on_device, placed.first_device_layer)


def _others_cpu_s(costs: Costs, placed: Placed, inside: frozenset[int]) -> float:
    """Of these, the CPU's own."""
    here = [not there and i not in inside for i, there in enumerate(placed.on_device)]
    n_layers = min(costs.graph.n_layer, placed.first_device_layer)
    operators_s = sum(cost.t_cpu_s for cost, own in zip(costs.operators, here, strict=True) if own)
    return operators_s + n_layers * costs.rest_cpu_s


def streamed_placement(problem: Problem, placed: Placed, plan: SlicePlan, on: Streaming) -> Placed:
    """`placed` with the plan's slices; seconds are still to be told."""
    gg, cg = [0] * len(problem.operators), [0] * len(problem.operators)
    layouts: list[str | None] = [None] * len(problem.operators)
    for streamed, slices in plan.layers:
        for i in streamed.block.operators:
            gg[i], cg[i] = slices.gg, slices.cg
            in_backend = slices.cc < streamed.block.extent or (plan.token_assignment and streamed.takes_n_g)
            layouts[i] = streamed.layout if slices.cc and in_backend else None
    streams = Streams(
        cg=tuple(cg),
        layouts=tuple(layouts),
        token_assignment=plan.token_assignment,
        settings=StreamSettings(
            on.prefetch.n_slots or 2, "layer" if on.prefetch.ahead == "layer" else "ahead", plan.kept_twice
        ),
        staging_bytes=plan.staging_bytes,
        twice_bytes=plan.twice_bytes,
        ttft_s=plan.prefill_s,
        tpot_s=plan.decode_s,
    )
    return replace(placed, gg=tuple(gg) if any(gg) else (), streams=streams)
