"""Flash attention on or off, chosen together with the placement by predicted time. Pure.

Stock llama.cpp turns flash attention on if a device supports it. On the CPU that is faster for prompts, and slower for
decode beyond some hundreds of tokens of context (docs/decisions.md), so no fixed choice is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from oallama.core.options import PLAIN_V_TYPES, Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import CPU_DEVICE, Attention, FlashAttention, ModelInfo, Operator, Phase, Workload
from oallama.core.units import MIB
from oallama.cost.graph import Graph
from oallama.cost.kernels import index_non_matmul, non_matmul_seconds
from oallama.cost.passes import Pass
from oallama.cost.passes import passes as workload_passes
from oallama.planner.policies.registry import Request
from oallama.planner.problem import NoAllocLoad, Problem
from oallama.profile.wanted import in_steps

SCORES_SHARE, SCORES_BYTES = 0.5, 256 * MIB
"""Without flash attention a compute buffer holds the scores of a micro-batch against the whole context. It may take
this share of the model file's bytes, or SCORES_BYTES if that is more."""


_MODES: tuple[FlashAttention, ...] = ("on", "off")


def with_attention(profile: Profile, flash_attn: FlashAttention) -> Profile:
    """The profile with non-matmul cases of one mode only ("auto": of all). A device without cases of that mode keeps
    the others."""
    if flash_attn == "auto":
        return profile
    is_on = flash_attn == "on"
    has_mode = {case.device for case in profile.rest if case.shape.flash_attn == is_on}
    cases = tuple(case for case in profile.rest if case.shape.flash_attn == is_on or case.device not in has_mode)
    return replace(profile, rest=cases)


def attention_seconds(
    profile: Profile, flash_attn: FlashAttention, device: str, passes: Sequence[Pass]
) -> float | None:
    """Seconds of one layer's non-matmul work over these passes; None if the profile has no cases of that mode."""
    is_measured = any(case.device == device and case.shape.flash_attn == (flash_attn == "on") for case in profile.rest)
    return (
        non_matmul_seconds(index_non_matmul(with_attention(profile, flash_attn)), device, passes)
        if is_measured
        else None
    )


def attention_choices(
    profile: Profile, passes: Sequence[Pass], plain_allowed: bool = True
) -> tuple[FlashAttention, ...]:
    """The modes worth planning with. One, if it is the faster one over these passes on both CPU and device; else both,
    the device's faster one first, as the better one then depends on the number of layers of each. Modes that CPU or
    device lacks are left out. Empty: the profile has no attention timings.

    plain_allowed: whether flash attention may be off (type of the V cache, memory).
    """
    faster: list[FlashAttention] = []
    possible: list[FlashAttention] = ["on", "off"] if plain_allowed else ["on"]
    for device in dict.fromkeys((profile.device, CPU_DEVICE)):
        timed = {mode: attention_seconds(profile, mode, device, passes) for mode in _MODES}
        seconds = {mode: s for mode, s in timed.items() if s is not None}
        if seconds:
            faster.append(min(seconds, key=seconds.__getitem__))
            possible = [mode for mode in possible if mode in seconds]
    modes = [mode for mode in dict.fromkeys(faster) if mode in possible]
    return tuple(modes or (possible if faster else ()))


def usual_attention(passes: Sequence[Pass]) -> FlashAttention:
    """The faster mode on the CPU without a profile, by typical times (TOKEN_UNITS).

    With flash attention a token's time depends on the positions that it sees; without it on the whole cache in steps of
    KV_STEP positions, later ones included, but each position takes less time.
    """
    flash_s = plain_s = 0.0
    for p in passes:
        sees = p.n_kv - (p.n_tokens - 1) / 2
        flash, plain = next(costs for least, *costs in TOKEN_UNITS if p.n_tokens >= least)
        flash_s += p.count * p.n_tokens * sees * flash
        plain_s += p.count * p.n_tokens * in_steps(p.n_kv) * plain
    return "on" if flash_s <= plain_s else "off"


TOKEN_UNITS = ((64, 1.0, 0.8), (2, 2.5, 0.65), (1, 1.0, 0.6))
"""(least batch, with flash attention, without): time of one position for one token, relative to flash attention in
decode. Rounded from profiles of a CPU with AVX-512 and heads of 32, 64 and 128 (docs/benchmarks.md): in batches below
64 ggml's CPU flash attention works row by row."""


def scores_fit(model: ModelInfo, workload: Workload) -> bool:
    """Whether the buffer of scores is small enough (F32, n_ctx positions for each head and token of a micro-batch)."""
    n_bytes = 4 * workload.n_ctx * workload.largest_batch * model.n_head
    return n_bytes <= max(SCORES_BYTES, SCORES_SHARE * model.file_bytes)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How attention is chosen for a model under the user's options."""

    model: ModelInfo
    options: Options

    def attention(self, flash_attn: FlashAttention) -> Attention:
        """Attention in this mode, with the requested types of the KV cache (default F16)."""
        return self.options.attention(Attention(flash_attn))

    def unmeasured_on_cpu(self, workload: Workload, known: Callable[[], Profile | None]) -> FlashAttention:
        """The mode on the CPU alone without new measurements. known: returns a profile if one exists."""
        if self.options.flash_attn != "auto":
            return self.options.flash_attn
        if not self._plain_allowed(workload):
            return "on"
        profile, passes = known(), workload_passes(workload, "mixed")
        modes = attention_choices(replace(profile, device=CPU_DEVICE), passes) if profile else ()
        return modes[0] if modes else usual_attention(passes)

    def modes(self, profile: Profile, workload: Workload, phase: Phase = "mixed") -> tuple[FlashAttention, ...]:
        """The modes to compare for a phase."""
        if self.options.flash_attn != "auto":
            return (self.options.flash_attn,)
        passes = workload_passes(workload, phase)
        return attention_choices(profile, passes, self._plain_allowed(workload)) or ("auto",)

    def allows(self, flash_attn: FlashAttention, workload: Workload) -> bool:
        """Whether this workload's micro-batch is possible: without flash attention its buffer of scores must be small
        enough."""
        return flash_attn != "off" or scores_fit(self.model, workload)

    def _plain_allowed(self, workload: Workload) -> bool:
        return self.attention("auto").type_v in PLAIN_V_TYPES and scores_fit(self.model, workload)


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """A model as the header of its GGUF describes it. operators: in graph order."""

    model: ModelInfo
    operators: tuple[Operator, ...]
    graph: Graph


def problem_of(
    header: ModelHeader,
    options: Options,
    profile: Profile,
    flash_attn: FlashAttention,
    no_alloc_load: NoAllocLoad,
    host_copies_limit: int,
    routing: Routing | None,
) -> Problem:
    """The problem for one attention mode. no_alloc_load: with that attention."""
    return Problem(
        header.operators,
        header.graph,
        with_attention(profile, flash_attn),
        no_alloc_load,
        options.vram,
        options.vram_fill,
        options.gpu_weights,
        host_copies_limit,
        routing,
        flash_attn=flash_attn,
        allows=partial(AttentionRule(header.model, options).allows, flash_attn),
    )


@dataclass(frozen=True, slots=True)
class Problems:
    """The planning problems of a model on a device, by attention mode. profile: with the cases of all modes."""

    rule: AttentionRule
    profile: Profile
    of: Callable[[FlashAttention], Problem]

    def worth_planning(self, request: Request) -> list[Problem]:
        """The problems of the attention modes that may be the fastest for a request."""
        modes = self.rule.modes(self.profile, request.workload, request.phase)
        if self.rule.options.flash_attn == "auto" and request.policy and request.policy.attention:
            modes = (request.policy.attention,)
        return [self.of(mode).of_step(request.workload.step) for mode in modes]
