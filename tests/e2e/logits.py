"""What logits are compared with: stock llama.cpp's of the same tokens, and bounds of their error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from e2e.placed import Placed
from llama_cpp import Llama

from oallama.core.options import Options
from oallama.core.types import Operator
from oallama.run.engine import Engine

Logits = npt.NDArray[np.float32]

ARCHITECTURES = (
    "llama", "llama-tied", "llama-moe", "qwen2", "qwen3", "qwen3moe", "gemma2", "phi3", "minicpm3", "gpt2",
)  # fmt: skip

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 300, 150)]
N_UBATCH = 64  # of placed(): three micro-batches, the last one cut

EXACT_NMSE = 1e-6
"""F16 and F32 weights: both sides multiply the same numbers and differ in the order of sums only."""

QUANTISED_NMSE = 1e-3
"""Quantised weights: ggml also quantises the activations before the mul-mat (Q8_0, Q8_K). A difference in the last bit
of an activation can move it to the next of 127 steps, up to half a step (0.4 % of the block's largest value) in single
values; so two right computations differ by up to about (0.004)^2 times the share of values that moved, per
layer. Repacked kernels on our side and plain ones on the worker's sum in another order, which is what moves them."""


def engine_of(case: Placed, **options: Any) -> Engine:
    names = {"operators": case.operators, "tensor_names": case.tensor_names}
    asked = {name: options.pop(name) for name in ("device", "flash_attn", "n_ubatch") if name in options}
    more = {"probed": True, "progress": False} | names | options
    return Engine(case.model, case.plan, Options(threads=1, **asked), **more)


def stock_logits(path: str | Path, tokens: list[int], flash_attn: bool = True, **options: Any) -> Logits:
    """What stock llama-cpp-python says, with its own defaults but for the threads and `options`."""
    settings: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | options
    llama = Llama(str(path), logits_all=True, flash_attn=flash_attn, **settings)
    try:
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)])
    finally:
        llama.close()


def nmse(found: Logits, wanted: Logits) -> float:
    """Mean squared error over mean square, as test-backend-ops computes it."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(((a - b) ** 2).sum() / (b**2).sum())


def attention(op: Operator) -> bool:
    return op.role.startswith("attn")


def movable(operator: Operator) -> bool:
    """Tied embeddings are read whole by another operation too."""
    return operator.name != "token_embd.weight"
