"""Policies of other systems from plan to logits, on an emulated card that computes the real values: what they place,
stream and assign is run as planned, and computes what stock llama.cpp does.

Plans are made of a described profile, so that they do not depend on how busy this machine is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.logits import TOKENS, nmse, stock_logits
from gguf_factory import write_gguf
from processes import here
from seeds import ALL, crossed

from oallama.bench.arms import ArmMaker
from oallama.bench.prepare import shared_setting
from oallama.bench.records import BenchTest
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.profile.store import profile_to_json
from oallama.run.stock import expected_places

pytestmark = pytest.mark.usefixtures("prober")

CARD = "emulated:vram=1GiB,scale=1,values=real"
EXACT_NMSE = 1e-6  # F16 weights: both sides multiply the same numbers (test_split_logits.py)
STREAMING = ("hetegen", "twinpilots", "flexgen")


def model(models: Path, arch: str) -> Path:
    path = models / f"{arch}.gguf"
    return path if path.is_file() else write_gguf(path, arch, weight_type="F16", n_layer=5)


def planned(path: Path, policy: str, gpu_weights: float = 0.4, link_bytes_per_s: float = 1e9) -> tuple[Placer, Plan]:
    profile = slow_cpu_fast_card(path, link_bytes_per_s)
    placer = Placer.load(path, device=CARD, profile=profile, gpu_weights=gpu_weights, threads=1)
    return placer, placer.plan(policy, n_prompt=128, n_gen=8)


@pytest.mark.parametrize(
    ("policy", "arch"),
    [
        *crossed((*STREAMING, "atsinfer"), ("llama", "phi3", "qwen3moe")),
        *crossed(("fiddler",), ("llama-moe", "qwen2moe", "qwen3moe")),
    ],
)
def test_a_plan_runs_as_planned_and_computes_what_stock_does(policy: str, arch: str, models: Path) -> None:
    path = model(models, arch)
    placer, plan = planned(path, policy, link_bytes_per_s=5e7 if policy == "fiddler" else 1e9)
    plan.check(placer.model, placer.operators)
    there = sum(o.bytes * p.gg for o, p in zip(placer.operators, plan.operators, strict=True))
    streamed = sum(o.bytes * p.cg for o, p in zip(placer.operators, plan.operators, strict=True))
    assert 0 < there <= 0.4 * sum(o.bytes for o in placer.operators)
    assert (streamed > 0) == (policy in STREAMING)
    with placer.engine(plan, progress=False) as engine:
        assert engine.warnings == ()
        assert engine.plan.operators == plan.operators
        assert nmse(engine.logits(TOKENS), stock_logits(path, TOKENS)) <= EXACT_NMSE
        assert engine.generate(list(range(1, 70)), max_tokens=2, temperature=0).n_gen == 2
        done = engine.split_stats
    if policy in STREAMING:
        assert done is not None and done.decode.bytes_streamed > 0
    if policy == "fiddler":
        assert plan.token_assignment and done is not None
        assert done.prompt.bytes_streamed > 0 == done.decode.bytes_streamed


def test_fiddler_computes_on_the_cpu_where_copying_never_pays(models: Path) -> None:
    path = model(models, "qwen3moe")
    placer, plan = planned(path, "fiddler", link_bytes_per_s=1e3)
    assert plan.token_assignment and not any(n_g for _, n_g in plan.token_assignment)
    with placer.engine(plan, progress=False) as engine:
        assert nmse(engine.logits(TOKENS), stock_logits(path, TOKENS)) <= EXACT_NMSE
        assert engine.generate(list(range(1, 70)), max_tokens=2, temperature=0).n_gen == 2
        done = engine.split_stats
    assert done is not None and done.prompt.bytes_streamed == 0 < done.prompt.n_phases


def test_hetegen_joins_an_ffn_once_where_its_shares_are_equal(models: Path) -> None:
    """K and V, which read the same input, run together, and so do gate, up and down."""
    placer, plan = planned(model(models, "llama"), "hetegen", gpu_weights=0.0)
    with placer.engine(plan, progress=False) as engine:
        assert engine.plan.operators == plan.operators
        engine.generate(list(range(1, 70)), max_tokens=4, temperature=0)
        assert engine.split_stats is not None
        assert engine.split_stats.decode.n_phases / engine.split_stats.n_decoded == 4 * placer.model.n_layer


def test_fit_is_llama_cpps_own_choice_as_a_plan(models: Path, tmp_path: Path) -> None:
    path = model(models, "llama")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_to_json(slow_cpu_fast_card(path, 1e9))), encoding="utf-8")
    written = tmp_path / "plan.json"
    common = ("--device", CARD, "--threads", 1, "--profile", profile)
    here("plan", path, "--policy", "fit", *common, "-p", 64, "-n", 8, "-o", written, cache=tmp_path)
    plan = Plan.load(written)
    assert plan.policy == "fit" and any("--fit chooses" in note for note in plan.notes)
    assert all(placement.gg == 1 for placement in plan.operators), "the card holds all of it"
    done = here("run", path, "-p", "hello", "-n", 2, "--temp", 0, "--json", "--policy", "fit", *common, cache=tmp_path)
    made = json.loads(done.stdout)
    assert made["policy"] == "fit" and made["n_gen"] == len(made["tokens"])


@pytest.mark.parametrize("policy", ["hetegen", *(("twinpilots", "scheinfer") if ALL else ())])
def test_the_affinity_report_of_a_policy_shows_what_its_plan_has(policy: str, models: Path, tmp_path: Path) -> None:
    path = model(models, "llama")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_to_json(slow_cpu_fast_card(path, 1e9))), encoding="utf-8")
    asked = (path, "--policy", policy, "--device", CARD, "--threads", 1, "--profile", profile, "-p", 64, "-n", 8)
    asked = (*asked, "--gpu-weights", "40%")
    plan = json.loads(here("plan", *asked, cache=tmp_path).stdout)
    report = json.loads(here("affinity-report", *asked, "--json", cache=tmp_path).stdout)
    places = {o["name"]: (o["gg"], o["cg"], o["cc"]) for o in plan["operators"]}
    assert {o["name"]: (o["gg"], o["cg"], o["cc"]) for o in report["operators"]} == places
    assert (report["policy"], report["predicted"], report["memory"]) == (policy, plan["predicted"], plan["memory"])
    split = {name for name, (gg, cg, _) in places.items() if cg or 0 < gg < 1}
    assert {o["name"] for o in report["operators"] if o["backend"] == "split"} == split != set()


def test_arms_of_a_bench_may_be_these_policies(models: Path) -> None:
    """Half of the weights may be on the card, so llama.cpp's --fit leaves layers on the host."""
    path = model(models, "llama")
    placer = Placer.load(path, device=CARD, profile=slow_cpu_fast_card(path, 1e9), gpu_weights=0.5, threads=1)
    tests = (BenchTest(64, 8),)
    setting = shared_setting(placer, tests)
    maker = ArmMaker(placer, setting, tests)
    stock, fit, hetegen = (maker.make(name) for name in ("stock-fit", "fit", "hetegen"))
    assert stock.stock is not None and fit.plan is not None and hetegen.plan is not None
    places = expected_places(placer.operators, placer.model.n_layer, stock.stock)
    assert set(places.values()) == {"device", "host"}
    assert {row["name"]: row["gg"] == 1 for row in fit.plan["operators"]} == {
        name: place == "device" for name, place in places.items()
    }
    assert (fit.plan["policy"], hetegen.plan["policy"]) == ("fit", "hetegen")
