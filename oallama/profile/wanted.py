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

from oallama.core.options import PLAIN_V_TYPES
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, ModelInfo, Operator, RestShape, SkippedCase
from oallama.profile.cases import PLAIN_LAYOUT, Case, CaseKey, Signature, bytes_read, flops

COLD_FACTOR = 4  # a cache that does not replace strictly the oldest line keeps part of a set twice its size
PASS_FLOPS = 8e9  # a tenth of a second on two ordinary cores
COMPUTE_BOUND_TOKENS = 64  # from here on slow layouts are left out, and the output matrix does not run
SLOW_LAYOUT = 2.0
MIN_REST_KV = 256  # llama.cpp pads the KV cache that attention sees to this
REST_KV_RATIO = 4  # of the two large depths; attention is affine in the depth
FRESH_REST_KV = 32  # the least depth: flash attention on the CPU takes no time for what is masked
MAX_REST_TOKENS = 512  # attention grows with batch times depth
REST = "REST"  # in place of an operation's name, for a rest case that was left out


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model needs of a profile."""

    mul_mats: tuple[tuple[Signature, int, int], ...]  # (signature, n_tokens, bytes of the working set)
    rest: tuple[tuple[int, int], ...]  # (n_tokens, n_kv)
    rest_shape: RestShape  # with flash attention; measured as rest_ways says
    n_layer: int


def wanted(
    model: ModelInfo,
    operators: Sequence[Operator],
    tokens: Sequence[int],
    llc_bytes: int,
    type_k: str = "f16",
    type_v: str = "f16",
) -> Wanted:
    """Distinct signatures at each batch size with their working sets, and the rest cases for a KV cache of type_k and
    type_v: every batch size when the cache holds nothing else, and at two depths; large batches are also measured at
    COMPUTE_BOUND_TOKENS, from where on ggml's CPU flash attention works in tiles.

    Operators outside the blocks (the output matrix) run on the last token only, whatever the prompt's length: they are
    not measured at COMPUTE_BOUND_TOKENS or more unless nothing smaller is asked for.
    """
    sizes = sorted(set(tokens))
    small = [n for n in sizes if n < COMPUTE_BOUND_TOKENS] or sizes[:1]
    total = sum(operator.bytes for operator in operators)
    inside: dict[Signature, bool] = {}
    for operator in operators:
        signature = signature_of(operator)
        inside[signature] = inside.get(signature, False) or operator.layer is not None
    ordered = sorted(inside, key=lambda s: (s.bytes, s.op, s.type, s.shape, s.n_expert_used))
    batches = sorted({min(n, MAX_REST_TOKENS) for n in sizes})
    shallow = max(MIN_REST_KV, *batches)
    if batches[-1] > COMPUTE_BOUND_TOKENS:
        batches = sorted({*batches, COMPUTE_BOUND_TOKENS})
    depths = [(n, n_kv) for n in batches for n_kv in (max(n, FRESH_REST_KV), shallow, REST_KV_RATIO * shallow)]
    return Wanted(
        mul_mats=tuple(
            (s, n, working_set(s, n, total, llc_bytes)) for s in ordered for n in (sizes if inside[s] else small)
        ),
        rest=tuple(dict.fromkeys(depths)) if _has_attention(model) else (),
        rest_shape=RestShape(
            n_embd=model.n_embd,
            n_head=model.n_head,
            n_head_kv=model.n_head_kv,
            n_embd_head_k=model.n_embd_head_k,
            n_embd_head_v=model.n_embd_head_v,
            n_ff=_widest_activation(operators),
            flash_attn=True,
            type_k=type_k.lower(),
            type_v=type_v.lower(),
        ),
        n_layer=model.n_layer,
    )


def rest_ways(shape: RestShape) -> tuple[RestShape, ...]:
    """With flash attention, and without where the V cache allows it."""
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
            width = operator.shape[0] * signature_of(operator).n_expert_used
            by_layer[operator.layer] = by_layer.get(operator.layer, 0) + width
    return max(by_layer.values(), default=0)


def signature_of(operator: Operator) -> Signature:
    """The part of an operator that its time depends on."""
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 1
    return Signature(operator.op, operator.type, operator.shape, used, operator.bytes)


def working_set(signature: Signature, n_tokens: int, model_bytes: int, llc_bytes: int) -> int:
    """Bytes of weights that the runs of one case rotate through (see the module's docstring)."""
    cold = COLD_FACTOR * llc_bytes
    wanted = max(min(model_bytes, cold), 2 * signature.bytes if signature.bytes < cold else 0)
    affordable = PASS_FLOPS * bytes_read(signature, n_tokens) / flops(signature, n_tokens)
    return max(signature.bytes, min(wanted, int(affordable)))


def sharing_tokens(want: Wanted) -> list[int]:
    """Batch sizes at which work at the same time is measured: the smallest, which memory limits, and the largest that
    is quick, which the cores limit."""
    sizes = sorted({n for signature, n, _ in want.mul_mats if signature.shape[2] == 1})
    quick = [n for n in sizes if n < COMPUTE_BOUND_TOKENS]
    return sorted({sizes[0], *quick[-1:]}) if sizes else []


def required(want: Wanted, device: str | None) -> list[Case]:
    """The cases without which a profile cannot serve the model: the plain layout on the CPU, and the device."""
    places = [(CPU_DEVICE, PLAIN_LAYOUT)] + ([(device, DEVICE_LAYOUT)] if device else [])
    return [case for place in places for case in cases_at(want, *place)]


def cases_at(want: Wanted, device: str, layout: str) -> list[Case]:
    """Every case of a model at one place."""
    return [Case(device, layout, signature, n, size) for signature, n, size in want.mul_mats]


def rest_skipped(device: str, n_tokens: int, n_kv: int, shape: RestShape, reason: str) -> SkippedCase:
    """The record of a rest case that was left out."""
    heads = f"{shape.n_head}/{shape.n_head_kv} heads of {shape.n_embd_head_k}/{shape.n_embd_head_v}"
    what = f"{heads}, feed-forward {shape.n_ff}"
    if (shape.type_k, shape.type_v) != ("f16", "f16"):
        what += f", KV {shape.type_k}/{shape.type_v}"
    if not shape.flash_attn:
        what += ", no flash attention"
    return SkippedCase(device, "rest", what, (shape.n_embd, n_kv, 1), 0, n_tokens, 0, reason, REST)


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Cheap ones first, so that an interruption leaves much done and slow layouts are known before large batches."""
    return sorted(
        cases, key=lambda c: (c.n_tokens, c.signature.bytes, c.signature.type, c.signature.shape, c.device, c.layout)
    )


def too_slow(case: Case, known: Mapping[CaseKey, float]) -> str | None:
    """Why a CPU layout need not be measured at a large batch: it was more than SLOW_LAYOUT times slower than the best
    layout at the largest small batch. None: measure it. known: seconds of the cases measured so far."""
    if case.device != CPU_DEVICE or case.n_tokens < COMPUTE_BOUND_TOKENS:
        return None
    same = {
        key: seconds
        for key, seconds in known.items()
        if (key.device, key.op, key.type, key.shape, key.n_expert_used)
        == (CPU_DEVICE, case.key.op, case.key.type, case.key.shape, case.key.n_expert_used)
        and 1 < key.n_tokens < COMPUTE_BOUND_TOKENS
    }
    if not same:
        return None
    n_tokens, size = max((key.n_tokens, key.working_set_bytes) for key in same)
    by_layout = {k.layout: s for k, s in same.items() if (k.n_tokens, k.working_set_bytes) == (n_tokens, size)}
    best = min(by_layout, key=lambda layout: by_layout[layout])
    own = by_layout.get(case.layout)
    if own is None or own <= SLOW_LAYOUT * by_layout[best]:
        return None
    return f"{own / by_layout[best]:.1f} times slower than {best} at {n_tokens} tokens"
