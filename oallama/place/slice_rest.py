"""The `scheinfer` policy's part of a placement: slices for the FFNs that OATO left on the host.

decide.py does not offer it until the backend can stream. It takes the place that `balance` has in split.py: OATO is
given a share of the device's memory, `slice_rest` what is left, and the least `predicted_s` over the shares wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oallama.core.types import Operator, OperatorPlacement, Workload
from oallama.cost.blocks import SplitBlock, split_blocks
from oallama.cost.linear import KernelTimes, kernel_times, stream_rates, streamed_block
from oallama.cost.operator_cost import PLAIN_LAYOUT, Curve, Pass, operator_costs
from oallama.cost.predict import Costs, index_rest, placement_seconds, rest_of
from oallama.cost.split_ffn import split_costs
from oallama.cost.timeline import Prefetch
from oallama.cost.transfer import transfer_rates
from oallama.place.baselines import Placed
from oallama.place.problem import Problem
from oallama.place.slice_plan import Layouts, SlicePlan, plan_slices
from oallama.place.slicing import Streaming


@dataclass(frozen=True, slots=True)
class SlicedRest:
    """A placement of whole operators and the slices of the others, with what it takes."""

    placed: Placed  # operators in blocks are on the host there
    plan: SlicePlan
    predicted_s: float  # of the workload: prompt and n_gen tokens
    ttft_s: float
    tpot_s: float


def slice_rest(
    problem: Problem,
    placed: Placed,
    load: Workload,
    room: int,
    weights_room: int,
    prefetch: Prefetch = Prefetch(),  # noqa: B008 - frozen
    pinned: bool = True,
    host_room: int = 0,
) -> SlicedRest | None:
    """Slices for the FFNs that `placed` leaves whole on the host, within `room` bytes of the device (weights_room: of
    slices alone; host_room: of host memory, for a second copy of CC). None: there is nothing that could be sliced.

    Everything else, attention among it, stays where `placed` has it; what it takes is spread evenly between the blocks.
    The last layer's FFN, which llama.cpp computes for the wanted tokens only, is priced like the others.
    Raises ProfileError where the profile lacks an operator or has no link.
    """
    profile, operators = problem.profile, problem.operators
    costs = split_costs(profile, operators, problem.graph.n_layer, (_decode(load),))
    members = [
        can and not there and is_ffn(operator)
        for operator, can, there in zip(operators, costs.splittable(), placed.on_device, strict=True)
    ]
    kernels = kernel_times(profile)
    blocks = [block for block in split_blocks(operators, members) if _measured(kernels, operators, block)]
    if not blocks:
        return None
    inside = frozenset(i for block in blocks for i in block.operators)
    gap = _gap(problem, placed, load, inside, len(blocks))
    choices: list[Layouts] = [
        {
            layout: streamed_block(kernels, operators, block, layout, gap)
            for layout in kernels.layouts([operators[i] for i in block.operators])
        }
        for block in blocks
    ]
    on = Streaming(stream_rates(costs, profile.link, pinned), prefetch, profile.contention)
    plan = plan_slices(choices, on, room, weights_room, load, host_room)
    return SlicedRest(placed, plan, plan.total_s(load), plan.prefill_s, plan.decode_s)


def sliced_placements(
    operators: Sequence[Operator], rest: SlicedRest, layouts: Sequence[str | None] = ()
) -> tuple[OperatorPlacement, ...]:
    """The record's fractions: of blocks as they were cut, of all others whole. The record's token_assignment is
    rest.plan.token_assignment, its staging rest.plan.staging_bytes.

    layouts: of each whole operator on the host; None, or no layouts: llama.cpp's own choice.
    """
    made: dict[int, OperatorPlacement] = {}
    for streamed, slices in rest.plan.layers:
        extent = streamed.block.extent
        layout = streamed.layout if slices.cc else None
        for i in streamed.block.operators:
            made[i] = OperatorPlacement(
                operators[i].name, slices.gg / extent, slices.cg / extent, slices.cc / extent, layout
            )
    for i, operator in enumerate(operators):
        if i not in made:
            there = rest.placed.on_device[i]
            layout = layouts[i] if layouts and not there else None
            made[i] = OperatorPlacement(operator.name, float(there), 0.0, float(not there), layout)
    return tuple(made[i] for i in range(len(operators)))


def is_ffn(operator: Operator) -> bool:
    return operator.role.rpartition(".")[2].startswith("ffn_")


def _decode(load: Workload) -> Pass:
    return Pass(1, load.n_prompt + max(1, load.n_gen) // 2, 1)


def _measured(kernels: KernelTimes, operators: Sequence[Operator], block: SplitBlock) -> bool:
    return PLAIN_LAYOUT in kernels.layouts([operators[i] for i in block.operators])


def _gap(problem: Problem, placed: Placed, load: Workload, inside: frozenset[int], n_blocks: int) -> Curve:
    """Seconds by batch size of all that is in no block, for one of n_blocks: other operators, attention and norms,
    crossings. At the batch sizes that the profile has."""
    sizes = sorted({case.n_tokens for case in problem.profile.cases if case.n_tokens <= load.n_ubatch} | {1})
    curve = []
    for n_tokens in sizes:
        over = (replace(_decode(load), n_tokens=n_tokens),)
        costs = _others(problem, over, inside)
        seconds = placement_seconds(costs, placed.on_device, placed.first_device_layer)
        curve.append((n_tokens, seconds / n_blocks))
    return tuple(curve)


def _others(problem: Problem, over: tuple[Pass, ...], inside: frozenset[int]) -> Costs:
    """Costs in which the operators inside blocks take no time."""
    profile = problem.profile
    kernels = kernel_times(profile).whole
    priced = operator_costs(kernels, problem.operators, problem.graph.n_layer, profile.device, over)
    others = tuple(replace(cost, t_cpu_s=0.0) if i in inside else cost for i, cost in enumerate(priced))
    rest = rest_of(index_rest(profile), profile.device, over)
    return Costs(others, problem.graph, transfer_rates(profile), over, *rest)
