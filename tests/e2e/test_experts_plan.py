"""`--policy experts` from counts to logits: hot sets as planned, stock llama.cpp's numbers, the ledger's memory.

Plans are made of a described profile, so that they do not depend on how busy this machine is.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.logits import TOKENS, nmse, stock_logits
from gguf_factory import write_gguf
from processes import here
from seeds import crossed

from oallama.bench.arms import ArmMaker
from oallama.bench.prepare import shared_setting
from oallama.bench.records import BenchTest
from oallama.bench.verify import expected_shares
from oallama.core.routing import LayerRouting, Routing, Traffic
from oallama.cost.experts import expert_use
from oallama.device.load_params import load_bridge
from oallama.placer import Given, Placer
from oallama.plan.plan import Plan
from oallama.profile.routing import write_routing
from oallama.profile.store import profile_to_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from routing import RoutingDraw, counts_of, draw, first_and_second, zipf_shares
from routing import write_routing as write_ids

pytestmark = pytest.mark.usefixtures("prober")

EMULATED = "emulated:vram=1GiB,scale=1,values=real"
EXACT_NMSE = 1e-6  # F16 weights: both sides multiply the same numbers (test_split_logits.py)
N_LAYER, N_EXPERT = 4, 8
SLOW_LINK = 2e7  # bytes/s, so that nothing is streamed
USES = (1.0, 300.0, 2.0, 3.0, 1.0, 500.0, 2.0, 400.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def counted(cache: Path, arch: str) -> Path:
    """A model whose experts were counted: three of eight serve nearly all traffic."""
    path = write_gguf(cache / f"{arch}.gguf", arch, weight_type="F16", n_layer=N_LAYER)
    model = Placer.load(path, device="none").model
    layers = tuple(LayerRouting(layer=i, n_tokens=500, uses=USES, before=USES, latest=USES) for i in range(N_LAYER))
    assert model.n_expert == N_EXPERT
    write_routing(
        Routing(
            version=1,
            model_fingerprint=model.fingerprint,
            n_expert=N_EXPERT,
            n_expert_used=model.n_expert_used,
            half_life_tokens=4096,
            decode=layers,
            prompt=layers,
        )
    )
    return path


def planned(path: Path, device: str) -> tuple[Placer, Plan]:
    profile = slow_cpu_fast_card(path, SLOW_LINK)
    placer = Placer.load(path, device=device, profile=profile, gpu_weights=0.4, threads=1, n_ubatch=64)
    return placer, placer.plan("experts", n_prompt=16, n_gen=256)


@pytest.mark.parametrize(
    ("arch", "device"),
    crossed(
        ["llama-moe", "qwen2moe", "qwen3moe", "granitemoe", "gpt-oss"],
        ["cpu-pair", "rpc-worker:1", EMULATED],
    ),
)
def test_a_plan_runs_as_planned_and_computes_what_stock_does(arch: str, device: str, cache: Path) -> None:
    path = counted(cache, arch)
    placer, plan = planned(path, device)
    plan.check(placer.model, placer.operators)
    hot = {p.name: p.hot_experts for p in plan.operators if p.hot_experts}
    assert hot and all(5 in experts for experts in hot.values())
    before = load_bridge().split().memory()
    with placer.engine(plan, progress=False) as engine:
        assert engine.warnings == ()
        assert engine.plan.operators == plan.operators
        held = load_bridge().split().memory()
        there = sum(o.bytes // N_EXPERT * len(hot[o.name]) for o in placer.operators if o.name in hot)
        assert held.device_weights - before.device_weights >= there > 0
        assert held.device_compute - before.device_compute <= plan.memory.staging
        assert nmse(engine.logits(TOKENS), stock_logits(path, TOKENS, n_ubatch=64)) <= EXACT_NMSE
        assert engine.generate(list(range(1, 70)), max_tokens=2, temperature=0).n_gen == 2


def test_the_device_holds_what_the_ledger_says(cache: Path) -> None:
    path = counted(cache, "qwen3moe")
    placer, plan = planned(path, EMULATED)
    memory = plan.memory
    with placer.engine(plan, progress=False):
        held = load_bridge().emulated().stats().device_bytes
    assert abs(memory.limit - memory.spare - held) <= max(0.02 * held, 1 << 16)


def test_the_command_line_and_bench_know_it(cache: Path) -> None:
    path = counted(cache, "qwen3moe")
    profile, folder = cache / "profile.json", cache / "cache"
    profile.write_text(json.dumps(profile_to_json(slow_cpu_fast_card(path, SLOW_LINK))), encoding="utf-8")
    on = ("--device", EMULATED, "--profile", profile, "--threads", 1, "--gpu-weights", "40%")
    asked = (path, *on, "-p", 16, "-n", 256, "--policy", "experts")
    here("plan", *asked, "-o", cache / "plan.json", cache=folder)
    plan = Plan.load(cache / "plan.json")
    assert plan.policy == "experts" and any(p.hot_experts for p in plan.operators)
    report = json.loads(here("affinity-report", *asked, "--json", cache=folder).stdout)
    split = {o["name"] for o in report["operators"] if o["backend"] == "split"}
    assert split >= {p.name for p in plan.operators if p.hot_experts}
    placer = Placer.load(path, device=EMULATED, profile=profile, gpu_weights=0.4, threads=1, n_ubatch=64)
    setting = shared_setting(placer, [BenchTest(16, 256)])
    spec = ArmMaker(placer, setting, (BenchTest(16, 256),)).make("experts")
    shares = expected_shares(spec, placer.operators, N_LAYER)
    hot = next(p for p in Plan.from_json(dict(spec.plan or {}), "the arm").operators if p.hot_experts)
    assert shares[hot.name] == pytest.approx(len(hot.hot_experts) / N_EXPERT)


def test_the_device_follows_a_file_and_begins_again_behind_its_end(tmp_path: Path) -> None:
    """Each layer's tokens in their order, over several graphs; rows of 7 end in the middle of a prompt."""
    path = write_gguf(tmp_path / "moe.gguf", "llama-moe", n_layer=N_LAYER)
    rows = draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 0.5), 2, 7))
    write_ids(tmp_path / "ids.txt", rows, "seven tokens")
    device = f"emulated:vram=1GiB,scale=1,values=drawn,routing={tmp_path / 'ids.txt'}"
    placer = Placer.load(path, device=device, threads=1, profile=slow_cpu_fast_card(path, 1e9))
    plan = placer.plan(Given([o.name for o in placer.operators], N_LAYER + 1), 64, 16)
    traffic: list[Traffic] = []
    with placer.engine(plan, progress=False, on_traffic=traffic.append) as engine:
        engine.generate(list(range(1, 17)), max_tokens=8, temperature=1.0)
    for layer, chosen in rows.items():
        n_seen = 0
        for tally in (traffic[0].prompt[layer], traffic[0].decode[layer]):
            uses = Counter(expert for i in range(tally.n_tokens) for expert in chosen[(n_seen + i) % 7])
            assert tally.uses == tuple(uses[expert] for expert in range(N_EXPERT)), layer
            n_seen += tally.n_tokens
    assert traffic[0].prompt[0].n_tokens == 16


def engine_tokens(traffic: list[Traffic]) -> int:
    """Decoded ones that a layer has seen, and prompts, which go on to give one each."""
    return sum(1 + (one.decode[0].n_tokens if 0 in one.decode else 0) for one in traffic)


def test_later_traffic_hits_as_often_as_promised(cache: Path) -> None:
    """The device follows the second half of a drawing; the plan was made from the first."""
    path = write_gguf(cache / "qwen3moe.gguf", "qwen3moe", weight_type="F16", n_layer=N_LAYER)
    model = Placer.load(path, device="none").model
    n_used = model.n_expert_used
    drawn = draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 1.0), n_used, 1200))
    first, second = first_and_second(drawn)
    counts = counts_of(first, model.fingerprint, N_LAYER, N_EXPERT, n_used)
    write_routing(counts)
    write_ids(cache / "later.txt", second, "the second half")
    placer, plan = planned(path, f"emulated:vram=1GiB,scale=1,values=drawn,routing={cache / 'later.txt'}")
    hot = {
        operator.layer: placement.hot_experts
        for operator, placement in zip(placer.operators, plan.operators, strict=True)
        if placement.hot_experts and operator.layer is not None
    }
    routers = {o.name: p for o, p in zip(placer.operators, plan.operators, strict=True) if o.role == "ffn_gate_inp"}
    assert hot and all(placement.gg == 1 for placement in routers.values()), "only these follow the file"
    traffic: list[Traffic] = []
    with placer.engine(plan, progress=False, on_traffic=traffic.append) as engine:
        while engine_tokens(traffic) < 150:  # what is drawn may end an answer
            engine.generate(list(range(1, 17)), max_tokens=50, temperature=1.0)
    use = expert_use(counts)
    counted_uses = [(layer, t.decode[layer].uses) for layer in hot for t in traffic if layer in t.decode]
    hits = sum(uses[expert] for layer, uses in counted_uses for expert in hot[layer])
    promised = sum(use[layer].decode[len(hot[layer])] * sum(uses) for layer, uses in counted_uses)
    n_uses = sum(sum(uses) for _, uses in counted_uses)
    assert hits / n_uses == pytest.approx(promised / n_uses, abs=0.07)
