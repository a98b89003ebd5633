"""What a user may ask of a placed model: read from text, checked, and put before what a plan says."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from oallama.core.codec import from_json
from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.core.types import Attention
from oallama.core.units import parse_bytes, parse_memory
from oallama.device.load_params import LoadSettings


def test_sizes_and_shares_may_be_text_and_none_asks_for_nothing() -> None:
    asked = Options.given(device="CUDA0", vram="6GiB", gpu_weights="50%", threads=None, flash_attn=None)
    assert asked == Options(device="CUDA0", vram=6 << 30, gpu_weights=0.5)
    assert Options.given(vram=123, gpu_weights=0.25) == Options(vram=123, gpu_weights=0.25)


def test_a_size_without_a_unit_is_not_taken_for_bytes() -> None:
    for text in ("0", "1048576", "12B", "12KiB", "6442450944"):
        assert parse_memory(text) == parse_bytes(text)
    for text in ("12", " 6 ", "1.5"):
        with pytest.raises(ValueError, match=f"write the unit, for example {text.strip()}GiB"):
            parse_memory(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"vram": "12"}, "--vram: '12' is 12 bytes; write the unit, for example 12GiB"),
        ({"vram_fill": 0.0}, "--vram-fill is 0; give a share above 0 and up to 1"),
        ({"gpu_weights": 1.5}, "--gpu-weights is 1.5; give a share from 0 to 1"),
        ({"vram": -1}, "--vram is negative"),
        ({"vram": "much"}, "--vram: "),
        ({"gpu_weights": "half"}, "--gpu-weights: "),
        ({"type_k": "q3"}, "'q3' is no KV cache type; choose one of f32, f16"),
        ({"flash_attn": "maybe"}, "-fa is 'maybe'"),
        ({"type_v": "Q8_0", "flash_attn": "off"}, "a V cache of type q8_0 needs flash attention"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_sentence(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Options.given(**asked)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_attention_is_what_was_asked_for_then_what_was_planned() -> None:
    planned = Attention(flash_attn="off", type_k="q8_0", type_v="f16")
    assert Options().attention() == Attention(flash_attn="auto", type_k="f16", type_v="f16")
    assert Options().attention(planned) == planned
    assert Options(flash_attn="on", type_v="Q8_0").attention(planned) == Attention(
        flash_attn="on", type_k="q8_0", type_v="q8_0"
    )
    assert Options(type_v="q8_0").attention(planned) == Attention(
        flash_attn="on", type_k="q8_0", type_v="q8_0"
    )  # which off does not go with


def test_what_a_load_gets_survives_the_way_to_a_child() -> None:
    settings = LoadSettings("model.gguf", "CUDA0", host_patterns=(("a.*", None), ("b", "CPU")), n_gpu_layers=3)
    assert from_json(LoadSettings, json.loads(json.dumps(asdict(settings))), "the load") == settings
