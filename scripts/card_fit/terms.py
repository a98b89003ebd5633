"""Terms of the cost model, each switched off in turn: what the error of prediction is without it.

A machine's rates were found with all terms there, which favours every one of them. So the rates are also found anew
without the term: what then comes to the same error, other terms explain as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from card_fit.errors import PHASES, median_error, rows_of
from card_fit.fit import fit
from card_fit.machine import FittedMachine
from card_fit.models import CardModel
from card_fit.predict import Predictor
from card_fit.tables import PublishedRun
from oallama.cost.passes import Pass
from oallama.cost.placement import Costs
from oallama.cost.rest import index_rest, rest_of
from oallama.cost.transfer import NO_TRANSFER
from oallama.place.problem import Problem, costs_over

SHALLOW = 256  # positions of the KV cache, which attention then always sees


def _same_machine(machine: FittedMachine) -> FittedMachine:
    return machine


def _same_costs(problem: Problem, passes: tuple[Pass, ...]) -> Costs:
    return costs_over(problem, passes)


@dataclass(frozen=True)
class Term:
    """What is left out, and how: of the machine's rates, or of the prices."""

    name: str
    machine: Callable[[FittedMachine], FittedMachine] = _same_machine
    costs: Callable[[Problem, tuple[Pass, ...]], Costs] = _same_costs


def _card(**rates: Any) -> Callable[[FittedMachine], FittedMachine]:
    return lambda machine: replace(machine, card=replace(machine.card, **rates))


def _host(**rates: Any) -> Callable[[FittedMachine], FittedMachine]:
    return lambda machine: replace(machine, host=replace(machine.host, **rates))


def _changed(**values: object) -> Callable[[Problem, tuple[Pass, ...]], Costs]:
    return lambda problem, passes: replace(costs_over(problem, passes), **values)  # type: ignore[arg-type]


def _passes(**values: int) -> Callable[[Problem, tuple[Pass, ...]], Costs]:
    return lambda problem, passes: costs_over(problem, tuple(replace(p, **values) for p in passes))


def _attention_stays(problem: Problem, passes: tuple[Pass, ...]) -> Costs:
    costs = costs_over(problem, passes)
    on_cpu, on_device = rest_of(index_rest(problem.profile), problem.profile.device, passes)
    return replace(costs, rest_cpu_s=on_cpu, rest_device_s=on_device, offloaded=())


def _all_outputs(problem: Problem, passes: tuple[Pass, ...]) -> Costs:
    return costs_over(problem, tuple(replace(p, n_outputs=p.n_tokens) for p in passes))


ALL = Term("all terms")

TERMS = (
    Term("latency of a kernel on the card", _card(kernel_s=0.0)),
    Term("latency of a node on the CPU", _host(kernel_s=0.0)),
    Term("launching a graph", _card(launch_s=0.0, launch_node_s=0.0)),
    Term("latency of copies", _card(copy_s=0.0, copy_issue_s=0.0, synchronize_s=0.0)),
    Term("first prompt of a process", lambda machine: replace(machine, first_prompt_s=0.0)),
    Term("a rate of Q6_K's own on the CPU", _host(flops_by_type=())),
    Term("attention's flop/s on the CPU", _host(flops_attention_per_s=inf)),
    Term("the card's flop/s", _card(flops_per_s=inf, flops_float_per_s=inf)),
    Term("depth of the KV cache", costs=_passes(n_kv=SHALLOW)),
    Term("rest of a layer on the CPU", costs=_changed(rest_cpu_s=0.0)),
    Term("rest of a layer on the card", costs=_changed(rest_device_s=0.0)),
    Term("crossings", costs=_changed(rates=NO_TRANSFER)),
    Term("host weights streamed in prompts", costs=lambda problem, passes: costs_over(problem, passes, False)),
    Term("attention goes along with them", costs=_attention_stays),
    Term("only wanted logits are computed", costs=_all_outputs),
)


class Without(Predictor):
    """Predicts without a term."""

    def __init__(
        self, term: Term, machine: FittedMachine, models: Mapping[str, CardModel], runs: Sequence[PublishedRun]
    ) -> None:
        super().__init__(term.machine(machine), models, runs)
        self._term = term

    def priced(self, problem: Problem, passes: tuple[Pass, ...]) -> Costs:
        return self._term.costs(problem, passes)


@dataclass(frozen=True)
class Effect:
    """Median errors without a term: with the machine's rates, and with rates that were found without it."""

    name: str
    error: dict[str, float]
    refitted: dict[str, float]


def effects(
    machine: FittedMachine,
    models: Mapping[str, CardModel],
    runs: Sequence[PublishedRun],
    fitted: Sequence[PublishedRun],
    terms: Sequence[Term] = TERMS,
) -> tuple[Effect, ...]:
    """Of all terms, then without each. runs: to predict; fitted: that the rates are found from."""

    def errors(term: Term, machine: FittedMachine) -> dict[str, float]:
        rows = rows_of(Without(term, machine, models, runs), runs)
        return {phase: median_error(rows, phase) for phase in PHASES}

    made = []
    for term in (ALL, *terms):
        again = fit(fitted, models, machine, lambda machine, term=term: Without(term, machine, models, fitted))  # type: ignore[misc]
        made.append(Effect(term.name, errors(term, machine), errors(term, again)))
    return tuple(made)


def noise(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """By phase: by how much two runs of one configuration differ, in the median."""
    groups: dict[object, list[PublishedRun]] = {}
    for run in runs:
        groups.setdefault(run.config, []).append(run)
    pairs = [times[:2] for times in groups.values() if len(times) > 1]
    return {
        phase: median(abs(getattr(a, f"{phase}_tps") / getattr(b, f"{phase}_tps") - 1) for a, b in pairs)
        for phase in PHASES
    }


def text(found: Sequence[Effect], noise_of: Mapping[str, float]) -> str:
    """As a table of markdown."""
    lines = [
        "| without | prompt | generation | prompt, rates found anew | generation, rates found anew |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        cells = [each.error["prompt"], each.error["eval"], each.refitted["prompt"], each.refitted["eval"]]
        lines.append(f"| {' | '.join([each.name, *map(_percent, cells)])} |")
    noise_text = " and ".join(map(_percent, noise_of.values()))
    return "\n".join(
        [*lines, "", f"Two runs of one configuration differ by {noise_text} (prompt, generation; medians)."]
    )


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
