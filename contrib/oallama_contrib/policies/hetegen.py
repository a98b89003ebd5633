"""The `hetegen` policy (Zhao et al., MLSys 2024): every linear operator of a layer is computed by the CPU and by the
device at the same time, which streams its share α, until both take as long; what gains the most for each byte lies
whole on the device. Each linear has its own α. Where those of gate, up and down round to the same cut, the FFN is one
block, whose results are joined once.

α follows from whole operators' times (section 3.2, Eq. 4-9) and is then corrected by the times of slices (the alpha
benchmark, section 4.4, Eq. 10-12). Here these come from the profile, slowed down as CPU and link were measured to slow
each other down, not from a run of the slices themselves. Both are of one token: of a prompt, slices are the same.
Weights of ours lie in pinned memory for good (no pin task, section 4.3, in T_COM: T_PIN is 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil

from oallama.cost.rates import SliceRates, interference_at
from oallama.cost.slices import BlockType, Cut, Gemms, Pricing
from oallama.planner.placement import Placement
from oallama.planner.policies.registry import MemoryBudget, policy
from oallama.planner.problem import Problem
from oallama_contrib.policies.modules import Module, modules_in, place_modules

GAMMA, STEP = 0.1, 0.02
"""γ and λ of section 4.4, which gives no values: how far α is varied, and in what steps."""

DEGREE = 2
HALVINGS = 60

Seconds = Callable[[float], float]
"""Seconds as a function of α."""


@dataclass(frozen=True, slots=True)
class Balance:
    """ᾱ, and the seconds that the slower side then takes: T̄_CPU."""

    alpha: float
    seconds: float


def alpha(cpu_s: float, gpu_s: float, transfer_s: float, pin_s: float = 0.0, overlapped: bool = True) -> float:
    """The share that the device should compute, so that T_CPU = T_GPU + T_COM (Eq. 4 and 8), in closed form (Eq. 5):
    T'_CPU / (T'_CPU + T'_GPU + T'_COM). T'_COM is the larger of pinning and transfer where they overlap (Eq. 8, 9),
    else their sum. Eq. 6, 7 and 9 leave T'_GPU out, which is 0 then. All seconds are of the whole operator."""
    com_s = max(pin_s, transfer_s) if overlapped else pin_s + transfer_s
    total_s = cpu_s + gpu_s + com_s
    return cpu_s / total_s if total_s > 0 else 0.0


def alpha_benchmark(cpu_s: Seconds, com_s: Seconds, start: float, gamma: float = GAMMA, step: float = STEP) -> Balance:
    """ᾱ near `start`, where polynomials through the times of both sides meet (Eq. 10-12).

    cpu_s(α): of N(1 - α) on the CPU; com_s(α): of α to the device, and there. Both are looked at from start - γ to
    start + γ in steps of λ; where they meet beyond, around the end that is nearer. 0 or 1 where they do not meet: the
    one side takes longer with the least share than the other with nearly all.
    """
    import numpy as np

    middle = start
    for _ in range(ceil(1 / gamma) + 1):
        n = round(gamma / step)
        wanted = (middle + step * i for i in range(-n, n + 1))
        tried = sorted({min(max(share, step), 1 - step) for share in wanted})
        cpu, com = (np.polynomial.Polynomial.fit(tried, [side(share) for share in tried], min(DEGREE, len(tried) - 1))
                    for side in (cpu_s, com_s))  # fmt: skip
        low, high = tried[0], tried[-1]
        if cpu(low) <= com(low):
            if low <= step:
                return Balance(0.0, cpu_s(0.0))
            middle = low
        elif cpu(high) >= com(high):
            if high >= 1 - step:
                return Balance(1.0, com_s(1.0))
            middle = high
        else:
            break
    for _ in range(HALVINGS):
        between = (low + high) / 2
        low, high = (between, high) if cpu(between) > com(between) else (low, between)
    return Balance(low, float(cpu(low)))


def balance(cost: BlockType, on: Pricing) -> Balance:
    """ᾱ of a block with one token, and T̄_CPU."""
    return _balance(cost.gemms, on.rates)


@lru_cache(maxsize=256)
def _balance(gemms: Gemms, rates: SliceRates) -> Balance:
    """Balance of mul-mats that are cut at one share; equal layers share the result."""
    beside = interference_at(rates.interference, 1)

    def cpu_s(share: float) -> float:
        return gemms.cpu_s(1 - share, 1) / (beside.cpu_with_link if share else 1.0)

    def com_s(share: float) -> float:
        copied_s = gemms.copy_s(rates.weights, share, 1)
        return copied_s / (beside.link_with_cpu if share < 1 else 1.0) + gemms.gpu_s(share, 1)

    return alpha_benchmark(
        cpu_s, com_s, alpha(gemms.cpu_s(1.0, 1), gemms.gpu_s(1.0, 1), gemms.copy_s(rates.weights, 1.0, 1))
    )


def cut(cost: BlockType, on: Pricing) -> Cut:
    """The cut nearest to ᾱ of those that are possible: CC of 1 - ᾱ, CG of ᾱ."""
    extent, step = cost.block.extent, cost.block.step
    cc = min(round((1 - balance(cost, on).alpha) * extent / step) * step, extent)
    return Cut(cc, extent - cc, 0)


def order(found: Sequence[Module], on: Pricing) -> list[int]:
    """What is no module of a layer first, as the paper leaves it on the GPU (section 4.2); then by falling
    g = T̄_CPU(ᾱ) / M (Eq. 13), earlier ones of equals first."""

    def gain(module: Module) -> float:
        if module.layer is None:
            return float("inf")
        return (module.cpu_s if module.cut is None else balance(module.cut[0], on).seconds) / module.bytes

    gains = [gain(module) for module in found]
    return sorted(range(len(found)), key=lambda i: (-gains[i], i))


@policy(
    "hetegen", "every linear operator on both sides at once", streams=True,
    published="only HeteGen's shares and promotion: weights are pinned at load, not while it runs, and gate, up and "
    "down whose shares are equal are joined once",
)  # fmt: skip
def hetegen(problem: Problem, budget: MemoryBudget) -> Iterable[Placement]:
    on = budget.slicer(budget.workload).on
    slicer, base, found = modules_in(problem, budget, partial(cut, on=on))
    yield place_modules(slicer, found, order(found, on), base, budget.costs, budget.asked.phase, *budget.cut_bytes())
