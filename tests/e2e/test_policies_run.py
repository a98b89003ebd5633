"""Plans of every policy, from a profile to logits: run as planned, in the memory that the memory breakdown says, with
stock llama.cpp's numbers. From Python, from the command line, and as arms of a bench.

Plans are made of a described profile, so that they do not depend on how busy this machine is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from devices import REAL
from e2e.described_card import profile_file, slow_cpu_fast_card
from e2e.forced import written
from e2e.logits import TOKENS, assert_stock, placed_logits
from e2e.plugin_runs import counted
from gguf_factory import write_llama_shape
from make_model import write_shape
from processes import here

from oallama.bench.arms import ArmMaker
from oallama.bench.prepare import shared_setting
from oallama.bench.records import BenchTest
from oallama.bench.verify import expected_shares
from oallama.core.routing import LayerRouting, Routing
from oallama.core.units import KIB, MIB
from oallama.device.load_params import load_bridge
from oallama.model.shapes import glm4moe
from oallama.placer import Given, Placer
from oallama.plan.plan import Plan
from oallama.profile.routing import write_routing
from oallama.profile.store import FOLDER_VARIABLE
from oallama.run.plugin_report import ask_report
from oallama.run.stock import expected_on_device

pytestmark = pytest.mark.usefixtures("no_alloc_loader", "kept_engines")

SHARE, SLACK = 0.02, 64 * KIB  # a weight's part is padded, by some hundred bytes
SLOW_LINK = 2e7  # bytes/s, so that nothing is streamed
USES = (1.0, 300.0, 2.0, 3.0, 1.0, 500.0, 2.0, 400.0)  # three of eight experts serve nearly all traffic


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Row:
    """A policy on a model. shape: of a larger llama in Q4_0 (layers, width, FFN). link: bytes/s; where it is slow
    nothing is streamed. limits: of the memory, 40 % of the weights where nothing is said. streams: in the prompt and in
    decode."""

    policy: str
    arch: str = "llama"
    device: str = REAL
    shape: tuple[int, int, int] | None = None
    link: float = 1e9
    limits: tuple[tuple[str, Any], ...] = (("gpu_weights", 0.4),)
    streams: tuple[bool, bool] = (False, False)
    fills: bool = False  # the whole of the device

    def model(self, models: Path) -> Path:
        if self.shape is None:
            return written(models, self.arch, weight_type="F16", n_layer=5)
        path, (n_layer, n_embd, n_ff) = models / f"{self.shape}.gguf", self.shape
        return path if path.is_file() else write_llama_shape(path, n_layer, n_embd, n_ff, 8, 4, 2000, "Q4_0")

    def placer(self, models: Path) -> Placer:
        path = self.model(models)
        profile = slow_cpu_fast_card(path, self.link)
        return Placer.load(path, device=self.device, threads=1, n_ubatch=64, profile=profile, **dict(self.limits))


BOTH, LARGE, ALL_12_MIB = (True, True), (8, 512, 2048), (("vram", 12 * MIB),)
ROWS = [
    Row("scheinfer", shape=LARGE, link=8e8, limits=ALL_12_MIB, streams=BOTH, fills=True),
    Row("scheinfer", shape=LARGE, link=1e6, limits=ALL_12_MIB),  # slices alone
    Row("scheinfer", shape=LARGE, limits=(("gpu_weights", 0.3),), streams=BOTH),
    Row("scheinfer", device="rpc-worker:1", limits=(("gpu_weights", 0.0),), streams=BOTH),
    Row("split", "phi3"),
    Row("oato", shape=LARGE, limits=ALL_12_MIB),
    Row("oato", shape=LARGE, limits=(("gpu_weights", 0.0),)),  # large batches alone
    Row("layers", shape=LARGE, limits=ALL_12_MIB),
    Row("layers", "gemma2", limits=()),  # all of it
    Row("hetegen", streams=BOTH),
    Row("hetegen", limits=(("gpu_weights", 0.0),), streams=BOTH),
    Row("twinpilots", "phi3", streams=BOTH),
    Row("flexgen", "qwen3moe", streams=BOTH),
    Row("atsinfer", "phi3"),
    Row("fiddler", "llama-moe", link=5e7, streams=(True, False)),
    Row("fiddler", "qwen2moe", link=5e7, streams=(True, False)),
    Row("fiddler", "qwen3moe", link=1e3),  # copying never pays
    Row("experts", "llama-moe", "cpu-pair", link=SLOW_LINK),
    Row("experts", "qwen2moe", "rpc-worker:1", link=1.5 * SLOW_LINK, streams=BOTH),  # its shared expert
    Row("experts", "qwen3moe", link=SLOW_LINK),
    Row("experts", "granitemoe", "cpu-pair", link=SLOW_LINK),
    Row("experts", "gpt-oss", link=SLOW_LINK),
]


def routed(placer: Placer) -> Placer:
    """With what is known of which experts are used."""
    model = placer.model
    layers = tuple(LayerRouting(layer=i, n_tokens=500, uses=USES, before=USES, latest=USES) for i in range(5))
    if model.n_expert:
        write_routing(
            Routing(1, model.fingerprint, model.n_expert, model.n_expert_used, 4096, decode=layers, prompt=layers)
        )
    return placer


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.policy}-{row.arch}-{row.device.partition(':')[0]}")
def test_a_plan_runs_as_planned_and_computes_what_stock_does(row: Row, models: Path) -> None:
    placer = routed(row.placer(models))
    all_logits = replace(placer.workload(128, 16, 256), n_outputs=0)
    plan = placer.plan(row.policy, workload=all_logits)
    plan.check(placer.model, placer.operators)
    memory, pairs = plan.memory, list(zip(placer.operators, plan.operators, strict=True))
    assert memory.weights_gpu + memory.kv + memory.compute + memory.staging + memory.spare == memory.limit
    assert memory.spare >= 0
    weights = sum(operator.bytes for operator in placer.operators)
    assert sum(o.bytes * p.gg for o, p in pairs) <= dict(row.limits).get("gpu_weights", 1.0) * weights
    hot = {o.name: p.hot_experts for o, p in pairs if p.hot_experts}
    assert bool(hot) == (row.policy == "experts") and all(5 in experts for experts in hot.values())
    split = load_bridge().split()
    before = split.memory()
    with placer.llama(plan, logits_all=True) as llama:
        assert llama.warnings == ()
        assert llama.plan.operators == plan.operators
        held = split.memory()
        assert held.device_weights - before.device_weights >= sum(
            operator.bytes // 8 * len(hot[operator.name]) for operator in placer.operators if operator.name in hot
        )
        assert held.device_compute - before.device_compute <= memory.staging
        on_device = load_bridge().emulated().stats().device_bytes if row.device == REAL else None
        assert_stock(placed_logits(llama, TOKENS), placer.model.path, TOKENS)
        with counted() as prompt:
            placed_logits(llama, range(1, 70))
        with counted() as decode:
            for token in (5, 6):
                llama.eval([token])
        if on_device is not None:
            assert load_bridge().emulated().stats().device_bytes == on_device, "nothing is taken while it runs"
            assert abs(memory.limit - memory.spare - on_device) <= max(SHARE * on_device, SLACK)
            assert not row.fills or on_device >= 0.88 * 12 * MIB
    assert (prompt[0].bytes_streamed > 0, decode[0].bytes_streamed > 0) == row.streams
    if (
        row.policy == "hetegen" and memory.weights_gpu == 0
    ):  # K and V, which read the same input, run together, and so do gate, up and down
        assert decode[0].n_segments / 2 == 4 * placer.model.n_layer


@pytest.mark.parametrize("row", [ROWS[0], Row("experts", "qwen3moe", link=SLOW_LINK)], ids=lambda row: row.policy)
def test_llama_server_runs_it_as_planned(row: Row, models: Path) -> None:
    """In the memory that the memory breakdown says, as the card itself counts it."""
    placer = routed(row.placer(models))
    plan = placer.plan(row.policy, n_prompt=128, n_gen=16, n_ctx=256)
    memory = plan.memory
    with placer.engine(plan) as engine:
        assert engine.warnings == () and engine.plan.operators == plan.operators
        reports = Path(psutil.Process(engine.pid).environ()["OALLAMA_REPORT"]).parent
        before = ask_report(reports, engine.pid, timeout_s=60)
        engine.generate(list(range(1, 70)), max_tokens=3, temperature=0)
        after = ask_report(reports, engine.pid, timeout_s=60)
        assert before is not None and before.emulated is not None
        on_device = before.emulated.device_bytes
        assert after is not None and after.emulated is not None
        assert after.emulated.device_bytes == on_device, "nothing is taken while it runs"
        assert abs(memory.limit - memory.spare - on_device) <= max(SHARE * on_device, SLACK)
    done = after.since(before)
    assert (done.stats.bytes_streamed > done.single.bytes_streamed, done.single.bytes_streamed > 0) == row.streams


def test_a_ring_of_one_slot(models: Path) -> None:
    """Chosen where memory is short: the ring is as long as a block, whose successors overwrite it one after another."""
    path = written(models, "llama", weight_type="Q4_0", n_layer=4)
    placer = Placer.load(path, device=REAL, profile=slow_cpu_fast_card(path, 3e8), vram=1700 * KIB, threads=1)
    plan = placer.plan("scheinfer", n_prompt=1, n_gen=32)
    assert plan.streaming is not None and plan.streaming.n_slots == 1
    streamed = [o.bytes * p.cg for o, p in zip(placer.operators, plan.operators, strict=True) if p.cg]
    assert len(streamed) > 4 and max(streamed) <= plan.streaming.ring_bytes < sum(streamed) / 2
    with placer.llama(plan, logits_all=True) as llama:
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)
        placed_logits(llama, [1, 2, 3])
        with counted() as decode:
            for token in (4, 5, 6):
                llama.eval([token])
        assert decode[0].bytes_streamed > 2 * sum(streamed), "of three tokens each fills it anew"


def test_a_long_prompt_that_streams_gets_a_larger_micro_batch(tmp_path: Path) -> None:
    """Planned, paid for, loaded, and computed alike. Streaming takes most of the time."""
    path = write_llama_shape(tmp_path / "model.gguf", 3, 256, 8192, 4, 2, 1000, "Q4_0")
    profile, n_prompt, n_ctx = slow_cpu_fast_card(path, 1e9), 1024, 1280
    tokens = [1 + i * 37 % 900 for i in range(n_prompt)]
    placer = Placer.load(path, device=REAL, gpu_weights=0.1, threads=1, profile=profile, flash_attn="on", n_ctx=n_ctx)
    plan, fixed = (placer.plan("scheinfer", n_prompt, 1, n_ubatch=n_ubatch) for n_ubatch in (None, 512))
    assert (plan.workload.n_ubatch, fixed.workload.n_ubatch) == (n_prompt, 512)
    assert plan.notes[0].startswith(f"micro-batch raised from 512 to {n_prompt} tokens")
    assert plan.predicted is not None and fixed.predicted is not None
    assert plan.predicted.total_s < fixed.predicted.total_s
    assert plan.memory.compute > fixed.memory.compute and plan.memory.spare >= 0
    with placer.llama(Plan.from_json(plan.to_json()), logits_all=True) as llama:
        held = load_bridge().emulated().stats().device_bytes
        assert llama.context_params.n_ubatch == n_prompt
        assert_stock(placed_logits(llama, tokens), path, tokens, n_ctx=n_ctx, n_ubatch=512)
    assert abs(plan.memory.limit - plan.memory.spare - held) <= max(SHARE * held, SLACK)


def test_a_block_that_only_predicts_further_tokens_takes_nothing(tmp_path: Path) -> None:
    """MTP: llama.cpp leaves it in the file, and counts it as a layer of -ngl. It is neither placed nor accounted."""
    shape = glm4moe(4, 256, 512, 6, 2, 300, 512, 1e6, head_dim=64, n_expert=8, n_expert_used=4, n_ff_expert=128)
    ahead = replace(shape, metadata=shape.metadata | {"nextn_predict_layers": 1})
    held: list[int] = []
    for name, made in (("with", ahead), ("without", shape.with_layers(3))):
        placer = Placer.load(write_shape(tmp_path / f"{name}.gguf", made, "Q4_0"), device=REAL, threads=1)
        everything = [operator.name for operator in placer.operators]
        plan = placer.plan(Given(everything, made.n_layer + 1), 64, 16, 256, measure=False)
        with placer.llama(plan) as llama:
            llama.eval([1, 2, 3])
            assert llama.warnings == ()
        held.append(plan.memory.weights_gpu + plan.memory.kv)
        assert {operator.layer for operator in placer.operators} == {None, 0, 1, 2}
    assert held[0] == held[1]


#
# commands, and arms of a bench
#


def asked(placer: Placer, folder: Path, n_prompt: int = 64, n_gen: int = 8) -> tuple[object, ...]:
    """The options of a command for what this placer plans."""
    device = ("--device", placer.device, "--threads", 1, "--profile", profile_file(placer.profile(), folder))
    return (placer.model.path, *device, "-p", n_prompt, "-n", n_gen, "--gpu-weights", placer.options.gpu_weights or 1)


@pytest.mark.parametrize("row", [Row("hetegen"), Row("experts", "qwen3moe", link=SLOW_LINK)])
def test_the_affinity_report_of_a_policy_shows_what_its_plan_has(row: Row, models: Path, tmp_path: Path) -> None:
    words = (*asked(routed(row.placer(models)), tmp_path, 16, 256), "--policy", row.policy)
    plan, report = (json.loads(here(name, *words, "--json").stdout) for name in ("plan", "affinity-report"))
    places = {o["name"]: (o["gg"], o["cg"], o["cc"]) for o in plan["operators"]}
    assert {o["name"]: (o["gg"], o["cg"], o["cc"]) for o in report["operators"]} == places
    assert (report["policy"], report["predicted"], report["memory"]) == (row.policy, plan["predicted"], plan["memory"])
    split = {o["name"] for o in plan["operators"] if o["cg"] or 0 < o["gg"] < 1 or o.get("hot_experts")}
    assert {o["name"] for o in report["operators"] if o["backend"] == "split"} == split != set()


def test_a_plan_that_streams_says_so_and_runs_with_either_way_of_copying(two_layers: Path, tmp_path: Path) -> None:
    """No weight may stay on the device, so that all that helps is streaming."""
    profile, plan = slow_cpu_fast_card(two_layers, 1e9), tmp_path / "plan.json"
    profile = replace(profile, fingerprint={**profile.fingerprint, "device_host_buffer": False})  # a worker has none
    placer = Placer.load(two_layers, device="rpc-worker:1", profile=profile, gpu_weights="0%", threads=1)
    said = " ".join(
        here("plan", *asked(placer, tmp_path)[:-1], "0%", "--policy", "scheinfer", "-o", plan).stderr.split()
    )
    assert "no pinned host memory" in said and "streamed" in said
    streaming = Plan.load(plan).streaming
    assert streaming is not None and min(streaming.piece_bytes, streaming.link_bytes_per_s, streaming.ring_bytes) > 0
    common = ("run", two_layers, "-p", "hello", "-n", "4", "--temp", "0", "--json", "--device", "rpc-worker:1")
    made = []
    for way in ("ahead", "layer"):
        replace(Plan.load(plan), streaming=replace(streaming, prefetch=way)).save(plan)
        made.append(json.loads(here(*common, "--plan", plan).stdout))
    assert made[0]["tokens"] == made[1]["tokens"] and made[0]["policy"] == "scheinfer"
    assert all(run["split"]["decode"]["bytes_streamed"] > 0 for run in made)


def test_fit_is_llama_cpps_own_choice_as_a_plan(models: Path, tmp_path: Path) -> None:
    words = asked(Row("fit").placer(models), tmp_path)[:-2]
    here("plan", *words, "--policy", "fit", "-o", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.policy == "fit" and any("--fit chooses" in note for note in plan.notes)
    assert all(placement.gg == 1 for placement in plan.operators), "the card holds all of it"


def test_arms_of_a_bench_may_be_these_policies(models: Path) -> None:
    """Half of the weights may be on the card, so llama.cpp's --fit leaves layers on the host."""
    placer = Row("hetegen", limits=(("gpu_weights", 0.5),)).placer(models)
    tests = (BenchTest(64, 8),)
    maker = ArmMaker(placer, shared_setting(placer, tests), tests)
    stock, fit, hetegen = (maker.make(name) for name in ("stock-fit", "fit", "hetegen"))
    assert stock.stock is not None and fit.plan is not None and hetegen.plan is not None
    on_device = expected_on_device(placer.operators, placer.model.n_layer, stock.stock)
    assert set(on_device.values()) == {True, False}
    assert on_device == {row.name: row.gg == 1 for row in fit.plan.operators}
    assert (fit.plan.policy, hetegen.plan.policy) == ("fit", "hetegen")


def test_an_arm_with_hot_experts_is_read_back_by_their_share(models: Path) -> None:
    placer = routed(Row("experts", "qwen3moe", link=SLOW_LINK).placer(models))
    tests = (BenchTest(16, 256),)
    spec = ArmMaker(placer, shared_setting(placer, tests), tests).make("experts")
    shares = expected_shares(spec, placer.operators, placer.model.n_layer)
    assert spec.plan is not None
    hot = next(row for row in spec.plan.operators if row.hot_experts)
    assert shares[hot.name] == pytest.approx(len(hot.hot_experts) / 8)
