"""The gate at work with a placer that plans nothing and a runner that measures nothing: what it tries and remembers."""

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
from oallama.bench.records import BenchResult, BenchTest, LoadReport, StockPlacement
from oallama.core.errors import DoesNotFit
from oallama.core.options import Options
from oallama.core.profile import LinearFit, Sharing
from oallama.core.types import Attention, MemoryLedger, OperatorPlacement, PlanRecord, Predicted, Workload
from oallama.device.spec import parse_device
from oallama.gate.key import distance, gate_key, timings_digest
from oallama.gate.measure import DEPTH_S, LEAST_DEPTH, TURN_S, gate_tests
from oallama.gate.pairs import MOST_PAIRS
from oallama.gate.plans import all_plans, candidate
from oallama.gate.run import BUDGET_S, Gated, gated_plan, remembered, stock_at_once
from oallama.gate.store import MOST_BLOCKS, KeptVerdict, read_kept, verdict_path, write_kept
from oallama.gate.verdict import choose, sentence
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
    monkeypatch.setattr("oallama.gate.plans.only_splits", lambda plan: True)


def runner(speed: dict[str, float], seen: list[Bench]) -> Callable[[Bench, ProgressCallback], BenchResult]:
    """Measures arms as fast as `speed` says, stock being 1; the arms do what they say."""

    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        seen.append(bench)
        world = World(reports_of(bench), lambda name, turn: 1.0 / speed.get(name, 1.0))
        return run_bench(bench, progress, start=world.start, available_memory=lambda: 1 << 40)

    return measure


def gate(placer: FakePlacer, speed: dict[str, float], seen: list[Bench], **options: Any) -> Gated:
    return gated_plan(placer, LOAD, measure=runner(speed, seen), **options)  # type: ignore[arg-type]


def test_the_two_best_predictions_are_measured_against_stock_and_the_winner_is_used() -> None:
    seen: list[Bench] = []
    said: list[str] = []
    found = gate(FakePlacer(), {"split": 1.5, "oato": 1.2}, seen, progress=lambda what, **_: said.append(what))
    assert "plan" in said, "planning takes its time too"
    assert [arm.name for arm in seen[0].arms] == ["stock-cpu", "split", "oato"]  # cpu is stock's own placement
    assert 2 * seen[0].n_blocks == MOST_PAIRS  # two samples of each arm are in a block
    assert (found.plan.policy, found.remembered) == ("split", False)
    assert found.verdict.seconds > 0


def test_a_plan_that_does_not_do_what_it_says_is_refused_and_the_other_used() -> None:
    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        result = runner({"split": 1.5, "oato": 1.2}, [])(bench, progress)
        arms = tuple(replace(a, problems=("it ran elsewhere",)) if a.spec.name == "split" else a for a in result.arms)
        return replace(result, arms=arms)

    found = gated_plan(FakePlacer(), LOAD, measure=measure)  # type: ignore[arg-type]
    refused = {each.policy: each.refused for each in found.verdict.trials}
    assert "it ran elsewhere" in refused["split"] and not refused["oato"]
    assert found.plan.policy == "oato"


def test_where_no_plan_is_faster_stocks_placement_is_used() -> None:
    found = gate(FakePlacer(), {"split": 0.5, "oato": 0.99}, [])
    assert found.verdict.winner is None
    assert found.plan.policy == "cpu"  # stock-cpu's: there is no stock-fit on cpu-pair


def test_a_policy_that_does_not_fit_is_left_out() -> None:
    seen: list[Bench] = []
    gate(FakePlacer(too_big=("split",)), {}, seen)
    assert [arm.name for arm in seen[0].arms] == ["stock-cpu", "oato", "layers"]


def test_on_two_cpus_only_plans_that_can_run_there_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oallama.gate.plans.only_splits", lambda plan: plan.policy in ("cpu", "oato"))
    seen: list[Bench] = []
    found = gate(FakePlacer(), {"oato": 1.5, "split": 9.0, "layers": 9.0}, seen)
    assert found.plan.policy == "oato"
    assert {arm.name for arm in seen[0].arms} <= {"stock-cpu", "cpu", "oato"}


def test_a_verdict_is_remembered_and_only_its_plan_made() -> None:
    placer, seen = FakePlacer(), []
    first = gate(placer, {"split": 1.5}, seen)
    placer.planned.clear()
    again = gate(placer, {"split": 0.1}, seen)
    assert (again.remembered, again.plan.policy, again.verdict) == (True, "split", first.verdict)
    assert (len(seen), placer.planned) == (1, ["split"])
    assert not gate(placer, {"split": 0.1}, seen, refresh=True).remembered
    assert gate(placer, {}, seen).verdict.winner is None  # the newer one counts


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


def test_a_longer_context_is_another_verdict_and_a_similar_prompt_is_not() -> None:
    seen: list[Bench] = []
    measure = runner({}, seen)
    for n_prompt, n_ctx in ((64, 4096), (100, 4096), (64, 5000), (64, 16384), (600, 4096)):
        gated_plan(FakePlacer(), Workload(n_prompt, 32, n_ctx), measure=measure, accept_near=False)  # type: ignore[arg-type]
    assert len(seen) == 3


def test_a_damaged_file_is_as_good_as_none() -> None:
    placer, seen = FakePlacer(), []
    gate(placer, {}, seen)
    path = verdict_path(gate_key(placer, LOAD))  # type: ignore[arg-type]
    assert path.is_file()
    other = json.loads(path.read_text())
    other["verdict"]["key"]["n_threads"] += 1
    for damaged in ("{", json.dumps(other)):
        path.write_text(damaged)
        assert not gate(placer, {}, seen).remembered


def test_a_file_with_more_blocks_than_are_measured_is_as_good_as_none() -> None:
    placer = FakePlacer()
    gate(placer, {"split": 1.5}, [])
    key = gate_key(placer, LOAD)  # type: ignore[arg-type]
    document = json.loads(verdict_path(key).read_text())
    series = document["pairs"][0]["series"]
    for n_blocks in (MOST_BLOCKS, MOST_BLOCKS + 1):
        series["kept"] = series["kept"][:1] * n_blocks
        verdict_path(key).write_text(json.dumps(document))
        assert (read_kept(key) is None) == (n_blocks > MOST_BLOCKS)


def test_a_file_whose_samples_cannot_be_compared_is_as_good_as_none() -> None:
    placer = FakePlacer()
    gate(placer, {"split": 1.5}, [])
    key = gate_key(placer, LOAD)  # type: ignore[arg-type]
    sound = verdict_path(key).read_text()

    def is_read(change: Callable[[dict[str, Any]], None]) -> bool:
        """With one pair's series changed."""
        document = json.loads(sound)
        change(document["pairs"][0]["series"])
        verdict_path(key).write_text(json.dumps(document))
        return read_kept(key) is not None

    def without_a_sample(series: dict[str, Any]) -> None:
        series["kept"][-1]["samples"][1].pop()

    def with_time(seconds: float) -> Callable[[dict[str, Any]], None]:
        def change(series: dict[str, Any]) -> None:
            series["kept"][0]["samples"][1][0]["gen_s"] = seconds

        return change

    def of_prompts_alone(series: dict[str, Any]) -> None:
        series["test"]["n_gen"] = 0
        for block in series["kept"]:
            for arm in block["samples"]:
                for sample in arm:
                    sample["gen_s"] = 0.0

    assert is_read(lambda series: None)
    assert not is_read(without_a_sample)
    assert is_read(with_time(2.0)) and not is_read(with_time(0.0))
    assert is_read(of_prompts_alone), "nothing was generated, so it took no time"


def test_each_policy_is_planned_once() -> None:
    placer = FakePlacer()
    all_plans(placer, LOAD, None)  # type: ignore[arg-type]
    assert len(placer.planned) == len(set(placer.planned)) > 2


def test_an_interrupted_measurement_decides_nothing() -> None:
    seen: list[Bench] = []

    def interrupted(bench: Bench, progress: ProgressCallback) -> BenchResult:
        return replace(runner({}, seen)(bench, progress), interrupted=True)

    placer = FakePlacer()
    with pytest.raises(KeyboardInterrupt):
        gated_plan(placer, LOAD, measure=interrupted)  # type: ignore[arg-type]
    kept = read_kept(gate_key(placer, LOAD))  # type: ignore[arg-type]
    assert kept is None or not kept.verdict.settled
    assert not gate(placer, {"split": 1.5}, seen).remembered


def test_turns_take_about_as_long_whatever_the_workload() -> None:
    def tests(load: Workload, total_s: float) -> tuple[BenchTest, ...]:
        return gate_tests(load, plan("split", load, NAMES, total_s))

    assert tests(Workload(64, 32, 4096), TURN_S) == (BenchTest(64, 16),)  # ttft TURN_S / 2, tpot TURN_S / 64
    assert tests(Workload(4000, 32, 4096), 80.0 * TURN_S) == (BenchTest(100, 4),)  # 100 tokens take TURN_S
    assert tests(Workload(8, 0, 4096), TURN_S) == (BenchTest(8, 1),)
    slow, load = plan("fit", Workload(64, 32, 4096), NAMES, 8 * TURN_S), Workload(64, 32, 4096)
    assert gate_tests(load, plan("split", load, NAMES, TURN_S), slow) == (BenchTest(32, 8),)  # stock takes turns too
    assert gate_tests(Workload(512, 128, 4096), None) == (BenchTest(32, 4),)


def test_a_plan_with_a_larger_micro_batch_is_measured_in_it() -> None:
    load = Workload(2000, 32, 4096)
    raised = plan("scheinfer", replace(load, n_ubatch=1024), NAMES, 0.1)
    assert gate_tests(load, raised) == (BenchTest(1024, 16),)
    assert gate_tests(load, plan("scheinfer", load, NAMES, 0.1)) == (BenchTest(512, 16),)
    assert candidate("oato", raised).placement != candidate("oato", plan("oato", load, NAMES, 0.1)).placement


def test_a_large_context_is_measured_at_a_second_depth_that_is_soon_filled() -> None:
    load = Workload(1000, 32, 32768)
    quick, deep = gate_tests(load, plan("split", load, NAMES, 2.0))  # 1 ms a token
    assert deep == replace(quick, n_depth=round(1000 * DEPTH_S))
    assert quick.n_depth == 0
    slow = gate_tests(load, plan("split", load, NAMES, 2.0 * DEPTH_S / LEAST_DEPTH * 1001))
    assert len(slow) == 1  # too slow to go there


def test_what_is_asked_for_behind_a_context_is_measured_there_as_far_as_that_is_soon_filled() -> None:
    load = Workload(64, 32, 32768, n_past=600)
    assert [t.n_depth for t in gate_tests(load, plan("split", load, NAMES, 0.02))] == [600, 16384]
    per_token = TURN_S / 2 / 64  # of the prompt
    far = replace(load, n_past=30_000)
    assert [t.n_depth for t in gate_tests(far, plan("split", far, NAMES, TURN_S))] == [int(DEPTH_S / per_token)]


def test_a_plan_made_for_a_depth_is_measured_near_it() -> None:
    """Without flash attention, which pays behind many tokens only."""

    def depths(load: Workload, way: Any, total_s: float = 2.0) -> list[int]:
        made = plan("cpu", load, (), total_s)
        return [t.n_depth for t in gate_tests(load, replace(made, attention=Attention(way)))]

    deep = Workload(2000, 32, 4096)  # 0.5 ms a prompt token
    assert depths(deep, "on") == [0]
    assert depths(deep, "off") == [2000 - 500 + 12]
    assert depths(Workload(64, 1040, 4096), "off", total_s=0.5) == [512]  # the middle of the generation
    assert depths(deep, "off", total_s=40.0) == [round(100 * DEPTH_S)]  # as deep as it allows at 10 ms a token
    assert depths(Workload(2000, 32, 32768), "off") == [1512, round(2000 * DEPTH_S)]


def reports_of(bench: Bench) -> dict[str, LoadReport]:
    """Of arms that did what they say."""
    found = {}
    for index, arm in enumerate(bench.arms):
        names = [row["name"] for row in arm.plan["operators"] if row["gg"]] if arm.plan else []
        found[arm.name] = report(*names, n_ubatch=index + 1)
    return found


def test_what_seems_faster_but_for_the_noise_is_measured_longer_and_all_pairs_count() -> None:
    """`split` is 1.2 times as fast as stock; the first three blocks have a noise of a fifth, the others none."""
    seen: list[Bench] = []

    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        seen.append(bench)

        def seconds(name: str, turn: int) -> float:
            noise = 0.2 if turn < 6 * len(bench.arms) else 0.0
            return (1 + noise * (turn // len(bench.arms) % 2)) / 1.2 if name == "split" else 1.0

        world = World(reports_of(bench), seconds)
        return run_bench(bench, progress, start=world.start, available_memory=lambda: 1 << 40)

    found = gated_plan(FakePlacer(), LOAD, measure=measure)  # type: ignore[arg-type]
    assert [[arm.name for arm in bench.arms] for bench in seen] == [["stock-cpu", "split", "oato"]]
    assert found.plan.policy == "split"
    n_pairs = {each.policy: each.ratio.n_pairs for each in found.verdict.trials if each.ratio is not None}
    assert n_pairs["oato"] == 6 < n_pairs["split"] <= 12


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


def test_when_time_is_over_stock_is_used_and_the_next_run_goes_on() -> None:
    turns = Turns({"stock-cpu": 3.0, "split": 2.0, "oato": 3.0}.__getitem__)
    found = turns.gate()
    assert (found.verdict.settled, found.verdict.winner, found.plan.policy) == (False, None, "cpu")
    assert BUDGET_S <= found.verdict.seconds < BUDGET_S + 3.0, "no turn may begin afterwards"
    kept = read_kept(gate_key(FakePlacer(), LOAD))  # type: ignore[arg-type]
    assert kept is not None and {each.policy: each.n_pairs for each in kept.pairs} == {"split": 2, "oato": 2}
    again, last = turns.gate(), turns.gate()
    assert (again.verdict.settled, again.remembered) == (False, False)
    assert (last.verdict.settled, last.plan.policy) == (True, "split")
    assert [each.ratio.n_pairs for each in last.verdict.trials if each.ratio is not None] == [6, 6]
    assert turns.gate().remembered
    assert not turns.gate(refresh=True).verdict.settled, "begins anew"


def test_pairs_of_another_placement_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"stock-cpu": 3.0, "split": 2.0, "oato": 3.0}.__getitem__)
    turns.gate()
    monkeypatch.setitem(COUNTS, "split", 5)
    turns.gate()
    kept = read_kept(gate_key(FakePlacer(), LOAD))  # type: ignore[arg-type]
    assert kept is not None and {each.policy: each.n_pairs for each in kept.pairs} == {"split": 2, "oato": 4}


def test_what_was_measured_behind_a_context_is_kept_apart() -> None:
    keys = [gate_key(FakePlacer(), replace(LOAD, n_past=n_past)) for n_past in (0, 512, 8192)]  # type: ignore[arg-type]
    assert len({str(sorted(key.items())) for key in keys}) == 3
    assert all(distance(key, keys[0]) is None for key in keys[1:])


def test_pairs_count_whatever_was_free_when_fit_was_asked_but_not_against_another_placement() -> None:
    turns = Turns({"stock-cpu": 3.0, "split": 2.0, "oato": 3.0}.__getitem__)
    key = gate_key(FakePlacer(), LOAD)  # type: ignore[arg-type]
    for change, n_pairs in ({"fit_target_mib": 7}, 4), ({"n_gpu_layers": 1}, 2):
        turns.gate(refresh=True)
        kept = read_kept(key)
        assert kept is not None
        write_kept(replace(kept, stock=replace(kept.stock, **change)))
        turns.gate()
        kept = read_kept(key)
        assert kept is not None and {each.n_pairs for each in kept.pairs} == {n_pairs}


def test_where_one_round_takes_too_long_it_is_tried_twice() -> None:
    turns = Turns(lambda name: 1500.0)
    first, found = turns.gate(), turns.gate()
    assert (first.verdict.settled, first.plan.policy) == (False, "cpu"), "the machine may have been busy"
    assert (found.verdict.settled, found.plan.policy) == (True, "cpu")
    assert "20 s were too short for one round of turns; `oallama tune`" in sentence(found.verdict)
    assert turns.gate().remembered
    assert turns.gate(Workload(600, 32, 4096)).is_near, "as it would be with other lengths"
    assert len(turns.taken) == 2
    longer = turns.gate(budget_s=1e6)
    assert (longer.remembered, longer.verdict.settled, longer.verdict.gave_up_s) == (False, True, 0.0)
    assert turns.gate().remembered


def test_planning_leaves_time_to_measure() -> None:
    turns, placer = Turns(lambda name: 0.1), FakePlacer()
    quick, placer.place = placer.place, lambda *args, **options: (turns.clock.sleep(6.0), quick(*args, **options))[1]  # type: ignore[method-assign]
    assert turns.gate(placer=placer).verdict.settled
    assert placer.planned == ["cpu", "scheinfer"], "no plan is begun in the second half"


def test_hopeless_candidates_are_given_up_after_a_block() -> None:
    turns = Turns({"stock-cpu": 0.1, "split": 0.3, "oato": 0.2}.__getitem__)
    found = turns.gate()
    assert (found.verdict.settled, found.plan.policy) == (True, "cpu")
    assert sorted(turns.taken) == ["oato"] * 2 + ["split"] * 2 + ["stock-cpu"] * 2
    assert "given up, at most 0.50× as fast" in {t.policy: t.refused for t in found.verdict.trials}["oato"]


def test_plans_are_made_behind_the_tokens_that_are_there() -> None:
    load = replace(LOAD, n_past=64)
    found = gated_plan(FakePlacer(), load, measure=runner({"split": 1.5}, []))  # type: ignore[arg-type]
    assert (found.plan.policy, found.plan.workload) == ("split", load)


def test_the_deep_test_is_for_those_who_have_not_lost_before() -> None:
    load, measured = Workload(1000, 32, 32768), []
    turns = Turns(lambda name: {"stock-cpu": 0.1, "layers": 0.05}.get(name, 0.2))

    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        measured.append(([arm.name for arm in bench.arms], [test.n_depth > 0 for test in bench.tests]))
        return turns(bench, progress)

    placer = FakePlacer()
    quick = placer.place
    placer.place = lambda policy, *given, **o: Plan.of(
        replace(quick(policy, *given, **o), predicted=Predicted(1.0, 0.01, 2.0))
    )  # type: ignore[method-assign, assignment]
    found = gated_plan(placer, load, measure=measure, clock=turns.clock)  # type: ignore[arg-type]
    first, second = measured
    assert first == (["stock-cpu", "layers", "oato"], [False])
    assert second == (["stock-cpu", "layers"], [True])
    assert found.verdict.winner == "layers"
    assert {each.n_depth > 0 for each in found.verdict.trials if each.policy == "layers"} == {False, True}


def test_plans_that_are_stocks_own_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in ("cpu", "oato", "scheinfer", "split", "layers"):
        monkeypatch.setitem(COUNTS, policy, 0)
    seen: list[Bench] = []
    found = gate(FakePlacer(), {}, seen)
    assert (seen, found.verdict.settled, found.plan.policy) == ([], True, "cpu")
    assert "stock-cpu's own placement" in sentence(found.verdict)
    assert gate(FakePlacer(), {}, seen).remembered


def test_the_nearest_verdict_serves_other_lengths_meanwhile() -> None:
    seen: list[Bench] = []
    measure, begun = runner({"split": 1.5}, seen), []

    def ask(n_prompt: int, n_gen: int, n_ctx: int = 4096, **options: Any) -> Gated:
        load = Workload(n_prompt, n_gen, n_ctx)
        return gated_plan(FakePlacer(), load, measure=measure, begin=lambda: begun.append(load), **options)  # type: ignore[arg-type]

    first = ask(64, 32)
    assert (first.is_near, len(begun)) == (False, 1)
    for lengths in ((600, 32), (64, 300), (2000, 1000)):
        found = ask(*lengths)
        assert (found.remembered, found.is_near, found.plan.policy) == (True, True, "split")
        assert found.plan.workload.n_prompt == lengths[0]
    assert (len(seen), len(begun)) == (1, 1)
    assert not ask(600, 32, refresh=True).is_near
    assert not ask(600, 32).is_near, "now it has its own"
    assert not ask(64, 32, 8192).is_near, "another context is another question"


def test_ctrl_c_keeps_the_pairs_that_are_complete() -> None:
    def seconds(name: str) -> float:
        if len(turns.taken) == 9:  # in the second block
            raise KeyboardInterrupt
        return {"stock-cpu": 1.0, "split": 0.8, "oato": 1.0}[name]

    turns = Turns(seconds)
    with pytest.raises(KeyboardInterrupt):
        turns.gate()
    kept = read_kept(gate_key(FakePlacer(), LOAD))  # type: ignore[arg-type]
    assert kept is not None and not kept.verdict.settled
    assert {each.policy: each.n_pairs for each in kept.pairs} == {"split": 2, "oato": 2}


def test_what_is_remembered_is_known_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    placer: Any = FakePlacer()
    assert remembered(placer, LOAD) is None
    assert stock_at_once(placer, LOAD).policy == "cpu"
    assert placer.planned == []
    gate(placer, {"split": 1.5}, [])
    found, near = remembered(placer, LOAD), remembered(placer, Workload(600, 32, 4096))
    assert found is not None and (found.plan.policy, found.is_near) == ("split", False)
    assert near is not None and (near.plan.policy, near.is_near) == ("split", True)
    assert remembered(FakePlacer(is_profiled=False), LOAD) is None  # type: ignore[arg-type]


def test_what_is_not_settled_is_not_remembered_as_a_verdict() -> None:
    turns = Turns({"stock-cpu": 3.0, "split": 2.0, "oato": 3.0}.__getitem__)
    assert not turns.gate().verdict.settled
    assert remembered(FakePlacer(), LOAD) is None  # type: ignore[arg-type]


def test_an_interval_that_says_nothing_is_measured_again() -> None:
    wild = iter([0.3, 3.0, 0.5, 2.0, 1.2, 0.9] * 100)
    turns = Turns(lambda name: next(wild) if name == "split" else 1.2 if name == "oato" else 1.0, Clock())
    found = turns.gate(budget_s=1000.0)
    assert not found.verdict.settled
    kept = read_kept(gate_key(FakePlacer(), LOAD))  # type: ignore[arg-type]
    assert kept is not None and "split" not in {each.policy for each in kept.pairs}
    assert not turns.gate(budget_s=1000.0).remembered


@pytest.mark.parametrize("speed", [{"split": 1.5}, {"split": 0.9}, {"split": 1.01}], ids=str)
def test_what_is_decided_or_not_worth_it_is_measured_once(speed: dict[str, float]) -> None:
    seen: list[Bench] = []
    gate(FakePlacer(), speed, seen)
    assert len(seen) == 1


def test_the_cpu_alone_is_tried_with_stocks_attention_too_where_its_plan_has_another() -> None:
    load = Workload(64, 32, 4096)
    assert "stock-cpu" not in all_plans(FakePlacer(), load, None)  # type: ignore[arg-type]
    assert "stock-cpu" not in all_plans(FakePlacer(cpu_attention="off", options=Options(flash_attn="off")), load, None)  # type: ignore[arg-type]
    plans = all_plans(FakePlacer(cpu_attention="off"), load, None)  # type: ignore[arg-type]
    ways = {name: plans[name].attention for name in ("cpu", "stock-cpu")}
    assert {name: way and way.flash_attn for name, way in ways.items()} == {"cpu": "off", "stock-cpu": "auto"}
    chosen = choose([candidate(name, made) for name, made in plans.items()])
    assert [each.policy for each in chosen] == ["split", "oato", "cpu", "stock-cpu"]


def test_the_verdict_of_stocks_attention_on_the_cpu_is_remembered() -> None:
    placer, seen = FakePlacer(), []
    first = gate(placer, {}, seen)
    won = replace(first.verdict, winner="stock-cpu")
    write_kept(KeptVerdict(won, StockPlacement(0)))
    found = gate(placer, {}, seen)
    assert (found.remembered, found.plan.policy, len(seen)) == (True, "cpu", 1)
    write_kept(KeptVerdict(replace(won, winner="nothing known"), StockPlacement(0)))
    assert not gate(placer, {}, seen).remembered


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
