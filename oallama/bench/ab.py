"""Running a comparison: every arm loaded in a process of its own, checked, warmed up, and measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from oallama.bench.process import ArmProcess
from oallama.bench.records import (
    ArmResult,
    ArmSpec,
    BenchResult,
    BenchTest,
    Cap,
    LoadReport,
    Sample,
    Series,
)
from oallama.bench.schedule import measure_blocks
from oallama.bench.verify import findings, problems, same_as
from oallama.core.errors import DeviceError, OallamaError
from oallama.core.types import Operator
from oallama.device.spec import parse_device

MEMORY_SHARE = 0.9  # of the machine's available memory that the arms may fill together


Start = Callable[[ArmSpec], ArmProcess]


class Progress(Protocol):
    """Told what is being done; `steps` more of them are now expected in all."""

    def __call__(self, doing: str, done: int = 0, expect: int = 0) -> None: ...


def quiet(doing: str, done: int = 0, expect: int = 0) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What to compare. n_blocks: palindromes of each test, so 2 * n_blocks samples of every arm.

    resident: False loads every arm anew for each of its turns; None does so only where they do not fit together.
    """

    arms: tuple[ArmSpec, ...]
    tests: tuple[BenchTest, ...]
    operators: tuple[Operator, ...]
    n_layer: int
    n_blocks: int = 3
    cap: Cap = field(default_factory=Cap)
    resident: bool | None = None
    delay_s: float = 0.0  # before each turn
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_bench(
    bench: Bench,
    progress: Progress = quiet,
    on_partial: Callable[[BenchResult], None] = lambda result: None,
    start: Start = ArmProcess,
    available_memory: Callable[[], int] | None = None,
) -> BenchResult:
    """Measure. on_partial sees the result so far after every block. Ctrl-C ends it with what there is
    (`interrupted`), or is raised again where there is nothing yet.

    Raises what an arm raises that cannot load or compute.
    """
    session = _Session(bench, progress, start, available_memory or _available_memory)
    try:
        session.load_all()
        session.warm_up()
        session.measure(on_partial)
    except KeyboardInterrupt:
        session.kill()
        if session.has_samples:
            return replace(session.result(), interrupted=True)
        raise
    except BaseException:
        session.kill()
        raise
    session.close()
    return session.result()


class _Session:
    """One run's processes and what they said so far."""

    def __init__(self, bench: Bench, progress: Progress, start: Start, available_memory: Callable[[], int]) -> None:
        self._bench = bench
        self._progress = progress
        self._start = start
        self._available = available_memory
        self._names = [operator.name for operator in bench.operators]
        self._running: list[ArmProcess | None] = [None] * len(bench.arms)
        self._reports: list[LoadReport | None] = [None] * len(bench.arms)
        self._resident = bench.resident is not False
        self._series: tuple[Series, ...] = tuple(Series(test) for test in bench.tests)
        self._idle_s = [0.0] * len(bench.arms)
        self._others_s = [0.0] * len(bench.arms)
        self._notes: list[str] = []
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    @property
    def has_samples(self) -> bool:
        return any(series.kept or series.discarded for series in self._series)

    def load_all(self) -> None:
        """Load every arm; where they do not fit together, load each once for its report and again for each turn."""
        n_arms = len(self._bench.arms)
        self._progress("", expect=2 * n_arms + 2 * self._bench.n_blocks * n_arms)
        for index in range(n_arms):
            if self._resident and not self._has_room():
                self._leave_residence("the arms do not fit into memory together")
            try:
                self._load(index)
            except DeviceError as error:
                if not self._resident or not any(self._running):
                    raise
                self._leave_residence(f"the arms do not fit together ({error})")
                self._load(index)
            if not self._resident:
                self._end(index)

    def warm_up(self) -> None:
        for index, spec in enumerate(self._bench.arms):
            self._progress(f"warm up {spec.name}" if self._resident else "", done=1)
            if self._resident:
                self._warm_up(index, self._bench.tests)

    def measure(self, on_partial: Callable[[BenchResult], None]) -> None:
        def on_block(series: Sequence[Series]) -> None:
            self._series = tuple(series)
            on_partial(self.result())

        """Raises DeviceError where not one block may be compared."""
        made = measure_blocks(len(self._bench.arms), self._bench.tests, self._bench.n_blocks, self._visit, on_block)
        if not any(series.kept for series in made):
            fault = made[0].discarded[-1].fault
            raise DeviceError(f"{fault}, in every block; close them, or run again when the machine is quiet")

    def result(self) -> BenchResult:
        """What is known now. All reports must be there."""
        bench = self._bench
        reports = [report for report in self._reports if report is not None]
        same = same_as([(spec.name, report) for spec, report in zip(bench.arms, reports, strict=True)])
        arms = tuple(
            ArmResult(
                spec,
                report,
                problems(spec, report, bench.operators, bench.n_layer, bench.cap),
                same.get(spec.name),
                idle / others if others else 0.0,
            )
            for spec, report, idle, others in zip(bench.arms, reports, self._idle_s, self._others_s, strict=True)
        )
        return BenchResult(
            operators=bench.operators,
            arms=arms,
            series=self._series,
            cap=bench.cap,
            started=self._started,
            resident=self._resident,
            warnings=(*self._notes, *findings(arms, self._series)),
            settings=bench.settings,
        )

    def close(self) -> None:
        for index in range(len(self._running)):
            self._end(index)

    def kill(self) -> None:
        for index, arm in enumerate(self._running):
            if arm is not None:
                with suppress(OallamaError, OSError):
                    arm.kill()
            self._running[index] = None

    def _visit(self, index: int, tests: Sequence[BenchTest]) -> Mapping[BenchTest, Sample]:
        name = self._bench.arms[index].name
        self._progress(f"measure {name}", done=1)
        if not self._resident:
            self._load(index)
            self._warm_up(index, tests)
        if self._bench.delay_s:
            time.sleep(self._bench.delay_s)
        before = [arm.cpu_seconds() if arm else 0.0 for arm in self._running]
        start = time.perf_counter()
        samples = self._arm(index).measure(tests)
        took = time.perf_counter() - start
        for other, arm in enumerate(self._running):
            if arm is not None and other != index:
                self._idle_s[other] += arm.cpu_seconds() - before[other]
                self._others_s[other] += took
        if not self._resident:
            self._end(index)
        return samples

    def _warm_up(self, index: int, tests: Sequence[BenchTest]) -> None:
        """And bring the report up to date: some memory is taken by the first decodes."""
        device_bytes, host_bytes = self._arm(index).warm_up(tests)
        report = self._reports[index]
        assert report is not None
        self._reports[index] = replace(report, device_bytes=device_bytes, host_bytes=host_bytes)

    def _load(self, index: int) -> None:
        spec = self._bench.arms[index]
        self._progress(f"load {spec.name}", done=int(self._reports[index] is None))
        arm = self._running[index] = self._start(spec)
        try:
            self._reports[index] = arm.load(self._names)
        except BaseException:
            self._running[index] = None
            arm.kill()
            raise

    def _has_room(self) -> bool:
        """Whether another arm as large as the largest so far fits into this machine's memory. What a worker process
        holds is this machine's memory too; a real device says itself when it is full."""
        seen = [report for report in self._reports if report is not None]
        if not seen:
            return True
        local = parse_device(self._bench.arms[0].setting.load.device).is_worker
        largest = max(report.host_bytes + (report.device_bytes if local else 0) for report in seen)
        return largest < MEMORY_SHARE * self._available()

    def _leave_residence(self, why: str) -> None:
        self._notes.append(f"{why}: each is loaded anew for each of its turns")
        self._resident = False
        self.close()

    def _arm(self, index: int) -> ArmProcess:
        arm = self._running[index]
        assert arm is not None
        return arm

    def _end(self, index: int) -> None:
        arm, self._running[index] = self._running[index], None
        if arm is not None:
            arm.close()


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
