"""What stock llama.cpp's --fit puts on a device of a given size, without llama.cpp and without the device.

It looks at bytes only. Dense models: as many whole layers as fit, from the end. Models with experts: first every
layer's other weights, then experts of whole layers from the end, then a part of one layer's more. (bench/fit.py calls
the real one, which needs the device.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, Operator, Predicted, Workload
from oallama.cost.placement import Costs
from oallama.place.budget import DeviceMemory
from oallama.place.placed import Budget, Placed, layers, placed_whole
from oallama.place.problem import Problem, costs_of, predicted_of

PARTS = (("ffn_up_exps", "ffn_gate_exps"), ("ffn_up_exps",))
"""Of one more layer's experts, the largest part that fits: all but down, or up alone."""


def priced_stock_fit(problem: Problem, load: Workload, memory: DeviceMemory) -> tuple[Costs, Placed, Predicted]:
    """The placement in the device's memory (before any operator), and what it is predicted to take. What stays on the
    host is computed in the plain layout, as stock llama.cpp does beside a GPU, and streamed there for large batches."""
    cases = problem.profile.cases
    plain = tuple(case for case in cases if case.device != CPU_DEVICE or case.layout == PLAIN_LAYOUT)
    stock = replace(problem, profile=replace(problem.profile, cases=plain))
    streams = memory.room(memory.n_layer) >= 0  # its buffers fit the device
    costs = costs_of(stock, load, "mixed", streams)
    placed = stock_fit(costs, problem.operators, memory.operator_room)
    return costs, placed, predicted_of(stock, load, placed, costs.layouts, streams)


def stock_fit(costs: Costs, operators: Sequence[Operator], budget: Budget) -> Placed:
    """The placement, priced over the passes of `costs`."""
    n_layer = costs.graph.n_layer
    whole = layers(costs, budget)
    experts = [operator.op == "MUL_MAT_ID" for operator in operators]
    if whole.first_device_layer == 0 or not any(experts):
        return whole
    layer_of = costs.graph.operator_layer

    def size(members: Iterable[int]) -> int:
        return sum(operators[i].bytes for i in members)

    def others(first: int) -> set[int]:
        return {i for i, layer in enumerate(layer_of) if layer >= first and not experts[i]}

    first = next((first for first in range(n_layer + 1) if size(others(first)) <= budget(first)), n_layer + 1)
    there = others(first)
    left = budget(first) - size(there)
    for layer in reversed(range(first, n_layer)):
        own = [i for i, at in enumerate(layer_of) if at == layer and experts[i]]
        if size(own) > left:
            parts = ([i for i in own if operators[i].role in roles] for roles in PARTS)
            there.update(next((part for part in parts if size(part) <= left), ()))
            break
        there.update(own)
        left -= size(own)
    on_device = [i in there and cost.t_gpu_s is not None for i, cost in enumerate(costs.operators)]
    return placed_whole(costs, on_device, first)
