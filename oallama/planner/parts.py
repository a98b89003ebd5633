"""The layers of one of several devices as a problem and a placement of their own: what is decided and priced for one
device holds there as it is. Pure.

The first device that has layers or slices takes the host's layers before its own into its part.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from oallama.core.routing import Routing
from oallama.core.types import Workload
from oallama.planner.placement import Placement
from oallama.planner.problem import LoadBytes, Problem

Window = tuple[int, int]
"""Layers [begin, end), the output counted as one behind the last."""


def windows(placement: Placement) -> tuple[Window, ...]:
    """Each device's part; an empty one where it has no layer."""
    ends = [*accumulate(placement.device_layers, initial=placement.first_device_layer)]
    first = next(iter(placement.devices_used), 0)
    return tuple((0 if device == first else begin, end) for device, (begin, end) in enumerate(pairwise(ends)))


def problem_in(problem: Problem, device: int, window: Window) -> Problem:
    """These layers on that device, by itself. What they take there is not asked of a load: they are placed in a given
    memory."""
    on, (first, behind) = problem.devices[device], problem.graph.operators_of(window)
    operators = tuple(
        replace(operator, layer=None if operator.layer is None else operator.layer - window[0])
        for operator in on.operators[first:behind]
    )
    routing = None if on.routing is None else _routing_in(on.routing, window)
    return replace(
        on,
        operators=operators,
        graph=on.graph.part(window),
        routing=routing,
        no_alloc_load=_never_loaded,
        first=problem_in(problem, 0, window) if device else None,
    )


def placement_in(problem: Problem, placement: Placement, device: int, window: Window) -> Placement:
    """Return the part of a placement over several devices that is in these layers of one, for problem_in."""
    first, behind = problem.graph.operators_of(window)
    return replace(
        placement,
        splits=(placement.device_splits[device],),
        assignments=placement.assignments[first:behind],
        first_device_layer=max(0, placement.first_device_layer - window[0]),
        device_layers=(),
    )


def sliced_parts(problem: Problem, placement: Placement) -> dict[int, tuple[Problem, Placement]]:
    """The problems and the placements that a placement's slices belong to, by device."""
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
        tuple(replace(one, layer=one.layer - begin) for one in layers if begin <= one.layer < end)
        for layers in (routing.decode, routing.prompt)
    )
    return replace(routing, decode=decode, prompt=prompt)


def _never_loaded(workload: Workload, placement: Placement) -> LoadBytes:
    raise AssertionError("a part of a model is never loaded by itself")
