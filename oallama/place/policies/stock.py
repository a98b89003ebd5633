"""The policies of stock llama.cpp: `fit`, `layers` and `cpu`.

`fit` is what --fit puts on a device of a given size, without llama.cpp and without the device (run/fit.py calls the
real one, which needs the device). It looks at bytes only. Dense models: as many whole layers as fit, from the end.
Models with experts: first every layer's other weights, then experts of whole layers from the end, then a part of one
layer's more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from oallama.core.errors import UsageError
from oallama.core.types import PLAIN_LAYOUT, Operator, Predicted, Workload
from oallama.cost.whole import Costs
from oallama.place.memory import DeviceMemory
from oallama.place.placement import Budget, Candidate, Placement, layers, placed_whole
from oallama.place.policies.registry import Asked, Policy, Room, policy, register
from oallama.place.price import price
from oallama.place.problem import Problem, costs_of, measured, operators_limit, operators_on_host
from oallama.place.verify import on_cpu

PARTS = (("ffn_up_exps", "ffn_gate_exps"), ("ffn_up_exps",))
"""Parts of one more layer's experts, of which the largest that fits is taken: all but down, or up alone."""


def held_as_stock(problem: Problem, placed: Placement) -> Placement:
    """The placement with what stays on the host in the plain layout: beside a device that has a type for host memory
    stock llama.cpp keeps it there, and repacks nothing."""
    if not problem.profile.has_host_buffer:
        return placed
    return replace(placed, places=tuple(p if p.is_device else p._replace(layout=PLAIN_LAYOUT) for p in placed.places))


def priced_stock_fit(problem: Problem, workload: Workload, memory: DeviceMemory) -> tuple[Placement, Predicted]:
    """The placement in the device's memory (before any operator), and what it is predicted to take. What stays on the
    host is streamed to the device for large batches, also where the device has nothing else."""
    streams = memory.room(memory.n_layer) >= 0  # its buffers fit the device
    costs = costs_of(problem, workload, "mixed", streams)
    placed = held_as_stock(problem, stock_fit(costs, problem.operators, memory.operator_room))
    return placed, price(problem, workload, placed, streams)


def stock_fit(costs: Costs, operators: Sequence[Operator], budget: Budget) -> Placement:
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


def stock_decision(problem: Problem, workload: Workload) -> Candidate:
    """--fit's placement on the device, with its ledger."""
    placed, predicted = priced_stock_fit(problem, workload, stock_memory(problem, workload))
    memory = measured(problem, workload, placed, problem.capacity(problem.probe(workload, placed)))
    return Candidate("fit", workload, placed, memory, predicted, ())


def stock_memory(problem: Problem, workload: Workload) -> DeviceMemory:
    """The device's memory for stock llama.cpp, which keeps its micro-batch: with norms and KV of all layers there."""
    taken = problem.probe(workload, operators_on_host(problem, workload))
    return DeviceMemory(
        problem.capacity(taken), problem.vram_fill, taken.kv, taken.compute, taken.weights_gpu, problem.graph.n_layer,
        operators_limit(problem), problem.runtime_bytes,
    )  # fmt: skip


def _fit(problem: Problem, asked: Asked) -> Candidate:
    if problem.gpu_weights is not None:
        raise UsageError("--gpu-weights does not limit --policy fit on a described machine; limit it by --vram")
    return stock_decision(problem, asked.workload)


@policy("layers", "whole layers, as llama.cpp's -ngl", reason="no layer fits the device")
def whole_layers(problem: Problem, room: Room) -> Iterable[Placement]:
    yield layers(room.costs, room.operator_bytes)


register(Policy("cpu", "nothing on the device", lambda problem, asked: on_cpu(problem, asked.workload, asked.phase)))
FIT = register(Policy("fit", "llama.cpp's own --fit", _fit)).name
