"""A plan's attention is what the engine, the bench and a placer that is told otherwise really run with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_factory import write_gguf
from processes import here

from oallama.bench.arms import ArmMaker
from oallama.bench.process import ArmProcess
from oallama.bench.records import BenchTest, Setting
from oallama.core.types import Attention, Workload
from oallama.cost.passes import passes
from oallama.device.load_params import LoadSettings
from oallama.place.attention import attention_seconds
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.profile.store import profile_to_json

pytestmark = pytest.mark.usefixtures("prober")

N_CTX = 1024
FLASH_ATTENTION = {"on": 1, "off": 0}  # llama_flash_attn_type


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "f16.gguf", "llama", weight_type="F16")


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return Placer.load(model, device="none", threads=1).plan(
        "cpu", workload=Workload(n_prompt=16, n_gen=4, n_ctx=N_CTX, n_ubatch=64), measure=False
    )


def saying(plan: Plan, flash_attn: str, type_k: str = "f16") -> Plan:
    return replace(plan, attention=Attention(flash_attn=flash_attn, type_k=type_k, type_v="f16"))  # type: ignore[arg-type]


def loaded(model: Path, plan: Plan, **told: str) -> tuple[int, int, Attention]:
    """(flash_attn_type, type_k) of the context that a placer's engine makes, and what the engine says of it."""
    with Placer.load(model, device="none", threads=1, **told).engine(plan) as engine:  # type: ignore[arg-type]
        params = engine.llama.context_params
        assert engine.generate([1, 2, 3], max_tokens=2, temperature=0).n_gen == 2
        return int(params.flash_attn_type), int(params.type_k), engine.attention


@pytest.mark.parametrize("way", ["on", "off"])
def test_the_engine_runs_with_what_the_plan_says(way: str, model: Path, plan: Plan) -> None:
    flash_attn, type_k, said = loaded(model, saying(plan, way, "q8_0"))
    assert (flash_attn, type_k) == (FLASH_ATTENTION[way], 8)  # GGML_TYPE_Q8_0
    assert said == Attention(flash_attn=way, type_k="q8_0", type_v="f16")  # type: ignore[arg-type]
    other = "off" if way == "on" else "on"
    assert loaded(model, saying(plan, way), flash_attn=other)[0] == FLASH_ATTENTION[other]


def test_a_plan_that_says_nothing_is_run_as_a_new_one_would_be(model: Path, plan: Plan) -> None:
    for n_prompt, way in ((16, "on"), (900, "off")):
        load = replace(plan.workload, n_prompt=n_prompt, n_gen=64)
        old = replace(plan, workload=load, attention=None)
        assert loaded(model, old)[0] == FLASH_ATTENTION[way]


def test_an_arm_chooses_for_what_is_measured_and_runs_with_it(model: Path) -> None:
    placer = Placer.load(model, device="none", threads=1)
    setting = Setting(LoadSettings(str(model), n_ctx=N_CTX, n_threads=1, n_ubatch=64))
    for depth, way in ((0, "on"), (900, "off")):
        spec = ArmMaker(placer, setting, (BenchTest(0, 16, depth),), {}).make("cpu")
        assert spec.plan is not None
        assert spec.plan["attention"]["flash_attn"] == way
        arm = ArmProcess(spec)
        try:
            assert arm.load(()).flash_attn == (way == "on")
        finally:
            arm.close()
    told = ArmMaker(placer, setting.changed(attention=Attention("on")), (BenchTest(0, 16, 900),), {}).make("cpu")
    arm = ArmProcess(told)
    try:
        assert arm.load(()).flash_attn
    finally:
        arm.close()


def test_a_profile_decides_where_there_is_one(model: Path, tmp_path: Path) -> None:
    placer = Placer.load(model, device="none", threads=1)
    profile = placer.profile(progress=False, tokens=(1,))
    assert {rest.shape.flash_attn for rest in profile.rest if rest.shape is not None} == {True, False}
    made = placer.plan("cpu", 16, 900, N_CTX, 64)
    said = made.attention
    over = passes(made.workload, "mixed")
    seconds = {way: attention_seconds(profile, way, "CPU", over) or 0.0 for way in ("on", "off")}  # type: ignore[arg-type]
    assert said is not None
    assert seconds[said.flash_attn] == min(seconds.values()) > 0

    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_to_json(profile)))
    asked = ("plan", model, "--device", "none", "--profile", file, "-fa", "off")
    told = json.loads(here(*asked, "-ctk", "q8_0").stdout)
    assert told["attention"] == {"flash_attn": "off", "type_k": "q8_0", "type_v": "f16"}
    assert here(*asked, "-ctv", "q8_0", code=2).stderr.count("\n") == 1
