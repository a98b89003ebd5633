"""A profile from described rates instead of measurements: of a card with a measured CPU, or of both. Pure.

Every mul-mat, and every node of a layer's non-matmul work, takes max(flop / flop rate, bytes / byte rate) plus a
latency. Copies take bytes / link rate plus a latency. CPU and link share the DRAM's rate. So plans can be made and
priced for machines that are not present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oallama.core.errors import ProfileError
from oallama.core.options import DEFAULT_ATTENTION, PLAIN_V_TYPES
from oallama.core.profile import Contention, LinearFit, NonMatmulCase, NonMatmulShape, Profile, ProfileCase
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, PLAIN_LAYOUT, Attention, ModelInfo, Operator
from oallama.device.card import FLOAT_TYPES, Card, Host
from oallama.profile.link import BOUNDARY_SIZES, LINK_SIZES
from oallama.profile.merge import PAIRS, empty
from oallama.profile.wanted import Wanted, contention_tokens, in_steps, non_matmul_shapes, wanted

DRAM_SHARE = 0.9
"""Default share of the DRAM's rate that the CPU alone reaches: 0.82 and 0.99 were measured on two desktops (63.8 of
77.9 GB/s, 29.97 of 30.3)."""

TOKENS = (1, 8, 32, 128, 512)
"""Batch sizes of a described profile: rates change between them where memory no longer limits."""

EXPERTS = 0.4
"""Share of a card's rate for quantised mul-mats that is reached with many small experts in prompts: of an RTX 3090,
from published runs of gpt-oss-120b at five micro-batches (docs/real-card.md)."""

ATTENTION = 0.5
"""Share of a card's memory rate that attention of one token reaches, as few heads share the cache."""

IN_CACHE, IN_CACHE_BYTES = 1.2, 12 << 20
"""Speed-up of a CPU's attention while the keys and values of a layer fit its cache. Fitted, as the constant above, to
274 published runs (docs/real-card.md)."""

DEPTHS = (256, 1024, 4096, 16384, 65536)
"""Tokens in the KV cache in non-matmul cases. Nothing is measured, so deep ones cost no time."""

F32 = 4
BACKEND = "CUDA"  # what a described card is taken for: queues, pinned memory, offload of host weights in large batches

KernelSeconds = Callable[[float, float, str | None], float]
"""Seconds of one kernel: (flop, bytes, type of its weights; None: it has none)."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """One node of a layer's non-matmul work."""

    flop: float
    n_bytes: float  # read and written


def described(
    host: Host,
    card: Card,
    model: ModelInfo,
    operators: Sequence[Operator],
    tokens: Sequence[int],
    kv: Attention = DEFAULT_ATTENTION,
) -> Profile:
    """A described profile at these batch sizes."""
    return with_card(
        host_profile(host, model, operators, tokens, kv), card, model, operators, host.dram_bytes_per_s, kv
    )


def host_profile(
    host: Host,
    model: ModelInfo,
    operators: Sequence[Operator],
    tokens: Sequence[int],
    kv: Attention = DEFAULT_ATTENTION,
) -> Profile:
    """The CPU's half: the plain layout, which is what a host beside a GPU computes in stock llama.cpp."""
    want = wanted(model, operators, tokens, llc_bytes=0, kv=kv)
    fingerprint = {"cpu": host.name, "device_spec": "none", "device_name": CPU_DEVICE, "described": True}
    return replace(
        empty(fingerprint),
        cases=_cases(want, tokens, CPU_DEVICE, PLAIN_LAYOUT, host.kernel_seconds),
        rest=_non_matmul(want, operators, tokens, CPU_DEVICE, host.kernel_seconds),
        warnings=(f"{host.name} is described, not measured: {host.source}",),
    )


def with_card(
    profile: Profile,
    card: Card,
    model: ModelInfo,
    operators: Sequence[Operator],
    dram_bytes_per_s: float | None = None,
    kv: Attention = DEFAULT_ATTENTION,
) -> Profile:
    """The CPU's half of a profile with this card as its device, at the batch sizes that the CPU was measured at.

    dram_bytes_per_s: that the CPU and the link read together; None: by DRAM_SHARE. Raises ProfileError if the CPU
    was not measured at all.
    """
    on_cpu = tuple(case for case in profile.cases if case.device == CPU_DEVICE)
    if not on_cpu:
        raise ProfileError("the profile has no CPU mul-mat; run `oallama profile` for this model")
    tokens = sorted({case.n_tokens for case in on_cpu})
    want = wanted(model, operators, tokens, llc_bytes=0, kv=kv)
    link = _link(card)
    split_s = card.launch_s + card.launch_node_s + card.synchronize_s
    excursion = _line(
        link["h2d_pinned"].alpha_s + link["d2h_pinned"].alpha_s + split_s,
        link["h2d_pinned"].beta_s_per_byte + link["d2h_pinned"].beta_s_per_byte,
        BOUNDARY_SIZES,
    )
    rest = tuple(case for case in profile.rest if case.device == CPU_DEVICE)

    def seconds(flop: float, n_bytes: float, weight_type: str | None) -> float:
        return card.kernel_seconds(flop, n_bytes, weight_type is None or weight_type in FLOAT_TYPES)

    return replace(
        profile,
        fingerprint={**profile.fingerprint, **_device_facts(card)},
        device=card.name,
        cases=on_cpu + _cases(want, tokens, card.name, DEVICE_LAYOUT, seconds),
        rest=rest + _non_matmul(want, operators, tokens, card.name, seconds),
        link=link,
        boundary=excursion,
        launch_s=split_s + card.kernel_s,
        sharing=_contention(want, on_cpu, card, dram_bytes_per_s),
        copy_wait=0.0,  # a copy on one stream waits for no other
        launch_issue_s=card.launch_s + card.launch_node_s,
        warnings=(*profile.warnings, f"{card.name} is described, not measured: {card.description}"),
    )


def _device_facts(card: Card) -> dict[str, Any]:
    return {
        "device_spec": f"described:{card.name}",
        "device_name": card.name,
        "device_description": card.description,
        "device_backend": BACKEND,
        "device_type": "GPU",
        "device_memory_bytes": card.memory_bytes,
        "device_host_buffer": True,
        "device_asynchronous": True,
        "described": True,
    }


def _cases(
    want: Wanted, tokens: Sequence[int], device: str, layout: str, seconds: KernelSeconds
) -> tuple[ProfileCase, ...]:
    """Price every distinct mul-mat at every batch size. It reads its weights and activations, and writes its result."""
    cases = []
    for mul_mat in dict.fromkeys(mul_mat for mul_mat, *_ in want.mul_mats):
        if mul_mat.input_f32 and device != CPU_DEVICE:
            continue  # CUDA has no such kernel
        for n_tokens in sorted(set(tokens)):
            k, n, _ = mul_mat.shape
            moved = F32 * n_tokens * mul_mat.matrices_per_token * (k + n)
            flop = mul_mat.flops(n_tokens) / (EXPERTS if mul_mat.routed and device != CPU_DEVICE else 1.0)
            total_s = seconds(flop, mul_mat.bytes_read(n_tokens) + moved, mul_mat.type)
            cases.append(ProfileCase(device, layout, mul_mat, n_tokens, mul_mat.bytes, total_s, (total_s,)))
    return tuple(cases)


def _non_matmul(
    want: Wanted, operators: Sequence[Operator], tokens: Sequence[int], device: str, seconds: KernelSeconds
) -> tuple[NonMatmulCase, ...]:
    """A layer's non-matmul work with flash attention and without, at every batch size and at depths that a line goes
    through."""
    routed = max((o.n_expert_used for o in operators if o.routed), default=0)
    cases = []
    for n_tokens in sorted(set(tokens)) if want.rest else ():
        for n_kv in sorted({n_tokens, *(depth for depth in DEPTHS if depth > n_tokens)}):
            for shape in non_matmul_shapes(want.non_matmul_shape):
                total_s = sum(
                    seconds(k.flop, k.n_bytes, None) for k in non_matmul_kernels(shape, n_tokens, n_kv, routed, device)
                )
                cases.append(NonMatmulCase(device, n_tokens, n_kv, total_s, shape, (total_s,)))
    return tuple(cases)


def non_matmul_kernels(
    shape: NonMatmulShape, n_tokens: int, n_kv: int, routed: int, device: str = CPU_DEVICE
) -> Iterator[KernelWork]:
    """Kernels of a layer beside its weight-bearing mul-mats. routed: experts of each token, 0 in a dense model."""
    q, k, v = (
        shape.n_head * shape.n_embd_head_k,
        shape.n_head_kv * shape.n_embd_head_k,
        shape.n_head_kv * shape.n_embd_head_v,
    )

    def moves(elements: float) -> KernelWork:
        return KernelWork(0.0, F32 * n_tokens * elements)

    yield from (moves(2 * shape.n_embd), moves(2 * shape.n_embd))  # norms
    yield from (moves(2 * q), moves(2 * k))  # rope
    yield from (moves(2 * k), moves(2 * v))  # KV write
    on_card = device != CPU_DEVICE
    cached = not on_card and sum(shape.cache_bytes(n_kv)) <= IN_CACHE_BYTES
    flop_share, byte_share = IN_CACHE if cached else 1.0, one_token_share(shape) if on_card and n_tokens == 1 else 1.0
    for kernel in attention_kernels(shape, n_tokens, n_kv):
        yield KernelWork(kernel.flop / flop_share, kernel.n_bytes / byte_share)
    yield moves(3 * shape.n_ff)  # GLU
    yield from (moves(3 * shape.n_embd), moves(3 * shape.n_embd))  # residual adds
    if routed:
        yield from (moves(2 * routed) for _ in range(5))  # softmax, top k, gather, sum, divide
        yield from (moves(0) for _ in range(routed))  # weighting and adding, whose bytes are priced with the experts


def one_token_share(shape: NonMatmulShape) -> float:
    """Share of a card's memory rate that attention of one token reaches. CUDA's kernel for a quantised cache reads keys
    and values again for each query head that shares them; the one for f16 reads them once."""
    plain = {shape.type_k, shape.type_v} <= set(PLAIN_V_TYPES)
    return ATTENTION if plain else min(ATTENTION, shape.n_head_kv / shape.n_head)


def attention_kernels(shape: NonMatmulShape, n_tokens: int, n_kv: int) -> Iterator[KernelWork]:
    """One kernel with flash attention. Without: scores, softmax, values and a transposition, over whole steps of the
    cache; scores are written and read in F32."""
    heads = shape.n_head
    if not shape.flash_attn:
        n_kv = in_steps(n_kv)
    keys, values = shape.cache_bytes(n_kv)
    queries, results = (F32 * n_tokens * heads * width for width in (shape.n_embd_head_k, shape.n_embd_head_v))
    by_keys, by_values = (2.0 * n_tokens * n_kv * heads * width for width in (shape.n_embd_head_k, shape.n_embd_head_v))
    if shape.flash_attn:
        yield KernelWork(by_keys + by_values, keys + values + queries + results)
        return
    scores = F32 * n_tokens * n_kv * heads
    yield KernelWork(by_keys, keys + queries + scores)
    yield KernelWork(0.0, 2 * scores)
    yield KernelWork(by_values, values + scores + results)
    yield KernelWork(0.0, 2 * results)


def _link(card: Card) -> dict[str, LinearFit]:
    """Seconds of one copy until it is done, and of its caller's time, which a copy from pageable memory takes whole."""
    copy_s = card.copy_issue_s + card.copy_s + card.synchronize_s
    pinned, pageable = 1 / card.pinned_bytes_per_s, 1 / card.pageable_bytes_per_s
    return {
        "h2d_pinned": _line(copy_s, pinned, LINK_SIZES),
        "h2d_pageable": _line(copy_s, pageable, LINK_SIZES),
        "d2h_pinned": _line(copy_s, pinned, LINK_SIZES),
        "d2h": _line(copy_s, pageable, LINK_SIZES),
        "issue_pinned": _line(card.copy_issue_s, 0.0, LINK_SIZES),
        "issue_pageable": _line(card.copy_issue_s + card.copy_s, pageable, LINK_SIZES),
    }


def _line(alpha_s: float, beta_s_per_byte: float, sizes: Iterable[int]) -> LinearFit:
    points = tuple((size, alpha_s + beta_s_per_byte * size) for size in sizes)
    return LinearFit(alpha_s, beta_s_per_byte, 1.0, points)


def _contention(
    want: Wanted, on_cpu: Sequence[ProfileCase], card: Card, dram_bytes_per_s: float | None
) -> tuple[Contention, ...]:
    """Contention of CPU and link for the DRAM, by the CPU's reads at each batch size; no other contention."""
    fastest: dict[int, float] = {}  # GB/s at which the CPU reads weights, by batch size
    for case in on_cpu:
        fastest[case.n_tokens] = max(fastest.get(case.n_tokens, 0.0), case.gb_per_s)
    cpu = fastest[min(fastest)]
    dram = cpu / DRAM_SHARE if dram_bytes_per_s is None else max(cpu, dram_bytes_per_s / 1e9)
    cases = []
    for n_tokens in contention_tokens(want):
        alone = {
            "cpu": fastest.get(n_tokens, 0.0),
            "device": card.bytes_per_s / 1e9,
            "link": card.pinned_bytes_per_s / 1e9,
        }
        for pair in PAIRS:
            left = min(1.0, dram / (alone["cpu"] + alone["link"])) if pair == ("cpu", "link") else 1.0
            rates = [alone[worker] for worker in pair]
            cases.append(Contention(*pair, n_tokens, *rates, *(left * rate for rate in rates)))
    return tuple(cases)
