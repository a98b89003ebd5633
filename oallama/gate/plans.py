"""The plans that the gate chooses among."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oallama.bench.arms import STOCK_CPU
from oallama.core.errors import DoesNotFit
from oallama.gate.verdict import CPU_ALONE, Candidate
from oallama.place.decide import CANDIDATES, hot_fault
from oallama.place.sliced import EXPERTS
from oallama.run.setup import only_splits

if TYPE_CHECKING:
    from oallama.bench.deadline import Deadline
    from oallama.core.types import Workload
    from oallama.cost.passes import Pass
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

FIRST = (CPU_ALONE, "scheinfer")  # alone, and what has the most to choose from
NAMES = (*FIRST, EXPERTS, *(policy for policy in CANDIDATES if policy not in FIRST), STOCK_CPU)
"""What may pass the gate: a plan by each policy, and the CPU alone with stock's own attention. The most promising ones
first, as there may be no time for all."""


def all_plans(
    placer: Placer, load: Workload, attention_passes: Sequence[Pass] | None, deadline: Deadline | None = None
) -> dict[str, Plan]:
    """A plan by every policy that has one that can run here, of those that are begun before the deadline. Where the
    CPU's plan leaves flash attention off, which stock llama.cpp would not, the CPU alone with stock's attention is
    among them as well."""
    found: dict[str, Plan] = {}
    for policy in NAMES:
        if found and deadline is not None and not deadline.left_s:
            break
        if policy == STOCK_CPU and not (placer.options.flash_attn == "auto" and leaves_flash_off(found[CPU_ALONE])):
            continue
        if policy == EXPERTS and hot_fault(placer.operators, placer.routing):
            continue
        with contextlib.suppress(DoesNotFit):
            plan = plan_by(placer, load, attention_passes, policy)
            if not placer.device.is_pair or only_splits(plan):
                found[policy] = plan
    return found


def plan_by(placer: Placer, load: Workload, attention_passes: Sequence[Pass] | None, name: str) -> Plan:
    """The plan of that name, one of NAMES. Its micro-batch may be larger than the workload's, where the user fixed
    none."""
    if name == STOCK_CPU:
        return placer.cpu_plan(load, stock_attention=True)
    return placer.place(name, load, attention_passes=attention_passes)


def candidate(policy: str, plan: Plan) -> Candidate:
    """What the gate knows of a plan before it measures. Flash attention that is left to llama.cpp is on: it is off only
    where it cannot be on."""
    document = plan.to_json()
    keys = ("device", "n_gpu_layers", "operators", "streaming", "token_assignment")
    placement = [document.get(key) for key in keys] + [plan.workload.n_ubatch, leaves_flash_off(plan)]
    predicted = plan.predicted.total_s if plan.predicted is not None else float("inf")
    digest = hashlib.sha256(json.dumps(placement, sort_keys=True).encode()).hexdigest()
    return Candidate(policy, predicted, digest)


def leaves_flash_off(plan: Plan) -> bool:
    attention = plan.attention
    return attention is not None and attention.flash_attn == "off"
