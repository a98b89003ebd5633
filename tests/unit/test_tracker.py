"""The statistics tracker: its means against sums over single runs, and what it says of what was not run yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.cost.tracker import MEMORY_RUNS, BlockKey, BlockSeconds, Sample, Tracker, size_class, total

KEY = BlockKey("blk.0.ffn_up.weight", 4096, 1, 512)
SECONDS = st.builds(BlockSeconds, *3 * [st.floats(0, 1)])


def parts(seconds: BlockSeconds) -> tuple[float, float, float]:
    return seconds.cpu_s, seconds.wait_s, seconds.other_s


@given(st.lists(st.tuples(SECONDS, st.integers(1, 20)), min_size=1, max_size=8))
def test_means_against_a_sum_over_runs(taken: list[tuple[BlockSeconds, int]]) -> None:
    """Run i of n weighs (1 - a)^(n - i) a, and the first one what is left."""
    tracker = Tracker()
    for seconds, n_runs in taken:
        tracker.feed([Sample(KEY, seconds, n_runs)])
    runs = [seconds for seconds, n_runs in taken for _ in range(n_runs)]
    share = 1 / MEMORY_RUNS
    weights = [(1 - share) ** (len(runs) - i) * share for i in range(1, len(runs) + 1)]
    weights[0] += (1 - share) ** len(runs)
    wanted = [sum(w * parts(run)[i] for w, run in zip(weights, runs, strict=True)) for i in range(3)]
    mean = tracker.mean(KEY)
    assert mean is not None and parts(mean) == pytest.approx(wanted)
    assert mean.total_s == pytest.approx(sum(wanted))
    assert total([mean, mean]).total_s == pytest.approx(2 * mean.total_s)


def test_classes_of_tokens_are_powers_of_two() -> None:
    assert [size_class(n) for n in (0, 1, 2, 3, 4, 5, 512, 513)] == [1, 1, 2, 4, 4, 8, 512, 1024]


def test_predictions_begin_and_are_forgotten() -> None:
    tracker, predicted, seen = Tracker(), BlockSeconds(1, 0, 0), BlockSeconds(3, 2, 1)
    assert tracker.mean(KEY) is None
    tracker.seed({(KEY.block, KEY.cc, KEY.batch): predicted})
    assert tracker.mean(KEY) == predicted
    tracker.feed([Sample(KEY, seen, 1)])
    mean = tracker.mean(KEY)
    assert mean is not None and mean.cpu_s == pytest.approx(1 + 2 / MEMORY_RUNS)
    tracker.feed([Sample(KEY, seen, 100)])
    mean = tracker.mean(KEY)
    assert mean is not None and parts(mean) == pytest.approx(parts(seen), rel=1e-4)
    tracker.seed({(KEY.block, KEY.cc, KEY.batch): predicted})
    assert tracker.mean(KEY) == predicted


def test_what_was_not_run_begins_as_what_is_nearest() -> None:
    tracker = Tracker()

    def at(**other: int) -> BlockKey:
        return BlockKey(**{"block": "a", "cc": 64, "batch": 1, "depth": 256} | other)

    tracker.feed([Sample(at(), BlockSeconds(1, 0, 0), 1), Sample(at(depth=4096), BlockSeconds(2, 0, 0), 1)])
    assert tracker.mean(at()) == BlockSeconds(1, 0, 0) == tracker.mean(at(depth=128))
    assert tracker.mean(at(depth=4096)) == BlockSeconds(1 + 1 / MEMORY_RUNS, 0, 0) == tracker.mean(at(depth=2048))
    assert tracker.mean(at(cc=32)) is None and tracker.mean(at(batch=512)) is None
    assert set(tracker.means()) == {at(), at(depth=4096)}


@given(st.integers(1, 1 << 20))
def test_classes_are_powers_of_two(n_tokens: int) -> None:
    size = size_class(n_tokens)
    assert size.bit_count() == 1 and size // 2 < n_tokens <= size
