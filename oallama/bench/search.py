"""A short measurement of a promising configuration of stock llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oallama.bench.ab import Bench, ProgressCallback, quiet, run_bench
from oallama.bench.process import Deadline
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, Sample
from oallama.core.errors import DeviceError, DoesNotFit, OutOfTime
from oallama.core.types import Operator

SEARCH_GEN = 16  # generated tokens while searching; their time is scaled to the test's

Measure = Callable[[Bench, ProgressCallback, Callable[[BenchResult], None]], BenchResult]
"""run_bench, or its replacement in a test."""


def tried(
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
    best = {series.test: min(series.samples(0), key=lambda one: one.seconds) for series in result.series if series.kept}
    if len(best) < len(bench.tests):
        raise OutOfTime(f"{spec.name} was not measured in time")
    return {test: _scaled(best[one], test.n_gen / max(1, one.n_gen)) for test, one in short.items()}, ""


def _scaled(sample: Sample, times: float) -> Sample:
    return replace(sample, gen_s=sample.gen_s * times)
