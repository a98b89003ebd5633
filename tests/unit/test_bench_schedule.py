"""The order of turns, drift, and what becomes of blocks that drifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.bench.records import BenchTest, Sample
from oallama.bench.schedule import MAX_DRIFT, measure_blocks, unsteady

PP = BenchTest(64, 0)


def timed(seconds: Mapping[int, Sequence[float]], turns: list[int] | None = None):
    """A visit that gives each arm its next time; both tests alike."""
    left = {arm: list(times) for arm, times in seconds.items()}

    def visit(arm: int, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        if turns is not None:
            turns.append(arm)
        time = left[arm].pop(0)
        return {test: Sample(time, 0.0) for test in tests}

    return visit


def test_a_drifted_block_is_discarded_and_measured_again() -> None:
    slow = [1.0, 1.0, 1.0, 1.5, 1.0, 1.0]  # the second block gets slower for both arms
    (made,) = measure_blocks(2, [PP], 2, timed({0: slow, 1: slow}))
    assert len(made.kept) == 2
    assert [block.drift for block in made.discarded] == [pytest.approx(0.5)]
    assert [s.seconds for s in made.samples(0)] == [1.0] * 4
    assert unsteady(made) == 0


LATE = Sample(1.0, 0.0, fault="the device was late")


def faulty(turns: Sequence[int], n_turns: list[int]):
    """A visit of one arm whose samples have a fault in these turns, counted from 0."""

    def visit(arm: int, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        n_turns.append(arm)
        return {test: LATE if len(n_turns) - 1 in turns else Sample(1.0, 0.0) for test in tests}

    return visit


def test_a_block_with_a_fault_is_measured_again_and_never_kept() -> None:
    (made,) = measure_blocks(1, [PP], 3, faulty([1, 4, 6, 8, 10], []))
    assert len(made.kept) == 1
    assert [block.fault for block in made.discarded] == ["the device was late"] * 5


def test_an_arm_with_a_fault_is_measured_again_at_the_end_of_its_block() -> None:
    turns: list[int] = []
    (made,) = measure_blocks(3, [PP], 1, faulty([4, 6], turns))  # 0 1 2 2 1* 0, 1* 1, 1 1
    assert turns == [0, 1, 2, 2, 1, 0, 1, 1, 1, 1]
    (block,) = made.kept
    assert not block.fault and not made.discarded
    assert [len(pair) for pair in block.samples] == [2, 2, 2]
    assert [bool(sample.fault) for sample in made.unused(1)] == [False, True, True, False]
    assert made.unused(0) == made.unused(2) == []


def test_on_a_machine_that_never_calms_down_the_calmest_blocks_are_taken_and_counted() -> None:
    times = [v for drift in (0.5, 0.2, 0.9, 0.3) for v in (1.0, 1.0 + drift)]
    (made,) = measure_blocks(1, [PP], 2, timed({0: times}))
    assert [round(block.drift, 6) for block in made.kept] == [0.2, 0.3]
    assert len(made.discarded) == 2
    assert unsteady(made) == 2


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.floats(0.5, 2.0), min_size=64, max_size=64))
def test_there_are_always_as_many_blocks_as_asked_for(n_arms: int, n_blocks: int, times: list[float]) -> None:
    every = iter(times * 4)
    (made,) = measure_blocks(n_arms, [PP], n_blocks, lambda arm, tests: {PP: Sample(next(every), 0.0)})
    assert len(made.kept) == n_blocks
    assert len(made.kept) + len(made.discarded) <= 2 * n_blocks
    kept_by_need = [block for block in made.kept if block.drift > MAX_DRIFT]
    assert all(block.drift >= worst.drift for block in made.discarded for worst in kept_by_need)


def test_a_done_arm_has_no_samples_in_later_blocks() -> None:
    turns: list[int] = []
    (made,) = measure_blocks(
        3, [PP], 3, timed({arm: [1.0] * 6 for arm in range(3)}, turns), done=lambda series: {1} if turns else ()
    )
    assert turns == [0, 1, 2, 2, 1, 0, *([0, 2, 2, 0] * 2)]
    assert [[len(samples) for samples in block.samples] for block in made.kept] == [[2, 2, 2], [2, 0, 2], [2, 0, 2]]
