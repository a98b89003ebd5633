"""Compares logits with stock llama.cpp's of the same tokens, and bounds their error.

The bounds are for NMSE. F16 and F32 weights: both sides multiply the same numbers and differ in the order of sums only.
But the plain kernel for F16 rounds the activations to F16, and AMX's does not: logits differ by 2e-7 to 2e-6, and with
experts by 1.6e-4, of which the median token has 1e-6. So the bound is what stock itself differs by.
Quantised weights: ggml quantises the activations as well (Q8_0 in blocks of 32, Q8_K in blocks of 256). A cut at block
boundaries leaves every block as it was, so a single mul-mat still differs in the order of its sums only. But a
difference in the last bit of its result can move an activation of the next mul-mat to another of 127 steps, up to 0.4 %
of its block's largest value; and in a model of experts it can send a token to another expert. Over Q4_0, Q4_K, Q6_K and
Q8_0, four seeds each, the worst was 6e-5 for dense architectures and 6e-4 with experts (qwen3moe). Two of llama.cpp's
own kernels for the same weights, plain and repacked, differ by up to 9e-5 and 4e-4 on these models. A wrong kernel, cut
or join gives 0.1 to 2.

A card multiplies F32 in TF32 or F16, and unpacks quantised weights where the CPU quantises the activations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from e2e.forced import N_CTX, N_UBATCH

import ggml_bridge
from oallama.core.types import CPU_DEVICE, FORCED_PLAIN_LAYOUT
from oallama.device.layouts import stock_layout, supports
from oallama.device.load_params import BuftOverride, load_bridge
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.plan.patterns import escape

llama_cpp = ggml_bridge.load().libraries.llama_cpp
Llama, api = llama_cpp.Llama, llama_cpp.llama_cpp

Logits = npt.NDArray[np.float32]

ARCHITECTURES = (
    "llama", "llama-tied", "llama-moe", "qwen2", "qwen3", "qwen3moe", "gemma2", "phi3", "minicpm3", "gpt2",
)  # fmt: skip

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 300, 150)]  # the last micro-batch is cut

EXACT_NMSE = 1e-6
QUANTISED_NMSE = 1e-3
FLOATS = ("F32", "F16")
BETWEEN_LAYOUTS = 4.0  # what is computed in parts, in stock's own differences between layouts


def stock_logits(
    path: str | Path, tokens: Sequence[int], flash_attn: bool = True, no_repack: bool = False, **options: Any
) -> Logits:
    """Logits of stock llama-cpp-python on the CPU, with its own defaults but for context, micro-batch, threads and
    `options`. op_offload is off: from 32 tokens on a card would multiply with weights that are in host memory, too.
    Weights for which its own layout would be wrong are plain; no_repack: all are."""
    settings: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_threads": 1, "n_threads_batch": 1} | options
    params, overrides = api.llama_model_default_params(), told_plain(path)
    no_devices = (ctypes.c_void_p * 1)(None)  # beside one with pinned memory weights would be there, and plain
    params.devices, params.use_extra_bufts = ctypes.cast(no_devices, ctypes.c_void_p), not no_repack
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "llama_model_default_params", lambda: params)
        llama = Llama(str(path), logits_all=True, flash_attn=flash_attn, op_offload=False, verbose=False, **settings)
    try:
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)])
    finally:
        llama.close()


def assert_greedy(answer: dict[str, Any], path: str | Path, prompt: str, n_tokens: int) -> None:
    """llama-server's greedy answer is what stock computes on the CPU, and its log-probabilities are up to rounding:
    where weights are split, halves are summed in another order."""
    found = answer["completion_probabilities"]
    assert len(found) == n_tokens
    llama = Llama(str(path), vocab_only=True, verbose=False)
    tokens = [*llama.tokenize(prompt.encode()), *(each["id"] for each in found)]
    llama.close()
    for each, row in zip(found, stock_logits(path, tokens[:-1])[-n_tokens:], strict=True):
        wanted = row.astype(np.float64)
        assert each["id"] == wanted.argmax()
        assert each["logprob"] == pytest.approx(wanted.max() - np.logaddexp.reduce(wanted), abs=0.02)


def placed_logits(llama: Any, tokens: Sequence[int]) -> Logits:
    """Logits [n_tokens, n_vocab] of a Llama that Placer.llama made with logits_all, from an empty context."""
    llama.reset()
    llama.eval(tokens)
    return np.array(llama.scores[: len(tokens)])


def told_plain(path: str | Path) -> Any:
    """Overrides that keep weights plain for which stock's own layout would be wrong on this CPU."""
    bridge = load_bridge()
    wrong = [o for o in operators(read_gguf(path)) if not supports(bridge, stock_layout(bridge, o), o, o.shape)]
    overrides = (BuftOverride * (len(wrong) + 1))()
    for override, operator in zip(overrides, wrong, strict=False):
        override.pattern = f"^{escape(operator.name)}$".encode()
        override.buft = bridge.buft(CPU_DEVICE, FORCED_PLAIN_LAYOUT)
    return overrides


def assert_stock(
    found: Logits, path: str | Path, tokens: Sequence[int], floats: Sequence[str] = FLOATS, **options: Any
) -> None:
    """Logits are stock's of these tokens, as assert_alike compares them. options: of stock_logits."""
    assert_alike(found, stock_logits(path, tokens, **options), path, floats)


def assert_alike(found: Logits, wanted: Logits, path: str | Path, floats: Sequence[str] = FLOATS) -> None:
    """Two logits [..., n_tokens, n_vocab] of one model are the same up to rounding; where all weights are floats, up to
    how much stock differs from itself between the CPU's layouts, if it does. Then a last bit may send a token to
    another expert: of a model of experts the median token is compared."""
    all_operators = operators(read_gguf(path))
    error, bound = nmse(found, wanted), QUANTISED_NMSE
    if all(operator.type in floats for operator in all_operators):
        bound = EXACT_NMSE
        if error > bound and not np.array_equal(
            chosen := stock_logits(path, TOKENS), plain := stock_logits(path, TOKENS, no_repack=True)
        ):
            routed = any(operator.routed for operator in all_operators)
            compared = typical_nmse if routed else nmse
            error, bound = compared(found, wanted), max(bound, BETWEEN_LAYOUTS * compared(chosen, plain))
    assert error <= bound, f"an NMSE of {error:.1e}, and at most {bound:.1e} is rounding"


def nmse(found: Logits, wanted: Logits) -> float:
    """Mean squared error over mean square, as test-backend-ops computes it."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(((a - b) ** 2).sum() / (b**2).sum())


def typical_nmse(found: Logits, wanted: Logits) -> float:
    """The median of the errors of single tokens."""
    rows = zip(found.reshape(-1, found.shape[-1]), wanted.reshape(-1, wanted.shape[-1]), strict=True)
    return float(np.median([nmse(a, b) for a, b in rows]))
