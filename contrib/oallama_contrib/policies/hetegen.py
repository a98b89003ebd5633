"""The `hetegen` policy (Zhao et al., MLSys 2024): every linear operator of a layer is computed by the CPU and by the
device at the same time, which streams its share α, until both take as long; what gains the most for each byte lies
whole on the device. Each linear has its own α. Where those of gate, up and down round to the same cut, the FFN is one
block, whose results are joined once.

The paper takes α from whole operators' times (section 3.2, Eq. 4-9), and corrects it where polynomials through the
measured times of slices meet (the alpha benchmark, section 4.4, Eq. 10-12). Here times of slices come from the profile,
slowed down as CPU and link were measured to slow each other down, so α is where these meet. They are of one token: of a
prompt, slices are the same. Weights of ours lie in pinned memory for good (no pin task, section 4.3: T_PIN is 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from oallama.cost.rates import SliceRates, interference_at
from oallama.cost.slices import BlockType, Cut, Gemms, Pricing
from oallama.planner.placement import Placement
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import Problem
from oallama_contrib.policies.modules import Module, place_in_order

LEAST = 0.02
"""Least share that either side has where both compute: α is between it and 1 - LEAST, else 0 or 1."""

HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Balance:
    """ᾱ, and the seconds that the slower side then takes: T̄_CPU."""

    alpha: float
    seconds: float


@lru_cache(maxsize=256)
def balance(gemms: Gemms, rates: SliceRates) -> Balance:
    """ᾱ of a block with one token, and T̄_CPU. ᾱ is the share with which T_CPU = T_GPU + T_COM of mul-mats that are cut
    at one share (Eq. 4, 8 and 10), found by halving; 0 or 1 where one side takes longer with its least share than the
    other with the rest. Equal layers share the result."""
    interference = interference_at(rates.interference, 1)

    def cpu_s(share: float) -> float:
        return gemms.cpu_s(1 - share, 1) / (interference.cpu_with_link if share else 1.0)

    def com_s(share: float) -> float:
        streamed, line = gemms.streamed(share, 1), rates.weights
        copied_s = streamed.n_copies * line.alpha_s + streamed.bytes * line.beta_s_per_byte
        return copied_s / (interference.link_with_cpu if share < 1 else 1.0) + gemms.gpu_s(share, 1)

    low, high = LEAST, 1 - LEAST
    if cpu_s(low) <= com_s(low):
        return Balance(0.0, cpu_s(0.0))
    if cpu_s(high) >= com_s(high):
        return Balance(1.0, com_s(1.0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cpu_s(middle) > com_s(middle) else (low, middle)
    return Balance(low, cpu_s(low))


def cut(kind: BlockType, pricing: Pricing) -> Cut:
    """The cut nearest to ᾱ of those that are possible: CC of 1 - ᾱ, CG of ᾱ."""
    extent, step = kind.block.extent, kind.block.step
    cc = min(round((1 - balance(kind.gemms, pricing.rates).alpha) * extent / step) * step, extent)
    return Cut(cc, extent - cc, 0)


def order(modules: Sequence[Module], pricing: Pricing) -> list[int]:
    """What is no module of a layer first, as the paper leaves it on the GPU (section 4.2); then by falling
    g = T̄_CPU(ᾱ) / M (Eq. 13), earlier ones of equals first."""

    def gain(module: Module) -> float:
        if module.layer is None:
            return float("inf")
        cpu_s = module.cpu_s if module.cut is None else balance(module.cut[0].gemms, pricing.rates).seconds
        return cpu_s / module.bytes

    gains = [gain(module) for module in modules]
    return sorted(range(len(modules)), key=lambda i: (-gains[i], i))


@policy(
    "hetegen", "every linear operator on both sides at once", streams=True,
    keeps_ubatch=True,
    caveat="only HeteGen's shares and promotion: weights are pinned at load, not while it runs, and gate, up and "
    "down whose shares are equal are joined once",
)  # fmt: skip
def hetegen(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    pricing = inputs.slicer(inputs.workload).pricing
    yield place_in_order(problem, inputs, partial(cut, pricing=pricing), partial(order, pricing=pricing))
