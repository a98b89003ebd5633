"""ScheInfer's testbed A (Lin et al., arXiv 2411.15715) as the solver's records, and the rates that it publishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oallama.core.profile import LinearFit
from oallama.core.types import MulMat, StreamSettings
from oallama.cost.blocks import SplitBlock
from oallama.cost.kernels import Curve, Kernel, interpolate
from oallama.cost.rates import NO_TRANSFER, SliceRates
from oallama.cost.slices import Around, BlockType, Cut, Gemm, Gemms, Pricing
from oallama.cost.timeline import BlockTimes, Step, cycle_seconds

GPU = (4.7e-6, 8.1e-13)  # Table I: alpha in seconds, beta in seconds per T*M*H
CPU = (1.1e-5, 5.4e-12)
LINK = (3.0e-6, 2.6e-11)  # beta in seconds per byte
LAUNCH_S = 4.4e-5
BYTES_PER_WEIGHT = 0.5  # INT4 without scales
RATES = {16: 0.18, 8: 0.25, 4: 0.42, 2: 0.71}  # V-E2: CPU threads -> r_CG of LLaMA-2-70B in decode, r_GG = 0

PAPER = StreamSettings(prefetch="layer")
"""As ScheInfer copies."""


@dataclass(frozen=True)
class PaperModel:
    """What the paper's formulas need of a model."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_embd_kv: int
    n_vocab: int
    n_expert: int = 1
    n_expert_used: int = 1

    def expert(self) -> tuple[tuple[int, int], ...]:
        """Shapes of gate, up, down."""
        return ((self.n_embd, self.n_ff), (self.n_embd, self.n_ff), (self.n_ff, self.n_embd))

    def attention(self) -> tuple[tuple[int, int], ...]:
        square, narrow = (self.n_embd, self.n_embd), (self.n_embd, self.n_embd_kv)
        return (square, narrow, narrow, square)


LLAMA = PaperModel("LLaMA-2-70B", 80, 8192, 28672, 1024, 32000)
MIXTRAL = PaperModel("Mixtral-7B", 32, 4096, 14336, 1024, 32000, 8, 2)


@dataclass(frozen=True)
class Betas:
    """The terms of Table I that are varied, in seconds per T*M*H and per byte."""

    cpu: float = CPU[1]
    gpu: float = GPU[1]
    bytes_per_weight: float = BYTES_PER_WEIGHT
    link: float = LINK[1]


class PaperPricing(Pricing):
    """Eq. 4, and with n_g > 0 Eq. 15, and their order as in Eq. 5: one launch for each kernel and each copy, on a
    stream of its own; CG and GG of a mul-mat computed together once its copy has arrived; sending and joining cost
    nothing. With prefetch "ahead" copies run across blocks instead, as ours do.

    alpha_C2G counts only where something is copied, as in Eq. 10, and CG' only where n_g > 0; what is streamed for CG'
    is r_CC of the weight (Eq. 15 writes all of it, which is the same at r_GG = 0).
    """

    def block_times(
        self, of: BlockType, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1, gap_share: float = 1.0
    ) -> BlockTimes:
        cc, cg, gg = (part / cut.extent for part in (cut.cc, cut.cg, cut.gg))
        prime = cc > 0 and n_g > 0
        n_launches = 2 * (cg > 0) + 2 * prime + (gg > 0)
        link = self.rates.weights
        steps = tuple(
            Step(
                gemm.copy_s(link, cg, n_tokens) + gemm.copy_s(link, cc, n_g),
                gemm.gpu_s(cg, n_tokens) + gemm.gpu_s(gg, n_tokens) + gemm.gpu_s(cc, n_g),
                n_launches * LAUNCH_S,
            )
            for gemm in (Gemms((one,)) for one in of.gemms)
        )
        return BlockTimes(interpolate(of.around.gap, n_tokens), 0.0, of.gemms.cpu_s(cc, n_tokens - n_g), steps, 0.0)

    def _seconds(self, of: BlockType, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> float:
        times = self.block_times(of, cut, n_tokens, n_g)
        if self.streaming.prefetch == "ahead":
            return cycle_seconds([times], self.streaming)
        return times.gap_s + max(times.cpu_s, device_end(times.steps))


def device_end(steps: Sequence[Step]) -> float:
    """tau_G of Eq. 5."""
    launched = copied = computed = 0.0
    for step in steps:
        launched += step.launch_s
        copied = max(launched, copied) + step.copy_s
        computed = max(copied, computed) + step.gpu_s
    return computed


def streaming(settings: StreamSettings = PAPER, link: float = LINK[1], link_alpha: float = LINK[0]) -> PaperPricing:
    return PaperPricing(SliceRates(LinearFit(link_alpha, link, 1.0), NO_TRANSFER, 0.0), settings)


def ffn(model: PaperModel, betas: Betas, decode: bool = True) -> BlockType:
    """One layer's FFN, after its attention. Of experts, decode computes the used ones on the token, a prompt all of
    them, each on its share of the tokens."""
    share = 1.0 if decode else model.n_expert_used / model.n_expert
    n_experts = model.n_expert_used if decode else model.n_expert
    gemms = []
    for k, n in model.expert() * n_experts:
        mul_mat, n_bytes = MulMat("MUL_MAT", "INT4", (k, n, 1)), round(k * n * betas.bytes_per_weight)
        cpu, gpu = (_kernel(line[0], beta * k * n * share) for line, beta in ((CPU, betas.cpu), (GPU, betas.gpu)))
        gemms.append(Gemm(mul_mat, n_bytes, cpu, gpu))
    n_bytes = round(sum(k * n for k, n in model.expert()) * model.n_expert * betas.bytes_per_weight)
    block = SplitBlock((), model.n_ff, 32, n_bytes, 0, 0, 0, 0, 0)
    gap = tuple((n_tokens, _attention_s(model, betas, n_tokens)) for n_tokens in (1, 1024))
    return BlockType(block, Gemms(gemms), around=Around(gap))


def alone(block: BlockType) -> BlockType:
    """The FFN without attention, as in section IV."""
    return replace(block, around=Around())


def _kernel(alpha_s: float, per_token_s: float) -> Kernel:
    """Eq. 3 for one weight: a straight line in the number of tokens, whose alpha is the same for any number of them."""
    return Kernel(_line(alpha_s, per_token_s), _line(alpha_s, 0.0))


def _line(at_none: float, per_token_s: float) -> Curve:
    return tuple((n, at_none + n * per_token_s) for n in (1, 1024))


def _attention_s(model: PaperModel, betas: Betas, n_tokens: int) -> float:
    """Its four mul-mats on the GPU, launched one by one. What grows with the context is left out."""
    steps = tuple(Step(0.0, GPU[0] + n_tokens * k * n * betas.gpu, LAUNCH_S) for k, n in model.attention())
    return device_end(steps)


def implied_cpu_beta(rate: float) -> float:
    """The CPU's beta for which r_CG* is `rate` on LLaMA-2-70B at T = 1, r_GG = 0: tau_G of Eq. 10 is n t_C."""
    work = LLAMA.n_embd * LLAMA.n_ff
    tau_g = 2 * LAUNCH_S + 3 * (LINK[0] + rate * work * BYTES_PER_WEIGHT * LINK[1]) + GPU[0] + rate * work * GPU[1]
    return (tau_g / 3 - CPU[0]) / ((1 - rate) * work)
