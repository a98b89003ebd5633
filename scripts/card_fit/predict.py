"""Tokens per second of a run of stock llama.cpp, by the product's cost model on a described machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from card_fit.machine import FittedMachine
from card_fit.models import CardModel
from card_fit.tables import PublishedRun
from oallama.core.types import Workload
from oallama.cost.graph import Graph, build_graph
from oallama.cost.passes import Pass, passes_at
from oallama.cost.placement import Costs, placement_seconds
from oallama.place.attention import with_attention
from oallama.place.placed import Placed
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.profile.described import described


@dataclass(frozen=True)
class PredictedRates:
    """Of one run, tokens per second."""

    prompt_tps: float
    eval_tps: float


class Predictor:
    """Predicts runs of these models on one machine; what runs have in common is priced once."""

    def __init__(self, machine: FittedMachine, models: Mapping[str, CardModel], runs: Iterable[PublishedRun]) -> None:
        self.machine, self.models = machine, models
        sizes: dict[str, set[int]] = {}
        for run in runs:
            sizes.setdefault(run.model, {1}).update(p.n_tokens for p in prompt_passes(run))
        self.sizes = sizes
        self.problems: dict[str, Problem] = {}
        self.costs: dict[tuple[str, tuple[Pass, ...]], Costs] = {}

    def __call__(self, run: PublishedRun) -> PredictedRates:
        n_layer = self.models[run.model].info.n_layer
        placed = stock_ngl(self.problem(run.model), run.ngl)
        seconds = [
            placement_seconds(
                self._costs(run.model, passes), placed, max(0, n_layer - run.ngl) if run.ngl else n_layer + 1
            )
            for passes in (prompt_passes(run), decode_pass(run))
        ]
        return PredictedRates(run.n_prompt / (seconds[0] + self.machine.first_prompt_s), 1 / seconds[1])

    def problem(self, name: str) -> Problem:
        if name not in self.problems:
            model = self.models[name]
            profile = described(
                self.machine.host, self.machine.card, model.info, model.operators, sorted(self.sizes[name])
            )
            self.problems[name] = Problem(
                model.operators, graph_of(model), with_attention(profile, "on"), _nothing, None, 0.9, None
            )
        return self.problems[name]

    def _costs(self, name: str, passes: tuple[Pass, ...]) -> Costs:
        key = (name, passes)
        if key not in self.costs:
            self.costs[key] = self.priced(self.problem(name), passes)
        return self.costs[key]

    def priced(self, problem: Problem, passes: tuple[Pass, ...]) -> Costs:
        """By the product's cost model."""
        return costs_over(problem, passes)


def prompt_passes(run: PublishedRun) -> tuple[Pass, ...]:
    return passes_at(0, run.n_prompt, 0, run.ubatch)


def decode_pass(run: PublishedRun) -> tuple[Pass, ...]:
    """One token in the middle of those that were generated."""
    return (Pass(1, run.n_prompt + max(1, run.n_gen // 2), 1),)


@lru_cache
def graph_of(model: CardModel) -> Graph:
    return build_graph(model.info, model.operators)


def stock_ngl(problem: Problem, ngl: int) -> tuple[bool, ...]:
    """Which operators b6097's -ngl puts on the device: the last layers, and the output only when all layers are there
    (since then llama.cpp counts the output first)."""
    n_layer = problem.graph.n_layer
    return tuple(
        ngl > n_layer if layer == n_layer else layer >= n_layer - ngl for layer in problem.graph.operator_layer
    )


def _nothing(load: Workload, placed: Placed) -> LoadBytes:
    return LoadBytes(0, 0, 0, 0, 0)
