"""The price of a placement: what a prompt and a token take; and what is predicted of passes that ran. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oallama.core.history import BlockRuns, SeenPasses
from oallama.core.types import PLAIN_LAYOUT, Predicted, Workload
from oallama.cost.passes import passes
from oallama.cost.slices import Pricing
from oallama.cost.timeline import BlockTimes, cycle_seconds
from oallama.cost.whole import placement_seconds
from oallama.place.cutting import CutBlocks, n_g_at
from oallama.place.placement import Placement
from oallama.place.problem import Problem, costs_of, costs_over
from oallama.place.sharing import slicer_of
from oallama.plan.plan import Plan


def price(problem: Problem, workload: Workload, placed: Placement, llama_uses_device: bool | None = None) -> Predicted:
    """TTFT, TPOT and their sum over the workload. Slices share out a prompt's tokens as their table says.

    llama_uses_device: whether llama.cpp has the device, and may stream plain host weights to it; None: where the
    placement has anything of llama.cpp there. Raises PlanError for slices that are no blocks of ours, ProfileError
    where the profile has no link.
    """
    if placed.is_sliced:
        slicer = slicer_of(problem, workload, placed)
        plan = slicer.priced(*slicer.cuts_of(placed), placed.token_assignment)
        return plan.predicted(workload)
    if llama_uses_device is None:
        llama_uses_device = placed.llama_uses_device(problem.graph.n_layer)
    layouts = host_layouts(problem, workload, placed, llama_uses_device)
    ttft_s, tpot_s = (
        placement_seconds(
            costs_over(problem, passes(workload, phase), llama_uses_device, layouts),
            placed.on_device,
            placed.first_device_layer,
        )
        for phase in ("prefill", "decode")
    )
    return Predicted.of(ttft_s, tpot_s, workload.n_gen)


def host_layouts(problem: Problem, workload: Workload, placed: Placement, llama_uses_device: bool) -> tuple[str, ...]:
    """Layout in which the host holds each operator: the placement's, where this machine has it; else the fastest. What
    is on the device counts as plain: attention of the host's layers is offloaded where all mul-mats around are."""
    beside = llama_uses_device or placed.is_sliced
    fastest = costs_of(problem, workload, "mixed", beside).layouts
    named = (PLAIN_LAYOUT if place.is_device else place.layout for place in placed.places)
    return tuple(
        layout if layout is not None and layout in problem.kernels.on_host(operator) else own
        for layout, own, operator in zip(named, fastest, problem.operators, strict=True)
    )


def seen_passes(problem: Problem, plan: Plan, placed: Placement, runs: Sequence[BlockRuns]) -> tuple[SeenPasses, ...]:
    """The passes of these runs by class of batch sizes. placed: as the plan says. Blocks that are computed for
    outputs alone run for fewer tokens than a pass has, and are left out."""
    if not placed.is_sliced:
        return ()
    slicer, table = slicer_of(problem, plan.workload, placed), plan.token_assignment
    own = [
        (block, (cost, cut))
        for block, (cost, cut) in zip(*slicer.cuts_of(placed), strict=True)
        if not cost.outputs_only and (not cut.is_whole or (table and cost.takes_n_g))
    ]
    layers, names = (
        [layer for _, layer in own],
        {problem.operators[i].name for block, _ in own for i in block.operators},
    )
    found = []
    for batch in sorted({one.batch for one in runs}):
        ran = [one for one in runs if one.batch == batch and one.block in names and one.n_runs > 0]
        if ran:
            most = max(ran, key=lambda one: one.n_runs)
            n_tokens = max(1, round(most.n_tokens / most.n_runs))
            found.append(_beside(_summed(ran, most.n_runs), layers, n_tokens, n_g_at(table, n_tokens), slicer.on))
    return tuple(found)


def _summed(runs: Sequence[BlockRuns], n_passes: int) -> SeenPasses:
    cpu_s, wait_s, other_s = (
        sum(getattr(one, name) for one in runs) / n_passes for name in ("cpu_s", "wait_s", "other_s")
    )
    return SeenPasses(runs[0].batch, n_passes, cpu_s, wait_s, other_s, 0.0, 0.0, 0.0, False)


def _beside(seen: SeenPasses, layers: CutBlocks, n_tokens: int, n_g: int, on: Pricing) -> SeenPasses:
    """Add the predicted seconds of a pass."""
    times = [on.block_times(cost, cut, n_tokens, n_g) for cost, cut in layers]
    rounds: dict[BlockTimes, tuple[float, float]] = {}
    for one in times:
        if one not in rounds:
            without_cpu_s = cycle_seconds([one._replace(cpu_s=0.0)], on.streaming)
            rounds[one] = cycle_seconds([one], on.streaming), without_cpu_s
    return replace(
        seen,
        predicted_cpu_s=sum(_beside_copies(one, rounds[one][0]) for one in times),
        predicted_device_s=sum(rounds[one][1] for one in times),
        predicted_between_s=sum(one.gap_s for one in times),
        copies_last=sum(one.copy_s for one in times) > sum(step.gpu_s for one in times for step in one.steps),
    )


def _beside_copies(times: BlockTimes, round_s: float) -> float:
    """Seconds of CC, which copies slow down for the share of a round that they take."""
    copied = min(1.0, times.copy_s / round_s) if round_s > 0 else 0.0
    return times.cpu_s * (1 + copied * (1 / times.interference.cpu_with_link - 1))
