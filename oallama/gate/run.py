"""The gate at work: plan by every policy, measure the best two against stock within a time, remember what is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from oallama.bench.ab import Bench, ProgressCallback, quiet, run_bench
from oallama.bench.arms import STOCK_CPU, STOCK_FIT, ArmMaker
from oallama.bench.deadline import Deadline
from oallama.bench.fit_plan import stock_plan
from oallama.bench.prepare import setting_of
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, StockPlacement
from oallama.bench.schedule import Done
from oallama.gate.key import gate_key
from oallama.gate.measure import Contest, gate_tests
from oallama.gate.pairs import Trial, worth_keeping
from oallama.gate.plans import all_plans, candidate, plan_by
from oallama.gate.store import KeptVerdict, nearest_kept, read_kept, write_kept
from oallama.gate.verdict import Verdict, answers, choose, decide, holds, reweighed, ruled_out, sentence

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.cost.passes import Pass
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

BUDGET_S = 20.0  # that a run may wait for the gate, by the wall clock
PLANNING_SHARE = 0.5  # of it that plans may be begun in
BENCH_BUDGET_S = 120.0  # where somebody came to measure

Measure = Callable[[Bench, ProgressCallback], BenchResult]


@dataclass(frozen=True, slots=True)
class Gated:
    plan: Plan
    verdict: Verdict
    remembered: bool  # the verdict was measured before
    is_near: bool = False  # for another length of prompt or generation


def gated_plan(
    placer: Placer,
    load: Workload,
    progress: ProgressCallback = quiet,
    measure: Measure = run_bench,
    begin: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    **asked: Any,
) -> Gated:
    """The plan that is faster than stock llama.cpp beyond noise, or stock's own placement as a plan; asked: as Gate.

    Takes one plan where a verdict is remembered; else at most about budget_s by the clock, and what was measured by
    then counts the next time. begin: called where it will plan and measure. Needs a device. Raises DoesNotFit where
    stock-fit does not fit, and what planning and measuring raise.
    """
    gate = Gate(placer, load, **asked)
    known = gate.remembered()
    if known is not None:
        return known
    begin()
    return gate.measured(progress, measure, clock)


def remembered(placer: Placer, load: Workload) -> Gated | None:
    """What gated_plan returns where it need not measure; None where it would. Raises what planning raises."""
    return None if placer.known_profile is None else Gate(placer, load).remembered()


def stock_at_once(placer: Placer, load: Workload) -> Plan:
    """Stock llama.cpp's own placement, which can do no harm, with nothing measured."""
    stock = ArmMaker(placer, setting_of(placer, load.n_ctx, load.n_ubatch)).make(stock_name(placer)).stock
    assert stock is not None
    return stock_plan(placer, load, stock, priced=False)


def stock_name(placer: Placer) -> str:
    """The arm that plans are measured against."""
    return STOCK_CPU if placer.device.is_pair else STOCK_FIT


class Gate:
    """For one model, device and workload. accept_near: a verdict for another length of prompt or generation does too.
    refresh: begin anew, whatever is remembered. budget_s: seconds that somebody waits. cpus: what the measured
    processes are pinned to. attention_passes: as in Placer.plan."""

    def __init__(
        self,
        placer: Placer,
        load: Workload,
        *,
        accept_near: bool = True,
        refresh: bool = False,
        budget_s: float = BUDGET_S,
        cpus: tuple[int, ...] = (),
        attention_passes: Sequence[Pass] | None = None,
    ) -> None:
        self._placer, self._load, self._passes = placer, load, attention_passes
        self._accept_near, self._refresh, self._budget_s = accept_near, refresh, budget_s
        self._setting = setting_of(placer, load.n_ctx, load.n_ubatch, cpus=cpus)
        self._free = self._setting.cap.device_bytes or 0
        self._key = gate_key(placer, load)
        self._kept = None if refresh else self._if_it_holds(read_kept(self._key))

    def remembered(self) -> Gated | None:
        """By the verdict of an earlier time; None where there is none that holds."""
        if self._refresh:
            return None
        kept, is_near = self._kept, False
        if self._accept_near and not (kept is not None and answers(kept.verdict, self._budget_s)):
            kept, is_near = self._if_it_holds(nearest_kept(self._key)), True
        if kept is None or not answers(kept.verdict, self._budget_s):
            return None
        placer, load, verdict = self._placer, self._load, kept.verdict
        if is_near:
            verdict = reweighed(verdict, kept.pairs, self._key, *self._lengths)
        winner = verdict.winner
        plan = plan_by(placer, load, self._passes, winner) if winner else stock_plan(placer, load, kept.stock)
        return Gated(plan, verdict, True, is_near)

    def measured(self, progress: ProgressCallback, measure: Measure, clock: Callable[[], float]) -> Gated:
        """Plan by every policy, measure the best of them, and keep what is found. Raises KeyboardInterrupt with that
        done where it was interrupted."""
        placer, load, kept, budget_s = self._placer, self._load, self._kept, self._budget_s
        start = clock()
        maker = ArmMaker(placer, self._setting, progress=progress)
        stock = maker.make(stock_name(placer))
        assert stock.stock is not None
        progress("plan")
        plans = all_plans(placer, load, self._passes, Deadline(start + PLANNING_SHARE * budget_s, clock))
        stocks = stock_plan(placer, load, stock.stock)
        as_stock = replace(candidate(stock.name, stocks), policy=stock.name)
        candidates = [candidate(policy, plan) for policy, plan in plans.items()]
        chosen = choose([each for each in candidates if not ruled_out(each, as_stock)])
        names = [each.policy for each in chosen]
        tests = gate_tests(load, plans[names[0]] if names else None, stocks)
        contest = Contest(load, {each.policy: each.placement for each in chosen})
        contest.know(kept.pairs if kept is not None and _same(kept.stock, stock.stock) else ())
        deadline = Deadline(max(start + budget_s, clock() + (1 - PLANNING_SHARE) * budget_s), clock)

        def ask(arms: tuple[ArmSpec, ...], test: BenchTest, n_blocks: int, done: Done) -> BenchResult:
            n_layer = placer.model.n_layer
            bench = Bench(arms, (test,), placer.operators, n_layer, n_blocks, deadline=deadline, done=done)
            return measure(bench, progress)

        contest.measure(stock, [maker.of_plan(name, plans[name]) for name in names], tests, ask)
        # not one round of turns; where it was so before, it will be again
        stuck = contest.out_of_time and not contest.n_new
        settled = not contest.interrupted and contest.settled(names, tests)
        gave_up_s = budget_s if stuck and not settled and kept is not None and not contest.interrupted else 0.0
        trials = contest.trials() or [Trial(each.policy, 0, None, ruled_out(each, as_stock)) for each in candidates]
        if stuck and not contest.pairs:
            too_slow = f"{budget_s:g} s were too short for one round of turns; `oallama tune` takes longer"
            trials = [Trial(name, tests[0].n_depth, None, too_slow) for name in names]
        measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        settled = settled or gave_up_s > 0
        seconds = clock() - start
        verdict = decide(self._key, stock.name, trials, self._free, measured_at, seconds, settled, gave_up_s)
        pairs = (each if settled else worth_keeping(each, *self._lengths) for each in contest.pairs.values())
        write_kept(KeptVerdict(verdict, stock.stock, tuple(each for each in pairs if each is not None)))
        if contest.interrupted:
            raise KeyboardInterrupt
        return Gated(plans[verdict.winner] if verdict.winner else stocks, verdict, False)

    @property
    def _lengths(self) -> tuple[int, int]:
        """Tokens of prompt and generation that pairs are weighed by."""
        return self._load.n_prompt, max(self._load.n_gen, 1)

    def _if_it_holds(self, kept: KeptVerdict | None) -> KeptVerdict | None:
        return kept if kept is not None and holds(kept.verdict, self._free) else None


def _same(one: StockPlacement, other: StockPlacement) -> bool:
    """Whatever was free on the device when --fit was asked."""
    return replace(one, fit_target_mib=0) == replace(other, fit_target_mib=0)


def gated_arm(maker: ArmMaker, refresh: bool = False) -> ArmSpec:
    """The arm `auto`: what the gate lets through, with its verdict for the reader."""

    def words(doing: str, done: int = 0, expect: int = 0) -> None:
        """The gate's turns are none of the comparison's."""
        if doing:
            maker.progress(f"the gate: {doing}")

    gated = gated_plan(
        maker.placer,
        maker.workload,
        words,
        refresh=refresh,
        cpus=maker.setting.cpus,
        attention_passes=maker.attention_passes,
        budget_s=BENCH_BUDGET_S,
        accept_near=False,
    )
    spec, text = maker.of_plan("auto", gated.plan), sentence(gated.verdict).removeprefix("oallama: ")
    how = f"remembered, took {gated.verdict.seconds:.1f} s" if gated.remembered else f"in {gated.verdict.seconds:.1f} s"
    document = {**asdict(gated.verdict), "said": text, "remembered": gated.remembered}
    return replace(spec, notes=(*spec.notes, f"gate, {how}: {text}"), gate=document)
