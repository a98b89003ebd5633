"""Baselines of a plan: stock llama.cpp's --fit, the CPU alone, the physical bound, and tokens by depth. Pure.

The bound is the least time of a pass if CPU, device and link are always busy and never wait for each other. Every
operator may be cut anywhere into cc, cg and gg (ScheInfer, section IV-A), so the least time t is the value of a linear
program: the CPU's work, the device's work and the link's copies each take at most t; CPU and link together use at most
the measured share of the DRAM; gg fits the device's memory. Launches, waits, joins, device copies of activations, norms
and attention take 0 s. If expert counts are known, each expert may be placed by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, log

from oallama.core.affinity_report import Baseline
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, FlashAttention, MemoryBreakdown, Operator, Predicted, Workload
from oallama.cost.experts import ExpertCoverage, expert_use
from oallama.cost.graph import computes_outputs_only
from oallama.cost.kernels import index_non_matmul, non_matmul_of
from oallama.cost.passes import Pass, decode_pass, passes
from oallama.cost.rates import interference_at, interference_curve
from oallama.cost.whole import OperatorCost, operator_costs
from oallama.plan.plan import Plan
from oallama.planner.attention import with_attention
from oallama.planner.policies.stock import priced_stock_fit
from oallama.planner.problem import Problem, empty_memory, operators_limit

GOLDEN = 0.6180339887498949
ROUNDS = 40  # of a search: its interval shrinks to 4e-9 of the first one
USE_STEP = 1.01  # by which shares of uses differ that are told apart


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """An operator in one pass: its seconds alone on CPU, device (None: cannot compute it) and link."""

    bytes: int
    cpu_s: float
    device_s: float | None
    link_s: float  # of what of its weight the pass needs


def physical_bound(problem: Problem, workload: Workload, memory: MemoryBreakdown) -> Predicted:
    """Bounds of TTFT, TPOT and the whole run, with the device memory that `memory` leaves for weights.

    --gpu-weights does not count the ring, in which the last streamed blocks stay until the next pass and need no copy.
    So that cap is raised by the staging.
    """
    budget = max(0, memory.limit - memory.kv - memory.compute)
    cap = operators_limit(problem)
    if cap is not None:
        budget = min(budget, cap + memory.staging)
    ttft_s, tpot_s = (_passes_s(problem, passes(workload, phase), budget) for phase in ("prefill", "decode"))
    return Predicted.with_drafts(ttft_s, tpot_s, workload)


def _passes_s(problem: Problem, phase_passes: Sequence[Pass], budget: int) -> float:
    """Passes counted without their KV depth, which does not matter here."""
    counted: dict[Pass, float] = defaultdict(float)
    for p in phase_passes:
        counted[replace(p, n_kv=0, count=1)] += p.count
    return sum(n * _pass_s(problem, p, budget) for p, n in counted.items())


def _pass_s(problem: Problem, forward: Pass, budget: int) -> float:
    costs = operator_costs(problem.kernels, problem.operators, problem.graph.n_run, (forward,))
    line = problem.profile.link.get("h2d_pinned") or problem.profile.link.get("h2d_pageable")
    copy_s_per_byte = line.beta_s_per_byte if line else inf
    uses = expert_use(problem.routing) if problem.routing else {}
    works: list[OperatorWork] = []
    for operator, cost in zip(problem.operators, costs, strict=True):
        n_rows = forward.n_outputs if computes_outputs_only(operator, problem.graph.n_run) else forward.n_tokens
        use = uses.get(operator.layer) if operator.layer is not None and operator.routed else None
        if use is not None and len(use.order) == operator.shape[2]:
            works += _by_expert(operator, cost, use, forward.n_tokens, n_rows, copy_s_per_byte)
        else:
            n_bytes = operator.bytes * operator.mul_mat.share_routed(n_rows) if n_rows else 0.0
            works.append(
                OperatorWork(operator.bytes, cost.t_cpu_s, cost.t_gpu_s, n_bytes * copy_s_per_byte if line else inf)
            )
    interference = interference_at(interference_curve(problem.profile), forward.n_tokens)
    return least_seconds(works, budget, interference.cpu_with_link + interference.link_with_cpu)


def _by_expert(
    operator: Operator, cost: OperatorCost, use: ExpertCoverage, n_tokens: int, n_rows: int, copy_s_per_byte: float
) -> list[OperatorWork]:
    """A work for each expert, by its share of the uses, rounded down so that there are few different ones. The device
    computes at most one row of each token per expert."""
    n_expert, n_used = operator.shape[2], operator.n_expert_used
    n_bytes = operator.bytes // n_expert
    works: list[OperatorWork] = []
    for n in range(n_expert):
        share = _rounded(use.coverage(n + 1, n_tokens) - use.coverage(n, n_tokens))
        device_s = None if cost.t_gpu_s is None else min(share, 1 / n_used) * cost.t_gpu_s
        needed = 1 - (1 - min(1.0, share * n_used)) ** n_rows
        link_s = inf if copy_s_per_byte == inf else n_bytes * needed * copy_s_per_byte
        works.append(OperatorWork(n_bytes, share * cost.t_cpu_s, device_s, link_s))
    return works


def _rounded(share: float) -> float:
    """The share rounded down to a power of USE_STEP."""
    return USE_STEP ** floor(log(share, USE_STEP)) if share > 0 else 0.0


def least_seconds(works: Sequence[OperatorWork], budget: int, dram: float = 2.0) -> float:
    """The least time of all works together with `budget` bytes of weights on the device.

    dram: sum of the speeds of CPU and link when both are busy, 1 to 2. Solves the dual of the linear program: for any
    prices per second of CPU, device, link and DRAM that add up to 1, the cost of the cheapest placement is a lower
    bound; the best prices give the value. The DRAM's price is best as large as possible, the smaller one of the CPU's
    and the link's, which leaves two prices to search for.
    """
    cost_at = _dual(Counter(works), budget)
    spared = 2.0 - min(2.0, max(1.0, dram))

    def cost_of(cpu: float, link: float) -> float:
        return cost_at(cpu, max(0.0, 1 - cpu - link), link) / (1 - spared * min(cpu, link))

    return _highest(lambda cpu: _highest(lambda link: cost_of(cpu, link), 1 - cpu), 1.0)


def _dual(works: Counter[OperatorWork], budget: int) -> Callable[[float, float, float], float]:
    """Cost of all works at prices of CPU, device and link. Works that save the most per byte are on the device."""
    import numpy as np

    n, size = np.array(list(works.values()), dtype=float), np.array([work.bytes for work in works], dtype=float)
    cpu_s = np.array([work.cpu_s for work in works])
    device_s = np.array([work.device_s or 0.0 for work in works])
    link_s = np.array([0.0 if work.link_s == inf else work.link_s for work in works])
    not_on_device = np.array([inf if work.device_s is None else 0.0 for work in works])
    not_streamed = np.array([inf if work.link_s == inf else 0.0 for work in works])

    def cost(cpu: float, device: float, link: float) -> float:
        on_device = device * device_s + not_on_device
        cheapest = np.minimum(cpu * cpu_s, on_device + link * link_s + not_streamed)
        saved = np.maximum(cheapest - on_device, 0.0) / np.maximum(size, 1.0)
        order = np.argsort(-saved)
        n_bytes = (n * size)[order]
        device_bytes = np.clip(budget - (np.cumsum(n_bytes) - n_bytes), 0.0, n_bytes)
        return float(n @ cheapest - saved[order] @ device_bytes)

    return cost


def _highest(f: Callable[[float], float], end: float) -> float:
    """The maximum of a unimodal function between 0 and `end`."""
    low, high = 0.0, max(0.0, end)
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = f(a), f(b)
    highest = max(f(low), f(high), at_a, at_b)
    for _ in range(ROUNDS):
        if at_a < at_b:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = f(b)
        else:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = f(a)
        highest = max(highest, at_a, at_b)
    return highest


STOCK, CPU_ALONE, BOUND = "stock --fit", "all CPU", "physical bound"


def baselines(problem: Problem, workload: Workload, used: MemoryBreakdown, alone: Predicted) -> tuple[Baseline, ...]:
    """The baselines of a plan; without stock if llama.cpp cannot use the device.

    problem, workload: with stock's attention mode and micro-batch, so that all plans for a model, a device and a
    workload have the same baselines. used: the plan's memory; if it does not use the device, the bound may use all of
    it. alone: times of the CPU alone.
    """
    stock: list[Baseline] = []
    if problem.profile.device != CPU_DEVICE:
        memory = empty_memory(problem, workload)
        buffers_fit = memory.budget(problem.graph.n_layer) >= 0
        stock.append(Baseline(STOCK, priced_stock_fit(problem, workload, memory)[1] if buffers_fit else alone))
        used = used if used.limit else replace(used, limit=memory.limit)
    return (*stock, Baseline(CPU_ALONE, alone), Baseline(BOUND, physical_bound(problem, workload, used)))


def planned_depth(workload: Workload) -> int:
    """The depth that a plan's TPOT is predicted for, in tokens."""
    return passes(workload, "decode")[0].n_kv


def token_seconds(profile: Profile, flash_attn: FlashAttention, n_layer: int, record: Plan, depth: int) -> float | None:
    """Predicted seconds of one token behind `depth` others. None if the plan predicts nothing, or the profile has
    no attention of this way."""
    if record.predicted is None or not profile.rest:
        return None
    on_device = max(0, record.n_gpu_layers - 1)  # llama.cpp counts the output as a layer
    index = index_non_matmul(with_attention(profile, flash_attn))

    def non_matmul_s(n_kv: int) -> float:
        step = replace(decode_pass(record.workload), n_kv=n_kv)
        on_cpu_s, on_device_s = non_matmul_of(index, profile.device, (step,))
        return (n_layer - on_device) * on_cpu_s + on_device * on_device_s

    return max(0.0, record.predicted.tpot_s + non_matmul_s(depth) - non_matmul_s(planned_depth(record.workload)))
