"""A placement and its way of attention, chosen together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oallama.core.errors import DoesNotFit
from oallama.core.types import CPU_DEVICE, ModelInfo, Profile, Workload
from oallama.cost.attention import attention_choices, rest_total, scores_fit, usual_attention
from oallama.cost.passes import Pass, passes
from oallama.device.attention import AskedAttention, Attention
from oallama.device.load_params import PLAIN_V_TYPES, FlashAttention
from oallama.place.problem import Decision


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How attention is chosen for one model, given what the user asked for.

    attend, below: forward passes that attention is chosen for; None: those of the workload.
    Raises UsageError where what was asked for is impossible.
    """

    model: ModelInfo
    asked: AskedAttention

    def __post_init__(self) -> None:
        self.with_way(self.stock)

    @property
    def stock(self) -> FlashAttention:
        """What stock llama.cpp would be told."""
        return self.asked.flash_attn or "auto"

    def with_way(self, flash_attn: FlashAttention) -> Attention:
        """With the KV cache that was asked for, F16 where none was."""
        return self.asked.over(Attention(flash_attn, "f16", "f16"))

    def decide(
        self,
        decided: Callable[[FlashAttention], Decision],
        profile: Profile,
        load: Workload,
        attend: Sequence[Pass] | None = None,
    ) -> tuple[Decision, FlashAttention]:
        """The decision with the least predicted time of the workload, and its way of attention; of equal ones the
        first. decided: decides for one way. Raises DoesNotFit where it is raised for every way."""
        ways = self._ways(profile, load, attend)
        if len(ways) == 1:
            return decided(ways[0]), ways[0]
        made: list[tuple[Decision, FlashAttention]] = []
        refused: list[DoesNotFit] = []
        for way in ways:
            try:
                made.append((decided(way), way))
            except DoesNotFit as error:
                refused.append(error)
        if not made:
            raise refused[0]
        return min(made, key=lambda one: self._seconds(one[0], one[1], profile, attend))

    def on_cpu_unmeasured(
        self, load: Workload, known: Callable[[], Profile | None], attend: Sequence[Pass] | None = None
    ) -> FlashAttention:
        """The way on the CPU alone where nothing is to be measured. known: a profile, if there happens to be one."""
        if self.asked.flash_attn is not None:
            return self.asked.flash_attn
        if not self._plain_allowed(load):
            return "on"
        profile, over = known(), _passes(load, attend)
        ways = attention_choices(replace(profile, device=CPU_DEVICE), over) if profile else ()
        return ways[0] if ways else usual_attention(over)

    def _ways(self, profile: Profile, load: Workload, attend: Sequence[Pass] | None) -> tuple[FlashAttention, ...]:
        if self.asked.flash_attn is not None:
            return (self.asked.flash_attn,)
        return attention_choices(profile, _passes(load, attend), self._plain_allowed(load)) or ("auto",)

    def _plain_allowed(self, load: Workload) -> bool:
        return self.with_way("auto").type_v.lower() in PLAIN_V_TYPES and scores_fit(self.model, load)

    def _seconds(
        self, decision: Decision, way: FlashAttention, profile: Profile, attend: Sequence[Pass] | None
    ) -> float:
        """Predicted seconds of the workload, with attention over `attend` in place of the workload's own."""
        total = decision.predicted.total_s
        if attend is None:
            return total
        n_layer = self.model.n_layer
        on_device = max(0, n_layer - decision.placed.first_device_layer)
        layers, own = (n_layer - on_device, on_device), passes(decision.workload, "mixed")
        return total + rest_total(profile, way, layers, attend) - rest_total(profile, way, layers, own)


def _passes(load: Workload, attend: Sequence[Pass] | None) -> Sequence[Pass]:
    return passes(load, "mixed") if attend is None else attend
