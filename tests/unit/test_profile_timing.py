"""The measuring schedule, with a runner that does nothing and a clock that it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.profile.timing import Policy, assess, measure, relative_half_width


class FakeMachine:
    """A clock, and a runner whose runs take the given seconds on it."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.seconds = iter(seconds)
        self.now = 100.0
        self.calls: list[int] = []

    def clock(self) -> float:
        return self.now

    def run(self, n: int) -> Sequence[float]:
        self.calls.append(n)
        taken = [next(self.seconds) for _ in range(n)]
        self.now += sum(taken)
        return taken


def test_a_steady_runner_ends_at_min_repeats_and_leaves_out_the_warm_up() -> None:
    machine = FakeMachine(chain([9.0], repeat(0.001)))
    timing = measure(machine.run, machine.clock, Policy(min_repeats=5, warmup_runs=1, time_cap_s=100))
    assert timing.seconds == 0.001
    assert timing.samples == (0.001,) * 6  # one, then a batch of min_repeats
    assert machine.calls == [1, 1, 5]


def test_a_runner_slower_than_the_cap_gets_min_repeats_only_up_to_the_hard_cap() -> None:
    machine = FakeMachine(repeat(3.0))
    timing = measure(machine.run, machine.clock, Policy(min_repeats=5, warmup_runs=1, time_cap_s=1.0, hard_cap=4.0))
    assert timing.samples == (3.0,)  # warm-up 3 s, one sample 3 s: beyond 4 times the cap


def test_a_runner_that_loses_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="gave 1 times for 2 runs"):
        measure(lambda n: [0.1], FakeMachine([]).clock, Policy(warmup_runs=2))


@given(st.lists(st.floats(1e-7, 1.0), min_size=200, max_size=200), st.integers(1, 8), st.floats(0.01, 2.0))
def test_any_schedule_ends_with_the_median_of_what_it_kept(times: list[float], min_repeats: int, cap: float) -> None:
    machine = FakeMachine(times)
    policy = Policy(min_repeats=min_repeats, max_repeats=60, time_cap_s=cap)
    timing = measure(machine.run, machine.clock, policy)
    assert 1 <= len(timing.samples) <= 60
    assert list(timing.samples) == times[1 : 1 + len(timing.samples)]
    assert sorted(timing.samples)[0] <= timing.seconds <= sorted(timing.samples)[-1]
    settled = relative_half_width(timing.samples) < policy.target and len(timing.samples) >= min_repeats
    assert settled or len(timing.samples) == 60 or machine.now - 100.0 >= cap


def test_the_interval_of_the_median_is_that_of_the_sign_test() -> None:
    # textbook ranks at 95 %: all of up to 8 samples, 2nd to 9th of 10, 6th to 15th of 20, 40th to 61st of 100
    assert relative_half_width([9.0, 10.0, 11.0]) == pytest.approx(0.1)
    assert relative_half_width([float(x) for x in range(1, 11)]) == pytest.approx((9 - 2) / 2 / 5.5)
    assert relative_half_width([float(x) for x in range(1, 21)]) == pytest.approx((15 - 6) / 2 / 10.5)
    assert relative_half_width([float(x) for x in range(1, 101)]) == pytest.approx((61 - 40) / 2 / 50.5)
    assert relative_half_width([5.0]) == math.inf
    assert relative_half_width([2.0, 2.0]) == 0


def test_drift_is_found_and_signed() -> None:
    slower = assess([1.0, 1.0, 1.01, 1.3, 1.3, 1.31])
    assert [finding.kind for finding in slower if finding.kind == "drift"] == ["drift"]
    drift = next(finding for finding in slower if finding.kind == "drift")
    assert drift.amount == pytest.approx(0.3 / 1.155, rel=0.01)
    faster = assess([1.31, 1.3, 1.3, 1.01, 1.0, 1.0])
    assert next(finding for finding in faster if finding.kind == "drift").amount < 0


def test_outliers_are_found_only_where_they_are_many() -> None:
    one = [1.0] * 19 + [5.0]
    three = [1.0] * 17 + [5.0, 9.0, 4.0]
    assert assess(one) == []
    (finding,) = assess(three)
    assert finding.kind == "outliers"
    assert finding.amount == pytest.approx(8.0)


def test_a_median_that_is_not_known_well_is_found() -> None:
    (finding,) = assess([1.0, 1.5, 2.0, 1.2])
    assert finding.kind == "unsettled"
    assert finding.amount == pytest.approx(relative_half_width([1.0, 1.5, 2.0, 1.2]))


def test_the_time_cap_ends_a_noisy_measurement() -> None:
    machine = FakeMachine(chain.from_iterable(repeat((0.1, 0.3))))
    timing = measure(machine.run, machine.clock, Policy(min_repeats=3, warmup_runs=0, time_cap_s=1.0))
    assert machine.now - 100.0 == pytest.approx(1.2)
    assert len(timing.samples) == 6  # 0.9 s after five runs is not yet the cap
    assert machine.calls == [1] * len(machine.calls)


def test_a_noisy_runner_is_repeated_until_max_repeats() -> None:
    machine = FakeMachine(chain.from_iterable(repeat((0.001, 0.003))))
    timing = measure(machine.run, machine.clock, Policy(max_repeats=40, warmup_runs=2, time_cap_s=100))
    assert len(timing.samples) == 40 and sum(machine.calls) == 42
    assert relative_half_width(timing.samples) > 0.02
