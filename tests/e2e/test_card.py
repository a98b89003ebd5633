"""A real device: CUDA or what OALLAMA_TEST_GPU names (marked gpu; scripts/gpu_run), and Vulkan, on a GPU or on the
processor through Mesa's lavapipe (marked vulkan; scripts/test --vulkan). Splits against stock llama.cpp on the CPU.

In a small model a rounding can send a token to another expert, which is 4e-3 at once; logits.py says what else differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from e2e.forced import Share, everything, ffn, forced, nothing, written
from e2e.logits import nmse, placed_logits, stock_logits
from e2e.plugin_runs import counted, loaded, logits_of, logits_of_sequences, with_plugin
from gguf_factory import write_llama_shape
from processes import here

from oallama.core.types import CPU_DEVICE, StreamSettings
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.device.opening import OpenDevice, open_device
from oallama.device.spec import parse_device
from oallama.placer import Placer

N_TOKENS = 40
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 300, N_TOKENS)]
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
         "IQ4_XS", "IQ3_S", "MXFP4")  # fmt: skip
ON_LAVAPIPE_SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")  # it compiles their kernels for minutes
CASES = [*(("llama", kind) for kind in (*TYPES, *ON_LAVAPIPE_SLOW)), ("phi3", "Q8_0"),  # gate and up in one weight
         *((arch, kind) for arch in ("llama-moe", "qwen3moe") for kind in ("F32", "F16", "Q4_0"))]  # fmt: skip
SAME_DEVICE_NMSE = 2e-6  # of graphs in which it does or does not compute the norm before the FFN as well


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("Vulkan0", marks=pytest.mark.vulkan),
        pytest.param(os.environ.get("OALLAMA_TEST_GPU", "CUDA0"), marks=pytest.mark.gpu),
    ],
)
def card(request: pytest.FixtureRequest) -> Iterator[OpenDevice]:
    name = request.param
    if ":" not in name and not any(each.name == name for each in load_bridge().devices()):
        pytest.skip(f"there is no {name}: scripts/gpu_run and scripts/test --vulkan run these on a card")
    with open_device(parse_device(name)) as opened:
        yield opened


def bound(arch: str, weight_type: str) -> float:
    """On lavapipe stock with all of the FFNs on the card is up to 8e-4 from stock on the CPU (IQ3_S; Q4_0: 9e-6, F32:
    6e-7), and a split up to 7e-4. TF32 differs more."""
    if "moe" in arch:
        return 1e-2
    return 1e-4 if weight_type == "F32" else 1e-3


@pytest.mark.parametrize("mode", ["split", "stream", "tokens"])
@pytest.mark.parametrize(("arch", "weight_type"), CASES)
def test_a_split_gives_the_logits_of_stock(
    arch: str, weight_type: str, mode: str, card: OpenDevice, models: Path
) -> None:
    """Half of each FFN on the card, a quarter of it streamed there, or a part of each batch whose CC it computes too.
    The same program gives the same twice, and holds nothing afterwards."""
    if weight_type in ON_LAVAPIPE_SLOW and "llvmpipe" in load_bridge().device(card.name).description:
        pytest.skip("lavapipe compiles the kernels of these types for minutes; a GPU does not")
    path = written(models, arch, weight_type=weight_type, **({} if arch == "phi3" else {"n_ff": 1024}))
    share = ffn(0.25, 0.25) if mode == "stream" else ffn(0.5)
    more = {"layout": "CPU", "token_assignment": ((1, 0), (8, 4), (N_TOKENS, 24))} if mode == "tokens" else {}
    held = load_bridge().split().memory()
    with counted() as done, with_plugin(path, card.name, share, **more) as context:
        for n in (1, 7, N_TOKENS):
            found = logits_of(context, TOKENS[:n])
            assert nmse(found, stock_logits(path, TOKENS[:n])) <= bound(arch, weight_type), f"{n} tokens"
            assert np.array_equal(found, logits_of(context, TOKENS[:n]))
    assert done[0].bytes_in > 0 and done[0].bytes_out > 0, "the device computed nothing"
    assert mode == "split" or done[0].bytes_streamed > 0, "nothing was streamed"
    assert load_bridge().split().memory() == held


@pytest.mark.parametrize("n_used", [2, 4])
@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_hot_experts(arch: str, weight_type: str, n_used: int, card: OpenDevice, models: Path) -> None:
    """One of eight, some and all, token by token and in batches: hits and misses in one token, tokens without either.
    CUDA computes experts of quantised weights row by row, of others by the slot that each rank names."""
    path = written(models, arch, weight_type=weight_type, n_expert_used=n_used)
    expected = stock_logits(path, TOKENS)
    for hot in ((3,), (0, 2, 5), tuple(range(8))):
        for sum_bytes in (0, None):  # rows are added up on the card, or come back
            with with_plugin(path, card.name, ffn(0.0), hot=hot, sum_bytes=sum_bytes) as context:
                found = logits_of_sequences(context, [TOKENS[:12]])[0]
                assert nmse(found, expected[:12]) <= bound("moe", weight_type), f"token by token, {hot} are hot"
                for n in (3, N_TOKENS):
                    found = logits_of(context, TOKENS[:n])
                    assert nmse(found, expected[:n]) <= bound("moe", weight_type), f"{n} tokens, {hot} are hot"


@pytest.mark.parametrize("weight_type", ["F16", "Q4_0"])
@pytest.mark.parametrize(
    ("arch", "share", "hot"),
    [
        ("llama", ffn(0.5), ()),
        ("llama", ffn(0.25, 0.25), ()),
        ("qwen3moe", ffn(0.5), ()),
        ("qwen3moe", nothing, (0, 3, 6)),
    ],
    ids=["cut", "streamed", "experts", "hot"],
)
def test_blocks_that_live_on_the_card(
    arch: str, share: Share, hot: tuple[int, ...], weight_type: str, card: OpenDevice, models: Path
) -> None:
    """Attention and routers are there: what a block reads and gives is the card's, and ggml's scheduler keeps the order
    of the two streams that work on it."""
    path = written(models, arch, weight_type=weight_type, n_layer=4)
    case = forced(path, str(card.spec), share, hot=hot, whole=lambda operator: not is_ffn(operator))
    with case.with_breakdown(staging=16 << 20).llama() as llama:
        for n in (1, 3, N_TOKENS):
            found = placed_logits(llama, TOKENS[:n])
            assert nmse(found, stock_logits(path, TOKENS[:n])) <= bound(arch, weight_type), f"{n} tokens"
            assert np.array_equal(found, placed_logits(llama, TOKENS[:n]))
        assert not [warning for warning in llama.warnings if "cannot live" in warning]


@pytest.mark.parametrize("gg", [0.01, 0.99])  # the smallest slice
def test_the_smallest_slice_on_either_side(gg: float, card: OpenDevice, models: Path) -> None:
    path = written(models, "llama", weight_type="Q4_0")
    with with_plugin(path, card.name, ffn(gg)) as context:
        assert nmse(logits_of(context, TOKENS), stock_logits(path, TOKENS)) <= bound("llama", "Q4_0")


@pytest.mark.parametrize("arch", ["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "minicpm3", "gpt2", "qwen3moe"])
def test_every_operator_split(arch: str, card: OpenDevice, models: Path) -> None:
    path = written(models, arch, weight_type="F32")
    with with_plugin(path, card.name, everything(0.5)) as context:
        assert nmse(logits_of(context, TOKENS), stock_logits(path, TOKENS)) <= bound(arch, "F32")


def test_all_gg_is_what_the_device_computes_unsplit(card: OpenDevice, models: Path) -> None:
    path, bridge = written(models, "llama", weight_type="Q4_0"), load_bridge()
    with with_plugin(path, card.name, ffn(1)) as context:
        found = logits_of(context, TOKENS)
    names = forced(path, share=ffn(1), probe=False).given
    with loaded(path, bridge.buft(card.name), names, [bridge.device(card.name).pointer]) as context:
        assert nmse(found, logits_of(context, TOKENS)) <= SAME_DEVICE_NMSE


@pytest.mark.parametrize("weight_type", ["F16", "BF16", "F32"])
def test_what_a_device_is_sent_is_not_overwritten(weight_type: str, card: OpenDevice, models: Path) -> None:
    """Narrow slices in decode, of 1 to 8 tokens: see test_split_logits.py."""
    path = write_llama_shape(models / f"narrow-{weight_type}.gguf", 1, 4096, 2048, 32, 8, 300, weight_type)
    with with_plugin(path, card.name, ffn(0.5)) as context:
        for n in range(1, 9):
            assert nmse(logits_of(context, TOKENS[:n]), stock_logits(path, TOKENS[:n])) <= 1e-3, f"{n} tokens"


@pytest.mark.parametrize("prefetch", ["ahead", "layer"])
@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_an_engine_streams(prefetch: str, n_slots: int, card: OpenDevice, models: Path) -> None:
    path = written(models, "llama", weight_type="Q4_0", n_layer=4)
    settings = StreamSettings(n_slots, prefetch)  # type: ignore[arg-type]
    with counted() as done, forced(path, str(card.spec), ffn(0.25, 0.25), streaming=settings).llama() as llama:
        assert [warning for warning in llama.warnings if "plan again" not in warning] == []
        found = placed_logits(llama, TOKENS)
        assert nmse(found, stock_logits(path, TOKENS)) <= bound("llama", "Q4_0")
        assert np.array_equal(found, placed_logits(llama, TOKENS))
    assert done[0].bytes_streamed > 0


#
# what is measured, and policies
#


@pytest.fixture(scope="module")
def measured(card: OpenDevice, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Placer:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path_factory.mktemp("profile")))
        placer = Placer.load(written(models, "llama", weight_type="Q4_0", n_layer=4), device=card.name, threads=1)
        placer.profile(progress=False, tokens=(1, 8))
        return placer


def test_the_device_has_what_streaming_needs_and_all_of_it_is_measured(card: OpenDevice, measured: Placer) -> None:
    assert card.info is not None and card.info.type in ("GPU", "IGPU") and card.info.memory_total > 0
    assert card.info.asynchronous and card.info.host_buffer and card.info.events
    assert load_bridge().pins(card.name, 1 << 20)
    listed = json.loads(here("devices", "--json").stdout)["devices"]
    assert card.name in [device["name"] for device in listed] and card.name in here("doctor").stdout
    profile = measured.profile()
    assert {"h2d_pinned", "h2d_pageable", "d2h"} <= profile.link.keys()
    assert all(fit.beta_s_per_byte > 0 for fit in profile.link.values())
    assert profile.contention is not None and profile.contention["link_alone_gb_per_s"] > 0
    timed = {(case.device, case.mul_mat.type) for case in profile.cases}
    assert (card.name, "Q4_0") in timed and (CPU_DEVICE, "Q4_0") in timed


@pytest.mark.parametrize("policy", ["layers", "oato", "split"])
def test_a_policy_places_half_and_computes_the_same(policy: str, measured: Placer, card: OpenDevice) -> None:
    """By a profile in which the CPU takes twice as long as the device, both in proportion to their work, and so long
    that links and launches cost nothing beside it: then a split pays, be the device lavapipe on a busy machine."""
    profile = measured.profile()
    slow = tuple(
        replace(case, seconds=1e-6 * prod(case.mul_mat.shape) * case.n_tokens * (2 if case.device == CPU_DEVICE else 1))
        for case in profile.cases
    )
    path = measured.model.path
    placer = Placer.load(path, card.name, gpu_weights="50%", threads=1, profile=replace(profile, cases=slow))
    plan = placer.plan(policy, n_prompt=64, n_gen=16, n_ctx=256, n_ubatch=64)
    on_device = sum(p.gg * o.bytes for p, o in zip(plan.operators, placer.operators, strict=True))
    total = sum(operator.bytes for operator in placer.operators)
    assert 0.2 * total < on_device <= 0.5 * total
    assert any(0 < placement.gg < 1 for placement in plan.operators) == (policy == "split")
    with placer.llama(plan, logits_all=True) as llama:
        assert nmse(placed_logits(llama, TOKENS), stock_logits(path, TOKENS)) <= bound("llama", "Q4_0")
        assert llama.warnings == ()
        assert llama.memory.device_bytes > 0
