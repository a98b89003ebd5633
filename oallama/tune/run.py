"""Tunes: finds the fastest options of stock llama.cpp for each class of workloads, then compares plans with them by A/B
tests. Saves each measurement at once; tuned/result.py says which plan wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from oallama.bench.ab import Bench, Measure, ProgressCallback, measure_briefly, quiet, run_bench
from oallama.bench.arms import STOCK_FIT, ArmMaker
from oallama.bench.prepare import setting_of
from oallama.bench.process import Deadline
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, Sample, Series
from oallama.bench.rows import not_comparable
from oallama.bench.server_arm import ServerArm
from oallama.core.errors import DeviceError, OutOfTime
from oallama.core.files import cache_folder
from oallama.core.types import Workload
from oallama.placer.stock import stock_plan
from oallama.placer.tuned import TunedPlan, result_key, tuned_plan
from oallama.planner.policies.stock import FIT, STOCK
from oallama.profile.emulate import keep_rates
from oallama.profile.store import measuring_lock
from oallama.run.stock import StockPlacement
from oallama.tune.candidates import Candidates, placement_of, with_stock_drafts
from oallama.tuned.classes import WorkloadClass, class_of
from oallama.tuned.result import LATE, MOST_PAIRS, ClassResult, Pair, Speed, StockTrial, TuneResult
from oallama.tuned.store import read_result, write_result

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

START_S, LOAD_BYTES_PER_S = 4.0, 4e8  # to start a process, and to load its model
TYPICAL_TURNS = 12  # of both arms together, to detect a difference of a few times the noise
MARGIN = 1.5  # time limit relative to the predicted time
LEAST_TIME_LIMIT_S = 20.0
SAME = "'s plan is the same"  # as the rival's, which the sentence names before
SEARCH_SHARE = 0.5  # largest share of the time for options of stock llama.cpp


@dataclass(frozen=True, slots=True)
class TuneOutcome:
    """The plan in use for a workload. left_s: predicted seconds until all requested classes are settled."""

    plan: Plan
    result: TuneResult
    workload_class: WorkloadClass
    tuned: TunedPlan | None  # None: no class near it is settled, so the plan is stock llama.cpp's own placement
    remembered: bool  # True: from the cache alone
    left_s: float = 0.0


def tune(
    placer: Placer,
    workload: Workload,
    classes: Iterable[WorkloadClass] | None = None,
    progress: ProgressCallback = quiet,
    begin: Callable[[TuneResult, float], None] = lambda result, seconds: None,
    time_limit_s: float | None = None,
    most_s: float = math.inf,
    refresh: bool = False,
    measure: Measure = run_bench,
    clock: Callable[[], float] = time.monotonic,
) -> TuneOutcome:
    """Measure these classes until each is settled; returns the plan for a workload. classes None: the workload's class.

    Measures for about time_limit_s seconds; None: the predicted time that settles the classes, or not at all if that is
    more than most_s. begin: called with the results so far and the seconds. refresh: discard results of these classes.
    Raises DoesNotFit if --fit does not fit, the errors of planning and measuring, and KeyboardInterrupt, which keeps
    every complete pair.
    """
    placer = by_measured_speed(placer, progress)
    wanted = tuple(classes) if classes is not None else (class_of(workload),)
    wanted = tuple(dict.fromkeys(_measurable(placer, workload_class) for workload_class in wanted))
    tuner = _Tuner(placer, workload, progress, measure, clock)
    tuner.read()
    if refresh:
        tuner.forget(wanted)
    if not tuner.left(wanted):
        return tuner.outcome(True)
    progress("plan")
    tuner.plan(wanted)
    if time_limit_s is None and tuner.seconds(wanted) > most_s:
        write_result(tuner.result)
        return tuner.outcome(True, wanted)
    with measuring_lock(cache_folder(), partial(progress, "wait for another oallama to finish measuring")):
        if not refresh:
            tuner.read()  # another run may have measured meanwhile
            if not tuner.left(wanted):
                return tuner.outcome(True)
        given_s = tuner.seconds(wanted) if time_limit_s is None else time_limit_s
        begin(tuner.result, given_s)
        try:
            tuner.measure(wanted, given_s)
        finally:
            if placer.device.is_emulated:
                keep_rates(placer.threads)
    return tuner.outcome(False, wanted)


def by_measured_speed(placer: Placer, progress: ProgressCallback = quiet) -> Placer:
    """The placer with its devices ordered by measured speed, as in later runs; the same placer if the user named the
    devices."""
    if not (placer.members and placer.chose_devices) or placer.known_profile is not None:
        return placer
    progress("profile")
    placer.profile()
    settled = placer.with_options()
    settled.drafter = placer.drafter
    return settled


def _measurable(placer: Placer, workload_class: WorkloadClass) -> WorkloadClass:
    """Return the class as it is measured: llama-server, which alone has drafts, is measured without a history."""
    return workload_class if placer.drafter is None else replace(workload_class, history=False)


def unsettled(placer: Placer, workload: Workload) -> tuple[ClassResult, float] | None:
    """(result so far of a workload's class, predicted seconds that settle it); None if the class is settled, or has no
    result."""
    tuner, workload_class = _Tuner(placer, workload), _measurable(placer, class_of(workload))
    tuner.read()
    result = tuner.result.of(workload_class)
    return None if result is None or result.settled else (result, tuner.seconds((workload_class,)))


def tuned_arm(maker: ArmMaker, refresh: bool = False) -> ArmSpec:
    """The arm `auto`: the plan that tuning found, with its result in the notes."""

    def words(doing: str, done: int = 0, expect: int = 0) -> None:
        """Show the step of tuning, but not its number of turns, which are not the comparison's."""
        if doing:
            maker.progress(f"tuning: {doing}")

    tuning = tune(maker.placer, maker.workload, progress=words, refresh=refresh)
    spec, seconds = maker.of_plan("auto", tuning.plan), tuning.result.seconds
    how = f"cached, took {seconds:.1f} s" if tuning.remembered else f"in {seconds:.1f} s"
    if (tuned := tuning.tuned) is None:
        said, document = "using llama.cpp's placement, as there is no clear result", None
    else:
        said, document = tuned.result.sentence, {**tuned.result.document, "remembered": tuning.remembered}
    return replace(spec, notes=(*spec.notes, f"tuning, {how}: {said}"), tuning=document)


class _Tuner:
    """Tunes one model, device and context. result: the results so far; each new one is saved to the cache."""

    def __init__(
        self,
        placer: Placer,
        workload: Workload,
        progress: ProgressCallback = quiet,
        measure: Measure = run_bench,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placer, self._asked, self._progress = placer, workload, progress
        self._measure, self._clock = measure, clock
        if placer.drafter is not None and measure is run_bench:
            start = partial(ServerArm, placer=placer, accepted=placer.drafter.acceptance.rates)
            self._measure = partial(run_bench, start=start)
        self._setting = setting_of(placer, workload.n_ctx, workload.n_ubatch, of_text=True)
        self._maker = ArmMaker(placer, self._setting, progress=progress)
        self.key = result_key(placer, workload.n_ctx, self._setting.cap)
        self.result = TuneResult(self.key)

    @cached_property
    def _fit(self) -> StockPlacement:
        """Stock llama.cpp's default."""
        return self._placement(STOCK_FIT)

    def _placement(self, arm: str) -> StockPlacement:
        """The placement of a stock arm, by layers, as plans have it."""
        placement = self._maker.make(arm).stock
        assert placement is not None
        return placement.by_layers

    def read(self) -> None:
        """Merge the cached results with plans that were made but not measured."""
        cached = read_result(self.key) or TuneResult(self.key)
        planned = [planned_class for planned_class in self.result.classes if cached.of(planned_class.of) is None]
        plans = {**self.result.plans, **cached.plans}
        self.result = replace(cached, classes=(*cached.classes, *planned), plans=plans)

    def forget(self, classes: Sequence[WorkloadClass]) -> None:
        """Drop the results of these classes; the cache keeps them until the next measurement."""
        self.result = replace(
            self.result, classes=tuple(result for result in self.result.classes if result.of not in classes)
        )

    def left(self, classes: Sequence[WorkloadClass]) -> list[ClassResult | None]:
        """Results of the unsettled classes; None for a class without a result."""
        return [
            result
            for workload_class in classes
            if (result := self.result.of(workload_class)) is None or not result.settled
        ]

    def outcome(self, remembered: bool, classes: Sequence[WorkloadClass] = ()) -> TuneOutcome:
        tuned = tuned_plan(self._placer, self._asked, self.result)
        plan = tuned.plan if tuned else stock_plan(self._placer, self._asked, self._fit)
        left_s = self.seconds(classes) if self.left(classes) else 0.0
        return TuneOutcome(plan, self.result, class_of(self._asked), tuned, remembered, left_s)

    def plan(self, classes: Sequence[WorkloadClass]) -> None:
        """Add stock's configurations and plans to measure for the classes without a result."""
        if new := {
            workload_class: self._workload(workload_class)
            for workload_class in classes
            if self.result.of(workload_class) is None
        }:
            self._placer.profile()  # replaces a profile of a busy machine if it is calm now
            alone = {
                str(member.device): self._placement(f"{STOCK_FIT}@{number}")
                for number, member in enumerate(self._placer.members)
            }
            candidates = Candidates(self._placer, new, self._fit, alone)
            for workload_class in new:
                self.result = self.result.with_class(candidates.of(workload_class))
            self.result = replace(self.result, plans={**self.result.plans, **candidates.plans})

    def seconds(self, classes: Sequence[WorkloadClass]) -> float:
        """Predicted seconds that settle these classes, with a margin; at least twice the seconds already spent without
        a pair."""
        load_s = START_S + sum(operator.bytes for operator in self._placer.operators) / LOAD_BYTES_PER_S
        results = list(filter(None, self.left(classes)))
        open_tries = [(trial.unmeasured, result.turn_s) for result in results for trial in result.open_tries]
        n_plans = len({ab_test.plan for result in results if (ab_test := result.open) is not None})
        searched_s = len({trial for trial, _ in open_tries}) * load_s + 3 * sum(s for _, s in open_tries)
        tested_s = 2 * n_plans * load_s + (TYPICAL_TURNS + 2) * sum(result.turn_s for result in results)
        in_vain_s = (
            0.0 if any(ab_test.pairs for result in results for ab_test in result.races) else 2 * self.result.seconds
        )
        return max(LEAST_TIME_LIMIT_S, MARGIN * (searched_s + tested_s), in_vain_s)

    def measure(self, classes: Sequence[WorkloadClass], time_limit_s: float) -> None:
        """Measure for about time_limit_s seconds. Raises DeviceError if --fit cannot be measured."""
        began, spent_s = self._clock(), self.result.seconds
        deadline = Deadline(began + 3 * time_limit_s, self._clock)  # the first round is worth waiting for

        def is_over(share: float = 1.0) -> bool:
            return self._clock() >= began + share * time_limit_s

        try:
            self._search(classes, lambda: is_over(SEARCH_SHARE), deadline)
            while not is_over():
                earlier = self.result
                for group in self._groups(classes):
                    if not is_over():
                        self._ab_test(group, is_over, deadline)
                if self.result == earlier:
                    break  # all classes are settled, or no round was valid
        except OutOfTime:
            pass
        finally:
            self.result = replace(self.result, seconds=spent_s + self._clock() - began)
            write_result(self.result)

    def _keep(self, changed: ClassResult) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.result = self.result.with_class(replace(changed, measured_at=now))
        write_result(self.result)

    #
    # options of stock llama.cpp
    #

    def _search(self, classes: Sequence[WorkloadClass], is_over: Callable[[], bool], deadline: Deadline) -> None:
        """Measure the configurations of stock llama.cpp in classes with several, --fit first; then choose the rivals.
        Raises OutOfTime."""
        tests: dict[StockTrial, list[ClassResult]] = {}
        for result in filter(None, self.left(classes)):
            for stock_trial in result.open_tries:
                tests.setdefault(stock_trial.unmeasured, []).append(result)
        placer = self._placer
        for n_done, (trial, wanted) in enumerate(tests.items()):
            if n_done and is_over():
                break
            by_test = {self._test(result): result.of for result in wanted}
            arm, operators, n_layer = self._stock_arm(trial), placer.operators, placer.model.n_layer
            samples, fault = measure_briefly(
                arm, tuple(by_test), operators, n_layer, self._progress, deadline, self._measure
            )
            if fault and trial == StockTrial(self._fit):
                raise DeviceError(f"llama.cpp's own placement cannot be measured: {fault}")
            for test, workload_class in by_test.items():
                speed = _speed(samples[test], test) if test in samples else None
                self._keep(self.result[workload_class].with_try(replace(trial, speed=speed, fault=fault)))
        for result in filter(None, self.left(classes)):
            if not result.stock_plan:
                self._choose_rival(result)

    def _choose_rival(self, result: ClassResult) -> None:
        """Make the fastest configuration the rival, with its plan; and bound the first words of the plans to compare
        with it."""
        late_may_win = self._placer.options.late_first_word
        rival = result.fastest(late_may_win)
        trial, fit = result.tries[rival], result.tries[0]
        name = FIT if rival == 0 else STOCK
        plan = self._stock_plan(self._workload(result.of), trial, name)
        most_late = LATE * fit.speed.prompt_s / trial.speed.prompt_s if fit.speed and trial.speed else LATE
        races = []
        for ab_test in result.races:
            same = placement_of(self.result.plan(ab_test.plan)) == placement_of(plan)
            refused = f"{ab_test.policy}{SAME}" if same else ab_test.refused
            races.append(replace(ab_test, most_late=None if late_may_win else most_late, refused=refused))
        plans = {**self.result.plans, plan.fingerprint: plan.to_json()}
        self.result = replace(self.result, plans=plans)
        self._keep(replace(result, rival=rival, stock_plan=plan.fingerprint, races=tuple(races)))

    #
    # A/B tests
    #

    def _groups(self, classes: Sequence[WorkloadClass]) -> list[list[ClassResult]]:
        """Group classes whose next A/B tests compare the same two configurations."""
        groups: dict[tuple[StockTrial, str], list[ClassResult]] = {}
        for result in filter(None, self.left(classes)):
            if result.stock_plan and result.open is not None:
                compared = result.tries[result.rival].unmeasured, result.open.plan
                groups.setdefault(compared, []).append(result)
        return list(groups.values())

    def _ab_test(self, group: Sequence[ClassResult], is_over: Callable[[], bool], deadline: Deadline) -> None:
        """Compare a plan with a rival for these classes until each is decided or the time is over. Raises OutOfTime,
        KeyboardInterrupt."""
        first, ab_test = group[0], group[0].open
        assert ab_test is not None
        class_of_test = {self._test(class_result): class_result for class_result in group}
        rival = self._stock_arm(first.tries[first.rival])
        ours = self._maker.of_plan(ab_test.policy, self.result.plan(ab_test.plan))

        def on_partial(result: BenchResult) -> None:
            for series in result.series:
                class_result = class_of_test[series.test]
                latest = class_result.ab_test(ab_test.plan)
                self._keep(class_result.with_test(replace(latest, pairs=(*latest.pairs, *_pairs(series)))))

        def done(series: Series) -> bool:
            return is_over() or self.result[class_of_test[series.test].of].ab_test(ab_test.plan).standing != "open"

        operators, n_layer = self._placer.operators, self._placer.model.n_layer
        bench = Bench((rival, ours), tuple(class_of_test), operators, n_layer, MOST_PAIRS, deadline=deadline, done=done)
        result = self._measure(bench, self._progress, on_partial)
        if why := not_comparable(result.arms, 1):
            if result.arms[1].same_as and not any(arm.problems for arm in result.arms):
                why = f"{ab_test.policy}{SAME}"
            for class_result in group:
                latest = self.result[class_result.of]
                self._keep(latest.with_test(replace(latest.ab_test(ab_test.plan), refused=why)))
        if result.interrupted:
            raise KeyboardInterrupt

    def _stock_arm(self, trial: StockTrial) -> ArmSpec:
        setting = self._setting
        if trial.device:
            setting = self._maker.setting_alone(self._placer.members.index(self._placer.alone_on(trial.device)))
        draft = self._stock_plan(self._asked, trial, FIT).draft if trial.n_draft else None
        return ArmSpec(f"stock {trial.flags}", setting, trial.placement, draft=draft)

    def _stock_plan(self, workload: Workload, trial: StockTrial, name: str) -> Plan:
        """A configuration of stock llama.cpp as a plan."""
        placer, drafter = self._placer.alone_on(trial.device), self._placer.drafter
        if not trial.n_draft or drafter is None:
            return stock_plan(placer, workload, trial.placement, name=name)
        placer_with_drafts, step = with_stock_drafts(placer, drafter, workload, trial.n_draft)
        plan = stock_plan(placer_with_drafts, replace(workload, step=step), trial.placement, name=name)
        return replace(plan, draft=drafter.draft(plan, drafter.acceptance.rates[: trial.n_draft]))

    def _workload(self, workload_class: WorkloadClass) -> Workload:
        return workload_class.workload(self._asked.n_ctx, self._asked.n_ubatch)

    def _test(self, result: ClassResult) -> BenchTest:
        workload = self._workload(result.of)
        return BenchTest(workload.n_prompt, result.n_measured, workload.n_past)


def _pairs(series: Series) -> list[Pair]:
    """All valid pairs of a test, also those of discarded rounds: leaving out drifting ones would bias the result."""
    rounds = [round_ for round_ in (*series.kept, *series.discarded) if not round_.fault]
    turns = [(rival, ours) for round_ in rounds for rival, ours in zip(*round_.samples, strict=True)]
    return [(_speed(rival, series.test), _speed(ours, series.test)) for rival, ours in turns]


def _speed(sample: Sample, test: BenchTest) -> Speed:
    return Speed(sample.prompt_s, sample.gen_s / test.n_gen)
