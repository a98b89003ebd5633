"""The ledger is what is really taken: what a plan says that it puts on the device, and what the device holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from gguf_factory import write_llama_shape
from make_model import write_shape
from model_shapes import glm4moe

from oallama.core.units import KIB, MIB
from oallama.device.load_params import load_bridge
from oallama.placer import Given, Placer

DEVICE = "emulated:vram=1GiB,scale=1,values=real"  # takes large batches of host operators, and has pinned memory
N_UBATCH = 64
SHARE, SLACK = 0.02, 64 * KIB  # a weight's part is padded, by some hundred bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_shape(tmp_path_factory.mktemp("model") / "model.gguf", 8, 512, 2048, 8, 4, 2000, "Q4_0")


@pytest.mark.parametrize(
    ("policy", "link_bytes_per_s", "fills"),
    [
        ("scheinfer", 8e8, True),  # streams
        ("scheinfer", 1e6, False),  # slices alone, of five FFNs; a part of one more would not pay for such a link
        ("oato", 1e9, False),  # an operator is a twentieth of the device
        ("layers", 1e9, False),  # a layer is a sixth of the device
    ],
)
def test_the_device_holds_what_the_plan_says(policy: str, link_bytes_per_s: float, fills: bool, model: Path) -> None:
    vram = 12 * MIB
    profile = slow_cpu_fast_card(model, link_bytes_per_s)
    placer = Placer.load(model, device=DEVICE, vram=vram, threads=1, profile=profile, n_ubatch=N_UBATCH)
    plan = placer.plan(policy, n_prompt=128, n_gen=16, n_ctx=256)
    memory = plan.memory
    planned = memory.weights_gpu + memory.kv + memory.compute + memory.staging
    assert planned + memory.spare == memory.limit and memory.spare >= 0
    with placer.engine(plan, progress=False) as engine:
        loaded = load_bridge().emulated().stats().device_bytes
        engine.generate(list(range(1, N_UBATCH + 8)), max_tokens=2, temperature=0)
        held = load_bridge().emulated().stats().device_bytes
        assert engine.warnings == ()
    assert loaded == held, "nothing is taken while it runs"
    assert abs(planned - held) <= max(SHARE * held, SLACK)
    if fills:
        assert held >= 0.88 * vram


def test_so_it_is_where_only_weights_are_capped(model: Path) -> None:
    profile = slow_cpu_fast_card(model, 1e9)
    placer = Placer.load(model, device=DEVICE, gpu_weights=0.3, threads=1, profile=profile, n_ubatch=N_UBATCH)
    plan = placer.plan("scheinfer", n_prompt=128, n_gen=16, n_ctx=256)
    assert any(0 < placement.gg < 1 or placement.cg for placement in plan.operators)
    with placer.engine(plan, progress=False):
        held = load_bridge().emulated().stats().device_bytes
    memory = plan.memory
    assert abs(memory.limit - memory.spare - held) <= max(SHARE * held, SLACK)


def test_a_block_that_only_predicts_further_tokens_takes_nothing(tmp_path: Path) -> None:
    """MTP: llama.cpp leaves it in the file, and counts it as a layer of -ngl. It is neither placed nor accounted."""
    shape = glm4moe(4, 256, 512, 6, 2, 300, 512, 1e6, head_dim=64, n_expert=8, n_expert_used=4, n_ff_expert=128)
    ahead = replace(shape, metadata=shape.metadata | {"nextn_predict_layers": 1})
    held: dict[str, int] = {}
    for name, made in (("with", ahead), ("without", shape.with_layers(3))):
        placer = Placer.load(write_shape(tmp_path / f"{name}.gguf", made, "Q4_0"), device=DEVICE, threads=1)
        everything = [operator.name for operator in placer.operators]
        plan = placer.plan(Given(everything, made.n_layer + 1), 64, 16, 256, measure=False)
        with placer.engine(plan, progress=False) as engine:
            engine.generate([1, 2, 3], max_tokens=2, temperature=0)
            assert engine.warnings == ()
        memory = plan.memory
        held[name] = memory.weights_gpu + memory.kv
        assert {operator.layer for operator in placer.operators} == {None, 0, 1, 2}
    assert held["with"] == held["without"]
