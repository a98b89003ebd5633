"""The gate at work with a placer that plans nothing and a runner that measures nothing: what it races and keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench_cases import N_LAYER, NAMES, OPERATORS, World, report

from oallama.bench.ab import Bench, ProgressCallback, run_bench
from oallama.bench.fit_plan import stock_plan
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, LoadReport, StockPlacement
from oallama.core.errors import DoesNotFit
from oallama.core.options import Options
from oallama.core.profile import LinearFit, Sharing
from oallama.core.types import Attention, MemoryLedger, OperatorPlacement, PlanRecord, Predicted, Workload
from oallama.device.spec import parse_device
from oallama.gate.run import (
    DEPTH_S,
    GEN_S,
    LEAST_BUDGET_S,
    Gated,
    gate_tests,
    gated_plan,
    placement_digest,
    remembered,
    stock_at_once,
    unsettled,
)
from oallama.gate.store import gate_key, prompt_class, read_verdict, timings_digest, verdict_path
from oallama.gate.verdict import Verdict
from oallama.plan.plan import Plan
from oallama.profile.merge import empty

GIB = 1 << 30
LOAD = Workload(64, 32, 4096)
SECONDS = {"oato": 4.0, "split": 3.0, "layers": 5.0}
"""Predicted; cpu and every other policy: 9."""

COUNTS = {"cpu": 0, "oato": 1, "split": 2, "layers": 3}  # operators on the device, 4 for other policies


def plan(policy: str, load: Workload, on_device: tuple[str, ...], total_s: float) -> Plan:
    operators = tuple(OperatorPlacement(n, float(n in on_device), 0.0, float(n not in on_device)) for n in NAMES)
    return Plan.of(
        PlanRecord(
            model_path="model.gguf",
            model_fingerprint="m" * 64,
            machine_fingerprint="0" * 16,
            device="cpu-pair" if on_device else "none",
            policy=policy,
            workload=load,
            operators=operators,
            n_gpu_layers=len(on_device),
            memory=MemoryLedger(GIB, 0.9, GIB, 0, 0, 0, 0, 0, 0),
            predicted=Predicted(total_s / 2, total_s / 64, total_s),
        )
    )


@dataclass
class FakePlacer:
    """Plans by name: each policy has another number of operators on the device."""

    planned: list[str] = field(default_factory=list)
    options: Options = field(default_factory=lambda: Options(vram=GIB))
    threads: int = 1
    has_device: bool = True
    device: Any = field(default_factory=lambda: parse_device("cpu-pair"))
    operators: Any = OPERATORS
    model: Any = field(
        default_factory=lambda: SimpleNamespace(path="model.gguf", fingerprint="m" * 64, n_layer=N_LAYER, n_expert=0)
    )
    too_big: tuple[str, ...] = ()
    launch_s: float = 0.0  # what the profile says of the device
    identity: dict[str, Any] | None = None  # what the device says of itself
    cpu_attention: str = "auto"  # of the plan cpu
    host_layout: str | None = None
    is_profiled: bool = True
    routing: Any = None

    def workload(self, n_prompt: int, n_gen: int, n_ctx: int | None = None, n_ubatch: int = 512) -> Workload:
        return Workload(n_prompt, n_gen, n_ctx or 4096, n_ubatch)

    @property
    def attention(self) -> Attention:
        return self.options.attention()

    def profile(self) -> Any:
        return replace(empty({"cpu": "a CPU", "n_threads": self.threads}), launch_s=self.launch_s)

    @property
    def known_profile(self) -> Any:
        return self.profile() if self.is_profiled else None

    @property
    def machine(self) -> dict[str, Any]:
        return {"cpu": "a CPU", "n_threads": self.threads, "device_identity": self.identity}

    def place(self, policy: str, load: Workload, attention_passes: Any) -> Plan:
        self.planned.append(policy)
        if policy in self.too_big:
            raise DoesNotFit(2, 1, "cpu-pair")
        if policy == "auto":
            policy = min((name for name in SECONDS if name not in self.too_big), key=SECONDS.__getitem__)
        names = NAMES[: COUNTS.get(policy, 4)]
        made = plan(policy, load, names, SECONDS.get(policy, 9.0))
        way: Any = self.cpu_attention if policy == "cpu" else "auto"
        return replace(made, attention=Attention(way))

    def cpu_plan(self, load: Workload, stock_attention: bool) -> Plan:
        assert stock_attention  # what was measured
        made = plan("cpu", load, (), 9.0)
        return replace(made, attention=Attention(), predicted=None)

    def plan_of(
        self, on_device: list[str], gpu_layers: int, load: Workload, policy: str, stock_attention: bool
    ) -> Plan:
        assert stock_attention
        return self.unpriced_plan(on_device, gpu_layers, load, policy)

    def unpriced_plan(self, on_device: list[str], gpu_layers: int, load: Workload, policy: str) -> Plan:
        made = plan(policy, load, tuple(on_device), 1.0)
        operators = tuple(replace(p, layout=self.host_layout if p.cc else None) for p in made.operators)
        return Plan.of(replace(made, n_gpu_layers=gpu_layers, operators=operators))


@pytest.fixture(autouse=True)
def _plans_of_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "check", lambda self, model, operators: None)
    monkeypatch.setattr("oallama.gate.run.only_splits", lambda plan: True)


def runner(speed: dict[str, float], seen: list[Bench]) -> Callable[[Bench, ProgressCallback], BenchResult]:
    """Measures arms as fast as `speed` says, stock being 1; the arms do what they say."""

    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        seen.append(bench)
        world = World(reports_of(bench), lambda name, turn: 1.0 / speed.get(name, 1.0))
        return run_bench(bench, progress, start=world.start, available_memory=lambda: 1 << 40)

    return measure


def gate(placer: FakePlacer, speed: dict[str, float], seen: list[Bench], **options: Any) -> Gated:
    return gated_plan(placer, LOAD, measure=runner(speed, seen), **options)  # type: ignore[arg-type]


def known(placer: FakePlacer, load: Workload = LOAD) -> Verdict | None:
    made: Any = placer
    return read_verdict(gate_key(made, load, int(0.9 * GIB)))


def test_the_best_prediction_is_raced_and_used_where_it_wins() -> None:
    seen: list[Bench] = []
    said: list[str] = []
    found = gate(FakePlacer(), {"split": 1.5, "oato": 2.0}, seen, progress=lambda what, **_: said.append(what))
    assert "plan" in said, "planning takes its time too"
    assert [[arm.name for arm in bench.arms] for bench in seen] == [["stock-cpu", "split"]]
    assert (found.plan.policy, found.remembered, found.verdict.settled) == ("split", False, True)
    assert len(found.verdict.races[0].pairs) == 4, "two blocks tell 1.5 from 1"


def test_where_no_plan_is_faster_stocks_placement_is_used() -> None:
    found = gate(FakePlacer(), {"split": 0.5}, [])
    assert found.verdict.won is None and found.verdict.settled
    assert found.plan.policy == "cpu"  # stock-cpu's: there is no stock-fit on cpu-pair
    assert {race.policy: race.refused for race in found.verdict.races}[
        "cpu"
    ] == "cpu's plan is stock-cpu's own placement"


def test_a_plan_that_does_not_do_what_it_says_is_refused() -> None:
    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        result = runner({"split": 1.5}, [])(bench, progress)
        arms = tuple(replace(a, problems=("it ran elsewhere",)) if a.spec.name == "split" else a for a in result.arms)
        return replace(result, arms=arms)

    found = gated_plan(FakePlacer(), LOAD, measure=measure)  # type: ignore[arg-type]
    assert "it ran elsewhere" in found.verdict.sentence and found.plan.policy == "cpu"


def test_a_verdict_is_remembered_and_only_its_plan_made() -> None:
    placer, seen = FakePlacer(), []
    first = gate(placer, {"split": 1.5}, seen)
    placer.planned.clear()
    again = gate(placer, {"split": 0.1}, seen)
    assert (again.remembered, again.plan.policy, again.verdict) == (True, "split", first.verdict)
    assert (len(seen), placer.planned) == (1, ["split"])
    assert not gate(placer, {"split": 0.1}, seen, refresh=True).remembered
    assert gate(placer, {}, seen).verdict.won is None  # the newer one counts


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 2},
        {"options": Options(vram=2 * GIB)},
        {"options": Options(vram=GIB, flash_attn="on")},
        {"options": Options(vram=GIB, type_k="q8_0")},
        {"options": Options(vram=GIB, gpu_weights=0.5)},
        {"options": Options(vram=GIB, n_ubatch=512)},  # which plans keep to
        {"options": Options(vram=GIB, n_batch=1024)},
        {"launch_s": 1e-5},
        {"identity": {"description": "the same name, another card"}},
    ],
    ids=str,
)
def test_another_setting_is_another_verdict(change: dict[str, Any]) -> None:
    seen: list[Bench] = []
    gate(FakePlacer(), {"split": 1.5}, seen)
    gate(FakePlacer(**change), {"split": 1.5}, seen)
    assert len(seen) == 2


def test_a_longer_context_or_class_of_prompts_is_another_verdict_and_a_similar_one_is_not() -> None:
    seen: list[Bench] = []
    measure = runner({}, seen)
    for n_prompt, n_gen, n_ctx in (
        (64, 32, 4096), (128, 9, 4096), (64, 32, 5000), (64, 32, 16384), (600, 32, 4096), (1024, 99, 4096)
    ):  # fmt: skip
        gated_plan(FakePlacer(), Workload(n_prompt, n_gen, n_ctx), measure=measure)  # type: ignore[arg-type]
    assert len(seen) == 3
    assert [prompt_class(n) for n in (1, 128, 129, 1024, 1025)] == [0, 0, 1, 1, 2]


def test_a_file_that_cannot_be_used_is_as_good_as_none() -> None:
    placer: Any = FakePlacer()
    gate(placer, {"split": 1.5}, [])
    path = verdict_path(gate_key(placer, LOAD, int(0.9 * GIB)))
    sound = json.loads(path.read_text())
    assert known(placer) is not None
    for change in (
        {"key": {**sound["key"], "n_threads": 9}}, {"races": [{**sound["races"][0], "pairs": [[0.0, 1.0]]}]},
        {"races": [{**sound["races"][0], "pairs": [[1.0, 1.0]] * 100}]}, {"tests": []}, {"races": 5},
    ):  # fmt: skip
        path.write_text(json.dumps({**sound, **change}))
        assert known(placer) is None, change
    path.write_text("{")
    assert known(placer) is None and not gate(placer, {}, []).remembered


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Turns:
    """Measures as run_bench does, by a clock of its own: a turn takes what `seconds` says of its arm."""

    seconds: Callable[[str], float]
    clock: Clock = field(default_factory=Clock)
    taken: list[str] = field(default_factory=list)

    def __call__(self, bench: Bench, progress: ProgressCallback) -> BenchResult:
        def seconds(name: str, turn: int) -> float:
            self.taken.append(name)
            return self.seconds(name)

        world = World(reports_of(bench), seconds, pass_time=self.clock.sleep)
        return run_bench(bench, progress, start=world.start, available_memory=lambda: 1 << 40)

    def gate(self, load: Workload = LOAD, placer: FakePlacer | None = None, **options: Any) -> Gated:
        made: Any = placer or FakePlacer()
        return gated_plan(made, load, measure=self, clock=self.clock, **options)


def test_pairs_add_up_from_run_to_run_and_each_run_gets_further() -> None:
    turns, budgets = Turns({"stock-cpu": 3.0, "split": 2.0}.__getitem__), []
    found = turns.gate(budget_s=5.0)
    assert (found.verdict.settled, found.verdict.won, found.plan.policy) == (False, None, "cpu")
    assert len(found.verdict.races[0].pairs) == 2, "one block, whatever the budget"
    assert "split is not told from it yet" in found.verdict.sentence
    placer: Any = FakePlacer()
    assert remembered(placer, LOAD) is None
    assert unsettled(placer, LOAD) == (found.verdict, found.left_s)
    last = turns.gate(placer=placer, begin=lambda _, seconds: budgets.append(seconds))
    assert (last.verdict.settled, last.plan.policy, len(last.verdict.races[0].pairs)) == (True, "split", 4)
    assert placer.planned == ["split"], "what is known is not planned anew"
    assert last.verdict.seconds == pytest.approx(20.0), "of both runs"
    assert budgets[0] > LEAST_BUDGET_S and turns.gate().remembered and unsettled(placer, LOAD) is None


def test_what_was_in_vain_is_given_twice_the_time() -> None:
    turns, budgets = Turns(lambda name: 1500.0), []
    found = [turns.gate(begin=lambda _, seconds: budgets.append(seconds)).verdict for _ in range(4)]
    assert [len(verdict.races[0].pairs) for verdict in found] == [0, 2, 4, 4]
    assert found[-1].settled and budgets[0] < budgets[1] < budgets[2]


def test_what_would_take_too_long_is_not_measured_but_told() -> None:
    turns = Turns({"stock-cpu": 3.0, "split": 2.0}.__getitem__)
    found = turns.gate(most_s=1.0)
    assert (turns.taken, found.plan.policy, found.verdict.open) == ([], "cpu", found.verdict.races[0])
    assert found.left_s >= LEAST_BUDGET_S
    placer = FakePlacer()
    assert turns.gate(placer=placer, most_s=1.0).verdict == found.verdict and not placer.planned, "it is kept"
    assert turns.gate(most_s=found.left_s).verdict.won


def test_ctrl_c_keeps_the_pairs_that_are_complete() -> None:
    def seconds(name: str) -> float:
        if len(turns.taken) == 6:  # in the second block
            raise KeyboardInterrupt
        return {"stock-cpu": 1.0, "split": 0.8}[name]

    turns = Turns(seconds)
    with pytest.raises(KeyboardInterrupt):
        turns.gate()
    kept = known(FakePlacer())
    assert kept is not None and not kept.settled and len(kept.races[0].pairs) == 2


def test_noise_is_measured_until_the_interval_excludes_1() -> None:
    """`split` is 1.2 times as fast as stock, every other turn by a fifth less; drifting blocks count too."""
    wild = iter([1.0, 1.2] * 100)
    turns = Turns(lambda name: next(wild) / 1.3 if name == "split" else 1.0)
    found = turns.gate(budget_s=1e6)
    assert found.plan.policy == "split" and len(found.verdict.races[0].pairs) > 4


def test_the_cpu_is_raced_where_the_best_plan_loses() -> None:
    placer = FakePlacer(device=parse_device("rpc-worker:1"))
    seen: list[list[str]] = []

    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        seen.append([arm.name for arm in bench.arms])
        return runner({"split": 0.5, "cpu": 1.5}, [])(bench, progress)

    def fit(maker: Any, name: str) -> Any:
        return ArmSpec(name, maker.setting, StockPlacement(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oallama.bench.arms.ArmMaker.make", fit)
        patch.setitem(SECONDS, "cpu", 1.5)
        patch.setitem(SECONDS, "split", 1.2)
        found = gated_plan(placer, LOAD, measure=measure)  # type: ignore[arg-type]
    assert seen == [["stock-fit", "split"], ["stock-fit", "cpu"]]
    assert found.plan.policy == "cpu"


def test_two_runs_at_once_give_one_verdict() -> None:
    turns = Turns({"stock-cpu": 3.0, "split": 2.0}.__getitem__)
    other: list[Gated] = []

    def waits(doing: str, **_: Any) -> None:
        if doing == "plan" and not other:  # meanwhile another run measures
            other.append(Turns(turns.seconds, turns.clock).gate())

    found = turns.gate(progress=waits)
    assert (found.remembered, found.verdict, turns.taken) == (True, other[0].verdict, [])


def test_turns_are_as_short_as_predicted_and_the_same_for_all_prompts_of_a_class() -> None:
    def tests(load: Workload, total_s: float) -> tuple[BenchTest, ...]:
        return gate_tests(load, (plan("split", load, NAMES, total_s),))[0]

    assert tests(Workload(64, 32, 4096), GEN_S) == (BenchTest(64, 16),)
    assert tests(Workload(20, 32, 4096), 0.1) == tests(Workload(100, 5, 4096), 0.1) == (BenchTest(64, 16),)
    assert tests(Workload(500, 32, 4096), 0.5) == (BenchTest(512, 16),)
    assert tests(Workload(500, 32, 4096), 100.0) == (BenchTest(32, 4),), "50 s for the prompt, 1.6 s a token"
    assert tests(Workload(8, 0, 64), 0.1) == (BenchTest(48, 16),), "no more than the context holds"
    slow, load = plan("fit", Workload(64, 32, 4096), NAMES, 8 * GEN_S), Workload(64, 32, 4096)
    assert gate_tests(load, (plan("split", load, NAMES, 0.1), slow))[0] == (BenchTest(32, 8),), "stock takes turns too"


def test_a_large_context_is_measured_at_a_second_depth_and_the_worse_of_both_counts() -> None:
    load = Workload(1000, 32, 32768)
    quick, deep = gate_tests(load, (plan("split", load, NAMES, 2.0),))[0]  # 1 ms a token
    assert deep == replace(quick, n_depth=round(1000 * DEPTH_S))

    placer = FakePlacer()
    quickly = placer.place
    placer.place = lambda policy, *given, **o: Plan.of(
        replace(quickly(policy, *given, **o), predicted=Predicted(1.0, 0.01, 2.0))
    )  # type: ignore[method-assign, assignment]

    def slow_there(bench: Bench, progress: ProgressCallback) -> BenchResult:
        assert len(bench.tests) == 2
        return runner({"split": 1.5, "oato": 1.5, "layers": 1.5}, [])(bench, progress)

    assert gated_plan(placer, load, measure=slow_there).verdict.won is not None  # type: ignore[arg-type]


def test_a_plan_that_leaves_flash_attention_off_is_measured_at_the_depth_that_it_is_for() -> None:
    def depths(load: Workload, way: Any) -> list[int]:
        made = replace(plan("cpu", load, (), 0.5), attention=Attention(way))
        return [test.n_depth for test in gate_tests(load, (made,))[0]]

    assert depths(Workload(2000, 32, 4096), "on") == [0]
    assert depths(Workload(2000, 32, 4096), "off") == [2048 - 512 + (128 - 16) // 2]
    assert depths(Workload(64, 32, 4096, n_past=600), "on")[0] > 0


def reports_of(bench: Bench) -> dict[str, LoadReport]:
    """Of arms that did what they say."""
    found = {}
    for index, arm in enumerate(bench.arms):
        names = [row["name"] for row in arm.plan["operators"] if row["gg"]] if arm.plan else []
        found[arm.name] = report(*names, n_ubatch=index + 1)
    return found


def test_plans_with_another_micro_batch_are_others() -> None:
    load = Workload(2000, 32, 4096)
    raised = plan("scheinfer", replace(load, n_ubatch=1024), NAMES, 0.1)
    assert placement_digest(raised) != placement_digest(plan("scheinfer", load, NAMES, 0.1))
    assert gate_tests(load, (raised,))[0] == (BenchTest(1024, 16),)


def test_what_is_remembered_is_known_without_measuring() -> None:
    placer: Any = FakePlacer()
    assert remembered(placer, LOAD) is None
    assert stock_at_once(placer, LOAD).policy == "cpu"
    assert placer.planned == []
    gate(placer, {"split": 1.5}, [])
    found = remembered(placer, LOAD)
    assert found is not None and found.plan.policy == "split"
    assert remembered(placer, Workload(600, 32, 4096)) is None, "another class of prompts"
    assert remembered(FakePlacer(is_profiled=False), LOAD) is None  # type: ignore[arg-type]


def on_worker(**changes: Any) -> Any:
    return FakePlacer(device=parse_device("rpc-worker:1"), **changes)


def test_stocks_placement_becomes_a_plan() -> None:
    load = Workload(64, 32, 4096, 128)
    some = stock_plan(on_worker(), load, StockPlacement(2, ((r"blk\.1\.ffn", "CPU"),)))
    assert [p.name for p in some.operators if p.gg] == ["blk.1.attn_q.weight", "output.weight"]
    assert (some.n_gpu_layers, some.policy, some.device, some.workload) == (2, "fit", "rpc-worker:1", load)
    assert stock_plan(on_worker(), load, StockPlacement(-1)).n_gpu_layers == N_LAYER + 1
    none = stock_plan(on_worker(), load, StockPlacement(0))
    assert (none.n_gpu_layers, none.device, any(p.gg for p in none.operators)) == (0, "rpc-worker:1", False)
    assert stock_plan(FakePlacer(), load, StockPlacement(0)).policy == "cpu"  # type: ignore[arg-type]


def test_stocks_placement_leaves_the_choice_of_host_memory_to_llama_cpp() -> None:
    placer, load = on_worker(), Workload(64, 32, 4096)
    placer.host_layout = "CPU_REPACK"  # what our own plans name where the device has pinned memory
    assert {p.layout for p in stock_plan(placer, load, StockPlacement(2)).operators} == {None}


@pytest.mark.parametrize(
    "change",
    [
        {"sharing": (Sharing("cpu", "device", 1, 2.0, 2.0, 1.0, 1.0),)},
        {"copy_wait": 1.0},
        {"launch_s": 1.0},
        {"launch_issue_s": 1.0},
        {"link": {"d2h": LinearFit(1e-6, 1e-9, 1.0)}},
    ],
)
def test_whatever_was_timed_anew_makes_another_verdict(change: dict[str, Any]) -> None:
    profile = FakePlacer().profile()
    assert timings_digest(replace(profile, **change)) != timings_digest(profile)
    assert timings_digest(replace(profile, warnings=("on battery",))) == timings_digest(profile)
