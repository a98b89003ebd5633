"""What a tiny model of each architecture consists of.

Widths are multiples of 256 wherever llama.cpp allows it, so that every block type fits.
"""

from __future__ import annotations

from collections.abc import Callable

from gguf_factory import llama_family as llama
from gguf_factory import other_families as other
from gguf_factory.parts import Model, Sizes

ARCHITECTURES: dict[str, Callable[[Sizes], Model]] = {
    "llama": lambda z: llama.llama_like("llama", z),
    "llama-tied": lambda z: llama.llama_like("llama", z, tied=True),
    "llama-moe": lambda z: llama.llama_moe("llama", z),
    "llama-fused": lambda z: llama.llama_like("llama", z, fused=True),
    "qwen2": lambda z: llama.llama_like("qwen2", z, bias=True),
    "qwen3": lambda z: llama.llama_like("qwen3", z, qk_norm=True),
    "qwen3moe": lambda z: llama.llama_moe("qwen3moe", z, qk_norm=True),
    "qwen2moe": llama.qwen2moe,
    "gemma2": lambda z: llama.gemma("gemma2", z),
    "gemma3": lambda z: llama.gemma("gemma3", z, qk_norm=True),
    "phi3": llama.phi3,
    "minicpm3": llama.minicpm3,
    "gpt2": lambda z: other.gpt2_like("gpt2", z, positions=True),
    "deepseek2": lambda z: llama.deepseek2(z),
    "deepseek2-fused": lambda z: llama.deepseek2(z, fused=True),
    "granitemoe": llama.granitemoe,
    "glm4": llama.glm4,
    "gptneox": other.gptneox,
    "bloom": lambda z: other.gpt2_like("bloom", z, embd_norm=True),
    "falcon": other.falcon,
    "starcoder2": other.starcoder2,
    "phi2": other.phi2,
    "command-r": other.command_r,
    "olmo2": other.olmo2,
    "gpt-oss": other.gpt_oss,
    "lfm2": other.lfm2,
    "mamba2": other.mamba2,
    "t5": other.t5,
}
