"""Modules that lie whole on the device, in an order of preference while memory lasts, and every other one cut: what
HeteGen's scheduler (section 4.5) and FlexGen's shares of weights have in common.

A module is what is moved at once: a linear operator, a whole FFN where its gate, up and down are cut at the same
element (both sides go on with their own part), or an operator that is not cut, such as the output. TwinPilots
(twinpilots.py) takes the same modules, and chooses by itself which lie where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from oallama.cost.slices import BlockType, Cut
from oallama.planner.affinity import fill
from oallama.planner.placement import Placement, operators_on_cpu, placed_whole
from oallama.planner.policies.registry import PolicyInputs
from oallama.planner.problem import Problem, costs_of
from oallama.planner.slicer import Slicer
from oallama.planner.staging import staging_bytes


@dataclass(frozen=True, slots=True)
class Module:
    """Operators that are placed together, and their block with its cut; None: it cannot be cut, and is on the CPU
    where it is not on the device."""

    operators: tuple[int, ...]
    layer: int | None
    bytes: int
    cpu_s: float  # of one token on the CPU
    cut: tuple[BlockType, Cut] | None


CutOf = Callable[[BlockType], Cut]


def modules_in(problem: Problem, inputs: PolicyInputs, cut_of: CutOf) -> tuple[Slicer, tuple[Module, ...]]:
    """(prices of cut blocks, what may go to the device in graph order). cut_of: from a linear operator, as a block by
    itself, to its cut."""
    operators, slicer = problem.operators, inputs.slicer(inputs.workload)
    nothing = operators_on_cpu(len(operators), inputs.first_device_layer)
    cuts = {
        block.operators[0]: cut_of(slicer.fastest(block.types))
        for block in slicer.blocks(nothing, cuts=range(len(operators)))
    }
    by_first: dict[int, Module] = {}
    for block in slicer.blocks(nothing, cuts=[cuts.get(i) for i in range(len(operators))]):
        members, kind = block.operators, slicer.fastest(block.types)
        layer = operators[members[0]].layer
        if layer is not None:
            cut = (kind, cuts[members[0]])
            by_first[members[0]] = Module(members, layer, kind.block.bytes, kind.gemms.cpu_s(1.0, 1), cut)
    in_modules = {i for module in by_first.values() for i in module.operators}
    of_token = costs_of(problem, inputs.workload, "decode").operators
    for i, (operator, cost) in enumerate(zip(operators, of_token, strict=True)):
        if i not in in_modules and cost.t_gpu_s is not None:
            by_first[i] = Module((i,), operator.layer, operator.bytes, cost.t_cpu_s, None)
    return slicer, tuple(by_first[i] for i in sorted(by_first))


def place_in_order(
    problem: Problem, inputs: PolicyInputs, cut_of: CutOf, order: Callable[[Sequence[Module]], list[int]]
) -> Placement:
    """The first modules of the order on the device, passing over what does not fit, and the others cut.

    order: from modules to their indices. Only modules of layers whose norms and KV are on the device may be whole. A
    module whose part does not fit a slot of the ring stays whole on the CPU.
    """
    slicer, modules = modules_in(problem, inputs, cut_of)
    all_bytes, weights_bytes = inputs.cut_bytes()
    candidates = _with_slots(slicer, modules, all_bytes)
    layers = inputs.costs.graph.operator_layer
    ranked = [i for i in order(modules) if layers[candidates[i].operators[0]] >= inputs.first_device_layer]
    sizes = [module.bytes for module in candidates]

    staging, needed = -1, 0
    while needed > staging:  # what the modules that stay need of the device is taken off the budget for the others
        staging = needed
        chosen = fill(ranked, sizes, min(all_bytes - staging, weights_bytes))
        needed = staging_of(slicer, [module for i, module in enumerate(candidates) if i not in chosen])
        if sum(sizes[i] for i in chosen) + needed <= all_bytes:
            break
    placement = placed_modules(slicer, inputs, candidates, chosen, needed)
    unsplit = [
        m.operators for i, m in enumerate(candidates) if i not in chosen and m.cut is not None and m.cut[1].is_uncut
    ]
    n_left = sum(map(len, unsplit))
    if not n_left:
        return placement
    note = f"{n_left} operators stay whole on the CPU: splitting gains nothing, or no part fits the ring"
    return replace(placement, notes=(*placement.notes, note))


def placed_modules(
    slicer: Slicer, inputs: PolicyInputs, candidates: Sequence[Module], chosen: Collection[int], staging: int
) -> Placement:
    """These modules whole on the device, and the others as they are cut; staging: bytes that takes."""
    chosen_operators = {i for n in chosen for i in candidates[n].operators}
    on_device = [i in chosen_operators for i in range(len(inputs.costs.operators))]
    whole = placed_whole(inputs.costs, on_device, inputs.first_device_layer)
    cuts = {m.operators: m.cut[1] for i, m in enumerate(candidates) if i not in chosen and m.cut is not None}
    if all(cut.is_uncut for cut in cuts.values()):
        return whole
    by_operator = {i: cut for members, cut in cuts.items() for i in members}
    blocks = slicer.blocks(whole, cuts=[by_operator.get(i) for i in range(len(on_device))])
    cut_blocks = [
        (kind, cuts.get(block.operators, kind.all_host)) for block in blocks for kind in [slicer.fastest(block.types)]
    ]
    return slicer.placed(whole, slicer.priced(blocks, cut_blocks, staging=staging), inputs.request.phase)


def _with_slots(slicer: Slicer, candidates: Sequence[Module], budget: int) -> Sequence[Module]:
    """The modules, those with the largest parts left whole until the ring fits."""
    while staging_of(slicer, candidates) > max(0, budget):
        streamed = [module for module in candidates if module.cut is not None and not module.cut[1].is_uncut]
        staging = {id(module): staging_of(slicer, [module]) for module in streamed}
        largest = max(staging.values())
        candidates = [on_cpu(module) if staging.get(id(module)) == largest else module for module in candidates]
    return candidates


def on_cpu(module: Module) -> Module:
    """The module, none of it streamed."""
    assert module.cut is not None
    kind, _ = module.cut
    return replace(module, cut=(kind, kind.all_host))


def staging_of(slicer: Slicer, candidates: Sequence[Module]) -> int:
    """Bytes of the device that the cuts of these modules need beside weights."""
    cut_blocks: list[tuple[BlockType, Cut]] = []
    previous = -1
    for module in candidates:
        if module.cut is not None:
            kind, cut = module.cut
            follows = module.operators[0] == previous + 1
            cut_blocks.append((kind if follows or not kind.block.relation else kind.with_relation(""), cut))
            previous = module.operators[-1]
    return staging_bytes(cut_blocks, slicer.pricing.streaming, slicer.workload.largest_batch, 0)
