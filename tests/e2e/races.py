"""Races for tests of tuning: arms are loaded once each in their process; how long a turn takes, and the time that
passes, is what a test says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oallama.bench.ab import Bench, ProgressCallback, run_bench
from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, LoadReport, Sample
from oallama.core.types import Workload
from oallama.placer import Placer
from oallama.tune.run import TuneOutcome, tune

LOAD = Workload(64, 32, 1024)
SLOWER, FASTER = 1.5, 1 / 1.5  # seconds of a plan, stock's being 1

_loaded: dict[tuple[str, str, str], tuple[LoadReport, tuple[int, int]]] = {}


class Arm:
    """An arm that was loaded once in a process, and whose turns take what the race says."""

    def __init__(self, race: Measured, spec: ArmSpec, deadline: Deadline | None) -> None:
        self._race, self._spec, self._deadline = race, spec, deadline
        self._key = spec.setting.load.path, spec.name, spec.plan.fingerprint if spec.plan else ""

    def load(self, operators: Sequence[str]) -> LoadReport:
        if self._key not in _loaded:
            with contextlib.closing(ArmProcess(self._spec)) as arm:
                _loaded[self._key] = arm.load(operators), arm.warm_up([BenchTest(8, 4)])
        return _loaded[self._key][0]

    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]:
        return _loaded[self._key][1]

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        n_draft = self._spec.draft.n_draft if self._spec.draft is not None else 0
        stock_s = self._race.stock(self._spec.name) * 0.8**n_draft
        seconds = stock_s if self._spec.stock else self._race.seconds(len(self._race.turns))
        late = 1.0 if self._spec.stock else self._race.late
        self._race.turns.append(self._spec.name)
        self._race.now += seconds * self._race.slowness
        if self._deadline is not None:
            self._deadline.check()
        return {test: Sample(late * seconds, seconds * test.n_gen) for test in tests}

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


@dataclass
class Measured:
    """A race whose plan takes `seconds` for its prompt and for each token, on a clock that runs `slowness` as fast.
    stock: what stock's arms of these names take."""

    seconds: Callable[[int], float]
    slowness: float = 1.0
    now: float = 1000.0
    turns: list[str] = field(default_factory=list)
    given_s: list[float] = field(default_factory=list)
    problem: str = ""  # of the plan's arm
    late: float = 1.0  # times as long as stock's that the plan's prompts take
    stock: Callable[[str], float] = lambda name: 1.0

    def __call__(
        self, bench: Bench, progress: ProgressCallback, on_partial: Callable[[BenchResult], None]
    ) -> BenchResult:
        made = run_bench(bench, progress, on_partial, start=functools.partial(Arm, self))  # type: ignore[arg-type]
        if not self.problem or len(bench.arms) == 1:
            return made
        return replace(made, arms=(made.arms[0], *(replace(a, problems=(self.problem,)) for a in made.arms[1:])))

    def tune(self, placer: Placer, workload: Workload = LOAD, **options: Any) -> TuneOutcome:
        def begin(_: object, seconds: float) -> None:
            self.given_s.append(seconds)

        return tune(placer, workload, measure=self, clock=lambda: self.now, begin=begin, **options)


def racing(seconds: float, **options: Any) -> Measured:
    return Measured(lambda turn: seconds, **options)
