"""A decision as the record that a plan is made of."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.types import ModelInfo, Operator, OperatorPlacement, PlanRecord
from oallama.place.baselines import Placed
from oallama.place.decide import Decision


def n_gpu_layers(n_layer: int, placed: Placed) -> int:
    """llama.cpp's -ngl: it counts the output as one layer behind the last."""
    return n_layer + 1 - placed.first_device_layer


def placements(operators: Sequence[Operator], placed: Placed) -> tuple[OperatorPlacement, ...]:
    """gg = 1 on the device, cc = 1 on the host."""
    return tuple(
        OperatorPlacement(operator.name, float(device), 0.0, float(not device))
        for operator, device in zip(operators, placed.on_device, strict=True)
    )


def plan_record(
    decision: Decision, model: ModelInfo, device: str, machine_fingerprint: str, name_layouts: bool
) -> PlanRecord:
    """The plan of a decision. name_layouts: say for each host operator which CPU layout was the fastest, for machines
    where llama.cpp would choose another one by itself (DESIGN 2.5: pinned host memory instead of repacking)."""
    placed = decision.placed
    return PlanRecord(
        model_path=model.path,
        model_fingerprint=model.fingerprint,
        machine_fingerprint=machine_fingerprint,
        device=device if placed.first_device_layer <= model.n_layer else "none",
        policy=decision.policy,
        workload=decision.workload,
        operators=tuple(
            OperatorPlacement(cost.name, float(there), 0.0, float(not there), _layout(cost.layout, there, name_layouts))
            for cost, there in zip(decision.costs.operators, placed.on_device, strict=True)
        ),
        n_gpu_layers=n_gpu_layers(model.n_layer, placed),
        memory=decision.memory,
        predicted=decision.predicted,
        extra={"notes": list(decision.notes)} if decision.notes else {},
    )


def _layout(fastest: str, on_device: bool, name_layouts: bool) -> str | None:
    return fastest if name_layouts and not on_device else None
