"""The order in which arms are measured: palindromes A B C C B A; disturbed rounds are measured again.

Knows neither processes nor the clock: `visit` measures one arm and returns its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oallama.bench.records import BenchTest, Round, Sample, Series
from oallama.bench.stats import round_drift

Visit = Callable[[int, Sequence[BenchTest]], Mapping[BenchTest, Sample]]
"""(position of the arm, tests) -> one sample of each test."""

Done = Callable[[Series], bool]
"""Whether a test needs no more measurements."""

MAX_DRIFT = 0.10
"""A round in which the machine got slower or faster by more than this is measured again."""

MAX_FAULTY = 2
"""Number of faulty rounds at the start after which the machine counts as unusable."""

REPAIRS = 2
"""Times that an arm with a fault is measured again at the end of its round, unless all arms have one."""


def measure_rounds(
    n_arms: int,
    tests: Sequence[BenchTest],
    n_rounds: int,
    visit: Visit,
    on_round: Callable[[Sequence[Series]], None] = lambda series: None,
    done: Done = lambda series: False,
) -> tuple[Series, ...]:
    """Measure until every test has n_rounds calm rounds, or is done, or twice as many were measured in all.

    An arm with a fault is measured again at the end of its round, unless all arms have one. Missing rounds are filled
    up with the calmest discarded ones, but never with faulty ones. If the first MAX_FAULTY rounds are all faulty,
    measuring ends. on_round is called after every round, so that an interruption loses only the present round.
    """
    series = {test: Series(test) for test in tests}
    ended: set[BenchTest] = set()
    for _ in range(2 * n_rounds):
        lacking = [test for test, so_far in series.items() if len(so_far.kept) < n_rounds and not hopeless(so_far)]
        missing = [test for test in lacking if test not in ended]
        if not missing:
            break
        for test, round_ in _round(n_arms, missing, visit).items():
            so_far = series[test]
            if round_.drift <= MAX_DRIFT and not round_.fault:
                series[test] = replace(so_far, kept=(*so_far.kept, round_))
            else:
                series[test] = replace(so_far, discarded=(*so_far.discarded, round_))
        on_round(tuple(series.values()))
        ended.update(test for test in missing if done(series[test]))
    filled = tuple(so_far if test in ended else filled_up(so_far, n_rounds) for test, so_far in series.items())
    on_round(filled)
    return filled


def hopeless(series: Series) -> bool:
    """Whether every round so far has a fault, and there were enough of them to expect no other."""
    return not series.kept and len(series.discarded) >= MAX_FAULTY and all(round_.fault for round_ in series.discarded)


def unsteady(series: Series) -> int:
    """Number of kept rounds that drifted, which were used because calm rounds were missing."""
    return sum(round_.drift > MAX_DRIFT for round_ in series.kept)


def _round(n_arms: int, tests: Sequence[BenchTest], visit: Visit) -> dict[BenchTest, Round]:
    """Measure one round."""
    arms = list(range(n_arms))
    forth = {arm: visit(arm, tests) for arm in arms}
    back = {arm: visit(arm, tests) for arm in reversed(arms)}
    samples = {test: {arm: (forth[arm][test], back[arm][test]) for arm in arms} for test in tests}
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
    rounds = {}
    for test, by_arm in samples.items():
        drift = round_drift([(first.seconds, second.seconds) for first, second in by_arm.values()])
        others = tuple(replaced[test].get(arm, ()) for arm in arms)
        rounds[test] = Round(tuple(by_arm[arm] for arm in arms), drift, others if any(others) else ())
    return rounds


def filled_up(series: Series, n_rounds: int) -> Series:
    """Fill up a series with fewer than n_rounds kept rounds with the calmest of its discarded ones, except faulty
    ones."""
    lacking = n_rounds - len(series.kept)
    if lacking <= 0:
        return series
    by_drift = sorted((round_ for round_ in series.discarded if not round_.fault), key=lambda round_: round_.drift)
    faulty = tuple(round_ for round_ in series.discarded if round_.fault)
    return replace(series, kept=(*series.kept, *by_drift[:lacking]), discarded=(*by_drift[lacking:], *faulty))
