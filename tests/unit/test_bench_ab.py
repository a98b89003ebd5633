"""A whole comparison with arms that are no processes: loading, turns, memory, interruptions, findings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from bench_cases import N_LAYER, NAMES, OPERATORS, World, report, stock

from oallama.bench.ab import Bench, run_bench
from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import BenchResult, BenchTest
from oallama.core.errors import OutOfTime

PP = BenchTest(64, 0)
ARMS = (stock("stock-cpu", 0), stock("stock-ngl", 99))
REPORTS = {"stock-cpu": report(), "stock-ngl": report(*NAMES)}
BENCH = Bench(ARMS, (PP,), OPERATORS, N_LAYER, n_blocks=2)
ROOMY = 1 << 40


def world(**changes: object) -> World:
    return World(dict(REPORTS), lambda name, turn: {"stock-cpu": 1.0, "stock-ngl": 0.5}[name], **changes)  # type: ignore[arg-type]


def run(bench: Bench, made: World, **options: object) -> BenchResult:
    return run_bench(bench, start=made.start, available_memory=lambda: ROOMY, **options)  # type: ignore[arg-type]


def test_arms_stay_loaded_and_take_turns() -> None:
    made = world()
    result = run(BENCH, made)
    turns = ["stock-cpu", "stock-ngl", "stock-ngl", "stock-cpu"] * 2
    assert made.said == [
        ("load", "stock-cpu"), ("load", "stock-ngl"), ("warm_up", "stock-cpu"), ("warm_up", "stock-ngl"),
        *(("measure", name) for name in turns),
        ("close", "stock-cpu"), ("close", "stock-ngl"),
    ]  # fmt: skip
    (series,) = result.series
    assert [s.seconds for s in series.samples(1)] == [0.5] * 4
    assert result.resident
    assert not result.interrupted
    assert (result.warnings, [arm.problems for arm in result.arms]) == ((), [(), ()])


@pytest.mark.parametrize("by_request", [True, False])
def test_arms_that_do_not_fit_together_are_loaded_for_each_turn(by_request: bool) -> None:
    made = world()
    bench = replace(BENCH, n_blocks=1, resident=False if by_request else None)
    result = run_bench(bench, start=made.start, available_memory=lambda: ROOMY if by_request else 1000)
    assert not result.resident
    assert any("do not fit into memory together" in warning for warning in result.warnings) != by_request
    alive = set()
    for what, who in made.said:
        if what == "load":
            alive.add(who)
        elif what in ("close", "kill"):
            alive.discard(who)
        assert len(alive) <= 1
    measured = [who for what, who in made.said if what == "measure"]
    assert measured == ["stock-cpu", "stock-ngl", "stock-ngl", "stock-cpu"]
    warmed = [who for what, who in made.said if what == "warm_up"]
    assert warmed == measured  # a model that was just loaded is warmed up first


def test_ctrl_c_leaves_the_complete_blocks() -> None:
    made = world()

    def seconds(name: str, turn: int) -> float:
        if turn == 5:
            raise KeyboardInterrupt
        return 1.0

    made.seconds = seconds
    partial: list[BenchResult] = []
    result = run(BENCH, made, on_partial=partial.append)
    assert result.interrupted
    assert [len(series.kept) for series in result.series] == [1]
    assert [len(each.series[0].kept) for each in partial] == [1]
    assert ("kill", "stock-cpu") in made.said


def test_an_arm_that_computes_out_of_turn_is_named() -> None:
    made = world()
    made.cpu = lambda name: float(made.turn) if name == "stock-ngl" else 0.0
    result = run(BENCH, made)
    assert result.arms[1].idle_cpu_share > 100  # fake turns take no time
    assert any("arm stock-ngl used" in warning for warning in result.warnings)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_deadline_leaves_the_complete_blocks_and_ends_every_process() -> None:
    clock = Clock()
    made = world(pass_time=clock.sleep)  # turns of 1 and 0.5 s, blocks of 3 s
    result = run(replace(BENCH, n_blocks=9, deadline=Deadline(4.2, clock)), made)
    assert (result.out_of_time, result.interrupted) == (True, False)
    assert [len(series.kept) for series in result.series] == [1]
    assert clock.now == 4.5, "the turn under way is the last"
    assert made.said[-2:] == [("kill", "stock-cpu"), ("kill", "stock-ngl")]


def test_a_process_that_does_not_answer_in_time_is_out_of_time() -> None:
    arm = ArmProcess(ARMS[0], Deadline(0.0, Clock()))
    try:
        with pytest.raises(OutOfTime, match="arm stock-cpu"):
            arm.load(())
    finally:
        arm.kill()
