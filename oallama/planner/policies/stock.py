"""The policies of stock llama.cpp: `fit`, `stock`, `layers` and `cpu`.

`fit` predicts the placement of --fit on a device of a given size, without llama.cpp and without the device (run/fit.py
calls the real one). It depends on bytes only. Dense models: as many whole layers as fit, from the end. Models with
experts: first all other weights of every layer, then experts of whole layers from the end, then a part of one more
layer's experts.

`stock` is the fastest of STOCK_MODES: --fit and other options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import itemgetter
from typing import Any

from oallama.core.errors import UsageError
from oallama.core.types import Operator, Predicted, StockOptions, Workload
from oallama.core.units import MIB
from oallama.cost.expert_cache import cached_layers
from oallama.cost.whole import Costs
from oallama.plan.export import stock_flags
from oallama.planner.memory import DeviceMemory
from oallama.planner.placement import (
    OperatorBudget,
    Placement,
    VerifiedPlan,
    last_layers,
    n_gpu_layers,
    operators_on_cpu,
    placed_whole,
)
from oallama.planner.policies.registry import (
    Policy,
    PolicyInputs,
    Request,
    best_verified,
    inputs_of,
    policy,
    register,
)
from oallama.planner.price import price, stock_layouts
from oallama.planner.problem import (
    Problem,
    costs_of,
    cpu_alone,
    empty_memory,
    memory_of,
    placed_bytes,
)
from oallama.planner.verify import on_cpu

PARTS = (("ffn_up_exps", "ffn_gate_exps"), ("ffn_up_exps",))
"""Parts of one more layer's experts, the largest first: all but down, or up alone."""


def priced_stock_fit(problem: Problem, workload: Workload, memory: DeviceMemory) -> tuple[Placement, Predicted]:
    """--fit's placement in the device's memory, with its price. Host weights are offloaded in large batches, also if
    the device has no layers; if not even its buffers fit, everything is on the CPU."""
    if memory.budget(memory.n_layer) < 0:
        placement = cpu_alone(problem, workload, "mixed")
    else:
        costs = costs_of(problem, workload, "mixed")
        placement = _with_options(stock_fit(costs, problem.operators, memory.operator_budget))
    return placement, price(problem, workload, placement)


def stock_fit(costs: Costs, operators: Sequence[Operator], budget: OperatorBudget) -> Placement:
    """The placement with its seconds over the passes of `costs`."""
    n_layer = costs.graph.n_layer
    whole = last_layers(costs, budget)
    experts = [operator.routed for operator in operators]
    if whole.first_device_layer == 0 or not any(experts):
        return whole
    layer_of = costs.graph.operator_layer

    def size(members: Iterable[int]) -> int:
        return sum(operators[i].bytes for i in members)

    def others(first: int) -> set[int]:
        return {i for i, layer in enumerate(layer_of) if layer >= first and not experts[i]}

    first = next((first for first in range(n_layer + 1) if size(others(first)) <= budget(first)), n_layer + 1)
    chosen = others(first)
    remaining = budget(first) - size(chosen)
    for layer in reversed(range(first, n_layer)):
        layer_experts = [i for i, operator_layer in enumerate(layer_of) if operator_layer == layer and experts[i]]
        if size(layer_experts) > remaining:
            parts = ([i for i in layer_experts if operators[i].role in roles] for roles in PARTS)
            chosen.update(next((part for part in parts if size(part) <= remaining), ()))
            break
        chosen.update(layer_experts)
        remaining -= size(layer_experts)
    on_device = [i in chosen and cost.t_gpu_s is not None for i, cost in enumerate(costs.operators)]
    return placed_whole(costs, on_device, first)


def verified_stock(problem: Problem, workload: Workload) -> VerifiedPlan:
    """The verified plan of --fit's placement."""
    placement, predicted = priced_stock_fit(problem, workload, empty_memory(problem, workload))
    memory = memory_of(problem, workload, placement)
    name = "fit" if placement.stock else "cpu"
    return VerifiedPlan(name, workload, placement, memory, predicted, (), problem.flash_attn)


def _fit(problem: Problem, request: Request) -> VerifiedPlan:
    if problem.gpu_weights is not None:
        raise UsageError("--gpu-weights does not limit --policy fit on a described machine; limit it by --vram")
    return verified_stock(problem, request.workload)


@policy("layers", "whole layers, as llama.cpp's -ngl", reason="no layer fits the device", takes_ngl=True)
def whole_layers(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    yield last_layers(inputs.costs, inputs.operator_bytes)


#
# the best that other options of stock llama.cpp can do
#


Variant = Callable[[Problem, PolicyInputs], Placement | None]
"""One configuration of stock llama.cpp; None if it is impossible or does not fit."""


def _with_options(placement: Placement, **options: Any) -> Placement:
    return replace(placement, stock=replace(placement.stock or StockOptions(), **options))


def _layers(problem: Problem, inputs: PolicyInputs) -> Placement:
    return _with_options(last_layers(inputs.costs, inputs.operator_bytes))


def _nothing(problem: Problem, inputs: PolicyInputs) -> Placement:
    return _with_options(operators_on_cpu(len(problem.operators), problem.graph.n_layer + 1))


def _fitted(problem: Problem, inputs: PolicyInputs) -> Placement:
    return _with_options(stock_fit(inputs.costs, problem.operators, inputs.operator_bytes))


def _fewest_experts(problem: Problem, inputs: PolicyInputs) -> Placement | None:
    """Everything on the device except the experts of the first layers, as few as possible (-ncmoe)."""
    for n in range(1, problem.graph.n_layer + 1):
        placement = _without_experts(problem, n)
        if placement is None or placed_bytes(problem, placement) <= inputs.operator_bytes(0):
            return placement
    return None


def _without_experts(problem: Problem, n_layers: int) -> Placement | None:
    """Everything on the device except the experts of the first layers; None if the model has no experts, or the device
    cannot compute the other operators."""
    operators, kernels = problem.operators, problem.kernels
    hosted = [o.routed and o.layer is not None and o.layer < n_layers for o in operators]
    on_device = [operator for operator, on_host in zip(operators, hosted, strict=True) if not on_host]
    if not any(hosted) or any(kernels.on_device(operator) is None for operator in on_device):
        return None
    return _with_options(Placement.whole([not on_host for on_host in hosted], 0), n_cpu_moe=n_layers)


def _with_no_host(variant: Variant) -> Variant:
    def changed(problem: Problem, inputs: PolicyInputs) -> Placement | None:
        if stock_layouts(problem, StockOptions(no_host=True)) == stock_layouts(problem, StockOptions()):
            return None
        placement = variant(problem, inputs)
        return None if placement is None else _with_options(placement, no_host=True)

    return changed


def _cached(share_on_host: float) -> Variant:
    """Experts of the first layers in host memory, everything else on the device, and an expert cache in the rest of its
    memory. share_on_host: share of the layers whose experts are on the host."""

    def changed(problem: Problem, inputs: PolicyInputs) -> Placement | None:
        placement = _without_experts(problem, ceil(share_on_host * problem.graph.n_layer))
        if placement is None or not problem.profile.link:
            return None
        remaining = inputs.operator_bytes(0) - placed_bytes(problem, placement)
        n_bytes = remaining // MIB * MIB
        if n_bytes <= 0 or not cached_layers(problem.operators, placement.on_device, 0, n_bytes):
            return None
        return _with_options(placement, moe_cache_bytes=n_bytes)

    return changed


STOCK_MODES: Mapping[str, tuple[Variant, ...]] = {
    "fit": (_fitted,),
    "ngl": (_layers, _nothing),
    "ncmoe": (_fewest_experts,),
    "no-host": tuple(map(_with_no_host, (_layers, _nothing, _fewest_experts))),
    "moe-cache": tuple(map(_cached, (1.0, 0.75, 0.5))),
}
"""Configurations of stock llama.cpp, by the names of the arms of `bench`."""

MOST_PROMISING = 3


def most_promising(
    problem: Problem,
    request: Request,
    modes: Iterable[str] = STOCK_MODES,
    n_ubatches: Sequence[int] = (),
    most: int = MOST_PROMISING,
    to_beat_s: float = inf,
    latest_s: float = inf,
) -> list[VerifiedPlan]:
    """The configurations of stock llama.cpp with the least predicted time, the fastest first, each with the best of
    these micro-batches and the workload's; verified by no_alloc loads. to_beat_s, latest_s: limits of the predicted
    seconds of the whole run and of the prompt."""

    def priced(variant: Variant, inputs: PolicyInputs) -> Placement | None:
        placement = variant(problem, inputs)
        if placement is None:
            return None
        predicted = price(problem, inputs.workload, placement)
        seconds = predicted.over(request.phase)
        return replace(placement, seconds=seconds) if predicted.ttft_s <= latest_s and seconds < to_beat_s else None

    sizes = (request.workload.n_ubatch, *n_ubatches)
    requests = [replace(request, workload=replace(request.workload, n_ubatch=n), required=False) for n in sizes]
    sized_inputs = [(sized, starts[0]) for sized in requests if (starts := inputs_of(problem, sized)[0])]
    configurations: list[tuple[float, Request, str, Variant]] = []
    for mode in modes:
        for variant in STOCK_MODES[mode]:
            priced_requests = [
                (placement.seconds, sized)
                for sized, inputs in sized_inputs
                if (placement := priced(variant, inputs)) is not None
            ]
            if priced_requests:
                configurations.append((*min(priced_requests, key=itemgetter(0)), mode, variant))
    verified: dict[Hashable, VerifiedPlan] = {}  # by configuration
    for _, sized, mode, variant in sorted(configurations, key=itemgetter(0)):
        if len(verified) == most:
            break

        def propose(problem: Problem, inputs: PolicyInputs, variant: Variant = variant) -> Iterator[Placement]:
            if (placement := priced(variant, inputs)) is not None:
                yield placement

        candidate = best_verified(problem, sized, mode, propose, f"stock's {mode} found no placement that fits")
        placement = candidate.placement
        configuration = placement.assignments, placement.stock, candidate.workload
        if placement.stock is not None and configuration not in verified:
            flags = stock_flags(
                n_gpu_layers(problem.graph.n_layer, placement), placement.stock, candidate.workload.n_ubatch
            )
            notes = (*candidate.notes, f"stock llama.cpp with {flags}")
            verified[configuration] = replace(candidate, notes=notes)
    return list(verified.values())


def fastest_stock(problem: Problem, request: Request) -> VerifiedPlan:
    """The fastest configuration by prediction, --fit's if none is faster. `policy` is its name in STOCK_MODES."""
    fit = verified_stock(problem, request.workload)
    if all(fit.placement.on_device):
        return fit
    return next(iter(most_promising(problem, request, most=1, to_beat_s=fit.predicted.over(request.phase))), fit)


cpu_policy = register(
    Policy(
        "cpu", "nothing on the device", lambda p, request: on_cpu(p, request.workload, request.phase), uses_device=False
    )
)
FIT = register(Policy("fit", "llama.cpp's own --fit", _fit, by_llama_cpp=True, keeps_ubatch=True, attention="on")).name
STOCK = "stock"
stock = register(
    Policy(STOCK, "the fastest options of stock llama.cpp", lambda p, r: replace(fastest_stock(p, r), policy=STOCK))
)
