"""The gate: what it races, what it keeps, and what the next run makes of that.

Plans, stock's --fit and what arms read back are real; arms are loaded once each. How long a turn takes, and the time
that passes, is what a test says.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from oallama.bench.ab import Bench, ProgressCallback, run_bench
from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, LoadReport, Sample
from oallama.core.profile import Profile
from oallama.core.types import Attention, Predicted, Workload
from oallama.gate.run import (
    DEPTH_S,
    GEN_S,
    LEAST_BUDGET_S,
    Gated,
    gate_tests,
    gated_plan,
    remembered,
    stock_at_once,
    unsettled,
)
from oallama.gate.store import gate_key, prompt_class, read_verdict, verdict_path
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.profile.store import FOLDER_VARIABLE

pytestmark = pytest.mark.usefixtures("prober")

LOAD = Workload(64, 32, 1024)
SHARE = 0.5  # of the weights may lie on the device
SLOWER, FASTER = 1.5, 1 / 1.5  # seconds of a plan, stock's being 1


@pytest.fixture(scope="module")
def placer(two_layers: Path, worker_profile: Profile) -> Placer:
    """That makes each plan once: planning is repeatable."""
    placer = Placer.load(two_layers, device="rpc-worker:1", profile=worker_profile, gpu_weights=SHARE, threads=1)
    placer.plan = functools.cache(placer.plan)  # type: ignore[method-assign]
    return placer


@pytest.fixture(scope="module")
def planned(placer: Placer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the verdict of a gate that has measured nothing yet."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(folder))
        found = gated_plan(placer, LOAD, most_s=0.0)
    assert found.verdict.stock == "stock-fit" and found.verdict.open is not None
    return folder


@pytest.fixture(autouse=True)
def cache(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return Path(shutil.copytree(planned, tmp_path / "cache"))


_loaded: dict[tuple[str, str | None], tuple[LoadReport, tuple[int, int]]] = {}


class Arm:
    """An arm that was loaded once in a process, and whose turns take what the race says."""

    def __init__(self, race: Measured, spec: ArmSpec, deadline: Deadline | None) -> None:
        self._race, self._spec, self._deadline = race, spec, deadline
        self._key = spec.name, spec.plan_fingerprint

    def load(self, operators: Sequence[str]) -> LoadReport:
        if self._key not in _loaded:
            with contextlib.closing(ArmProcess(self._spec)) as arm:
                _loaded[self._key] = arm.load(operators), arm.warm_up([BenchTest(8, 4)])
        return _loaded[self._key][0]

    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]:
        return _loaded[self._key][1]

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        seconds = 1.0 if self._spec.stock else self._race.seconds(len(self._race.turns))
        self._race.turns.append(self._spec.name)
        self._race.now += seconds * self._race.slowness
        if self._deadline is not None:
            self._deadline.check()
        return {test: Sample(seconds, seconds if test.n_gen else 0.0) for test in tests}

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    kill = close


@dataclass
class Measured:
    """A race whose plan takes `seconds` of a turn, on a clock that runs `slowness` as fast."""

    seconds: Callable[[int], float]
    slowness: float = 1.0
    now: float = 1000.0
    turns: list[str] = field(default_factory=list)
    given_s: list[float] = field(default_factory=list)
    problem: str = ""  # of the plan's arm

    def __call__(self, bench: Bench, progress: ProgressCallback) -> BenchResult:
        made = run_bench(bench, progress, start=functools.partial(Arm, self))  # type: ignore[arg-type]
        if not self.problem:
            return made
        return replace(made, arms=(made.arms[0], *(replace(a, problems=(self.problem,)) for a in made.arms[1:])))

    def gate(self, placer: Placer, **options: Any) -> Gated:
        def begin(_: object, seconds: float) -> None:
            self.given_s.append(seconds)

        return gated_plan(placer, LOAD, measure=self, clock=lambda: self.now, begin=begin, **options)


def racing(seconds: float, **options: Any) -> Measured:
    return Measured(lambda turn: seconds, **options)


def test_the_best_prediction_is_raced_and_used_where_it_wins(placer: Placer) -> None:
    race = racing(FASTER)
    found = race.gate(placer)
    first = found.verdict.races[0]
    assert set(race.turns) == {"stock-fit", first.policy}
    assert found.verdict.won == first and found.plan.policy == first.policy and not found.remembered
    assert len(first.pairs) == 4, "two blocks tell 1.5 from 1"
    assert first.ratio is not None and first.ratio.value == pytest.approx(1.5)
    assert found.plan.predicted is not None


def test_where_no_plan_is_faster_stocks_placement_is_used(placer: Placer) -> None:
    found, stock = racing(SLOWER).gate(placer), stock_at_once(placer, LOAD)
    assert found.verdict.settled and found.verdict.won is None
    assert found.plan.operators == stock.operators and stock.predicted is None
    assert found.verdict.sentence.startswith("llama.cpp's placement stays: ")
    assert all(len(race.pairs) == 4 or race.refused for race in found.verdict.races)


def test_a_plan_that_does_not_do_what_it_says_is_refused(placer: Placer) -> None:
    found = racing(FASTER, problem="it ran elsewhere").gate(placer)
    assert "it ran elsewhere" in found.verdict.races[0].refused and found.verdict.won is None


def test_a_verdict_is_remembered_until_it_is_asked_for_anew(placer: Placer) -> None:
    assert remembered(placer, LOAD) is None
    first, later = racing(FASTER).gate(placer), racing(SLOWER)
    again = later.gate(placer)
    assert (again.remembered, again.plan, again.verdict) == (True, first.plan, first.verdict) and not later.turns
    assert remembered(placer, LOAD) == again
    assert later.gate(placer, refresh=True).verdict.won is None and later.turns
    assert racing(FASTER).gate(placer).verdict.won is None, "the newer one counts"


def test_pairs_add_up_from_run_to_run_and_each_run_gets_further(placer: Placer) -> None:
    race = racing(FASTER)
    found = race.gate(placer, budget_s=1.2)
    assert (found.verdict.settled, found.verdict.won) == (False, None)
    assert len(found.verdict.races[0].pairs) == 2, "one block, whatever the budget"
    assert found.plan.operators == stock_at_once(placer, LOAD).operators
    assert remembered(placer, LOAD) is None and unsettled(placer, LOAD) == (found.verdict, found.left_s)
    last = race.gate(placer)
    assert last.verdict.settled and len(last.verdict.races[0].pairs) == 4 and last.verdict.won
    assert last.verdict.seconds == pytest.approx(race.now - 1000.0), "of both runs"
    assert race.given_s[1] >= LEAST_BUDGET_S and unsettled(placer, LOAD) is None


def test_what_was_in_vain_is_given_twice_the_time(placer: Placer) -> None:
    race = racing(FASTER, slowness=500.0)
    found = [race.gate(placer).verdict for _ in range(4)]
    n_pairs = [len(verdict.races[0].pairs) for verdict in found]
    assert n_pairs[0] == 0 and n_pairs == sorted(n_pairs) and n_pairs[-1] == 4 and found[-1].settled
    assert race.given_s[0] < race.given_s[1]


def test_what_would_take_too_long_is_not_measured_but_told(placer: Placer) -> None:
    race = racing(FASTER)
    found = race.gate(placer, most_s=1.0)
    assert race.turns == [] and found.verdict.open == found.verdict.races[0] and found.left_s >= LEAST_BUDGET_S
    assert race.gate(placer, most_s=found.left_s).verdict.won


def test_ctrl_c_keeps_the_pairs_that_are_complete(placer: Placer) -> None:
    def seconds(turn: int) -> float:
        if turn >= 6:  # in the second block
            raise KeyboardInterrupt
        return FASTER

    with pytest.raises(KeyboardInterrupt):
        Measured(seconds).gate(placer)
    kept = unsettled(placer, LOAD)
    assert kept is not None and len(kept[0].races[0].pairs) == 2


def test_two_runs_at_once_give_one_verdict(placer: Placer) -> None:
    race, other = racing(FASTER), []

    def waits(doing: str, **_: Any) -> None:
        if doing == "plan" and not other:  # meanwhile another run measures
            other.append(racing(FASTER).gate(placer))

    found = race.gate(placer, progress=waits)
    assert (found.remembered, found.verdict, race.turns) == (True, other[0].verdict, [])


def test_a_file_that_cannot_be_used_is_as_good_as_none(placer: Placer, cache: Path) -> None:
    racing(FASTER).gate(placer)
    (path,) = cache.glob("gate-*.json")
    sound = json.loads(path.read_text())
    assert read_verdict(sound["key"]) is not None
    for change in (
        {"key": {**sound["key"], "n_threads": 9}}, {"races": [{**sound["races"][0], "pairs": [[0.0, 1.0]]}]},
        {"races": [{**sound["races"][0], "pairs": [[1.0, 1.0]] * 100}]}, {"tests": []}, {"races": 5},
    ):  # fmt: skip
        path.write_text(json.dumps({**sound, **change}))
        assert read_verdict(sound["key"]) is None, change
    path.write_text("{")
    assert read_verdict(sound["key"]) is None


def test_another_setting_is_another_verdict_and_a_similar_one_is_not(two_layers: Path, worker_profile: Profile) -> None:
    def path(load: Workload = LOAD, profile: Profile = worker_profile, **changes: Any) -> Path:
        asked = {"device": "rpc-worker:1", "gpu_weights": SHARE, "threads": 1, **changes}
        return verdict_path(gate_key(Placer.load(two_layers, profile=profile, **asked), load, 1 << 30))

    paths = [
        path(), path(threads=2), path(gpu_weights=0.4), path(flash_attn="on"), path(type_k="q8_0"),
        path(n_ubatch=512), path(n_batch=1024), path(profile=replace(worker_profile, launch_s=1e-3)),
        path(device="none"), path(replace(LOAD, n_ctx=16384)), path(replace(LOAD, n_prompt=600)),
        path(replace(LOAD, n_past=512)),
    ]  # fmt: skip
    assert len(set(paths)) == len(paths)
    assert path(replace(LOAD, n_prompt=128, n_gen=9)) == path(replace(LOAD, n_ctx=1100)) == paths[0]
    assert [prompt_class(n) for n in (1, 128, 129, 1024, 1025)] == [0, 0, 1, 1, 2]


def test_turns_are_as_short_as_predicted_and_the_same_for_all_prompts_of_a_class(placer: Placer) -> None:
    made = placer.plan("cpu", workload=Workload(64, 32, 4096), measure=False)

    def plan(load: Workload, total_s: float, flash_attn: Any = "on") -> Plan:
        predicted = Predicted(total_s / 2, total_s / 64, total_s)
        return replace(made, workload=load, predicted=predicted, attention=Attention(flash_attn))

    def tests(load: Workload, total_s: float, *others: Plan) -> tuple[BenchTest, ...]:
        return gate_tests(load, (plan(load, total_s), *others))[0]

    assert tests(Workload(64, 32, 4096), GEN_S) == (BenchTest(64, 16),)
    assert tests(Workload(20, 32, 4096), 0.1) == tests(Workload(100, 5, 4096), 0.1) == (BenchTest(64, 16),)
    assert tests(Workload(500, 32, 4096), 0.5) == (BenchTest(512, 16),)
    assert tests(Workload(500, 32, 4096), 100.0) == (BenchTest(32, 4),), "50 s for the prompt, 1.6 s a token"
    assert tests(Workload(8, 0, 64), 0.1) == (BenchTest(48, 16),), "no more than the context holds"
    slow = plan(Workload(64, 32, 4096), 8 * GEN_S)
    assert tests(Workload(64, 32, 4096), 0.1, slow) == (BenchTest(32, 8),), "stock takes turns too"
    quick, deep = tests(Workload(1000, 32, 32768), 2.0)
    assert deep == replace(quick, n_depth=round(1000 * DEPTH_S)), "a large context at a second depth"
    load = Workload(2000, 32, 4096)
    for way, depth in (("on", 0), ("off", 2048 - 512 + (128 - 16) // 2)):
        assert gate_tests(load, (plan(load, 0.5, way),))[0][0].n_depth == depth, "of a plan without flash attention"
