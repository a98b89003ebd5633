"""Plans and predictions for a model on described, unmeasured machines.

Dry loads on the CPU say what llama.cpp takes there, attention on as it chooses where a GPU has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from oallama.core.errors import UsageError
from oallama.core.profile import Profile
from oallama.core.types import PrefetchMode, Workload
from oallama.device.card import Card
from oallama.device.machines import Machine
from oallama.place.attention import with_attention
from oallama.place.placement import Candidate
from oallama.place.policies.registry import Rules
from oallama.place.problem import LoadBytes, Problem
from oallama.place.pure_plan import Memory, WhatIf, probe_of, pure_plan, pure_problem, what_if
from oallama.place.verify import on_cpu
from oallama.plan.plan import Plan
from oallama.profile.described import TOKENS, described, with_card

if TYPE_CHECKING:
    from oallama.placer.placer import Placer


def problem_on(placer: Placer, machine: Machine) -> Problem:
    """Host memory is assumed to be sufficient."""
    profile = described_profile(placer, machine)
    return pure_problem(placer.header, profile, placer.options, memory_on(placer, machine), "on", placer.routing)


def described_profile(placer: Placer, machine: Machine) -> Profile:
    return described(machine.host, machine.card, placer.model, placer.operators, TOKENS)


def memory_on(placer: Placer, machine: Machine) -> Memory:
    vram = placer.options.vram
    return Memory(
        machine.card.memory_bytes if vram is None else vram,
        host_room=sys.maxsize,
        on_host=lambda load, _attention: _on_host(placer, load),
    )


def plan_for(
    placer: Placer,
    machine: Machine,
    load: Workload,
    policy: str | None = None,
    prefetch: PrefetchMode | None = None,
) -> Plan:
    """Plan for a described machine; see Placer.plan. policy None: auto; FIT: as predicted by what_if. Raises
    UsageError, DoesNotFit."""
    return pure_plan(
        placer.header,
        described_profile(placer, machine),
        replace(placer.options, flash_attn="on"),
        memory_on(placer, machine),
        load,
        policy or "auto",
        Rules(prefetch=prefetch or "ahead"),
        placer.routing,
    )


def alone_and_beside(
    placer: Placer, cards: Sequence[Card], load: Workload, policy: str = "auto"
) -> tuple[Candidate, Iterator[WhatIf]]:
    """Predict this machine by itself, and with each of these cards, one after the other. policy:
    whose plans are compared with stock llama.cpp's. The placer must be one without a device.

    Raises UsageError, ProfileError, and what a dry load raises.
    """
    if not placer.device.is_none:
        raise UsageError("what-if needs a placer with --device none: the cards are its devices")
    rule = placer.attention_rule
    placer.dry_loads.begin_on_host(load, rule.attention("on"))
    for way in rule.ways(placer.profile(), load):
        placer.dry_loads.begin_on_host(load, rule.attention(way))
    alone, _ = rule.decide(lambda way: on_cpu(placer.problem(way), load, "mixed"), placer.profile(), load)
    return alone, beside_each(placer, placer.problem("on"), cards, load, policy)


def beside_each(
    placer: Placer, of_cpu: Problem, cards: Sequence[Card], load: Workload, policy: str
) -> Iterator[WhatIf]:
    """Each card with all its memory beside this machine's CPU, whose problem that is."""
    model, operators = placer.model, placer.operators
    host = _on_host(placer, load)

    def problem_with(card: Card) -> Problem:
        own = with_card(placer.profile(), card, model, operators, kv=placer.attention_rule.attention("on"))
        probe = probe_of(host, operators, model.n_layer, card.memory_bytes)
        return replace(of_cpu, profile=with_attention(own, "on"), probe=probe, vram=None, gpu_weights=None)

    return (what_if(problem_with(card), card, load, policy) for card in cards)


def _on_host(placer: Placer, load: Workload) -> LoadBytes:
    return LoadBytes(0, *placer.dry_loads.on_host(load, placer.attention_rule.attention("on")), 0)
