"""One model on machines of which nothing was measured: what a placer plans and predicts for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import FlashAttention, ModelInfo, Operator, PrefetchMode, Workload
from oallama.cost.graph import Graph
from oallama.device.card import Card
from oallama.device.machines import Machine
from oallama.place.attention import AttentionRule, with_attention
from oallama.place.decide import FIT, decide
from oallama.place.placed import Placed
from oallama.place.problem import LoadBytes, Problem
from oallama.place.record import plan_record
from oallama.place.what_if import HostLoad, WhatIf, probe_of, stock_decision, what_if
from oallama.plan.plan import Plan
from oallama.profile.described import TOKENS, described, with_card
from oallama.run.dry_loads import DryLoads


@dataclass(frozen=True, slots=True)
class Described:
    """The model, what was asked for, and dry loads of it on the CPU: they say what llama.cpp takes, attention on as
    it chooses where a GPU has it."""

    model: ModelInfo
    operators: tuple[Operator, ...]
    graph: Graph
    options: Options
    attention_rule: AttentionRule
    dry_loads: DryLoads
    routing: Routing | None = None

    def begin(self, load: Workload, flash_attn: FlashAttention) -> None:
        """Have a dry load made meanwhile, where there is a process for it."""
        self.dry_loads.begin_on_host(load, self.attention_rule.attention(flash_attn))

    def problem(self, machine: Machine) -> Problem:
        """Host memory is taken to be enough."""
        options = self.options
        memory_bytes = machine.card.memory_bytes if options.vram is None else options.vram

        def probe(load: Workload, placed: Placed) -> LoadBytes:
            return probe_of(self._on_host(load), self.operators, self.model.n_layer, memory_bytes)(load, placed)

        return Problem(
            self.operators,
            self.graph,
            with_attention(described(machine.host, machine.card, self.model, self.operators, TOKENS), "on"),
            probe,
            options.vram,
            options.vram_fill,
            options.gpu_weights,
            host_room=sys.maxsize,
            routing=self.routing,
        )

    def plan(self, machine: Machine, load: Workload, policy: str | None, prefetch: PrefetchMode | None) -> Plan:
        """policy None: auto; FIT: as what_if predicts it. Raises UsageError, DoesNotFit."""
        problem = self.problem(machine)
        if policy != FIT:
            decision = decide(problem, policy or "auto", load, "mixed", prefetch=prefetch or "ahead")
        elif self.options.gpu_weights is None:
            decision = stock_decision(problem, load)
        else:
            raise UsageError("--gpu-weights does not limit --policy fit on a described machine; limit it by --vram")
        record = plan_record(decision, self.model, self.operators, machine.card.name, "")
        return Plan.of(replace(record, attention=self.attention_rule.attention("on")))

    def what_if(
        self, of_cpu: Problem, profile: Profile, cards: Sequence[Card], load: Workload, policy: str
    ) -> tuple[WhatIf, ...]:
        """Each card with all its memory beside this machine's CPU, whose problem and profile these are."""
        host = self._on_host(load)

        def beside(card: Card) -> Problem:
            own = with_card(profile, card, self.model, self.operators, kv=self.attention_rule.attention("on"))
            probe = probe_of(host, self.operators, self.model.n_layer, card.memory_bytes)
            return replace(of_cpu, profile=with_attention(own, "on"), probe=probe, vram=None, gpu_weights=None)

        return tuple(what_if(beside(card), card, load, policy) for card in cards)

    def _on_host(self, load: Workload) -> HostLoad:
        return HostLoad(*self.dry_loads.on_host(load, self.attention_rule.attention("on")))
