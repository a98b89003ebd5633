"""A plan's attention is what the engine, the bench and a placer that is told otherwise really run with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from e2e.described_card import profile_file
from processes import here

from oallama.bench.arms import ArmMaker
from oallama.bench.process import ArmProcess
from oallama.bench.records import BenchTest, Setting
from oallama.core.types import Attention, Workload
from oallama.cost.passes import passes
from oallama.device.load_params import LoadSettings
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.planner.attention import attention_seconds

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

N_CTX = 1024
FLASH_ATTENTION = {"on": 1, "off": 0}  # llama_flash_attn_type


@pytest.fixture(scope="module")
def placer(f16: Path) -> Placer:
    return Placer.load(f16, device="none", threads=1)


@pytest.fixture(scope="module")
def plan(placer: Placer) -> Plan:
    return placer.plan("cpu", workload=Workload(n_prompt=16, n_gen=4, n_ctx=N_CTX, n_ubatch=64), measure=False)


def loaded(plan: Plan, **told: str) -> tuple[int, int, int]:
    """(flash_attn_type, type_k, type_v) of the context that a placer makes."""
    placer = Placer.load(plan.model_path, device="none", threads=1, **told)  # type: ignore[arg-type]
    with placer.llama(plan) as llama:
        llama.eval([1, 2, 3])
        params = llama.context_params
        return int(params.flash_attn_type), int(params.type_k), int(params.type_v)


@pytest.mark.parametrize(("way", "other"), [("on", "off"), ("off", "on")])
def test_a_load_is_as_the_plan_says(way: str, other: str, plan: Plan) -> None:
    """Options of a load override the plan's attention; a plan without it runs as a new plan would."""
    said = Attention(way, "q8_0" if way == "on" else "f16", "f16")  # type: ignore[arg-type]
    planned = replace(plan, attention=said)
    assert loaded(planned) == (FLASH_ATTENTION[way], 8 if way == "on" else 1, 1)  # GGML_TYPE_Q8_0, F16
    assert loaded(planned, flash_attn=other, type_k="f16")[0] == FLASH_ATTENTION[other]
    workload = replace(plan.workload, n_prompt=16 if way == "on" else 900, n_gen=64)
    assert loaded(replace(plan, workload=workload, attention=None))[0] == FLASH_ATTENTION[way]


@pytest.mark.usefixtures("stub_server")
def test_llama_server_is_started_with_what_the_plan_and_the_options_say(plan: Plan) -> None:
    placer = Placer.load(plan.model_path, device="none", threads=1, type_v="q8_0")
    with placer.engine(replace(plan, attention=Attention("on", "q8_0", "f16"))) as engine:
        assert engine.attention == Attention("on", "q8_0", "q8_0")
        assert engine.generate([1, 2, 3], max_tokens=2, temperature=0).n_gen == 2
        words = psutil.Process(engine.pid).cmdline()
    for option, value in (("-fa", "on"), ("-ctk", "q8_0"), ("-ctv", "q8_0")):
        assert words[words.index(option) + 1] == value


@pytest.mark.parametrize(
    ("depth", "told", "is_flash"), [(0, None, True), (900, None, False), (900, Attention("on"), True)]
)
def test_an_arm_chooses_for_what_is_measured_and_runs_with_it(
    depth: int, told: Attention | None, is_flash: bool, placer: Placer
) -> None:
    setting = Setting(LoadSettings(placer.model.path, n_ctx=N_CTX, n_threads=1, n_ubatch=64))
    setting = setting if told is None else setting.changed(attention=told)
    spec = ArmMaker(placer, setting, (BenchTest(0, 16, depth),), {}).make("cpu")
    assert spec.plan is not None and spec.plan.attention is not None
    assert told is not None or spec.plan.attention.flash_attn == ("on" if is_flash else "off")
    arm = ArmProcess(spec)
    try:
        assert arm.load(()).flash_attn == is_flash
    finally:
        arm.close()


def test_a_profile_decides_where_there_is_one(f16: Path, tmp_path: Path) -> None:
    placer = Placer.load(f16, device="none", threads=1)
    profile = placer.profile(progress=False, tokens=(1,))
    assert {rest.shape.flash_attn for rest in profile.rest} == {True, False}
    made = placer.plan("cpu", 16, 900, N_CTX, 64)
    said, over = made.attention, passes(made.workload, "mixed")
    seconds = {way: attention_seconds(profile, way, "CPU", over) or 0.0 for way in ("on", "off")}  # type: ignore[arg-type]
    assert said is not None
    assert seconds[said.flash_attn] == min(seconds.values()) > 0

    asked = ("plan", f16, "--device", "none", "--profile", profile_file(profile, tmp_path), "-fa", "off")
    told = json.loads(here(*asked, "-ctk", "q8_0", "--json").stdout)
    assert told["attention"] == {"flash_attn": "off", "type_k": "q8_0", "type_v": "f16"}
    assert here(*asked, "-ctv", "q8_0", code=2).stderr.count("\n") == 1
