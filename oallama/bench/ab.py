"""Runs a comparison: each arm is loaded in its own process, checked, warmed up, and measured in turns; or one arm
briefly, to choose among options."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import psutil

from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import ArmResult, ArmSpec, BenchResult, BenchTest, LoadReport, Sample, Series
from oallama.bench.schedule import Done, measure_rounds
from oallama.bench.verify import findings, problems, same_as
from oallama.core.errors import DeviceError, DoesNotFit, OutOfTime
from oallama.core.types import Operator

MEMORY_SHARE = 0.9  # of the machine's available memory that the arms may fill together


class RunningArm(Protocol):
    """An arm's process, as ab.py uses it (ArmProcess says what each does)."""

    def load(self, operators: Sequence[str]) -> LoadReport: ...
    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]: ...
    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]: ...
    def cpu_seconds(self) -> float: ...
    def close(self) -> None: ...


Start = Callable[[ArmSpec, Deadline | None], RunningArm]


class ProgressCallback(Protocol):
    """Called with the current step; `steps`: how many more are now expected in all."""

    def __call__(self, doing: str, done: int = 0, expect: int = 0) -> None: ...


def _available_memory() -> int:
    return int(psutil.virtual_memory().available)


def quiet(doing: str, done: int = 0, expect: int = 0) -> None:
    """Ignores progress."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A comparison to run. n_rounds: palindromes of each test, so 2 * n_rounds samples of every arm.

    resident: False reloads every arm for each of its turns; None only if they do not fit together. deadline: when the
    comparison ends. done: called after each round with each test, whether it needs no more rounds.
    """

    arms: tuple[ArmSpec, ...]
    tests: tuple[BenchTest, ...]
    operators: tuple[Operator, ...]
    n_layer: int
    n_rounds: int = 3
    resident: bool | None = None
    deadline: Deadline | None = None
    done: Done = lambda series: False
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_bench(
    bench: Bench,
    progress: ProgressCallback = quiet,
    on_partial: Callable[[BenchResult], None] = lambda result: None,
    start: Start = ArmProcess,
    available_memory: Callable[[], int] = _available_memory,
) -> BenchResult:
    """Measure. on_partial is called with the result so far after every round. Ctrl-C returns the result so far
    (`interrupted`), or is raised again if there is none yet; so does the deadline.

    Raises the error of an arm that cannot load or compute, and OutOfTime if nothing was measured by the deadline.
    """
    session = _Session(bench, progress, start, available_memory)
    try:
        session.load_all()
        session.warm_up()
        session.measure(on_partial)
    except (KeyboardInterrupt, OutOfTime) as stop:
        if not session.has_samples:
            raise
        return replace(session.result(), interrupted=isinstance(stop, KeyboardInterrupt))
    finally:
        session.close()
    return session.result()


SEARCH_GEN = 16  # generated tokens while searching; their time is scaled to the test's

Measure = Callable[[Bench, ProgressCallback, Callable[[BenchResult], None]], BenchResult]
"""run_bench, or its replacement in a test."""


def measure_briefly(
    spec: ArmSpec,
    tests: Sequence[BenchTest],
    operators: tuple[Operator, ...],
    n_layer: int,
    progress: ProgressCallback = quiet,
    deadline: Deadline | None = None,
    measure: Measure = run_bench,
) -> tuple[Mapping[BenchTest, Sample], str]:
    """(the faster of two samples of each test, ""), or ({}, why the configuration cannot be used: it fails, or differs
    from its specification). Raises OutOfTime if the deadline passes first, and KeyboardInterrupt."""
    short = {test: replace(test, n_gen=min(test.n_gen, SEARCH_GEN)) for test in tests}
    bench = Bench((spec,), tuple(dict.fromkeys(short.values())), operators, n_layer, n_rounds=1, deadline=deadline)
    try:
        result = measure(bench, progress, lambda _: None)
    except (DeviceError, DoesNotFit) as error:
        return {}, str(error)
    if result.interrupted:
        raise KeyboardInterrupt
    (arm,) = result.arms
    if arm.problems:
        return {}, arm.problems[0]
    if not all(series.kept for series in result.series):
        raise OutOfTime(f"{spec.name} was not measured in time")
    best = {series.test: min(series.samples(0), key=lambda sample: sample.seconds) for series in result.series}
    return {test: _scaled(best[shorter], test, shorter) for test, shorter in short.items()}, ""


def _scaled(sample: Sample, test: BenchTest, shorter: BenchTest) -> Sample:
    return replace(sample, gen_s=sample.gen_s * test.n_gen / max(1, shorter.n_gen))


@dataclass(slots=True)
class _Arm:
    """One arm of a run. process: None unless loaded; report: of its last load, None before the first load."""

    spec: ArmSpec
    process: RunningArm | None = None
    report: LoadReport | None = None
    idle_cpu_s: float = 0.0  # CPU time that it used while others were measured
    others_s: float = 0.0  # that others were measured

    def warm_up(self, tests: Sequence[BenchTest]) -> None:
        """Warm up, and update the report: some memory is taken by the first decodes."""
        assert self.process is not None and self.report is not None
        device_bytes, host_bytes = self.process.warm_up(tests)
        self.report = replace(self.report, device_bytes=device_bytes, host_bytes=host_bytes)

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()


class _Session:
    def __init__(
        self, bench: Bench, progress: ProgressCallback, start: Start, available_memory: Callable[[], int]
    ) -> None:
        self._bench = bench
        self._progress = progress
        self._start = start
        self._available = available_memory
        self._names = [operator.name for operator in bench.operators]
        self._arms = [_Arm(spec) for spec in bench.arms]
        self._resident = bench.resident is not False
        self._series: tuple[Series, ...] = tuple(Series(test) for test in bench.tests)
        self._notes: list[str] = []
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    @property
    def has_samples(self) -> bool:
        return any(series.kept or series.discarded for series in self._series)

    def load_all(self) -> None:
        """Load all arms; if they do not fit together, load each once for its report and again for each turn."""
        n_arms = len(self._arms)
        self._progress("", expect=2 * n_arms + 2 * self._bench.n_rounds * n_arms)
        for arm in self._arms:
            if self._resident and not self._has_room():
                self._leave_residence("the arms do not fit into memory together")
            try:
                self._load(arm)
            except DeviceError as error:
                if not self._resident or arm is self._arms[0]:
                    raise
                self._leave_residence(f"the arms do not fit together ({error})")
                self._load(arm)
            if not self._resident:
                arm.close()

    def warm_up(self) -> None:
        for arm in self._arms:
            self._progress(f"warm up {arm.spec.name}" if self._resident else "", done=1)
            if self._resident:
                self._check_time()
                arm.warm_up(self._bench.tests)

    def measure(self, on_partial: Callable[[BenchResult], None]) -> None:
        """Raises DeviceError if each round had a fault."""

        def on_round(series: Sequence[Series]) -> None:
            self._series = tuple(series)
            on_partial(self.result())

        bench = self._bench
        measured = measure_rounds(len(self._arms), bench.tests, bench.n_rounds, self._visit, on_round, done=bench.done)
        fault = measured[0].discarded[-1].fault if measured[0].discarded else ""
        if fault and not any(series.kept for series in measured):
            raise DeviceError(f"{fault}, in every round; close them, or run again when the machine is quiet")

    def result(self) -> BenchResult:
        """The result so far. Needs all reports."""
        bench = self._bench
        same = same_as([(arm.spec.name, arm.report) for arm in self._arms if arm.report is not None])
        arms = tuple(
            ArmResult(
                arm.spec,
                arm.report,
                problems(arm.spec, arm.report, bench.operators, bench.n_layer),
                same.get(arm.spec.name),
                arm.idle_cpu_s / arm.others_s if arm.others_s else 0.0,
            )
            for arm in self._arms
            if arm.report is not None
        )
        return BenchResult(
            operators=bench.operators,
            arms=arms,
            series=self._series,
            started=self._started,
            resident=self._resident,
            warnings=(*self._notes, *findings(arms, self._series)),
            settings=bench.settings,
        )

    def close(self) -> None:
        for arm in self._arms:
            arm.close()

    def _visit(self, index: int, tests: Sequence[BenchTest]) -> Mapping[BenchTest, Sample]:
        self._check_time()
        arm = self._arms[index]
        self._progress(f"measure {arm.spec.name}", done=1)
        if not self._resident:
            self._load(arm)
            arm.warm_up(tests)
        others = [(o, o.process, o.process.cpu_seconds()) for o in self._arms if o.process and o is not arm]
        assert arm.process is not None
        start = time.perf_counter()
        samples = arm.process.measure(tests)
        took = time.perf_counter() - start
        for other, process, before in others:
            other.idle_cpu_s += process.cpu_seconds() - before
            other.others_s += took
        if not self._resident:
            arm.close()
        return samples

    def _load(self, arm: _Arm) -> None:
        self._progress(f"load {arm.spec.name}", done=int(arm.report is None))
        self._check_time()
        arm.process = self._start(arm.spec, self._bench.deadline)
        arm.report = arm.process.load(self._names)

    def _check_time(self) -> None:
        if self._bench.deadline is not None:
            self._bench.deadline.check()

    def _has_room(self) -> bool:
        """Whether another arm as large as the largest so far fits into this machine's memory. A device reports itself
        when it is full."""
        reports = [arm.report for arm in self._arms if arm.report is not None]
        if not reports:
            return True
        return max(report.host_bytes for report in reports) < MEMORY_SHARE * self._available()

    def _leave_residence(self, why: str) -> None:
        self._notes.append(f"{why}: each is reloaded for each of its turns")
        self._resident = False
        self.close()
