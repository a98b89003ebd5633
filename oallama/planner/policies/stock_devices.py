"""Predicts where llama.cpp's --fit places layers on several devices of given sizes, without a load. Pure.

As in common_fit_params (b11549). If everything fits, layers are divided by free memory. Else the last device gets as
many of the last layers as fit, then the device before it, and so on. Models with experts: first all other weights of
every layer, then whole layers from the first on, device after device. The part of one more layer that --fit tries last
is ignored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from oallama.core.types import StockOptions, Workload
from oallama.planner.placement import Placement, VerifiedPlan
from oallama.planner.policies.stock import FIT
from oallama.planner.problem import Problem, empty_memory
from oallama.planner.verify import verify

Fits = Callable[[int, int, int, int], bool]
"""(device, begin, end, full) -> whether the device has room for the layers [begin, end), where the layers before `full`
have their experts on it and the others have them on the host."""


def stock_over_devices(problem: Problem, workload: Workload) -> VerifiedPlan | None:
    """--fit's placement over the problem's devices; None if it uses fewer than two of them, or does not fit."""
    operators, graph, n_layers = problem.operators, problem.graph, problem.graph.n_layer + 1
    memories = [empty_memory(device, workload) for device in problem.devices]
    experts = [operator.routed for operator in operators]

    def n_bytes(begin: int, end: int, with_experts: bool) -> int:
        first, last = graph.operators_of((begin, end))
        return sum(operators[i].bytes for i in range(first, last) if with_experts or not experts[i])

    def fits(device: int, begin: int, end: int, full: int) -> bool:
        memory, n_layers = memories[device], min(end, graph.n_layer) - min(begin, graph.n_layer)
        size = n_bytes(begin, max(begin, min(full, end)), True) + n_bytes(max(begin, min(full, end)), end, False)
        return begin == end or size <= memory.operator_budget(memory.n_layer - n_layers)

    bounds, full = fitted(n_layers, [memory.capacity for memory in memories], fits, any(experts))
    device_layers = tuple(end - begin for begin, end in pairwise(bounds))
    if sum(n > 0 for n in device_layers) < 2:
        return None
    on_device = (
        layer >= bounds[0] and (layer < full or not expert)
        for layer, expert in zip(graph.operator_layer, experts, strict=True)
    )
    computable = (problem.kernels.on_device(operator) is not None for operator in operators)
    placement = Placement.whole(
        [is_device and is_computable for is_device, is_computable in zip(on_device, computable, strict=True)], bounds[0]
    )
    placement = replace(placement, stock=StockOptions(), device_layers=device_layers)
    verified = verify(problem, FIT, workload, placement)
    return verified if verified.memory.fits else None


def layers_by_share(n_layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Number of the last n_layers layers that llama.cpp gives each device, by its share (llama_model::load_tensors)."""
    ends = [end / sum(shares) for end in accumulate(shares)]
    devices = [min(bisect_right(ends, layer / n_layers), len(shares) - 1) for layer in range(n_layers)]
    return tuple(map(devices.count, range(len(shares))))


def fitted(n_layers: int, free: Sequence[int], fits: Fits, has_experts: bool) -> tuple[list[int], int]:
    """(begin of each device's range of layers, and the end of the last; the first layer without experts there)."""
    devices = range(len(free))
    shares = [0, *accumulate(layers_by_share(n_layers, free))]
    if all(fits(device, begin, end, n_layers) for device, (begin, end) in enumerate(pairwise(shares))):
        return shares, n_layers
    full = 0 if has_experts else n_layers
    bounds = [n_layers]
    for device in reversed(devices):
        end = bounds[0]
        bounds.insert(0, next(begin for begin in range(end + 1) if fits(device, begin, end, full)))
    if not has_experts or bounds[0] > 0:
        return bounds, full
    for device in devices:
        begin, end = bounds[device], bounds[device + 1]
        full = next(full for full in range(n_layers, begin - 1, -1) if fits(device, begin, max(full, end), full))
        bounds[device + 1 :] = [max(full, bound) for bound in bounds[device + 1 :]]
        if full < bounds[device + 1]:
            break
    return bounds, full
