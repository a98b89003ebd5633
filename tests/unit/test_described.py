"""Profiles of described rates, and what the cost model and the policies make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import CARD, HOST, ROUTED, SMALL, weights_of

from oallama.core.profile import Profile, RestShape
from oallama.core.types import CPU_DEVICE, Attention, MulMat, Workload
from oallama.core.units import MIB
from oallama.cost.graph import build_graph
from oallama.cost.passes import Pass
from oallama.cost.rates import NO_INTERFERENCE, interference_at, interference_curve, transfer_rates, weight_stream
from oallama.cost.whole import placement_seconds
from oallama.place.attention import with_attention
from oallama.place.placement import Placement
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import (
    ATTENTION,
    EXPERTS,
    IN_CACHE,
    IN_CACHE_BYTES,
    Kernel,
    attention_kernels,
    described,
    host_profile,
    one_token_share,
    rest_kernels,
    with_card,
)
from oallama.profile.merge import missing_link, missing_sharing
from oallama.profile.store import profile_from_json, profile_to_json
from oallama.profile.wanted import wanted

pytestmark = pytest.mark.usefixtures("small_cards")

TOKENS = (1, 32, 512)


def made(n_expert: int = 0, type_name: str = "Q4_0") -> tuple[Profile, Problem]:
    of = ROUTED if n_expert else SMALL
    ops = weights_of(of, type_name=type_name)
    profile = described(HOST, CARD, of, ops, TOKENS)

    def probe(load: Workload, placed: Placement) -> LoadBytes:
        there = sum(op.bytes for op, on in zip(ops, placed.on_device, strict=True) if on)
        layers = max(0, of.n_layer - placed.first_device_layer)
        kv = layers * load.n_ctx * 2 * 2 * 256
        return LoadBytes(there, sum(op.bytes for op in ops) - there, kv, MIB, 8 * 2**30)

    return profile, Problem(ops, build_graph(of, ops), profile, probe, None, 0.9, None)


def test_all_on_the_device_costs_the_sum_of_its_kernels() -> None:
    profile, problem = made()
    plain = replace(problem, profile=with_attention(profile, "off"))
    one = Pass(1, 256, 1)
    costs = costs_over(plain, (one,))
    everything = (True,) * len(problem.operators)

    def mul_mat_s(mul_mat: MulMat) -> float:
        k, n, _ = mul_mat.shape
        n_bytes = mul_mat.bytes_read(1) + 4 * (k + n)
        return CARD.kernel_seconds(mul_mat.flops(1), n_bytes, False)

    shape = next(rest.shape for rest in profile.rest if rest.shape and not rest.shape.flash_attn)
    kernels = sum(mul_mat_s(op.mul_mat) for op in problem.operators)
    kernels += 4 * sum(CARD.kernel_seconds(k.flop, k.n_bytes, True) for k in rest_kernels(shape, 1, 256, 0, CARD.name))
    rates = transfer_rates(profile)
    there_and_back = rates.split_s + rates.copy_in.seconds(4 * 1024) + rates.copy_out.seconds(4 * 4096)
    assert placement_seconds(costs, everything, 0) == pytest.approx(kernels + there_and_back)
    assert rates.split_s == pytest.approx(CARD.launch_s + CARD.launch_node_s + CARD.synchronize_s)


def test_nothing_is_left_to_measure_and_it_can_be_stored() -> None:
    profile, problem = made(n_expert=8)
    want = wanted(ROUTED, problem.operators, TOKENS, 0)
    assert missing_link(profile) == []
    assert missing_sharing(profile, want) == []
    assert profile_from_json(profile_to_json(profile)) == profile
    facts = profile.fingerprint
    assert facts["described"] is True
    assert facts["device_host_buffer"] and facts["device_asynchronous"]
    assert profile.is_pinned and not profile.is_blocking
    assert weight_stream(profile) == profile.link["h2d_pageable"]


def test_cpu_and_link_together_read_what_the_dram_gives() -> None:
    of = SMALL
    ops = weights_of(of)
    profile = with_card(host_profile(HOST, of, ops, TOKENS), CARD, of, ops, dram_bytes_per_s=45e9)
    shared = profile.contention
    assert shared is not None
    assert shared.first_with_second_gb_per_s + shared.second_with_first_gb_per_s == pytest.approx(45)
    cpu, link = shared.first_alone_gb_per_s * 1e9, shared.second_alone_gb_per_s * 1e9
    beside = interference_at(interference_curve(profile), 1)
    assert beside.cpu_with_link == beside.link_with_cpu == pytest.approx(45e9 / (cpu + link))
    assert interference_at(interference_curve(profile), 512) == NO_INTERFERENCE


def test_a_layer_s_rest_reads_and_writes_what_its_operations_do() -> None:
    """Floats of a token: two norms, rope of Q and K, K and V into the cache, the GLU and two residual adds."""
    shape = RestShape(n_embd=64, n_ff=160, n_head=4, n_head_kv=2, n_embd_head_k=16, n_embd_head_v=24, flash_attn=True)
    attention = list(attention_kernels(shape, 3, 256))
    dense = list(rest_kernels(shape, 3, 256, 0))
    moved = 2 * 64 + 2 * 64 + 2 * 64 + 2 * 32 + 2 * 32 + 2 * 48 + 3 * 160 + 3 * 64 + 3 * 64
    assert sum(k.n_bytes for k in dense) == 4 * 3 * moved + sum(k.n_bytes for k in attention)
    cache, products = 2 * 256 * 2 * (16 + 24), 2 * 3 * 256 * 4 * (16 + 24)
    assert [(k.flop, k.n_bytes) for k in attention] == [(products, cache + 4 * 3 * 4 * (16 + 24))]
    softmax = list(attention_kernels(replace(shape, flash_attn=False), 3, 200))  # over whole steps of the cache
    assert [k.flop for k in softmax if k.flop] == [products * 16 / 40, products * 24 / 40]
    scores, results = 4 * 3 * 256 * 4, 4 * 3 * 4 * 24
    assert sum(k.n_bytes for k in softmax) == cache + 4 * 3 * 4 * 16 + 4 * scores + 3 * results
    routed = list(rest_kernels(shape, 3, 256, 8))
    assert len(routed) == len(dense) + 5 + 1 + 7
    assert sum(k.n_bytes for k in routed) == sum(k.n_bytes for k in dense) + 4 * 3 * (5 * 16 + 16 * 64 + 7 * 192)


def test_attention_of_one_token_on_a_card_and_from_a_cpu_s_cache() -> None:
    shape = RestShape(n_embd=64, n_ff=160, n_head=4, n_head_kv=2, n_embd_head_k=64, n_embd_head_v=64, flash_attn=True)

    def attention(n_tokens: int, n_kv: int, device: str) -> Kernel:
        return max(rest_kernels(shape, n_tokens, n_kv, 0, device), key=lambda kernel: kernel.flop)

    shallow, deep = IN_CACHE_BYTES // 512, IN_CACHE_BYTES // 512 + 1  # two heads' keys and values take 512 bytes
    cached, read = attention(1, shallow, CPU_DEVICE), attention(1, deep, CPU_DEVICE)
    assert read.flop == pytest.approx(IN_CACHE * cached.flop, rel=1e-3)
    assert attention(1, 256, "card").n_bytes == attention(1, 256, CPU_DEVICE).n_bytes / ATTENTION
    assert attention(2, 256, "card").n_bytes == attention(2, 256, CPU_DEVICE).n_bytes


def test_a_quantised_cache_is_read_for_each_query_head() -> None:
    f16 = RestShape(n_embd=64, n_ff=160, n_head=8, n_head_kv=2, n_embd_head_k=64, n_embd_head_v=64, flash_attn=True)
    assert one_token_share(f16) == ATTENTION
    assert one_token_share(replace(f16, type_v="q8_0")) == 2 / 8
    assert one_token_share(replace(f16, type_k="q8_0", n_head_kv=8)) == ATTENTION
    of = SMALL
    profile = described(HOST, CARD, of, weights_of(of), (1, 32), Attention("on", "q8_0", "q8_0"))
    assert {case.shape.type_k for case in profile.rest if case.shape} == {"q8_0"}


def test_a_card_s_experts_take_longer_than_one_matrix() -> None:
    profile, _ = made(n_expert=8)
    routed = next(c for c in profile.cases if c.mul_mat.op == "MUL_MAT_ID" and c.device == "card" and c.n_tokens == 512)
    assert routed.seconds == pytest.approx(routed.mul_mat.flops(512) / CARD.flops_per_s / EXPERTS + CARD.kernel_s)


def test_a_host_may_be_slower_with_some_types_and_in_attention() -> None:
    host = replace(HOST, flops_by_type=(("Q6_K", 1e11),), flops_attention_per_s=2e11)
    assert [host.rate_of(kind) for kind in ("Q4_0", "Q6_K", "F16", None)] == [1e12, 1e11, 0.5e12, 2e11]
    assert host.kernel_seconds(1e11, 1.0, "Q6_K") == pytest.approx(1 + host.kernel_s)
    plain = replace(HOST, flops_float_per_s=None)
    assert plain.rate_of("F16") == plain.rate_of(None) == 1e12


def test_points_of_the_link_lie_on_their_lines_and_nothing_slows_the_card() -> None:
    profile, _ = made()
    for name, line in profile.link.items():
        assert line.points, name
        assert [seconds for _, seconds in line.points] == pytest.approx([line.seconds(n) for n, _ in line.points]), name
    with_device = [pair for pair in profile.sharing if pair.second == "device"]
    assert {pair.first for pair in with_device} == {"cpu"}
    for pair in with_device:
        rate = pytest.approx(CARD.bytes_per_s / 1e9)
        assert (pair.second_alone_gb_per_s, pair.second_with_first_gb_per_s) == (rate, rate)
