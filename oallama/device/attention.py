"""KV cache and attention of a llama_context: what was asked for, and what holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from oallama.core.errors import UsageError
from oallama.device.load_params import PLAIN_V_TYPES, FlashAttention


@dataclass(frozen=True, slots=True)
class Attention:
    """How a context is made. flash_attn "auto": llama.cpp decides, which turns it on where every device has it."""

    flash_attn: FlashAttention
    type_k: str  # as llama.cpp's -ctk names it
    type_v: str


@dataclass(frozen=True, slots=True)
class AskedAttention:
    """What the user said; None: nothing."""

    flash_attn: FlashAttention | None
    type_k: str | None
    type_v: str | None

    def over(self, said: Attention) -> Attention:
        """What was asked for, `said` where nothing was. Raises UsageError for a quantised V cache and -fa off."""
        told = {name: value.lower() for name, value in asdict(self).items() if value is not None}
        both = replace(said, **told)
        if both.flash_attn == "off" and both.type_v.lower() not in PLAIN_V_TYPES:
            if self.flash_attn == "off":
                raise UsageError(
                    f"a V cache of type {both.type_v} needs flash attention; leave out -fa off, or choose one of "
                    f"{', '.join(PLAIN_V_TYPES)} with -ctv"
                )
            return replace(both, flash_attn="on")
        return both
