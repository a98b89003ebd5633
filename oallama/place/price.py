"""The price of a placement: what a prompt and a token take. Searches, reports and simulations have no other. Pure."""

from __future__ import annotations

from oallama.core.types import Predicted, Workload
from oallama.cost.passes import passes
from oallama.cost.placement import placement_seconds
from oallama.place.placed import Placed
from oallama.place.problem import Problem, costs_of, costs_over
from oallama.place.slicer import slicer_of


def price(problem: Problem, load: Workload, placed: Placed, llama_uses_device: bool | None = None) -> Predicted:
    """TTFT, TPOT and their sum over the workload. Slices share out a prompt's tokens as their table says.

    llama_uses_device: whether llama.cpp has the device, and may stream plain host weights to it; None: where the
    placement has anything of llama.cpp there. Raises PlanError for slices that are no blocks of ours, ProfileError
    where the profile has no link.
    """
    if placed.slices is not None:
        slicer = slicer_of(problem, load, placed.slices)
        plan = slicer.priced(slicer.cuts_of(placed), placed.slices.token_assignment, False, 0, 0)
        return Predicted.of(plan.prefill_s, plan.decode_s, load.n_gen)
    if llama_uses_device is None:
        llama_uses_device = placed.llama_uses_device(problem.graph.n_layer)
    layouts = host_layouts(problem, load, placed, llama_uses_device)
    ttft_s, tpot_s = (
        placement_seconds(
            costs_over(problem, passes(load, phase), llama_uses_device, layouts),
            placed.on_device,
            placed.first_device_layer,
        )
        for phase in ("prefill", "decode")
    )
    return Predicted.of(ttft_s, tpot_s, load.n_gen)


def host_layouts(problem: Problem, load: Workload, placed: Placed, llama_uses_device: bool) -> tuple[str, ...]:
    """Layout in which the host holds each operator: the placement's, where this machine has it."""
    empty = not placed.uses_device(problem.graph.n_layer)
    fastest = costs_of(problem, load, "mixed", llama_uses_device or not empty).layouts
    if empty or not placed.layouts:
        return fastest
    return tuple(
        named if named is not None and named in problem.kernels.on_host(operator) else own
        for named, own, operator in zip(placed.layouts, fastest, problem.operators, strict=True)
    )
