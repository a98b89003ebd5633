"""Chooses what tuning measures for each class of workloads: configurations of stock llama.cpp, and the fewest plans
that serve all classes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.types import DecodeStep, Predicted, StockOptions, Workload
from oallama.placer.drafter import Drafter, beside_drafts, planned_with_drafts
from oallama.placer.plans import plan_of_ranges
from oallama.placer.stock import memory_cap, promising_stock, stock_load, stock_plan
from oallama.planner.decide import larger_ubatches
from oallama.planner.policies.registry import Request
from oallama.planner.policies.stock import FIT, MOST_PROMISING, STOCK_MODES
from oallama.run.stock import StockPlacement, effect_of
from oallama.tuned.classes import WorkloadClass, classes_in
from oallama.tuned.result import LATE, MOST_TESTS, ABTest, ClassResult, StockTrial

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

GEN_S, LEAST_GEN, MOST_GEN = 1.0, 4, 16  # a turn generates as many tokens as are predicted for GEN_S, within limits
UNKNOWN = Predicted(1.0, 0.25, 33.0)  # of a class without a prediction
HOPELESS = 2.0  # predicted to take more than this many times as long as the fastest: not measured
LIKELY_LATE = 1.5  # first word predicted to come more than this many times as late as with --fit: not measured
STOCK_DRAFTS = (1, 2, 4)  # numbers of drafts to try with stock llama.cpp if the user asks for drafts
NEAR = 1.03  # a plan serves a class if it is predicted to take at most this many times as long as the best one


PredictedTry = tuple[float, StockTrial]
"""A configuration of stock llama.cpp to measure, behind its predicted seconds; infinite without a prediction."""


class Candidates:
    """Configurations and plans for classes that are not measured yet. workloads: the workload of each class; fit: stock
    llama.cpp's own placement; alone: with several devices, its placement on each alone."""

    def __init__(
        self,
        placer: Placer,
        workloads: Mapping[WorkloadClass, Workload],
        fit: StockPlacement,
        alone: Mapping[str, StockPlacement],
    ) -> None:
        self._placer, self._workloads, self._fit, self._alone = placer, workloads, fit, alone
        self._late_may_win, self._drafter = placer.options.late_first_word, placer.drafter
        self._fits = {
            workload_class: stock_plan(placer, workload, fit).predicted
            for workload_class, workload in workloads.items()
        }
        self._long_workloads = {
            workload_class: workload_class.longer(workload.n_ctx, workload.n_ubatch)
            for workload_class, workload in workloads.items()
        }
        self._long_fits = {
            workload_class: stock_plan(placer, workload, fit).predicted
            for workload_class, workload in self._long_workloads.items()
        }
        self._plans: dict[str, Plan] = {}  # by fingerprint
        for workload_class in workloads:
            self._add_plans(workload_class)
        self._ranked = {workload_class: self._ranks(workload_class) for workload_class in workloads}
        self._wide = {
            plan: sum(self._is_near(workload_class, plan) for workload_class in workloads) for plan in self._plans
        }

    @property
    def plans(self) -> dict[str, Any]:
        """All plans as JSON, by fingerprint."""
        return {name: plan.to_json() for name, plan in self._plans.items()}

    def of(self, workload_class: WorkloadClass) -> ClassResult:
        """Return the measurements to make for a class. Plans come in this order: those near the best, those that serve
        most classes, the fastest by prediction."""
        workload, fit = self._workloads[workload_class], self._fits[workload_class] or UNKNOWN
        stock = self._stock(workload_class)
        best_s = min(seconds for seconds, _ in stock)
        ranked = {
            name: seconds for name, seconds in self._ranked[workload_class].items() if seconds <= HOPELESS * best_s
        }
        names = sorted(
            ranked, key=lambda name: (not self._is_near(workload_class, name), -self._wide[name], ranked[name])
        )
        promised = {name: best_s / ranked[name] if best_s < math.inf else None for name in names}
        n_gen = max(LEAST_GEN, min(MOST_GEN, workload.n_gen, int(GEN_S / fit.tpot_s) if fit.tpot_s else MOST_GEN))
        return ClassResult(
            workload_class,
            workload.n_gen,
            n_gen,
            fit.ttft_s * (1 + workload.n_past / workload.n_prompt / 2) + n_gen * fit.tpot_s,
            tuple(stock_trial for _, stock_trial in stock),
            races=tuple(ABTest(self._plans[n].policy, n, workload.n_gen, promised[n]) for n in names[:MOST_TESTS]),
        )

    def _add_plans(self, workload_class: WorkloadClass) -> None:
        """Add the best plan for a class, with and without drafts, and the CPU alone. If its first word is late for any
        prompt of the class, also add the best plans for longer prompts."""
        asked = self._workloads[workload_class]
        if self._drafter is not None:
            with suppress(DoesNotFit):
                plan = planned_with_drafts(
                    self._placer, self._drafter, asked,
                    lambda placer, workload: placer.plan("auto", workload=workload),
                )  # fmt: skip
                if plan.draft is not None and plan.stock is None:
                    self._keep(plan)
        best = self._add_best(asked)
        self._add("cpu", asked, self._placer)
        alike = [other for other in classes_in(asked.n_ctx) if other.history == workload_class.history]
        longer = [other.workload(asked.n_ctx, asked.n_ubatch) for other in alike]
        for workload in (workload for workload in longer if workload.n_prompt > asked.n_prompt):
            if best is not None and self._priced(best, workload_class)[1] > LATE:
                best = self._add_best(workload)

    def _add_best(self, workload: Workload) -> Plan | None:
        """Add our best plan, with several devices on each and over all; returns the fastest. Configurations of stock
        llama.cpp are measured separately."""
        alone = self._placer.local_members or (self._placer,)
        plans = [self._add_best_on(placer, workload) for placer in alone]
        if self._placer.members:
            request = Request(workload, n_ubatches=larger_ubatches(workload, self._placer.options))
            ranges_plan = plan_of_ranges(self._placer, request)
            plans.append(None if ranges_plan is None else self._keep(ranges_plan))
        priced = [(plan.predicted.total_s, plan) for plan in plans if plan is not None and plan.predicted is not None]
        return min(priced, key=itemgetter(0))[1] if priced else None

    def _add_best_on(self, placer: Placer, workload: Workload) -> Plan | None:
        best = self._add("auto", workload, placer)
        if best is None or best.stock is None:
            return best
        with suppress(UsageError):  # the model has no experts that could follow
            if placer.model.n_expert:
                return self._add("experts", workload, placer)
        return self._add("scheinfer", workload, placer)

    def _add(self, policy: str, workload: Workload, placer: Placer) -> Plan | None:
        with suppress(DoesNotFit):
            plan = placer.plan(policy, workload=workload)
            return plan if plan.stock is not None else self._keep(plan)
        return None

    def _keep(self, plan: Plan) -> Plan:
        placement = placement_of(plan)
        plan = next((known for known in self._plans.values() if placement_of(known) == placement), plan)
        return self._plans.setdefault(plan.fingerprint, plan)

    def _ranks(self, workload_class: WorkloadClass) -> dict[str, float]:
        """Predicted seconds of the plans, the fastest first; then plans whose first word may be late. Plans that are
        likely to be late are left out."""
        ranked = []
        for name, plan in self._plans.items():
            predicted, late = self._priced(plan, workload_class)
            if late <= LIKELY_LATE and math.isfinite(predicted.total_s):
                ranked.append((late > LATE, predicted.total_s, name))
        return {name: seconds for _, seconds, name in sorted(ranked)}

    def _priced(self, plan: Plan, workload_class: WorkloadClass) -> tuple[Predicted, float]:
        """(times for the class's workload, how many times as late as with --fit the first word is predicted to come, at
        most over usual and long prompts of the class; 0 where any may win)."""

        def price(workload: Workload) -> Predicted:
            workload = replace(workload, n_ubatch=plan.workload.n_ubatch, step=plan.workload.step)
            return self._placer.price(plan, workload)

        predicted = price(self._workloads[workload_class])
        fit, long_fit = self._fits[workload_class], self._long_fits[workload_class]
        if fit is None or long_fit is None or self._late_may_win:
            return predicted, 0.0
        long = price(self._long_workloads[workload_class])
        return predicted, max(predicted.ttft_s / fit.ttft_s, long.ttft_s / long_fit.ttft_s)

    def _is_near(self, workload_class: WorkloadClass, plan: str) -> bool:
        """Whether a plan serves a class about as well as the best one (NEAR)."""
        ranked = self._ranked[workload_class]
        return plan in ranked and ranked[plan] <= NEAR * next(iter(ranked.values()))

    def _stock(self, workload_class: WorkloadClass) -> list[PredictedTry]:
        """Configurations of stock llama.cpp to measure, --fit first."""
        placer, workload, fit = self._placer, self._workloads[workload_class], self._fits[workload_class]
        default = (math.inf if fit is None else fit.total_s, StockTrial(self._fit))
        if fit is None:
            return [default]
        latest_s = math.inf if self._late_may_win else LIKELY_LATE * fit.ttft_s
        modes, n_ubatches = [mode for mode in STOCK_MODES if mode != FIT], larger_ubatches(workload, placer.options)
        configurations = {self._does(default): default}
        for device, placement in self._alone.items():
            predicted = stock_plan(placer.alone_on(device), workload, placement).predicted
            if predicted is not None and predicted.ttft_s <= latest_s:
                candidate = (predicted.total_s, StockTrial(placement, device=device))
                configurations.setdefault(self._does(candidate), candidate)
        promising = [
            (predicted.total_s, StockTrial(placement, device=device))
            for device in self._alone or ("",)
            for placement, predicted in promising_stock(placer.alone_on(device), workload, modes, n_ubatches, latest_s)
        ]
        for candidate in sorted(promising, key=itemgetter(0))[:MOST_PROMISING]:
            configurations.setdefault(self._does(candidate), candidate)
        offered = [*configurations.values(), *self._stock_with_drafts(workload, n_ubatches, latest_s)]
        most_s = HOPELESS * min(seconds for seconds, _ in offered)
        return [candidate for candidate in offered if candidate is default or candidate[0] <= most_s]

    def _stock_with_drafts(
        self, workload: Workload, n_ubatches: Sequence[int], latest_s: float
    ) -> Iterator[PredictedTry]:
        """Yield the most promising configuration for each number of drafts."""
        if self._drafter is None:
            return
        for n_draft in (n for n in STOCK_DRAFTS if n <= self._drafter.most_drafts):
            with suppress(DoesNotFit):
                placer, step = with_stock_drafts(self._placer, self._drafter, workload, n_draft)
                drafted_workload = replace(workload, step=step)
                options = promising_stock(placer, drafted_workload, n_ubatches=n_ubatches, latest_s=latest_s)
                if options:
                    placement, predicted = min(options, key=lambda option: option[1].total_s)
                    yield predicted.total_s, StockTrial(placement, n_draft=n_draft)

    def _does(self, candidate: PredictedTry) -> Hashable:
        """A key that is equal for equivalent configurations."""
        (_, stock_trial), placer = candidate, self._placer
        return stock_trial.device, effect_of(placer.operators, placer.model.n_layer, stock_trial.placement)


def with_stock_drafts(placer: Placer, drafter: Drafter, workload: Workload, n_draft: int) -> tuple[Placer, DecodeStep]:
    """beside_drafts for n_draft drafts, under the placer's memory cap. Raises DraftDoesNotFit."""
    cap = memory_cap(placer, stock_load(placer, workload.n_ctx, workload.n_ubatch))
    placer_with_drafts, _, step = beside_drafts(
        placer, drafter, workload, drafter.acceptance.rates[:n_draft], cap.device_bytes or 0
    )
    return placer_with_drafts, step


def placement_of(plan: Plan) -> Hashable:
    """A key that is equal for plans with equal placements. Flash attention "auto" counts as on: llama.cpp turns it off
    only where it is impossible."""
    options = plan.stock or StockOptions()
    is_off = plan.attention is not None and plan.attention.flash_attn == "off"
    return (
        plan.device, plan.n_gpu_layers, plan.operators, plan.streaming, plan.token_assignment, options.no_host,
        options.moe_cache_bytes, plan.workload.n_ubatch, is_off, plan.draft and (plan.draft.kind, plan.draft.n_draft),
    )  # fmt: skip
