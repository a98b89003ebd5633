"""The plans that the gate chooses among, and stock llama.cpp's placement as a plan of ours."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from oallama.bench.arms import STOCK_CPU
from oallama.bench.stock import expected_places
from oallama.core.errors import DoesNotFit
from oallama.gate.verdict import CPU_ALONE, Candidate
from oallama.place.decide import POLICIES
from oallama.plan.plan import Plan
from oallama.run.setup import only_splits

if TYPE_CHECKING:
    from oallama.bench.records import StockPlacement
    from oallama.core.types import Workload
    from oallama.cost.passes import Pass
    from oallama.placer import Placer

NAMES = (*(policy for policy in POLICIES if policy != "auto"), STOCK_CPU)
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
    """The plan of that name, one of NAMES. Its micro-batch may be larger than the workload's, where the user fixed
    none."""
    if name == STOCK_CPU:
        return placer.cpu_plan(**asdict(load), stock_attention=True)
    return placer.plan(name, load.n_prompt, load.n_gen, load.n_ctx, attention_passes=attention_passes)


def candidate(policy: str, plan: Plan) -> Candidate:
    """What the gate knows of a plan before it measures."""
    document = plan.to_json()
    placement = [document.get(key) for key in ("device", "n_gpu_layers", "operators", "attention")]
    placement.append(plan.workload.n_ubatch)
    predicted = plan.predicted.total_s if plan.predicted is not None else float("inf")
    digest = hashlib.sha256(json.dumps(placement, sort_keys=True).encode()).hexdigest()
    return Candidate(policy, predicted, digest)


def stock_plan(placer: Placer, load: Workload, placement: StockPlacement) -> Plan:
    """Stock llama.cpp's placement, attention and choice of host memory as a plan of ours, for the engine to load: the
    very configuration that the stock arm has, which is why the device stays open even with nothing on it (llama.cpp
    computes large batches there)."""
    if placer.device.is_pair:  # stock llama.cpp has no such device
        return plan_by(placer, load, None, STOCK_CPU)
    n_layer = placer.model.n_layer
    places = expected_places(placer.operators, n_layer, placement)
    on_device = [name for name, place in places.items() if place == "device"]
    gpu_layers = n_layer + 1 if placement.n_gpu_layers < 0 else min(placement.n_gpu_layers, n_layer + 1)
    plan = placer.plan_of(on_device, gpu_layers, **asdict(load), policy="fit", stock_attention=True)
    operators = tuple(replace(operator, layout=None) for operator in plan.operators)
    return Plan(replace(plan.record, device=str(placer.device), operators=operators))


def leaves_flash_off(plan: Plan) -> bool:
    attention = plan.record.attention
    return attention is not None and attention.flash_attn == "off"
