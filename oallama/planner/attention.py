"""Flash attention on or off, chosen together with the placement by predicted time. Pure.

Stock llama.cpp turns flash attention on wherever a device has it. On the CPU that gains for prompts and costs beyond
some hundreds of tokens of context when generating (docs/decisions.md), so that no fixed choice is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oallama.core.options import PLAIN_V_TYPES, Options
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, Attention, FlashAttention, ModelInfo, Workload
from oallama.core.units import MIB
from oallama.cost.kernels import index_non_matmul, non_matmul_of, non_matmul_seconds
from oallama.cost.passes import Pass
from oallama.cost.passes import passes as workload_passes
from oallama.planner.placement import VerifiedPlan
from oallama.planner.policies.registry import Request
from oallama.planner.problem import Problem
from oallama.profile.wanted import in_steps

SCORES_SHARE, SCORES_BYTES = 0.5, 256 * MIB
"""Without flash attention a compute buffer holds the scores of a micro-batch against the whole context. It may take
this share of the model file, or so many bytes where that is more."""


def with_attention(profile: Profile, flash_attn: FlashAttention) -> Profile:
    """The profile with the non-matmul cases of one mode only ("auto": all of them). A device without cases of
    that mode keeps the others."""
    if flash_attn == "auto":
        return profile
    wanted = flash_attn == "on"
    has_it = {case.device for case in profile.rest if case.shape.flash_attn == wanted}
    kept = tuple(case for case in profile.rest if case.shape.flash_attn == wanted or case.device not in has_it)
    return replace(profile, rest=kept)


def attention_seconds(
    profile: Profile, flash_attn: FlashAttention, device: str, passes: Sequence[Pass]
) -> float | None:
    """Seconds of one layer beside its operators over these passes; None if the profile has not timed that way."""
    known = any(case.device == device and case.shape.flash_attn == (flash_attn == "on") for case in profile.rest)
    return non_matmul_seconds(index_non_matmul(with_attention(profile, flash_attn)), device, passes) if known else None


def attention_choices(
    profile: Profile, passes: Sequence[Pass], plain_allowed: bool = True
) -> tuple[FlashAttention, ...]:
    """The ways that are worth planning with: one where the CPU and the device agree on the faster over these passes,
    else both, the device's first: which is better then depends on how many layers each has. A way that one of them
    lacks is left out. Empty: the profile does not tell.

    plain_allowed: whether attention may go without flash attention at all (type of the V cache, memory).
    """
    faster: list[FlashAttention] = []
    lacking: set[FlashAttention] = set() if plain_allowed else {"off"}
    for device in dict.fromkeys((profile.device, CPU_DEVICE)):
        flash, plain = (attention_seconds(profile, mode, device, passes) for mode in ("on", "off"))
        if flash is None and plain is None:
            continue
        if flash is None:
            lacking.add("on")
        if plain is None:
            lacking.add("off")
        faster.append("on" if plain is None or (flash is not None and flash <= plain) else "off")
    modes: list[FlashAttention] = [mode for mode in dict.fromkeys(faster) if mode not in lacking]
    if faster and not modes:
        modes = [mode for mode in _MODES if mode not in lacking]
    return tuple(modes)


_MODES: tuple[FlashAttention, ...] = ("on", "off")


def non_matmul_total(
    profile: Profile, flash_attn: FlashAttention, layers: tuple[int, int], passes: Sequence[Pass]
) -> float:
    """Seconds of all layers beside their operators. layers: how many are on the CPU, how many on the device."""
    on_cpu, on_device = non_matmul_of(index_non_matmul(with_attention(profile, flash_attn)), profile.device, passes)
    return layers[0] * on_cpu + layers[1] * on_device


def usual_attention(passes: Sequence[Pass]) -> FlashAttention:
    """The way on the CPU where nothing was measured: by the times that attention usually takes (TOKEN_UNITS).

    With flash attention a token costs as much as it sees, without it as much as it is shown, which is the cache in
    steps of KV_STEP positions with those to come among them, only that each position costs less.
    """
    with_it = without = 0.0
    for p in passes:
        sees = p.n_kv - (p.n_tokens - 1) / 2
        flash, plain = next(costs for least, *costs in TOKEN_UNITS if p.n_tokens >= least)
        with_it += p.count * p.n_tokens * sees * flash
        without += p.count * p.n_tokens * in_steps(p.n_kv) * plain
    return "on" if with_it <= without else "off"


TOKEN_UNITS = ((64, 1.0, 0.8), (2, 2.5, 0.65), (1, 1.0, 0.6))
"""(least batch, with flash attention, without): time of one position for one token, in that of flash attention in
decode. Rounded from the profile's own cases, on a CPU with AVX-512 and for heads of
32, 64 and 128 (docs/benchmarks.md): in batches below 64 ggml's CPU flash attention works row by row."""


def scores_fit(model: ModelInfo, workload: Workload) -> bool:
    """Whether the scores' buffer is small enough (F32, n_ctx positions for each head and token of a micro-batch)."""
    n_bytes = 4 * workload.n_ctx * workload.largest_batch * model.n_head
    return n_bytes <= max(SCORES_BYTES, SCORES_SHARE * model.file_bytes)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How attention is chosen for one model, given what the user asked for.

    passes, below: forward passes that attention is chosen for; None: those of the workload.
    """

    model: ModelInfo
    asked: Options

    def attention(self, flash_attn: FlashAttention) -> Attention:
        """Attention with the KV cache that was asked for, F16 where none was."""
        return self.asked.attention(Attention(flash_attn))

    def unmeasured_on_cpu(
        self, workload: Workload, known: Callable[[], Profile | None], passes: Sequence[Pass] | None = None
    ) -> FlashAttention:
        """The way on the CPU alone where nothing is to be measured. known: a profile, if there happens to be one."""
        if self.asked.flash_attn != "auto":
            return self.asked.flash_attn
        if not self._plain_allowed(workload):
            return "on"
        profile, passes = known(), _passes(workload, passes)
        modes = attention_choices(replace(profile, device=CPU_DEVICE), passes) if profile else ()
        return modes[0] if modes else usual_attention(passes)

    def modes(
        self, profile: Profile, workload: Workload, passes: Sequence[Pass] | None = None
    ) -> tuple[FlashAttention, ...]:
        """Settings of flash attention that are compared."""
        if self.asked.flash_attn != "auto":
            return (self.asked.flash_attn,)
        return attention_choices(profile, _passes(workload, passes), self._plain_allowed(workload)) or ("auto",)

    def allows(self, flash_attn: FlashAttention, workload: Workload) -> bool:
        """Whether attention may have this workload's micro-batch: without flash attention the buffer of its scores must
        stay small."""
        return flash_attn != "off" or scores_fit(self.model, workload)

    def _plain_allowed(self, workload: Workload) -> bool:
        return self.attention("auto").type_v in PLAIN_V_TYPES and scores_fit(self.model, workload)


@dataclass(frozen=True, slots=True)
class Problems:
    """The planning problems of a model on a device, by attention mode. profile: of all modes."""

    rule: AttentionRule
    profile: Profile
    of: Callable[[FlashAttention], Problem]

    def worth_planning(self, request: Request) -> list[Problem]:
        """One for each attention mode that may be the fastest for a request."""
        asked, own = self.rule.asked.flash_attn, request.policy.attention if request.policy else None
        modes = self.rule.modes(self.profile, request.workload, request.passes)
        if own is not None:
            modes = (own if asked == "auto" else asked,)
        return [self.of(mode).of_step(request.workload.step) for mode in modes]


def seconds_over(problem: Problem, decision: VerifiedPlan, passes: Sequence[Pass] | None) -> float:
    """Predicted seconds of the workload, with attention over `passes` in place of the workload's own."""
    total = decision.predicted.total_s
    if passes is None:
        return total
    n_layer, mode = problem.graph.n_layer, problem.flash_attn
    on_device = max(0, n_layer - decision.placement.first_device_layer)
    layers, planned = (n_layer - on_device, on_device), workload_passes(decision.workload, "mixed")
    return (
        total
        + non_matmul_total(problem.profile, mode, layers, passes)
        - non_matmul_total(problem.profile, mode, layers, planned)
    )


def _passes(workload: Workload, passes: Sequence[Pass] | None) -> Sequence[Pass]:
    return workload_passes(workload, "mixed") if passes is None else passes
