"""The order in which arms are measured: palindromes A B C C B A; disturbed blocks are measured again.

Knows neither processes nor the clock: `visit` measures one arm and returns its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oallama.bench.records import BenchTest, Block, Sample, Series
from oallama.bench.stats import block_drift

Visit = Callable[[int, Sequence[BenchTest]], Mapping[BenchTest, Sample]]
"""(position of the arm, tests) -> one sample of each test."""

Done = Callable[[Series], bool]
"""Whether a test needs no more measurements."""

MAX_DRIFT = 0.10
"""A block in which the machine got slower or faster by more than this is measured again."""

MAX_FAULTY = 2
"""Number of faulty blocks at the start after which the machine counts as unusable."""

REPAIRS = 2
"""Times that an arm with a fault is measured again at the end of its block, where others of the block have none."""


def measure_blocks(
    n_arms: int,
    tests: Sequence[BenchTest],
    n_blocks: int,
    visit: Visit,
    on_block: Callable[[Sequence[Series]], None] = lambda series: None,
    done: Done = lambda series: False,
) -> tuple[Series, ...]:
    """Measure until every test has n_blocks calm blocks, or is done, or twice as many were measured in all.

    An arm with a fault in a block is measured again at its end, unless all have one. What is missing in the end
    is filled up with the calmest of the discarded blocks; one with a fault is never kept, and where the first
    MAX_FAULTY blocks all have one, nothing more is measured. on_block sees the state after every block, so that an
    interruption loses only the block under way.
    """
    series = {test: Series(test) for test in tests}
    ended: set[BenchTest] = set()
    for _ in range(2 * n_blocks):
        lacking = [test for test, made in series.items() if len(made.kept) < n_blocks and not hopeless(made)]
        missing = [test for test in lacking if test not in ended]
        if not missing:
            break
        for test, block in _block(n_arms, missing, visit).items():
            made = series[test]
            if block.drift <= MAX_DRIFT and not block.fault:
                series[test] = replace(made, kept=(*made.kept, block))
            else:
                series[test] = replace(made, discarded=(*made.discarded, block))
        on_block(tuple(series.values()))
        ended.update(test for test in missing if done(series[test]))
    filled = tuple(made if test in ended else filled_up(made, n_blocks) for test, made in series.items())
    on_block(filled)
    return filled


def hopeless(series: Series) -> bool:
    """Whether every block so far has a fault, and there were enough of them to expect no other."""
    return not series.kept and len(series.discarded) >= MAX_FAULTY and all(block.fault for block in series.discarded)


def unsteady(series: Series) -> int:
    """Number of kept blocks that drifted, which were used because calm blocks were missing."""
    return sum(block.drift > MAX_DRIFT for block in series.kept)


def _block(n_arms: int, tests: Sequence[BenchTest], visit: Visit) -> dict[BenchTest, Block]:
    """Measure one block."""
    arms = list(range(n_arms))
    there = {arm: visit(arm, tests) for arm in arms}
    back = {arm: visit(arm, tests) for arm in reversed(arms)}
    samples = {test: {arm: (there[arm][test], back[arm][test]) for arm in arms} for test in tests}
    replaced: dict[BenchTest, dict[int, tuple[Sample, ...]]] = {test: {} for test in tests}
    for _ in range(REPAIRS):
        late = [arm for arm in arms if any(sample.fault for by_arm in samples.values() for sample in by_arm[arm])]
        if len(late) == len(arms):
            break
        for arm in late:
            first, second = visit(arm, tests), visit(arm, tests)
            for test, by_arm in samples.items():
                replaced[test][arm] = (*replaced[test].get(arm, ()), *by_arm[arm])
                by_arm[arm] = (first[test], second[test])
    blocks = {}
    for test, by_arm in samples.items():
        drift = block_drift([(first.seconds, second.seconds) for first, second in by_arm.values()])
        others = tuple(replaced[test].get(arm, ()) for arm in arms)
        blocks[test] = Block(tuple(by_arm[arm] for arm in arms), drift, others if any(others) else ())
    return blocks


def filled_up(series: Series, n_blocks: int) -> Series:
    """Fill up a series with the calmest of its discarded blocks where fewer than n_blocks were kept; none with a
    fault."""
    lacking = n_blocks - len(series.kept)
    if lacking <= 0:
        return series
    by_drift = sorted((block for block in series.discarded if not block.fault), key=lambda block: block.drift)
    faulty = tuple(block for block in series.discarded if block.fault)
    return replace(series, kept=(*series.kept, *by_drift[:lacking]), discarded=(*by_drift[lacking:], *faulty))
