"""The paper's testbed A as the solver's records: its two models' blocks with the times of Table I."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oallama.core.types import LinearFit
from oallama.cost.blocks import SplitBlock
from oallama.cost.operator_cost import Curve
from oallama.cost.slice_times import Gemm, StreamedBlock, StreamRates, paper_times
from oallama.cost.timeline import PAPER, BlockTimes, Prefetch, Step, timeline
from oallama.cost.transfer import NO_TRANSFER
from oallama.place.slicing import Streaming
from oallama.profile.cases import Signature
from scheinfer.published import BYTES_PER_WEIGHT, CPU, GPU, LAUNCH_S, LINK


@dataclass(frozen=True)
class Model:
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

    def other_bytes(self) -> float:
        """Of attention, embedding and output, which lie on the GPU."""
        weights = self.n_layer * sum(k * n for k, n in self.attention()) + 2 * self.n_vocab * self.n_embd
        return weights * BYTES_PER_WEIGHT


LLAMA = Model("LLaMA-2-70B", 80, 8192, 28672, 1024, 32000)
MIXTRAL = Model("Mixtral-7B", 32, 4096, 14336, 1024, 32000, 8, 2)


@dataclass(frozen=True)
class Betas:
    """The terms of Table I that are varied, in seconds per T*M*H and per byte."""

    cpu: float = CPU[1]
    gpu: float = GPU[1]
    bytes_per_weight: float = BYTES_PER_WEIGHT
    link: float = LINK[1]


def streaming(prefetch: Prefetch = PAPER, link: float = LINK[1], link_alpha: float = LINK[0]) -> Streaming:
    rates = StreamRates(LinearFit(link_alpha, link, 1.0), NO_TRANSFER, 0.0, LAUNCH_S)
    return Streaming(rates, prefetch, None, paper_times)


def ffn(model: Model, betas: Betas, decode: bool = True) -> StreamedBlock:
    """One layer's FFN, after its attention. Of experts, decode computes the used ones on the token, a prompt all of
    them, each on its share of the tokens."""
    share = 1.0 if decode else model.n_expert_used / model.n_expert
    n_experts = model.n_expert_used if decode else model.n_expert
    gemms = []
    for k, n in model.expert() * n_experts:
        signature = Signature("MUL_MAT", "INT4", (k, n, 1), 1, round(k * n * betas.bytes_per_weight))
        cpu, gpu = _curve(CPU[0], betas.cpu * k * n * share), _curve(GPU[0], betas.gpu * k * n * share)
        gemms.append(Gemm(signature, cpu, ((1, CPU[0]),), gpu, ((1, GPU[0]),)))
    n_bytes = round(sum(k * n for k, n in model.expert()) * model.n_expert * betas.bytes_per_weight)
    block = SplitBlock((), model.n_ff, 32, n_bytes, 0, 0, 0, 0, 0)
    gap = tuple((n_tokens, _attention_s(model, betas, n_tokens)) for n_tokens in (1, 1024))
    return StreamedBlock(block, tuple(gemms), gap=gap)


def alone(block: StreamedBlock) -> StreamedBlock:
    """The FFN without attention, as in section IV."""
    return replace(block, gap=((1, 0.0),))


def _curve(alpha_s: float, per_token_s: float) -> Curve:
    """Eq. 3 for one weight: a straight line in the number of tokens."""
    return tuple((n, alpha_s + n * per_token_s) for n in (1, 1024))


def _attention_s(model: Model, betas: Betas, n_tokens: int) -> float:
    """Its four mul-mats on the GPU, launched one by one. What grows with the context is left out."""
    steps = tuple(Step(0.0, GPU[0] + n_tokens * k * n * betas.gpu, LAUNCH_S) for k, n in model.attention())
    return timeline([BlockTimes(0.0, 0.0, 0.0, steps, 0.0)], PAPER).end_s
