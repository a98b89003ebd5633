"""Measuring candidates against stock, one test after another, until each has won or lost, or time is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oallama.bench.records import ArmSpec, BenchResult, BenchTest, Series
from oallama.bench.rows import refusal
from oallama.bench.schedule import Done, filled_up
from oallama.bench.stats import LEAST_PAIRS
from oallama.core.errors import OutOfTime
from oallama.core.types import Workload
from oallama.gate.pairs import Pairs, Standing, Trial, pairs_of, standing, together, trial
from oallama.gate.plans import leaves_flash_off
from oallama.plan.plan import Plan

TURN_S = 0.25  # a turn's prompt, and its generation, are as long as the prediction says this takes
LEAST_PROMPT, MOST_GEN, LEAST_GEN = 32, 16, 4
N_BLOCKS = LEAST_PAIRS // 2  # the fewest that give an interval
LARGE_CTX = 8192  # contexts from here on are measured at a second depth
DEPTH_S = 3.0  # which is as deep as the prediction says this takes to fill
LEAST_DEPTH = 1024

MeasureBench = Callable[[tuple[ArmSpec, ...], BenchTest, int, Done], BenchResult]
"""(stock and candidates, test, blocks at most, which arms are done) -> what was measured."""


@dataclass(slots=True)
class Contest:
    """The candidates, and their pairs so far. placements: policy -> digest of its placement."""

    load: Workload
    placements: Mapping[str, str]
    pairs: dict[tuple[str, BenchTest], Pairs] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # policy -> why it can have no ratio
    n_new: int = 0  # pairs measured here
    out_of_time: bool = False
    interrupted: bool = False

    def know(self, known: Sequence[Pairs]) -> None:
        """Pairs of an earlier time count where the policy still makes the same placement."""
        for each in known:
            if self.placements.get(each.policy) == each.placement:
                self.pairs[each.policy, each.test] = each

    def measure(self, stock: ArmSpec, arms: Sequence[ArmSpec], tests: Sequence[BenchTest], ask: MeasureBench) -> None:
        """Until each candidate has won or lost in each test, or there is no more time. Who lost one is not asked again,
        and nobody is who has an interval where another has won."""
        for test in tests:
            racing = [arm for arm in arms if all(self.standing(arm.name, each) != "lost" for each in tests)]
            known = {arm.name: self.pairs.get((arm.name, test)) for arm in racing}
            racing = [arm for arm in racing if arm.name in self._open(known)]
            if racing and not self.out_of_time and not self.interrupted:
                self._measure(stock, racing, test, ask)

    def _measure(self, stock: ArmSpec, racing: Sequence[ArmSpec], test: BenchTest, ask: MeasureBench) -> None:
        names = [arm.name for arm in racing]
        before = dict(self.pairs)

        def now(made: Series) -> dict[str, Pairs]:
            return {name: self._added(before, made, name, arm) for arm, name in enumerate(names, 1)}

        def done(series: Sequence[Series]) -> frozenset[int]:
            still = self._open(now(series[0]))
            return frozenset(arm for arm, name in enumerate(names, 1) if name not in still)

        try:
            result = ask((stock, *racing), test, 2 * N_BLOCKS, done)
        except OutOfTime:
            self.out_of_time = True
            return
        except KeyboardInterrupt:
            self.interrupted = True
            return
        self.out_of_time, self.interrupted = result.out_of_time, result.interrupted
        made = filled_up(result.series[0], N_BLOCKS)
        self.n_new += len(made.samples(0))
        self.pairs.update({(name, test): pairs for name, pairs in now(made).items()})
        for arm, name in enumerate(names, 1):
            if why := refusal(result.arms, arm, LEAST_PAIRS):
                self.refused[name] = why

    def standing(self, name: str, test: BenchTest) -> Standing:
        return "lost" if name in self.refused else self._standing(self.pairs.get((name, test)))

    def settled(self, names: Sequence[str], tests: Sequence[BenchTest]) -> bool:
        """Whether a candidate has won everywhere, or each has lost somewhere."""
        standings = [[self.standing(name, test) for test in tests] for name in names]
        return any(set(each) == {"won"} for each in standings) or all("lost" in each for each in standings)

    def trials(self) -> list[Trial]:
        lengths = self.load.n_prompt, max(self.load.n_gen, 1)
        return [trial(each, *lengths, self.refused.get(name, "")) for (name, _), each in self.pairs.items()]

    def _standing(self, pairs: Pairs | None) -> Standing:
        return "open" if pairs is None else standing(pairs, self.load.n_prompt, max(self.load.n_gen, 1))

    def _added(self, before: Mapping[tuple[str, BenchTest], Pairs], made: Series, name: str, arm: int) -> Pairs:
        new, known = pairs_of(name, self.placements[name], made, arm), before.get((name, made.test))
        return new if known is None else together(known, new)

    def _open(self, now: Mapping[str, Pairs | None]) -> frozenset[str]:
        """The candidates of a test that need more pairs. Where one has won, those that have an interval do not."""
        found = {name: self._standing(pairs) for name, pairs in now.items() if name not in self.refused}
        won = "won" in found.values()
        return frozenset(
            name
            for name, each in found.items()
            if each == "open" and not (won and (pairs := now[name]) is not None and pairs.n_pairs >= LEAST_PAIRS)
        )


def gate_tests(load: Workload, plan: Plan | None, stock: Plan | None = None) -> tuple[BenchTest, ...]:
    """The user's prompt and generation, behind what the workload has before them; shortened to what the slower
    prediction, the plan's or stock's, says takes TURN_S each, the prompt to the plan's micro-batch at most; and the
    same at a depth where the context is large. A plan that leaves flash attention off for the depth of the workload is
    measured near that depth. Without a prediction: the shortest."""
    predicted = [each.predicted for each in (plan, stock) if each is not None and each.predicted is not None]
    per_prompt_token = max((each.ttft_s / load.n_prompt for each in predicted), default=TURN_S)
    tpot = max((each.tpot_s for each in predicted), default=TURN_S)

    def within(seconds: float, each: float) -> int:
        return int(seconds / each) if each > 0 else 1 << 30

    n_ubatch = load.n_ubatch if plan is None else plan.workload.n_ubatch
    n_prompt = min(load.n_prompt, n_ubatch, max(LEAST_PROMPT, within(TURN_S, per_prompt_token)))
    n_gen = min(max(load.n_gen, 1), MOST_GEN, max(LEAST_GEN, within(TURN_S, tpot)))
    off = plan is not None and leaves_flash_off(plan)
    left_out = max(0, load.n_prompt - n_prompt + (load.n_gen - n_gen) // 2)
    first_depth = load.n_past + (left_out if off else 0)
    tests = [BenchTest(n_prompt, n_gen, min(first_depth, within(DEPTH_S, per_prompt_token)))]
    if load.n_ctx >= LARGE_CTX:
        depth = min(load.n_ctx // 2, load.n_ctx - n_prompt - n_gen, within(DEPTH_S, per_prompt_token))
        if depth >= max(LEAST_DEPTH, 2 * tests[0].n_depth):
            tests.append(BenchTest(n_prompt, n_gen, depth))
    return tuple(tests)
