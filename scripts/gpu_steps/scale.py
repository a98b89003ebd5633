"""Scale of a run: the same steps on a card, and on a machine that only plays one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.models import Shape


@dataclass(frozen=True)
class TokenCounts:
    n_prompt: int
    n_gen: int


@dataclass(frozen=True)
class Scale:
    """What is measured. seconds: factor on the steps' estimates, which are for the largest cards."""

    name: str
    oato_f16: Shape
    oato_q4: Shape
    llama70b: Shape
    mixtral: Shape
    oato: TokenCounts
    scheinfer: TokenCounts
    ubatch: TokenCounts  # whose prompt is longer than one micro-batch
    repetitions: int
    threads: tuple[int, ...]
    profile_tokens: tuple[int, ...]
    types: tuple[str, ...]  # whose correctness comes first
    other_types: tuple[str, ...]
    memory_caps: tuple[int, ...]  # bytes of device memory under which all arms are compared
    overlap_bytes: int
    overlap_tokens: int
    ffn: tuple[int, int]  # K and N of the gate whose slices are timed
    seconds: float
    caps: bool = True
    """Whether the papers' caps are applied, and all are scaled to the layers; else a share of the weights stands in."""


QUANTISED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0",
)  # fmt: skip
ALL_TYPES = ("F32", "F16", "BF16", *QUANTISED)
COMMON_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")
GIB = 1 << 30

LEASE = Scale(
    name="lease",
    oato_f16=Shape("llama3-8b", "F16", 12),
    oato_q4=Shape("llama3-8b", "Q4_0", 32),
    llama70b=Shape("llama2-70b", "Q4_0", 8),
    mixtral=Shape("mixtral-8x7b", "Q4_0", 8),
    oato=TokenCounts(64, 32),
    scheinfer=TokenCounts(1024, 128),
    ubatch=TokenCounts(2048, 32),
    repetitions=6,
    threads=(4, 8, 16),
    profile_tokens=(1, 32, 512),
    types=COMMON_TYPES,
    other_types=tuple(name for name in ALL_TYPES if name not in COMMON_TYPES),
    memory_caps=(3 * GIB, 6 * GIB, 12 * GIB),
    overlap_bytes=256 << 20,
    overlap_tokens=512,
    ffn=(4096, 14336),
    seconds=1.0,
)
FULL = replace(
    LEASE,
    name="full",
    oato_f16=Shape("llama3-8b", "F16", 32),
    llama70b=Shape("llama2-70b", "Q4_0", 80),
    mixtral=Shape("mixtral-8x7b", "Q4_0", 32),
    repetitions=10,
    overlap_bytes=1 << 30,
    seconds=4.0,
)
SMALL = replace(
    LEASE,
    name="small",
    oato_f16=Shape("llama-mini", "F16", 4),
    oato_q4=Shape("llama-mini", "Q4_0", 4),
    llama70b=Shape("llama-mini", "Q4_0", 8),
    mixtral=Shape("moe-mini", "Q4_0", 4),
    oato=TokenCounts(16, 8),
    scheinfer=TokenCounts(32, 8),
    ubatch=TokenCounts(1024, 4),
    threads=(1, 2),
    types=("F32", "F16", "Q4_0", "Q4_K", "Q8_0"),
    other_types=(),
    memory_caps=(16 << 20,),
    overlap_bytes=8 << 20,
    overlap_tokens=16,
    ffn=(768, 2048),
    caps=False,
)
SCALES = {scale.name: scale for scale in (LEASE, FULL, SMALL)}
