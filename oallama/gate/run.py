"""The gate at work: race the plan that is predicted to be the fastest against stock llama.cpp, and keep every pair."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from oallama.bench.ab import Bench, ProgressCallback, quiet, run_bench
from oallama.bench.arms import STOCK_CPU, STOCK_FIT, ArmMaker
from oallama.bench.prepare import setting_of
from oallama.bench.process import Deadline
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, Block, Series
from oallama.bench.rows import refusal
from oallama.bench.stats import LEAST_PAIRS
from oallama.core.errors import DoesNotFit, OutOfTime
from oallama.core.files import cache_folder
from oallama.gate.store import TYPICAL, gate_key, prompt_class, read_verdict, write_verdict
from oallama.gate.verdict import MOST_PAIRS, Race, Verdict, weighted_seconds
from oallama.placer.fit import stock_cpu_plan, stock_plan
from oallama.profile.store import measuring_lock
from oallama.run.setup import only_splits

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.cost.passes import Pass
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

CPU = "cpu"  # the policy
N_GEN = 128  # tokens of a generation that turns are weighed for
PROMPT_S, GEN_S = 1.0, 0.5  # a turn's prompt, and its generation, are as long as the prediction says this takes
LEAST_PROMPT, LEAST_GEN, MOST_GEN = 32, 4, 16
LARGE_CTX, LEAST_DEPTH = 8192, 1024  # contexts from here on are measured at a second depth, at least that deep
DEPTH_S = 3.0  # which is as deep as the prediction says this takes to fill
HOPELESS = 2.0  # predicted to take more than so many times as long as stock: not raced

START_S, LOAD_BYTES_PER_S = 4.0, 4e8  # a process, and its model's weights
TYPICAL_TURNS = 20  # of both arms: what tells a difference of a few noises
MARGIN = 1.5  # times as long as is predicted is given
LEAST_BUDGET_S = 20.0

Measure = Callable[[Bench, ProgressCallback], BenchResult]


@dataclass(frozen=True, slots=True)
class Gated:
    """plan: that the verdict lets through. left_s: predicted seconds of measuring until an open verdict is settled."""

    plan: Plan
    verdict: Verdict
    remembered: bool  # nothing was measured now
    left_s: float = 0.0


def gated_plan(
    placer: Placer,
    load: Workload,
    progress: ProgressCallback = quiet,
    begin: Callable[[Verdict, float], None] = lambda verdict, seconds: None,
    budget_s: float | None = None,
    most_s: float = math.inf,
    refresh: bool = False,
    cpus: tuple[int, ...] = (),
    attention_passes: Sequence[Pass] | None = None,
    measure: Measure = run_bench,
    clock: Callable[[], float] = time.monotonic,
) -> Gated:
    """The plan that is faster than stock llama.cpp beyond noise, or stock's own placement as a plan.

    Where that is not known, measures for about budget_s; None: what is predicted to settle it, or not at all where that
    is more than most_s. begin gets what is known and the seconds. refresh: forget what is known. cpus: what measured
    processes are pinned to; attention_passes: as in Placer.place. Raises DoesNotFit where stock-fit does not fit, what
    planning and measuring raise, and KeyboardInterrupt with every complete pair kept.
    """
    gate = Gate(placer, load, cpus, attention_passes)
    known = None if refresh else gate.known()
    if known is not None and known.settled:
        return gate.outcome(known, True)
    progress("plan")
    verdict = known or gate.planned()
    if budget_s is None and gate.predicted_seconds(verdict) > most_s:
        write_verdict(verdict)
        return gate.outcome(verdict, True)
    if race := verdict.open:
        gate.plan(race.policy)  # now, as planning may have to measure, which the lock is for as well
    wait = partial(progress, "wait for another oallama that measures")
    with measuring_lock(cache_folder(), wait):
        verdict = (None if refresh else gate.known()) or verdict  # another run may have measured meanwhile
        if verdict.settled:
            write_verdict(verdict)
            return gate.outcome(verdict, True)
        given_s = gate.predicted_seconds(verdict) if budget_s is None else budget_s
        begin(verdict, given_s)
        verdict = gate.measured(verdict, given_s, progress, measure, clock)
    return gate.outcome(verdict, False)


def remembered(placer: Placer, load: Workload) -> Gated | None:
    """Return what gated_plan would without measuring; None where it would measure. Raises what planning raises."""
    if placer.known_profile is None:
        return None
    gate = Gate(placer, load)
    known = gate.known()
    return gate.outcome(known, True) if known is not None and known.settled else None


def unsettled(placer: Placer, load: Workload) -> tuple[Verdict, float] | None:
    """An open verdict with the predicted seconds of measuring that settle it; None where there is none."""
    if placer.known_profile is None:
        return None
    gate = Gate(placer, load)
    known = gate.known()
    return None if known is None or known.settled else (known, gate.predicted_seconds(known))


def stock_at_once(placer: Placer, load: Workload) -> Plan:
    """Stock llama.cpp's own placement, which can do no harm, with nothing measured."""
    stock = ArmMaker(placer, setting_of(placer, load.n_ctx, load.n_ubatch)).make(stock_name(placer)).stock
    assert stock is not None
    return stock_plan(placer, load, stock, priced=False)


def stock_name(placer: Placer) -> str:
    """The arm that plans are measured against."""
    return STOCK_CPU if placer.device.is_pair else STOCK_FIT


class Gate:
    """The gate of one model, device and workload. Planning is repeatable, so a policy's name identifies its plan."""

    def __init__(
        self,
        placer: Placer,
        load: Workload,
        cpus: tuple[int, ...] = (),
        attention_passes: Sequence[Pass] | None = None,
    ) -> None:
        self._placer, self._load, self._passes = placer, load, attention_passes
        self._setting = setting_of(placer, load.n_ctx, load.n_ubatch, cpus=cpus)
        self._key = gate_key(placer, load, self._setting.cap.device_bytes or 0)
        self._plans: dict[str, Plan] = {}

    def known(self) -> Verdict | None:
        return read_verdict(self._key)

    def outcome(self, verdict: Verdict, was_known: bool) -> Gated:
        won = verdict.won
        plan = self.plan(won.policy) if won else stock_plan(self._placer, self._load, verdict.placement)
        return Gated(plan, verdict, was_known, 0.0 if verdict.settled else self.predicted_seconds(verdict))

    def planned(self) -> Verdict:
        """Stock's placement, and the candidates to race against it: the plan with the best prediction, then the CPU
        alone, which is what stock llama.cpp does without the device; with stock's way of attention where the CPU's plan
        has another. None that is stock's own placement, or hopeless by prediction."""
        placer, load = self._placer, self._load
        stock = ArmMaker(placer, self._setting).make(stock_name(placer))
        assert stock.stock is not None
        stocks = stock_plan(placer, load, stock.stock)
        found: dict[str, Plan] = {}
        with contextlib.suppress(DoesNotFit):
            best = self.plan("auto")
            found[best.policy] = self._plans[best.policy] = best
        found[CPU] = self.plan(CPU)
        if placer.options.flash_attn == "auto" and leaves_flash_off(found[CPU]):
            found[STOCK_CPU] = self.plan(STOCK_CPU)
        races, seen = [], {placement_digest(stocks): stock.name}
        for policy, plan in found.items():
            times = _times_as_fast(stocks, plan)
            if (same := seen.setdefault(placement_digest(plan), policy)) != policy:
                refused = f"{policy}'s plan is {same}'s own placement"
            elif times is not None and times * HOPELESS < 1:
                refused = f"{policy} is predicted to take {1 / times:.1f} times as long as {stock.name}"
            elif placer.device.is_pair and not only_splits(plan):
                refused = f"{policy}'s plan cannot run on two CPUs"
            else:
                refused = ""
            races.append(Race(policy, times, refused=refused))
        first = next((found[race.policy] for race in races if not race.refused), stocks)
        tests, turn_s = gate_tests(load, (first, stocks))
        return Verdict(self._key, stock.name, stock.stock, tests, tuple(races), turn_s)

    def predicted_seconds(self, verdict: Verdict) -> float:
        """Seconds that should tell both arms of a race apart, with a margin: at least those of four pairs so far, or
        twice those spent without a pair."""
        load_s = START_S + sum(operator.bytes for operator in self._placer.operators) / LOAD_BYTES_PER_S
        depth_s = DEPTH_S * sum(test.n_depth > 0 for test in verdict.tests)
        seconds = MARGIN * (2 * (load_s + depth_s) + (TYPICAL_TURNS + 2) * verdict.turn_s)
        race = verdict.open
        n_pairs = len(race.pairs) if race is not None else 0
        return max(LEAST_BUDGET_S, seconds, 4 * verdict.seconds / n_pairs if n_pairs else 2 * verdict.seconds)

    def measured(
        self,
        verdict: Verdict,
        budget_s: float,
        progress: ProgressCallback,
        measure: Measure,
        clock: Callable[[], float],
    ) -> Verdict:
        """The verdict with what races of about so many seconds add to it, each pair kept as soon as it is there."""
        began, spent_s = clock(), verdict.seconds
        maker = ArmMaker(self._placer, self._setting, progress=progress)
        setting = self._setting if verdict.stock == STOCK_FIT else self._setting.changed(device="none")
        stock = ArmSpec(verdict.stock, setting, verdict.placement)

        def keep(race: Race) -> None:
            nonlocal verdict
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            verdict = replace(verdict.with_race(race), seconds=spent_s + clock() - began, measured_at=now)
            write_verdict(verdict)

        keep(verdict.races[0])
        while (race := verdict.open) is not None and clock() < began + budget_s:
            course = Course(race, verdict.tests, self._load, keep, lambda: clock() >= began + budget_s)
            bench = Bench(
                (stock, maker.of_plan(race.policy, self.plan(race.policy))),
                verdict.tests,
                self._placer.operators,
                self._placer.model.n_layer,
                n_blocks=MOST_PAIRS,
                deadline=Deadline(began + 3 * budget_s, clock),  # the first block is worth waiting for
                done=course.done,
            )
            try:
                result = measure(bench, progress)
            except OutOfTime:
                keep(course.race)
                break
            if why := refusal(result.arms, 1, LEAST_PAIRS):
                keep(replace(course.race, refused=why))
            if result.interrupted:
                raise KeyboardInterrupt
            if verdict.open == race:
                break  # not one block was fit to be compared
        return verdict

    def plan(self, policy: str) -> Plan:
        """Make a policy's plan. Its micro-batch may be larger than the workload's, where the user fixed none."""
        if policy not in self._plans:
            placer, load = self._placer, self._load
            if policy == STOCK_CPU:
                self._plans[policy] = stock_cpu_plan(placer, load)
            else:
                self._plans[policy] = placer.plan(policy, workload=load, attention_passes=self._passes)
        return self._plans[policy]


class Course:
    """A race while it is measured: hands on each new pair, and says when there are enough of them or of seconds."""

    def __init__(
        self,
        race: Race,
        tests: Sequence[BenchTest],
        load: Workload,
        keep: Callable[[Race], None],
        over: Callable[[], bool],
    ) -> None:
        self.race, self._keep, self._over = race, keep, over
        self._n_prompt = TYPICAL[prompt_class(load.n_prompt)]
        self._seen = dict.fromkeys(tests, (0, 0))

    def done(self, series: Sequence[Series]) -> Collection[int]:
        """Called after each block, whether or not the machine was calm: leaving out drifting ones would choose."""
        blocks = [(made.test, block) for made in series if (block := self._new(made)) is not None]
        if blocks and not any(block.fault for _, block in blocks):
            pairs = tuple(min((self._pair(*each, i) for each in blocks), key=lambda p: p[0] / p[1]) for i in (0, 1))
            self.race = replace(self.race, pairs=(*self.race.pairs, *pairs))
            self._keep(self.race)
        return (1,) if self.race.standing != "open" or self._over() else ()

    def _new(self, made: Series) -> Block | None:
        """The block of a test that was not there at the last call."""
        before, now = self._seen[made.test], (len(made.kept), len(made.discarded))
        self._seen[made.test] = now
        if now[0] > before[0]:
            return made.kept[-1]
        return made.discarded[-1] if now[1] > before[1] else None

    def _pair(self, test: BenchTest, block: Block, turn: int) -> tuple[float, float]:
        stock, own = (
            weighted_seconds(samples[turn].prompt_s, samples[turn].gen_s, test, self._n_prompt, N_GEN)
            for samples in block.samples
        )
        return stock, own


def gate_tests(load: Workload, plans: Sequence[Plan]) -> tuple[tuple[BenchTest, ...], float]:
    """(what a turn is, the seconds that it is predicted to take): a prompt of the workload's class, one micro-batch at
    most, and some tokens, both shortened to what the slowest prediction says takes PROMPT_S and GEN_S; and the same at
    a depth where the context is large. A plan that leaves flash attention off for the depth of the workload is measured
    near that depth. Without a prediction: the shortest."""
    predicted = [plan.predicted for plan in plans if plan.predicted is not None]
    token_s = max((each.ttft_s / load.n_prompt for each in predicted), default=PROMPT_S)
    tpot_s = max((each.tpot_s for each in predicted), default=GEN_S)

    def within(seconds: float, each: float) -> int:
        return int(seconds / each) if each > 0 else 1 << 30

    typical = TYPICAL[prompt_class(load.n_prompt)]
    n_gen = min(MOST_GEN, max(LEAST_GEN, within(GEN_S, tpot_s)))
    longest = min(typical, plans[0].workload.n_ubatch, load.n_ctx - n_gen)
    n_prompt = max(1, min(longest, max(LEAST_PROMPT, within(PROMPT_S, token_s))))
    left_out = typical - n_prompt + (N_GEN - n_gen) // 2 if leaves_flash_off(plans[0]) else 0
    most = load.n_ctx - n_prompt - n_gen
    tests = [BenchTest(n_prompt, n_gen, max(0, min(load.n_past + left_out, within(DEPTH_S, token_s), most)))]
    deep = min(load.n_ctx // 2, within(DEPTH_S, token_s), most)
    if load.n_ctx >= LARGE_CTX and deep >= max(LEAST_DEPTH, 2 * tests[0].n_depth):
        tests.append(BenchTest(n_prompt, n_gen, deep))
    return tuple(tests), len(tests) * (n_prompt * token_s + n_gen * tpot_s)


def leaves_flash_off(plan: Plan) -> bool:
    return plan.attention is not None and plan.attention.flash_attn == "off"


def placement_digest(plan: Plan) -> str:
    """Digest that is the same for plans that place alike. Flash attention that is left to llama.cpp is on: it is off
    only where it cannot be on."""
    document = plan.to_json()
    keys = ("device", "n_gpu_layers", "operators", "streaming", "token_assignment")
    placement = [document.get(key) for key in keys] + [plan.workload.n_ubatch, leaves_flash_off(plan)]
    return hashlib.sha256(json.dumps(placement, sort_keys=True).encode()).hexdigest()


def gated_arm(maker: ArmMaker, refresh: bool = False) -> ArmSpec:
    """The arm `auto`: what the gate lets through, with its verdict for the reader."""

    def words(doing: str, done: int = 0, expect: int = 0) -> None:
        """Show what the gate does, without its turns, which the comparison does not count."""
        if doing:
            maker.progress(f"the gate: {doing}")

    found = gated_plan(
        maker.placer,
        maker.workload,
        words,
        refresh=refresh,
        cpus=maker.setting.cpus,
        attention_passes=maker.attention_passes,
    )
    spec, verdict = maker.of_plan("auto", found.plan), found.verdict
    how = f"remembered, took {verdict.seconds:.1f} s" if found.remembered else f"in {verdict.seconds:.1f} s"
    document = {**verdict.document, "remembered": found.remembered}
    return replace(spec, notes=(*spec.notes, f"gate, {how}: {verdict.sentence}"), gate=document)


def _times_as_fast(stocks: Plan, plan: Plan) -> float | None:
    if stocks.predicted is None or plan.predicted is None or not math.isfinite(plan.predicted.total_s):
        return None
    return stocks.predicted.total_s / plan.predicted.total_s
