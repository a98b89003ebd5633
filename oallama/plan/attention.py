"""KV cache and attention of a plan: part of what it was made for, so that whatever runs it uses the same.

A plan's JSON has them as `"attention": {"flash_attn", "type_k", "type_v"}`; plans written before 2026-11-21 have not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, cast

from oallama.core.errors import PlanError
from oallama.core.types import PlanRecord
from oallama.device.attention import Attention
from oallama.device.load_params import CACHE_TYPES, FLASH_ATTENTION, FlashAttention

KEY = "attention"


def attention_of(record: PlanRecord) -> Attention | None:
    """What the plan says; None for a plan that says nothing. Raises PlanError where it cannot be read."""
    said: Any = record.extra.get(KEY)
    if said is None:
        return None

    def choice(name: str, known: Iterable[str]) -> str:
        value = said.get(name) if isinstance(said, dict) else None
        if isinstance(value, str) and value in known:
            return value
        raise PlanError(
            f"the plan's {KEY}.{name} is {value!r}, but one of {', '.join(known)} is needed; make a new plan"
        )

    flash_attn = cast("FlashAttention", choice("flash_attn", FLASH_ATTENTION))
    return Attention(flash_attn, choice("type_k", CACHE_TYPES), choice("type_v", CACHE_TYPES))


def with_attention_of(record: PlanRecord, attention: Attention) -> PlanRecord:
    """The record, saying so."""
    return replace(record, extra={**record.extra, KEY: asdict(attention)})


def attention_arguments(record: PlanRecord) -> list[str]:
    """-fa, -ctk and -ctv of stock llama.cpp for the plan; nothing of a plan that says nothing."""
    said = attention_of(record)
    if said is None:
        return []
    kv = [("-ctk", said.type_k), ("-ctv", said.type_v)]
    return ["-fa", said.flash_attn, *(word for flag, name in kv if name != "f16" for word in (flag, name))]
