"""Device bytes that instances of a back end take besides buffers: CUDA's pool and cuBLAS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

from oallama.core.types import Operator
from oallama.core.units import MIB
from oallama.cost.blocks import F32
from oallama.device.card import FLOAT_TYPES

RUNTIME_BYTES = {"CUDA": 48 * MIB, "ROCm": 48 * MIB}
"""Device bytes that an instance of a back end takes besides buffers and its pool, which no no_alloc load reports.
ggml-cuda: a cuBLAS workspace (4 MiB; 32 MiB from Hopper on: common.cuh, cublas_handle), and partial results of matrix
kernels and attention (mmq.cuh: 64 KiB per multiprocessor). Unknown for other back ends."""

CUBLAS_BYTES = 100 * MIB
"""Bytes of cuBLAS's kernels, loaded once per process: usually 70 to 100 MB."""

INTEGER_TYPES = frozenset(
    {"Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ2_XXS",
     "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "MXFP4", "NVFP4"}
)  # fmt: skip
"""Types that ggml-cuda multiplies with integer kernels in large batches (mmq.cu, ggml_cuda_should_use_mmq)."""

_VOLTA = re.compile(r"V100|GV100|TITAN V\b|Xavier")
_ROW_PADDING = 512  # elements of an activation
_Q8_1 = 36 / 32  # bytes per element
_F16 = 2


def runtime_bytes(
    backend: str, description: str, operators: Sequence[Operator], n_ubatch: int, plain_attention: bool,
    n_instances: int,
) -> int:  # fmt: skip
    """Device bytes that instances of its back end take for themselves while they compute micro-batches; 0 if unknown.
    plain_attention: attention without flash attention, which uses cuBLAS.

    Each instance keeps the memory of its largest mul-mat (ggml 0.26.0, ggml-cuda.cu, ggml_cuda_pool), and aborts if
    that does not fit. The output computes one token.
    """
    base_bytes = RUNTIME_BYTES.get(backend, 0)
    if not base_bytes:
        return 0
    integers = backend == "CUDA" and not _VOLTA.search(description)
    pool = max((_pool_bytes(o, 1 if o.is_last else n_ubatch, integers) for o in operators), default=0)
    cublas = plain_attention or any(not o.is_last and not _in_integers(o, integers) for o in operators)
    return n_instances * (base_bytes + pool) + (CUBLAS_BYTES if cublas and n_instances else 0)


def _in_integers(operator: Operator, integers: bool) -> bool:
    return integers and operator.type in INTEGER_TYPES


def _pool_bytes(operator: Operator, n_tokens: int, integers: bool) -> int:
    """Bytes that a mul-mat takes from the pool. Integer kernels: its input as Q8_1 (mmq.cu). cuBLAS: input and result
    in F16, and a quantised weight in F16 (ggml-cuda.cu, ggml_cuda_mul_mat_cublas); for experts one matrix, and all rows
    once more in the order of experts (ggml_cuda_mul_mat_id). One token needs no cuBLAS."""
    k, n, _ = operator.shape
    routed = operator.routed
    rows = n_tokens * (operator.n_expert_used if routed else operator.shape[2])
    in_q8_1 = ceil(rows * ceil(k / _ROW_PADDING) * _ROW_PADDING * _Q8_1)
    if n_tokens == 1 or _in_integers(operator, integers):
        return in_q8_1
    weight = 0 if operator.type in FLOAT_TYPES else _F16 * k * n * (1 if routed else operator.shape[2])
    return weight + _F16 * rows * (k + n) + (F32 * rows * (k + n) if routed else 0)
