"""The plans that the gate chooses among."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from oallama.bench.arms import STOCK_CPU
from oallama.core.errors import DoesNotFit
from oallama.gate.verdict import CPU_ALONE, Candidate
from oallama.place.decide import CANDIDATES
from oallama.run.setup import only_splits

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.cost.passes import Pass
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

NAMES = (*CANDIDATES, STOCK_CPU)
"""What may pass the gate: a plan by each policy, and the CPU alone with stock's own attention."""


def all_plans(placer: Placer, load: Workload, attention_passes: Sequence[Pass] | None) -> dict[str, Plan]:
    """A plan by every policy that has one that can run here. Where the CPU's plan leaves flash attention off, which
    stock llama.cpp would not, the CPU alone with stock's attention is among them as well: measured, whatever was
    predicted."""
    found: dict[str, Plan] = {}
    for policy in NAMES:
        if policy == STOCK_CPU and not (placer.options.flash_attn == "auto" and leaves_flash_off(found[CPU_ALONE])):
            continue
        with contextlib.suppress(DoesNotFit):
            plan = plan_by(placer, load, attention_passes, policy)
            if not placer.device.is_pair or only_splits(plan):
                found[policy] = plan
    return found


def plan_by(placer: Placer, load: Workload, attention_passes: Sequence[Pass] | None, name: str) -> Plan:
    """The plan of that name, one of NAMES."""
    if name == STOCK_CPU:
        return placer.cpu_plan(**asdict(load), stock_attention=True)
    return placer.plan(name, **asdict(load), attention_passes=attention_passes)


def candidate(policy: str, plan: Plan) -> Candidate:
    """What the gate knows of a plan before it measures."""
    document = plan.to_json()
    placement = [document.get(key) for key in ("device", "n_gpu_layers", "operators", "attention")]
    predicted = plan.predicted.total_s if plan.predicted is not None else float("inf")
    digest = hashlib.sha256(json.dumps(placement, sort_keys=True).encode()).hexdigest()
    return Candidate(policy, predicted, digest)


def leaves_flash_off(plan: Plan) -> bool:
    attention = plan.record.attention
    return attention is not None and attention.flash_attn == "off"
