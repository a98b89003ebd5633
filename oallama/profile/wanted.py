"""What to measure for a model: the distinct mul-mats of its operators, and where. Pure.

Working set. Decode reads every weight once a token, so a weight is cold when its turn comes again unless the whole
model fits the cache. A case therefore rotates through copies of its weight that together are as large as the model, or
`COLD_FACTOR` times the last-level cache where the model is larger: a model that fits the cache is measured in the
cache, as it will run. There are at least two copies, except of a weight that alone is that large, and except where one
pass over the copies would take more than `PASS_FLOPS`: with many tokens each byte that was read is used so often that
where it came from hardly counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oallama.core.codec import to_json
from oallama.core.options import DEFAULT_ATTENTION, PLAIN_V_TYPES
from oallama.core.profile import Case, NonMatmulShape, SkippedCase
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, PLAIN_LAYOUT, Attention, ModelInfo, MulMat, Operator

COLD_FACTOR = 4  # a cache that does not replace strictly the oldest line keeps part of a set twice its size
PASS_FLOPS = 8e9  # a tenth of a second on two ordinary cores
COMPUTE_BOUND_TOKENS = 64  # from here on slow layouts are left out, and the output matrix does not run
STEP_TOKENS = (2, 3, 4, 5, 8)
"""Tokens of decode steps that several requests or drafts make. Kernels change between them (ggml's CPU takes 4 or 8
rows at a time, and the rest one by one; ggml-cuda multiplies by up to 8 columns in one kernel and by more in another),
so none is interpolated from others."""
SLOW_LAYOUT = 2.0
KV_STEP = 256  # positions: llama.cpp pads the KV cache that attention sees to steps of so many
NON_MATMUL_KV_RATIO = 4  # of the two large depths; attention is affine in the depth
FRESH_NON_MATMUL_KV = 32  # the least depth: flash attention on the CPU takes no time for what is masked
MAX_NON_MATMUL_TOKENS = 512  # attention grows with batch times depth
NON_MATMUL = "REST"  # in place of an operation's name, for a non-matmul case that was left out


@dataclass(frozen=True, slots=True)
class Wanted:
    """Cases that a model needs of a profile."""

    tokens: tuple[int, ...]  # batch sizes that were asked for, ascending
    mul_mats: tuple[tuple[MulMat, int, int], ...]  # (mul-mat, n_tokens, bytes of the working set), at STEP_TOKENS too
    rest: tuple[tuple[int, int], ...]  # (n_tokens, n_kv)
    non_matmul_shape: NonMatmulShape  # with flash attention; measured as non_matmul_shapes says
    n_layer: int


def wanted(
    model: ModelInfo,
    operators: Sequence[Operator],
    tokens: Sequence[int],
    llc_bytes: int,
    kv: Attention = DEFAULT_ATTENTION,
) -> Wanted:
    """Distinct mul-mats at each batch size with their working sets, and the non-matmul cases for a KV cache of these
    types: every batch size when the cache holds nothing else, and at two depths; large batches are also measured at
    COMPUTE_BOUND_TOKENS, from where on ggml's CPU flash attention works in tiles.

    Mul-mats are measured at STEP_TOKENS as well. Operators behind the blocks (the output matrix) run on the tokens
    whose logits are wanted, whatever the prompt's length: they are not measured at COMPUTE_BOUND_TOKENS or more unless
    nothing smaller is asked for.
    """
    asked = sorted(set(tokens))
    sizes = sorted({*asked, *(n for n in STEP_TOKENS if asked[0] < n < asked[-1])})
    small = [n for n in sizes if n < COMPUTE_BOUND_TOKENS] or sizes[:1]
    total = sum(operator.bytes for operator in operators)
    all_tokens: dict[MulMat, bool] = {}  # whether it sees all tokens
    for operator in operators:
        all_tokens[operator.mul_mat] = all_tokens.get(operator.mul_mat, False) or not operator.is_last
    ordered = sorted(all_tokens, key=lambda m: (m.bytes, m.op, m.type, m.shape, m.n_expert_used))
    batches = sorted({min(n, MAX_NON_MATMUL_TOKENS) for n in asked})
    shallow = max(KV_STEP, *batches)
    if batches[-1] > COMPUTE_BOUND_TOKENS:
        batches = sorted({*batches, COMPUTE_BOUND_TOKENS})
    depths = [
        (n, n_kv) for n in batches for n_kv in (max(n, FRESH_NON_MATMUL_KV), shallow, NON_MATMUL_KV_RATIO * shallow)
    ]
    return Wanted(
        tokens=tuple(asked),
        mul_mats=tuple(
            (mul_mat, n, working_set(mul_mat, n, total, llc_bytes))
            for mul_mat in ordered
            for n in (sizes if all_tokens[mul_mat] else small)
        ),
        rest=tuple(dict.fromkeys(depths)) if _has_attention(model) else (),
        non_matmul_shape=NonMatmulShape(
            n_embd=model.n_embd,
            n_head=model.n_head,
            n_head_kv=model.n_head_kv,
            n_embd_head_k=model.n_embd_head_k,
            n_embd_head_v=model.n_embd_head_v,
            n_ff=_widest_activation(operators),
            flash_attn=True,
            type_k=kv.type_k.lower(),
            type_v=kv.type_v.lower(),
        ),
        n_layer=model.n_layer,
    )


def in_steps(n_kv: int) -> int:
    """Positions of the KV cache that attention is shown."""
    return -(-n_kv // KV_STEP) * KV_STEP


def non_matmul_shapes(shape: NonMatmulShape) -> tuple[NonMatmulShape, ...]:
    """The shape with flash attention, and without where the V cache allows it."""
    plain = (replace(shape, flash_attn=False),) if shape.type_v in PLAIN_V_TYPES else ()
    return (replace(shape, flash_attn=True), *plain)


def _has_attention(model: ModelInfo) -> bool:
    """Whether the layers look like a Llama block, the only one whose rest can be measured."""
    heads = (model.n_head, model.n_head_kv, model.n_embd_head_k, model.n_embd_head_v)
    return min(heads) > 0 and model.n_head % model.n_head_kv == 0 and model.n_embd_head_k % 2 == 0


def _widest_activation(operators: Sequence[Operator]) -> int:
    """Elements per token that the feed-forward activation of a layer computes, of all its experts; the most of any
    layer."""
    by_layer: dict[int | None, int] = {}
    for operator in operators:
        if operator.role.startswith("ffn_down"):
            width = operator.shape[0] * operator.mul_mat.n_expert_used
            by_layer[operator.layer] = by_layer.get(operator.layer, 0) + width
    return max(by_layer.values(), default=0)


def working_set(mul_mat: MulMat, n_tokens: int, model_bytes: int, llc_bytes: int) -> int:
    """Bytes of weights that the runs of one case rotate through (see the module's docstring)."""
    cold = COLD_FACTOR * llc_bytes
    wanted = max(min(model_bytes, cold), 2 * mul_mat.bytes if mul_mat.bytes < cold else 0)
    affordable = PASS_FLOPS * mul_mat.bytes_read(n_tokens) / mul_mat.flops(n_tokens)
    return max(mul_mat.bytes, min(wanted, int(affordable)))


def contention_tokens(want: Wanted) -> list[int]:
    """Batch sizes at which work at the same time is measured: the smallest, which memory limits, and the largest that
    is quick, which the cores limit."""
    measured = {n for mul_mat, n, _ in want.mul_mats if mul_mat.shape[2] == 1}
    sizes = [n for n in want.tokens if n in measured]
    quick = [n for n in sizes if n < COMPUTE_BOUND_TOKENS]
    return sorted({sizes[0], *quick[-1:]}) if sizes else []


def required(want: Wanted, device: str | None) -> list[Case]:
    """The cases without which a profile cannot serve the model: the plain layout on the CPU, and the device."""
    on_device = cases_at(want, device, DEVICE_LAYOUT) if device else []
    return cases_at(want, CPU_DEVICE, PLAIN_LAYOUT) + on_device


def cases_at(want: Wanted, device: str, layout: str) -> list[Case]:
    """List every case of a model on one device in one layout."""
    return [Case(device, layout, *what) for what in want.mul_mats]


def kernel_kind(mul_mat: MulMat) -> str:
    """The sort of kernel: MUL_MAT, MUL_MAT of 3-D weights, or MUL_MAT_ID. A layout may be sound for one only."""
    return "3-D MUL_MAT" if mul_mat.op == "MUL_MAT" and mul_mat.shape[2] > 1 else mul_mat.op


def non_matmul_skipped(device: str, n_tokens: int, n_kv: int, shape: NonMatmulShape, reason: str) -> SkippedCase:
    """The record of a non-matmul case that was left out."""
    what = ", ".join(f"{name} {value}" for name, value in to_json(shape).items())
    return SkippedCase(device, "rest", MulMat(NON_MATMUL, what, (shape.n_embd, n_kv, 1), 0), n_tokens, 0, reason)


def non_matmul_label(device: str, n_tokens: int, n_kv: int, shape: NonMatmulShape) -> str:
    """A non-matmul case in a few words."""
    without = "" if shape.flash_attn else ", no flash attention"
    return f"{device} other work of a layer at {n_tokens} tokens, KV {n_kv}{without}"


def case_label(case: Case) -> str:
    """A case in a few words."""
    shape = "x".join(map(str, case.mul_mat.shape))
    layout = "" if case.layout in (case.device, DEVICE_LAYOUT) else f" {case.layout}"
    return f"{case.device}{layout} {case.mul_mat.type} {shape} at {case.n_tokens} tokens"


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Cheap ones first, so that an interruption leaves much done and slow layouts are known before large batches; of
    each mul-mat the CPU's plain layout after the others (merge.is_complete)."""

    def order(case: Case) -> tuple[Any, ...]:
        mul_mat, is_plain = case.mul_mat, case.layout == PLAIN_LAYOUT
        return (case.n_tokens, mul_mat.bytes, mul_mat.type, mul_mat.shape, case.device, is_plain, case.layout)

    return sorted(cases, key=order)


def too_slow(case: Case, known: Mapping[Case, float]) -> str | None:
    """Why a CPU layout need not be measured at a large batch: it was more than SLOW_LAYOUT times slower than the best
    layout at the largest small batch. None: measure it. known: seconds of the cases measured so far."""
    if case.device != CPU_DEVICE or case.n_tokens < COMPUTE_BOUND_TOKENS:
        return None
    small = [
        other
        for other in known
        if (other.device, other.mul_mat) == (CPU_DEVICE, case.mul_mat) and 1 < other.n_tokens < COMPUTE_BOUND_TOKENS
    ]
    largest = max(((other.n_tokens, other.working_set_bytes) for other in small), default=None)
    by_layout = {other.layout: known[other] for other in small if (other.n_tokens, other.working_set_bytes) == largest}
    if largest is None or case.layout not in by_layout:
        return None
    best = min(by_layout, key=lambda layout: by_layout[layout])
    slower = by_layout[case.layout] / by_layout[best]
    return f"{slower:.1f} times slower than {best} at {largest[0]} tokens" if slower > SLOW_LAYOUT else None
