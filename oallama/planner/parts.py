"""The layers of one of several devices as a Problem and a Placement, so that planning and pricing for a single device
apply unchanged. Pure.

The part of the first device with layers or slices includes the host's layers before it.
"""

from __future__ import annotations

from dataclasses import replace

from oallama.core.routing import Routing
from oallama.core.types import Workload
from oallama.planner.placement import Placement
from oallama.planner.problem import LoadBytes, Problem

Window = tuple[int, int]
"""Layers [begin, end), the output counted as one layer after the last."""


def windows(placement: Placement) -> tuple[Window, ...]:
    """The window of each device; empty if it has no layer."""
    first = next(iter(placement.devices_used), 0)
    return tuple((0 if device == first else begin, end) for device, (begin, end) in enumerate(placement.device_ranges))


def problem_in(problem: Problem, device: int, window: Window) -> Problem:
    """The problem of these layers on that device alone. It has no no_alloc load: placements are made for a given
    memory."""
    device_problem, (first, end) = problem.devices[device], problem.graph.operators_of(window)
    operators = tuple(
        replace(operator, layer=None if operator.layer is None else operator.layer - window[0])
        for operator in device_problem.operators[first:end]
    )
    routing = None if device_problem.routing is None else _routing_in(device_problem.routing, window)
    return replace(
        device_problem,
        operators=operators,
        graph=device_problem.graph.part(window),
        routing=routing,
        no_alloc_load=_never_loaded,
        first=problem_in(problem, 0, window) if device else None,
    )


def placement_in(problem: Problem, placement: Placement, device: int, window: Window) -> Placement:
    """The part of a placement over several devices for problem_in."""
    first, end = problem.graph.operators_of(window)
    return replace(
        placement,
        slices=(placement.device_slices[device],),
        assignments=placement.assignments[first:end],
        first_device_layer=max(0, placement.first_device_layer - window[0]),
        device_layers=(),
    )


def sliced_parts(problem: Problem, placement: Placement) -> dict[int, tuple[Problem, Placement]]:
    """(problem, placement) of each device on which the placement has slices, by device number."""
    if not placement.device_layers:
        return {0: (problem, placement)} if placement.is_sliced else {}
    parts = {
        device: (problem_in(problem, device, window), placement_in(problem, placement, device, window))
        for device, window in enumerate(windows(placement))
        if window[0] < window[1]
    }
    return {device: part for device, part in parts.items() if part[1].is_sliced}


def _routing_in(routing: Routing, window: Window) -> Routing:
    begin, end = window
    decode, prompt = (
        tuple(
            replace(layer_counts, layer=layer_counts.layer - begin)
            for layer_counts in layers
            if begin <= layer_counts.layer < end
        )
        for layers in (routing.decode, routing.prompt)
    )
    return replace(routing, decode=decode, prompt=prompt)


def _never_loaded(workload: Workload, placement: Placement) -> LoadBytes:
    raise AssertionError("a part of a model is never loaded by itself")
