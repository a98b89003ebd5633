"""The policy of several devices: a range of layers for each, by a dynamic program (planner/ranges.py).

It is none of `--policy`: with several devices, Placer.plan compares it with the best plan on each of them alone.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate

from oallama.core.errors import DoesNotFit
from oallama.cost.passes import passes
from oallama.planner.memory import CorrectedBudget, DeviceMemory
from oallama.planner.placement import Placement, VerifiedPlan
from oallama.planner.policies.registry import ROUNDS, Policy, Request
from oallama.planner.problem import Problem, device_costs, memory_before, operators_on_host
from oallama.planner.ranges import place
from oallama.planner.verify import on_cpu, verify

NAME = "ranges"


def best_over(problem: Problem, asked: Request) -> VerifiedPlan:
    """The fastest placement over the problem's devices that fits each, by no_alloc loads as best_verified has them; on
    the CPU where fewer than two devices would be used. Raises DoesNotFit where none fits."""
    workload, n_layer = asked.workload, problem.graph.n_layer
    costs = device_costs(problem, passes(workload, asked.phase))
    before = [device.no_alloc_load(workload, operators_on_host(device, workload)) for device in problem.devices]
    corrected = [
        CorrectedBudget(memory_before(device, workload, taken))
        for device, taken in zip(problem.devices, before, strict=True)
    ]
    best: VerifiedPlan | None = None
    for _ in range(ROUNDS):
        budgets = [partial(_bytes_left, budget.memory) for budget in corrected]
        placement = place(costs, problem.operators, budgets)
        if sum(n > 0 for n in placement.device_layers) < 2:
            return best or on_cpu(problem, workload, asked.phase)
        if best is not None and placement.seconds >= best.placement.seconds:
            return best
        last = verify(problem, NAME, workload, placement)
        if last.memory.fits:
            best = last
        learned = [
            budget.learn(n_layer - n_blocks, n_bytes, real)
            for budget, (n_blocks, n_bytes), real in zip(
                corrected, on_each(problem, placement), last.memory.devices, strict=True
            )
        ]
        if not any(learned):
            break
    if best is not None:
        return best
    worst = min(range(len(problem.devices)), key=lambda i: last.memory.devices[i].spare)
    real = last.memory.devices[worst]
    raise DoesNotFit(
        real.limit - real.spare, real.limit, problem.devices[worst].profile.device, f"the {NAME} placement"
    )


def _bytes_left(memory: DeviceMemory, n_blocks: int) -> int:
    """Return the bytes left for operators beside the norms and KV of n_blocks layers."""
    return memory.operator_budget(memory.n_layer - n_blocks)


def on_each(problem: Problem, placement: Placement) -> list[tuple[int, int]]:
    """(blocks, bytes of operators) of each device."""
    begins, graph = accumulate(placement.device_layers, initial=placement.first_device_layer), problem.graph
    found = []
    for begin, n_layers in zip(begins, placement.device_layers, strict=False):
        first, last = graph.operators_of((begin, begin + n_layers))
        on_device = zip(problem.operators[first:last], placement.on_device[first:last], strict=True)
        n_blocks = max(0, min(begin + n_layers, graph.n_layer) - begin)
        found.append((n_blocks, sum(operator.bytes for operator, here in on_device if here)))
    return found


ranges = Policy(NAME, "a range of layers for each of several devices", best_over)
