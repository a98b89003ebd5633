"""The policies of stock llama.cpp: `fit`, `stock`, `layers` and `cpu`.

`fit` is what --fit puts on a device of a given size, without llama.cpp and without the device (run/fit.py calls the
real one, which needs the device). It looks at bytes only. Dense models: as many whole layers as fit, from the end.
Models with experts: first every layer's other weights, then experts of whole layers from the end, then a part of one
layer's more.

`stock` is the best of what its other options can do, too: STOCK_WAYS, each by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import itemgetter

from oallama.core.errors import UsageError
from oallama.core.types import Operator, Predicted, StockOptions, Workload
from oallama.core.units import MIB
from oallama.cost.expert_cache import cached_layers
from oallama.cost.whole import Costs
from oallama.place.memory import DeviceMemory
from oallama.place.placement import Budget, Candidate, Placement, layers, n_gpu_layers, nothing_there, placed_whole
from oallama.place.policies.registry import (
    Asked,
    Policy,
    Room,
    best_verified,
    policy,
    register,
    rooms_of,
)
from oallama.place.price import price, stock_layouts
from oallama.place.problem import Problem, costs_of, cpu_alone, measured, operators_limit, operators_on_host, own_bytes
from oallama.place.verify import on_cpu
from oallama.plan.export import stock_flags

PARTS = (("ffn_up_exps", "ffn_gate_exps"), ("ffn_up_exps",))
"""Parts of one more layer's experts, of which the largest that fits is taken: all but down, or up alone."""


def priced_stock_fit(problem: Problem, workload: Workload, memory: DeviceMemory) -> tuple[Placement, Predicted]:
    """The placement in the device's memory (before any operator), and what it is predicted to take. What stays on the
    host is streamed to the device for large batches, also where the device has nothing else; where not even its buffers
    fit, everything is on the CPU."""
    if memory.room(memory.n_layer) < 0:
        placed = cpu_alone(problem, workload, "mixed")
    else:
        costs = costs_of(problem, workload, "mixed")
        placed = replace(stock_fit(costs, problem.operators, memory.operator_room), stock=StockOptions())
    return placed, price(problem, workload, placed)


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
    return Candidate("fit" if placed.stock else "cpu", workload, placed, memory, predicted, ())


def stock_memory(problem: Problem, workload: Workload) -> DeviceMemory:
    """The device's memory for stock llama.cpp, which keeps its micro-batch: with norms and KV of all layers there."""
    taken = problem.probe(workload, operators_on_host(problem, workload))
    return DeviceMemory(
        problem.capacity(taken), problem.vram_fill, taken.kv, taken.compute, taken.weights_gpu, problem.graph.n_layer,
        operators_limit(problem), problem.runtime_bytes(workload),
    )  # fmt: skip


def _fit(problem: Problem, asked: Asked) -> Candidate:
    if problem.gpu_weights is not None:
        raise UsageError("--gpu-weights does not limit --policy fit on a described machine; limit it by --vram")
    return stock_decision(problem, asked.workload)


@policy("layers", "whole layers, as llama.cpp's -ngl", reason="no layer fits the device")
def whole_layers(problem: Problem, room: Room) -> Iterable[Placement]:
    yield layers(room.costs, room.operator_bytes)


#
# the best that other options of stock llama.cpp can do
#


Variant = Callable[[Problem, Room], Placement | None]
"""One configuration of stock llama.cpp in a room; None if it cannot be or does not fit."""


def _layers(problem: Problem, room: Room) -> Placement:
    return replace(layers(room.costs, room.operator_bytes), stock=StockOptions())


def _nothing(problem: Problem, room: Room) -> Placement:
    placed = nothing_there(len(problem.operators), problem.graph.n_layer + 1)
    return replace(placed, stock=StockOptions())


def _fitted(problem: Problem, room: Room) -> Placement:
    return replace(stock_fit(room.costs, problem.operators, room.operator_bytes), stock=StockOptions())


def _fewest_experts(problem: Problem, room: Room) -> Placement | None:
    """All but the experts of as few first layers as fit."""
    for n in range(1, problem.graph.n_layer + 1):
        placed = _without_experts(problem, n)
        if placed is None or own_bytes(problem, placed) <= room.operator_bytes(0):
            return placed
    return None


def _without_experts(problem: Problem, n_layers: int) -> Placement | None:
    """All on the device but the experts of the first layers; None if it has no experts or cannot compute the
    others."""
    operators, kernels = problem.operators, problem.kernels
    hosted = [o.op == "MUL_MAT_ID" and o.layer is not None and o.layer < n_layers for o in operators]
    there = [operator for operator, on_host in zip(operators, hosted, strict=True) if not on_host]
    if not any(hosted) or any(kernels.on_device(operator) is None for operator in there):
        return None
    return replace(Placement.whole([not on_host for on_host in hosted], 0), stock=StockOptions(n_cpu_moe=n_layers))


def _with_no_host(variant: Variant) -> Variant:
    def made(problem: Problem, room: Room) -> Placement | None:
        if stock_layouts(problem, StockOptions(no_host=True)) == stock_layouts(problem, StockOptions()):
            return None
        placed = variant(problem, room)
        if placed is None or placed.stock is None:
            return None
        return replace(placed, stock=replace(placed.stock, no_host=True))

    return made


def _cached(share_on_host: float) -> Variant:
    """Experts of the first layers in host memory, all others on the device, and what it has left for a cache of them.
    share_on_host: of the layers."""

    def made(problem: Problem, room: Room) -> Placement | None:
        placed = _without_experts(problem, ceil(share_on_host * problem.graph.n_layer))
        if placed is None or placed.stock is None or not problem.profile.link:
            return None
        left = room.operator_bytes(0) - own_bytes(problem, placed)
        n_bytes = left // MIB * MIB
        if n_bytes <= 0 or not cached_layers(problem.operators, placed.on_device, 0, n_bytes):
            return None
        return replace(placed, stock=replace(placed.stock, moe_cache_bytes=n_bytes))

    return made


STOCK_WAYS: Mapping[str, tuple[Variant, ...]] = {
    "fit": (_fitted,),
    "ngl": (_layers, _nothing),
    "ncmoe": (_fewest_experts,),
    "no-host": tuple(map(_with_no_host, (_layers, _nothing, _fewest_experts))),
    "moe-cache": tuple(map(_cached, (1.0, 0.75, 0.5))),
}
"""What stock llama.cpp can be told, by the names of the arms of `bench`."""

MOST_PROMISING = 3


def most_promising(
    problem: Problem,
    asked: Asked,
    ways: Iterable[str] = STOCK_WAYS,
    n_ubatches: Sequence[int] = (),
    most: int = MOST_PROMISING,
    to_beat_s: float = inf,
    latest_s: float = inf,
) -> list[Candidate]:
    """The configurations of stock llama.cpp that are predicted to take the least, the best first, each with the best of
    these micro-batches or the workload's; verified by dry loads. to_beat_s, latest_s: none of which all, or the prompt,
    is predicted to take longer."""

    def priced(variant: Variant, room: Room) -> Placement | None:
        placed = variant(problem, room)
        if placed is None:
            return None
        predicted = price(problem, room.workload, placed)
        seconds = predicted.over(asked.phase)
        return replace(placed, seconds=seconds) if predicted.ttft_s <= latest_s and seconds < to_beat_s else None

    sizes = [replace(asked, workload=replace(asked.workload, n_ubatch=n), required=False) for n in n_ubatches]
    roomy = [
        (own, rooms[0]) for own in (replace(asked, required=False), *sizes) if (rooms := rooms_of(problem, own)[0])
    ]
    found: list[tuple[float, Asked, str, Variant]] = []
    for way in ways:
        for variant in STOCK_WAYS[way]:
            tried = [(placed.seconds, own) for own, room in roomy if (placed := priced(variant, room)) is not None]
            found += [(*min(tried, key=itemgetter(0)), way, variant)] if tried else []
    made: list[Candidate] = []
    for _, own, way, variant in sorted(found, key=itemgetter(0)):
        if len(made) == most:
            break

        def propose(problem: Problem, room: Room, variant: Variant = variant) -> Iterator[Placement]:
            if (placed := priced(variant, room)) is not None:
                yield placed

        candidate = best_verified(problem, way, own, propose, f"stock's {way} found no placement that fits")
        placed = candidate.placement
        if placed.stock is not None and all(_differ(candidate, one) for one in made):
            flags = stock_flags(n_gpu_layers(problem.graph.n_layer, placed), placed.stock, candidate.workload.n_ubatch)
            made.append(replace(candidate, notes=(*candidate.notes, f"stock llama.cpp with {flags}")))
    return made


def _differ(one: Candidate, other: Candidate) -> bool:
    """Whether two configurations are not the same."""
    return (one.placement.places, one.placement.stock, one.workload) != (
        other.placement.places, other.placement.stock, other.workload
    )  # fmt: skip


def strongest(problem: Problem, asked: Asked) -> Candidate:
    """The fastest options by prediction, `policy` being their name in STOCK_WAYS: --fit's where none is faster."""
    fit = stock_decision(problem, asked.workload)
    if all(fit.placement.on_device):
        return fit
    return next(iter(most_promising(problem, asked, most=1, to_beat_s=fit.predicted.over(asked.phase))), fit)


def _strongest(problem: Problem, asked: Asked) -> Candidate:
    return replace(strongest(problem, asked), policy=STOCK)


register(Policy("cpu", "nothing on the device", lambda problem, asked: on_cpu(problem, asked.workload, asked.phase)))
FIT = register(Policy("fit", "llama.cpp's own --fit", _fit)).name
STOCK = register(Policy("stock", "the fastest options of stock llama.cpp", _strongest)).name
