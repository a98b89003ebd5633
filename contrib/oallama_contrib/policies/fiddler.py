"""The `fiddler` policy, to compare with: models of experts as Fiddler runs them (Kamahori et al., ICLR 2025).
Everything except experts is on the device; experts are in host memory, except those that fit, and each is computed
where that takes less: by the CPU, or by the device once its weights were copied there (Algorithm 1).

Fiddler decides that for each expert by the tokens that it was routed to. A plan decides it for all at once, by the
tokens of the batch: from some length on. Fiddler puts the most popular
experts on the device; a plan knows no single experts, so those of whole layers are there, the last ones first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from oallama.core.errors import UsageError
from oallama.core.types import PLAIN_LAYOUT, Operator, Phase
from oallama.cost.slices import Pricing
from oallama.cost.whole import Costs
from oallama.planner.affinity import fill
from oallama.planner.cutting import CutBlocks, TokenTable, count_blocks, counted_seconds
from oallama.planner.placement import Placement, all_on_cpu, placed_whole, whole_bytes
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import Problem
from oallama.planner.slicer import Slicer
from oallama.planner.staging import most_n_g, staging_bytes


def experts_last(costs: Costs, operators: Sequence[Operator], first_device_layer: int, budget: int) -> Placement:
    """The placement that fills the budget with operators from first_device_layer on: first all but experts, then the
    experts of one layer after another, the last layer first."""
    experts: dict[int, list[int]] = {}
    non_experts: list[int] = []
    for i, (cost, layer) in enumerate(zip(costs.operators, costs.graph.operator_layer, strict=True)):
        if layer >= first_device_layer and cost.t_gpu_s is not None:
            (experts.setdefault(layer, []) if operators[i].routed else non_experts).append(i)
    units = [*((i,) for i in non_experts), *(tuple(experts[layer]) for layer in sorted(experts, reverse=True))]
    sizes = [sum(operators[i].bytes for i in unit) for unit in units]
    chosen = {i for n in fill(range(len(units)), sizes, budget) for i in units[n]}
    if not chosen:
        return all_on_cpu(costs)
    return placed_whole(costs, [i in chosen for i in range(len(operators))], first_device_layer)


def copied_from(cut_blocks: CutBlocks, pricing: Pricing, max_tokens: int) -> int | None:
    """The fewest tokens of a batch from which on, up to max_tokens, all of them take less on the device, with the
    weights copied there, than on the CPU. None: no batch does."""
    blocks = count_blocks(cut_blocks)

    def pays(n: int) -> bool:
        return counted_seconds(blocks, pricing, n, n) < counted_seconds(blocks, pricing, n, 0)

    first = 1 + bisect_left(range(1, max_tokens + 1), True, key=pays)
    return first if first <= max_tokens else None


def token_table(first: int | None, max_tokens: int) -> TokenTable:
    """n_g is all tokens from `first` on, and none before; None: none of any batch."""
    if first is None:
        return ((max_tokens, 0),)
    return tuple(dict.fromkeys(((n, g) for n, g in ((first - 1, 0), (first, first), (max_tokens, max_tokens)) if n)))


def with_split(slicer: Slicer, whole: Placement, phase: Phase, budget: int, copies: bool) -> Placement | None:
    """`whole` with the experts in host memory held by the split back end: computed by the CPU, or copied to the device
    for batches for which that pays. Without the back end llama.cpp would copy them for every large batch.

    copies: False: the CPU computes them in any batch. None: nothing can be held, or there is no room for the ring.
    """
    blocks = slicer.blocks(whole)
    if not blocks:
        return None
    plain = [block.in_layout(PLAIN_LAYOUT) or slicer.fastest(block.types) for block in blocks]
    cut_blocks = [(kind.in_split if kind.takes_n_g else kind, kind.all_host) for kind in plain]
    max_tokens = slicer.workload.largest_batch
    table = token_table(copied_from(cut_blocks, slicer.pricing, max_tokens) if copies else None, max_tokens)
    staging = staging_bytes(cut_blocks, slicer.pricing.streaming, max_tokens, most_n_g(table, max_tokens))
    if staging > budget:
        return None
    return slicer.placed(whole, slicer.priced(blocks, cut_blocks, table, staging=staging), phase)


@policy(
    "fiddler", "everything but experts on the device, experts copied for large batches", streams=True,
    keeps_ubatch=True,
    caveat="Fiddler's choice by tokens is made for all experts of a batch at once, not for each expert",
)  # fmt: skip
def fiddler(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    """Placements with experts computed by the CPU, with and without the split back end, and with experts copied: the
    ring takes room from experts, so that all ways are compared."""
    operators, costs, phase = problem.operators, inputs.costs, inputs.request.phase
    if all(not operator.routed for operator in operators):
        raise UsageError("policy fiddler needs a model with experts; use layers or oato")
    slicer, first_device_layer = inputs.slicer(inputs.workload), inputs.first_device_layer
    all_bytes, weights_bytes = inputs.cut_bytes()
    whole = experts_last(costs, operators, first_device_layer, min(all_bytes, weights_bytes))
    computed = with_split(slicer, whole, phase, all_bytes, False)
    yield from (computed, whole) if computed is not None else (whole,)
    experts_budget = all_bytes
    for _ in range(2):  # what the largest block needs may depend on which experts are left
        whole = experts_last(costs, operators, first_device_layer, min(experts_budget, weights_bytes))
        copying = with_split(slicer, whole, phase, all_bytes, True)
        if copying is None:
            break
        experts_budget = all_bytes - copying.first_slices.staging_bytes
        if whole_bytes(operators, copying.on_device) <= experts_budget:
            yield copying
            break
