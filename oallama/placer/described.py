"""Plans and predictions for a model on described, unmeasured machines.

Memory is estimated from no_alloc loads on the CPU, with flash attention on, as llama.cpp chooses with a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from oallama.core.errors import UsageError
from oallama.core.types import PrefetchMode, Workload
from oallama.device.card import Card
from oallama.device.machines import Machine
from oallama.placer.model_on_device import ModelOnDevice
from oallama.plan.plan import Plan
from oallama.planner.attention import Problems, with_attention
from oallama.planner.decide import AUTO, decide, plan, policy_named
from oallama.planner.placement import VerifiedPlan
from oallama.planner.policies.registry import Request, Rules
from oallama.planner.policies.stock import cpu_policy
from oallama.planner.problem import LoadBytes, Problem
from oallama.planner.pure_plan import (
    Memory,
    WhatIf,
    estimated_device_load,
    problem_over,
    pure_problems,
    what_if,
    what_if_over,
)
from oallama.profile.described import TOKENS, described, with_card


def problems_on(placer: ModelOnDevice, machine: Machine) -> Problems:
    """The planning problems on a described machine. Its host memory is assumed to suffice."""
    options = replace(placer.options, flash_attn="on")
    memory = Memory(
        machine.card.memory_bytes if options.vram is None else options.vram,
        host_copies_limit=sys.maxsize,
        on_host=lambda workload, _attention: _on_host(placer, workload),
    )
    profile = described(machine.host, machine.card, placer.model, placer.operators, TOKENS)
    return pure_problems(placer.header, profile, options, memory, placer.routing)


def plan_for(
    placer: ModelOnDevice,
    machine: Machine,
    workload: Workload,
    policy: str | None = None,
    prefetch: PrefetchMode | None = None,
) -> Plan:
    """Plan for a described machine; see Placer.plan. policy None: auto; fit: as predicted by what_if. Raises
    UsageError, DoesNotFit."""
    rules = Rules(prefetch=prefetch or "ahead")
    return plan(problems_on(placer, machine), Request(workload, policy_named(policy or AUTO, rules), rules=rules))


def alone_and_beside(
    placer: ModelOnDevice, rows: Sequence[tuple[Card, ...]], workload: Workload, policy: str = AUTO
) -> tuple[VerifiedPlan, Iterator[WhatIf]]:
    """Yield predictions for this machine without a card, then with the cards of each row. policy: of the plans that are
    compared with stock llama.cpp's. The placer must have no device.

    Raises UsageError, ProfileError, and what a no_alloc load raises.
    """
    if not placer.device.is_none:
        raise UsageError("what-if needs a placer with --device none: the cards are its devices")
    if policy != AUTO and any(len(cards) > 1 for cards in rows):
        raise UsageError(f"policy {policy} uses one card; omit --policy, or name cards between commas")
    rule = placer.attention_rule
    placer.no_alloc_loads.begin_on_host(workload, rule.attention("on"))
    for mode in rule.modes(placer.profile(), workload):
        placer.no_alloc_loads.begin_on_host(workload, rule.attention(mode))
    request = Request(workload, cpu_policy)
    cpu_decision = decide(placer.problems.worth_planning(request), request)
    return cpu_decision, _beside_each(placer, rows, workload, policy)


def _beside_each(
    placer: ModelOnDevice, rows: Sequence[tuple[Card, ...]], workload: Workload, policy: str
) -> Iterator[WhatIf]:
    """Yield predictions for each row's cards, with all their memory, and this machine's CPU."""
    model, operators, host, on_cpu = placer.model, placer.operators, _on_host(placer, workload), placer.problem("on")
    attention = placer.attention_rule.attention("on")

    def problem_with(card: Card) -> Problem:
        profile = with_attention(with_card(placer.profile(), card, model, operators, kv=attention), "on")
        no_alloc_load = estimated_device_load(host, operators, model.n_layer, card.memory_bytes)
        return replace(on_cpu, profile=profile, no_alloc_load=no_alloc_load, vram=card.memory_bytes, gpu_weights=None)

    for cards in rows:
        first_problem, *others = map(problem_with, cards)
        if others:
            yield what_if_over(problem_over([first_problem, *others], host), cards, workload)
        else:
            yield what_if(first_problem, cards[0], workload, policy_named(policy))


def _on_host(placer: ModelOnDevice, workload: Workload) -> LoadBytes:
    return LoadBytes(0, *placer.no_alloc_loads.on_host(workload, placer.attention_rule.attention("on")), 0)
