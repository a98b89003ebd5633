"""All of it on a Vulkan device: a GPU, or the processor through Mesa's lavapipe, which offers what GPUs do: memory of
its own, pinned host memory, asynchronous streams and events. `scripts/test --vulkan` builds what is needed and runs it.

Bounds are for NMSE of logits against stock llama.cpp on the CPU. ggml's Vulkan kernels are not its CPU kernels: those
for batches multiply in F16, F32 weights too, and they unpack quantised weights where the CPU quantises the activations.
So whole models differ by that already where nothing is split: on lavapipe by up to 5e-7 (F32), 4e-5 (F16) and 3e-4
(quantised); splits by up to 1e-6, 4e-5 and 5e-4, and the less of a model is on the device, the less. A rounding can
also send a token to another expert, which is 4e-3 at once in models this small. A wrong kernel, cut or join gives 0.1
to 2.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from e2e.logits import engine_of, nmse
from e2e.placed import Placed, placed
from e2e.plugin_runs import loaded, logits_of, pattern_of, with_plugin
from e2e.split_cases import everything, ffn, split_placements, streaming_case
from gguf_factory import write_gguf
from processes import here

from oallama.core.types import CPU_DEVICE, StreamSettings
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.placer import Placer
from oallama.profile.store import profile_to_json

pytestmark = pytest.mark.vulkan

DEVICE = "Vulkan0"
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 300, 150)]
F32_NMSE = 5e-6
ROUNDED_NMSE = 1e-3
EXPERTS_NMSE = 1e-2
SAME_DEVICE_NMSE = 2e-6
"""Between two graphs for the device, in which it does or does not compute the norm before the FFN as well."""

ON_LAVAPIPE_SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")
"""Types whose kernels take lavapipe a minute and more to compile."""


@pytest.fixture(scope="module", autouse=True)
def device() -> str:
    """The ggml name of the device under test."""
    if not any(device.name == DEVICE for device in load_bridge().devices()):
        pytest.skip("no Vulkan device: scripts/test --vulkan builds llama.cpp for one and runs these tests")
    return DEVICE


def model(models: Path, arch: str, weight_type: str) -> Path:
    path = models / f"{arch}-{weight_type}.gguf"
    return path if path.is_file() else write_gguf(path, arch, weight_type=weight_type)


def bound(arch: str, weight_type: str) -> float:
    if weight_type == "F32":
        return F32_NMSE
    return EXPERTS_NMSE if "moe" in arch else ROUNDED_NMSE


def on_cpu(path: Path, tokens: list[int] = TOKENS) -> npt.NDArray[np.float32]:
    """Logits of stock llama.cpp on the CPU."""
    with loaded(path) as context:
        return logits_of(context, tokens)


def ffn_names(case: Placed) -> list[str]:
    return [operator.name for operator in case.operators if is_ffn(operator)]


#
# the device, and the policies that place whole operators
#


def test_the_device_has_what_streaming_needs() -> None:
    listed = json.loads(here("devices", "--json").stdout)["devices"]
    (found,) = [device for device in listed if device["name"] == DEVICE]
    assert found["backend"] == "Vulkan" and found["type"] in ("GPU", "IGPU")
    assert found["async"] and found["host_buffer"] and found["events"]
    assert found["memory_total"] > 0
    assert load_bridge().pins(DEVICE, 1 << 20)


def test_doctor_finds_nothing_wrong() -> None:
    said = here("doctor").stdout
    assert DEVICE in said


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Placer:
    """A model of four layers, profiled."""
    path = write_gguf(models / "four.gguf", "llama", weight_type="Q4_0", n_layer=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path_factory.mktemp("profile")))
        placer = Placer.load(path, device=DEVICE, gpu_weights="50%", threads=1)
        placer.profile(progress=False, tokens=(1, 8))
        return placer


@pytest.fixture(scope="module")
def profile(measured: Placer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a profile in which the CPU takes twice as long as the device, and both so long that links and
    launches cost nothing beside it: then a split pays, be the device lavapipe."""
    profile = measured.profile()
    there = {(case.mul_mat, case.n_tokens): case.seconds for case in profile.cases if case.device == DEVICE}
    slow = tuple(
        replace(case, seconds=there[case.mul_mat, case.n_tokens] * (2000 if case.device == CPU_DEVICE else 1000))
        for case in profile.cases
    )
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    path.write_text(json.dumps(profile_to_json(replace(profile, cases=slow))), encoding="utf-8")
    return path


def test_the_profile_measures_the_link_pinned_and_not(measured: Placer) -> None:
    profile = measured.profile()
    assert {"h2d_pinned", "h2d_pageable", "d2h"} <= profile.link.keys()
    assert all(fit.beta_s_per_byte > 0 for fit in profile.link.values())
    assert profile.contention is not None and profile.contention.second_alone_gb_per_s > 0
    timed = {(case.device, case.mul_mat.type) for case in profile.cases}
    assert (DEVICE, "Q4_0") in timed and (CPU_DEVICE, "Q4_0") in timed


@pytest.mark.parametrize("policy", ["layers", "oato", "split"])
def test_a_policy_places_half_and_computes_the_same(policy: str, measured: Placer, profile: Path) -> None:
    placer = Placer.load(measured.model.path, DEVICE, gpu_weights="50%", threads=1, profile=profile)
    plan = placer.plan(policy, n_prompt=64, n_gen=16, n_ctx=256, n_ubatch=64, fill="full")
    there = sum(p.gg * o.bytes for p, o in zip(plan.operators, placer.operators, strict=True))
    total = sum(operator.bytes for operator in placer.operators)
    assert 0.2 * total < there <= 0.5 * total
    assert any(0 < placement.gg < 1 for placement in plan.operators) == (policy == "split")
    with placer.engine(plan) as engine:
        found = engine.logits(TOKENS)
        assert engine.warnings == ()
        assert engine.memory.device_bytes > 0
    assert nmse(found, on_cpu(Path(placer.model.path))) <= ROUNDED_NMSE


#
# split operators
#


@pytest.mark.parametrize("n_tokens", [1, 7, 64])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.99, 1.0])  # 0.01 and 0.99: the smallest slice
@pytest.mark.parametrize(
    ("arch", "weight_type"),
    [("llama", "F32"), ("llama", "F16"), ("llama", "Q4_0"), ("llama", "Q4_K"), ("qwen3moe", "F32"),
     ("qwen3moe", "F16"), ("llama-moe", "Q4_0"), ("phi3", "Q8_0")],
)  # fmt: skip
def test_a_split_ffn_computes_the_same(arch: str, weight_type: str, share: float, n_tokens: int, models: Path) -> None:
    path = model(models, arch, weight_type)
    case = placed(path)
    before = load_bridge().split().stats()
    with with_plugin(case, split_placements(case.operators, ffn(share)), ffn_names(case), DEVICE) as context:
        found = logits_of(context, TOKENS[:n_tokens])
        again = logits_of(context, TOKENS[:n_tokens])
    done = load_bridge().split().stats() - before
    assert np.array_equal(found, again), "the same program twice"
    assert (done.bytes_in > 0) == (share > 0) and (done.bytes_out > 0) == (share > 0)
    wanted = on_cpu(path, TOKENS[:n_tokens])
    if share == 0:
        assert np.array_equal(found, wanted)
    assert nmse(found, wanted) <= bound(arch, weight_type)


@pytest.mark.parametrize("arch", ["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "minicpm3", "gpt2", "qwen3moe"])
def test_every_operator_split(arch: str, models: Path) -> None:
    path = model(models, arch, "F32")
    case = placed(path)
    given = [operator.name for operator in case.operators if operator.name != "token_embd.weight"]
    with with_plugin(case, split_placements(case.operators, everything(0.5)), given, DEVICE) as context:
        found = logits_of(context, TOKENS)
    assert nmse(found, on_cpu(path)) <= F32_NMSE


@pytest.mark.parametrize(
    "weight_type",
    ["BF16", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "MXFP4",
     *ON_LAVAPIPE_SLOW],
)  # fmt: skip
def test_every_type_that_both_sides_know(weight_type: str, models: Path) -> None:
    if weight_type in ON_LAVAPIPE_SLOW and "llvmpipe" in load_bridge().device(DEVICE).description:
        pytest.skip("lavapipe compiles the kernels of these types for minutes; a GPU does not")
    path = model(models, "llama", weight_type)
    case = placed(path)
    with with_plugin(case, split_placements(case.operators, ffn(0.5)), ffn_names(case), DEVICE) as context:
        for n_tokens in (1, 20):
            assert nmse(logits_of(context, TOKENS[:n_tokens]), on_cpu(path, TOKENS[:n_tokens])) <= ROUNDED_NMSE


def test_all_gg_is_what_the_device_computes_unsplit(models: Path) -> None:
    case = placed(model(models, "llama", "Q4_0"))
    given = ffn_names(case)
    with with_plugin(case, split_placements(case.operators, ffn(1)), given, DEVICE) as context:
        found = logits_of(context, TOKENS)
    bridge = load_bridge()
    overrides = [(pattern_of(given), bridge.buft(DEVICE))]
    with loaded(Path(case.model.path), overrides, [bridge.device(DEVICE).pointer]) as context:
        assert nmse(found, logits_of(context, TOKENS)) <= SAME_DEVICE_NMSE


#
# what is streamed
#


def streamed_logits(case: Placed) -> npt.NDArray[np.float32]:
    """Twice, which must be the same to the bit; weights must have been copied for it."""
    before = load_bridge().split().stats()
    with engine_of(case, probed=None) as engine:
        assert [warning for warning in engine.warnings if "plan again" not in warning] == []
        found, again = engine.logits(TOKENS), engine.logits(TOKENS)
    assert (load_bridge().split().stats() - before).bytes_streamed > 0
    assert np.array_equal(found, again)
    return found


@pytest.mark.parametrize("weight_type", ["F32", "F16", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("prefetch", ["ahead", "layer"])
@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_streamed_slices_compute_the_same(weight_type: str, prefetch: str, n_slots: int, models: Path) -> None:
    path = model(models, "llama", weight_type)
    settings = StreamSettings(n_slots, prefetch)  # type: ignore[arg-type]
    case = streaming_case(path, DEVICE, lambda operator: (0.25, 0.25), streaming=settings)
    assert nmse(streamed_logits(case), on_cpu(path)) <= bound("llama", weight_type)


def test_experts_are_streamed(models: Path) -> None:
    path = model(models, "qwen3moe", "F32")
    case = streaming_case(path, DEVICE, lambda operator: (0.0, 0.5), token_assignment=((1, 0), (64, 16)))
    assert nmse(streamed_logits(case), on_cpu(path)) <= F32_NMSE


#
# memory
#


def test_results_come_back_through_pinned_memory(models: Path) -> None:
    """Into the host memory that the device offers, and from there to where they belong."""
    assert load_bridge().pins(DEVICE, 1 << 20)
    case = placed(model(models, "llama", "F32"))
    path = Path(case.model.path)
    split = load_bridge().split()
    before = split.memory()
    with with_plugin(case, split_placements(case.operators, ffn(0.5)), ffn_names(case), DEVICE) as context:
        assert nmse(logits_of(context, TOKENS[:1]), on_cpu(path, TOKENS[:1])) <= F32_NMSE
        assert split.memory().host_compute > before.host_compute
        assert nmse(logits_of(context, TOKENS), on_cpu(path)) <= F32_NMSE
    assert split.memory() == before
