"""The price of a placement: seconds of the prompt and of a token; and predictions for passes that ran. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.history import BlockRuns, SeenPasses
from oallama.core.types import PLAIN_LAYOUT, Phase, Predicted, StockOptions, Workload
from oallama.cost.expert_cache import MOST_TOKENS, beside_cache, cached_layers, through_cache
from oallama.cost.passes import Pass
from oallama.cost.passes import passes as workload_passes
from oallama.cost.ranges import ranges_seconds
from oallama.cost.rates import slice_rates
from oallama.cost.slices import Pricing
from oallama.cost.timeline import BlockTimes, cycle_seconds
from oallama.cost.whole import Costs, placement_seconds
from oallama.plan.plan import Plan
from oallama.planner.cutting import CutBlocks, n_g_at
from oallama.planner.parts import sliced_parts
from oallama.planner.placement import Placement
from oallama.planner.problem import Problem, costs_of, costs_over, device_costs
from oallama.planner.slicer import Slicing, slicer_of


def price(problem: Problem, workload: Workload, placement: Placement) -> Predicted:
    """TTFT, TPOT and total seconds of the workload. n_g is as in the placement's token assignment.

    Raises PlanError for a slice of an operator that cannot be split, ProfileError if the profile has no link.
    """
    problem = problem.of_step(workload.step)
    sliced: dict[int, Slicing] = {}
    for device, (part, part_placement) in sliced_parts(problem, placement).items():
        slicer = slicer_of(part, workload, part_placement)
        sliced[device] = slicer.priced(
            *slicer.cuts_of(part_placement), part_placement.first_slices.settings.token_assignment
        )
    if sliced and not placement.device_layers:
        return sliced[0].predicted(workload)
    layouts = host_layouts(problem, workload, placement)

    def seconds(phase: Phase) -> float:
        phase_passes = workload_passes(workload, phase)
        if not placement.device_layers:
            return _whole_seconds(problem, placement, layouts, phase_passes)
        sliced_s = {n: slicing.prefill_s if phase == "prefill" else slicing.decode_s for n, slicing in sliced.items()}
        devices = device_costs(problem, phase_passes, layouts, mapped=not sliced)
        return ranges_seconds(
            devices, placement.device_layers, placement.on_device, placement.first_device_layer, sliced_s
        )

    return Predicted.with_drafts(seconds("prefill"), seconds("decode"), workload)


def _whole_seconds(problem: Problem, placement: Placement, layouts: Sequence[str], passes: tuple[Pass, ...]) -> float:
    """Seconds of these passes under a placement of whole operators. layouts: host_layouts."""
    small = tuple(p for p in passes if placement.cache_bytes and p.n_tokens <= MOST_TOKENS)
    total = 0.0
    for group in filter(None, (small, tuple(p for p in passes if p not in small))):
        costs, on_device, waits_s = whole_costs(problem, placement, layouts, group)
        total += waits_s + placement_seconds(costs, on_device, placement.first_device_layer)
    return total


def whole_costs(
    problem: Problem, placement: Placement, layouts: Sequence[str], passes: tuple[Pass, ...]
) -> tuple[Costs, Sequence[bool], float]:
    """(costs, which operators the device computes, seconds of waits for stock llama.cpp's expert cache) over these
    passes of a placement of whole operators. They must all be larger than MOST_TOKENS or none: only small passes use
    that cache. layouts: host_layouts."""
    on_device, cache_bytes = placement.on_device, placement.cache_bytes
    llama_uses_device = placement.llama_uses_device(problem.graph.n_layer)
    costs = costs_over(problem, passes, llama_uses_device, layouts, mapped=not cache_bytes)
    if not cache_bytes:
        return costs, on_device, 0.0
    cached = cached_layers(problem.operators, on_device, placement.first_device_layer, cache_bytes)
    if passes[0].n_tokens > MOST_TOKENS:
        return beside_cache(costs, cached), on_device, 0.0
    rates = slice_rates(problem.profile)  # of weights in pinned memory
    issue_s = rates.issue.alpha_s if rates.issue else 0.0
    costs, waits_s = through_cache(costs, problem.operators, cached, rates.weights, issue_s)
    in_cache = {i for group in cached for i in group.operators}
    return costs, [is_device or i in in_cache for i, is_device in enumerate(on_device)], waits_s


def host_layouts(problem: Problem, workload: Workload, placement: Placement) -> tuple[str, ...]:
    """The host layout of each operator: the placement's if it was profiled here, else stock llama.cpp's choice for a
    stock configuration, else the fastest. Operators on the device count as plain, so that they do not keep attention
    from being offloaded (cost/whole.py, offloads_attention)."""
    if placement.stock is not None:
        chosen = stock_layouts(problem, placement.stock)
    else:
        chosen = costs_of(problem, workload, "mixed", placement.llama_uses_device(problem.graph.n_layer)).layouts
    placement_layouts = (
        PLAIN_LAYOUT if assignment.is_device else assignment.layout for assignment in placement.assignments
    )
    return tuple(
        layout if layout is not None and layout in problem.kernels.on_host(operator) else other
        for layout, other, operator in zip(placement_layouts, chosen, problem.operators, strict=True)
    )


def stock_layouts(problem: Problem, options: StockOptions) -> tuple[str, ...]:
    """The layouts in which stock llama.cpp keeps host weights: plain, in pinned memory, if the device has pinned memory
    and --no-host is not set; else the first of the CPU's layouts, in alphabetical order, that takes the weight (ggml
    0.26.0, ggml_backend_cpu_get_extra_buffer_types)."""
    if problem.profile.has_host_buffer and not options.no_host:
        return (PLAIN_LAYOUT,) * len(problem.operators)
    layouts = (sorted(problem.kernels.on_host(operator)) for operator in problem.operators)
    return tuple(next((name for name in names if name != PLAIN_LAYOUT), PLAIN_LAYOUT) for names in layouts)


def seen_passes(
    problem: Problem, plan: Plan, placement: Placement, runs: Sequence[BlockRuns]
) -> tuple[SeenPasses, ...]:
    """Measured and predicted seconds of a pass, for each class of batch sizes in `runs`. placement: the plan's. Leaves
    out blocks that compute output tokens only, as they run for fewer tokens than the pass has."""
    if not placement.is_sliced:
        return ()
    problem, placement = next(iter(sliced_parts(problem, placement).values()))  # of several devices the first
    slicer, table = slicer_of(problem, plan.workload, placement), placement.first_slices.settings.token_assignment
    timed_blocks = [
        (block, (block_type, cut))
        for block, (block_type, cut) in zip(*slicer.cuts_of(placement), strict=True)
        if not block_type.outputs_only and (not cut.is_uncut or (table and block_type.takes_n_g))
    ]
    cut_blocks = [cut_block for _, cut_block in timed_blocks]
    names = {problem.operators[i].name for block, _ in timed_blocks for i in block.operators}
    seen = []
    for batch in sorted({run.batch for run in runs}):
        batch_runs = [run for run in runs if run.batch == batch and run.block in names and run.n_runs > 0]
        if batch_runs:
            most = max(batch_runs, key=lambda run: run.n_runs)
            n_tokens = max(1, round(most.n_tokens / most.n_runs))
            cpu_s, wait_s, other_s = (
                sum(getattr(run, name) for run in batch_runs) / most.n_runs for name in ("cpu_s", "wait_s", "other_s")
            )
            predicted = _prediction(cut_blocks, n_tokens, n_g_at(table, n_tokens), slicer.pricing)
            seen.append(SeenPasses(batch, most.n_runs, cpu_s, wait_s, other_s, *predicted))
    return tuple(seen)


def _prediction(cut_blocks: CutBlocks, n_tokens: int, n_g: int, pricing: Pricing) -> tuple[float, float, float, bool]:
    """The predicted values of SeenPasses."""
    times = [pricing.block_times(block_type, cut, n_tokens, n_g) for block_type, cut in cut_blocks]
    rounds: dict[BlockTimes, tuple[float, float]] = {}
    for block in times:
        if block not in rounds:
            without_cpu_s = cycle_seconds([block._replace(cpu_s=0.0)], pricing.streaming)
            rounds[block] = cycle_seconds([block], pricing.streaming), without_cpu_s
    return (
        sum(_cpu_beside_copies_s(block, rounds[block][0]) for block in times),
        sum(rounds[block][1] for block in times),
        sum(block.inter_block_s for block in times),
        sum(block.copy_s for block in times) > sum(step.gpu_s for block in times for step in block.steps),
    )


def _cpu_beside_copies_s(times: BlockTimes, round_s: float) -> float:
    """Seconds of CC, slowed down by copies during their share of the round."""
    copied_share = min(1.0, times.copy_s / round_s) if round_s > 0 else 0.0
    return times.cpu_s * (1 + copied_share * (1 / times.interference.cpu_with_link - 1))
