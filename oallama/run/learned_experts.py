"""Hot experts of a loaded model that follow what is used: uses that the split back end counted, and exchanges for them
while nobody uses the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oallama.core.routing import Routing, Tally, Uses
from oallama.core.types import Operator
from oallama.device.guard import Runner
from oallama.place.learned_experts import HALF_LIFE_TOKENS, exchanges, first_windows, learned_sets
from oallama.plan.plan import Plan
from oallama.profile.routing import tallied, window_after
from oallama.run.hot_experts import HotExperts
from oallama.run.idle_work import IdleWork
from oallama.run.turns import Turns

if TYPE_CHECKING:
    from ggml_bridge import SplitPlan


@dataclass(slots=True)
class Known:
    """What is known of a model's routing; grows with what its engines count."""

    routing: Routing


class LearnedExperts:
    """For one engine, in whose turns experts are exchanged, where `runner` calls. `count` is to be called there too."""

    def __init__(self, split: SplitPlan, hot: HotExperts, known: Known, turns: Turns, runner: Runner) -> None:
        self._split, self._hot, self._known = split, hot, known
        self._idle = IdleWork(self._next_step, turns, runner)
        self._windows: dict[int, Uses] = first_windows(known.routing)
        self._counted = False  # something, since exchanges were looked for
        self._steps: Iterator[Callable[[], None]] = iter(())
        self._wants_more = False  # there may be a next step
        self.n_exchanged = 0

    def count(self) -> None:
        """One generation has ended."""
        decode, prompt = {}, {}
        for layer, operator in self._hot.layers.items():
            uses = self._split.take_uses(operator.name, operator.shape[2])
            if uses.n_several:
                prompt[layer] = Tally(uses.n_several, uses.several)
            if uses.n_single:
                decode[layer] = tally = Tally(uses.n_single, uses.single)
                before = self._windows.get(layer, (0.0,) * operator.shape[2])
                self._windows[layer] = window_after(before, tally, HALF_LIFE_TOKENS)
                self._counted = self._wants_more = True
        self._known.routing = tallied(self._known.routing, decode, prompt)

    @property
    def goes_on(self) -> bool:
        """Whether nothing has gone wrong in the background."""
        return not self._idle.failure

    @property
    def is_busy(self) -> bool:
        """Whether experts are being exchanged, or are to be when the call at hand has ended."""
        return self.goes_on and (self._idle.is_busy or self._wants_more)

    def go_on(self) -> None:
        """Exchange what is worth it, in the background."""
        if self._wants_more:
            self._idle.begin()

    def stop(self) -> None:
        """Returns when the piece at hand is copied; go_on goes on."""
        self._idle.stop()

    def start_anew(self) -> None:
        """Somebody else is about to change the hot experts, whose turn it is."""
        self._idle.stop()
        self._idle.drop()
        self._steps = iter(())

    def _next_step(self) -> Callable[[], None] | None:
        """What brings the hot experts nearer to what is used; None: there is nothing to do. The file is read here.
        Raises ModelFileError."""
        step = next(self._steps, None)
        if step is None and self._counted:
            self._counted = False
            self._steps = self._exchanges()
            step = next(self._steps, None)
        self._wants_more = step is not None or self._counted
        return step

    def _exchanges(self) -> Iterator[Callable[[], None]]:
        n_used = self._known.routing.n_expert_used
        for layer in self._hot.layers:
            for each in exchanges(self._windows.get(layer, ()), self._hot.of_layer(layer), n_used):
                yield from self._hot.steps(self._split, layer, each.goes, each.comes)
                self.n_exchanged += 1


def learned_plan(plan: Plan, operators: Sequence[Operator], routing: Routing) -> Plan:
    """The plan with as many hot experts, of each layer those that are used by what is known now. A layer whose
    operators have different sets keeps them."""
    layers = {operator.name: operator.layer for operator in operators if operator.layer is not None}
    sets: dict[int, set[tuple[int, ...]]] = {}
    for placement in plan.operators:
        if placement.hot_experts and placement.name in layers:
            sets.setdefault(layers[placement.name], set()).add(placement.hot_experts)
    hot = {layer: next(iter(own)) for layer, own in sets.items() if len(own) == 1}
    learned = learned_sets(hot, first_windows(routing), routing.n_expert_used)
    placements = tuple(
        replace(p, hot_experts=tuple(sorted(learned[layers[p.name]])))
        if p.hot_experts and layers.get(p.name) in learned
        else p
        for p in plan.operators
    )
    return plan if placements == plan.operators else replace(plan, operators=placements)
