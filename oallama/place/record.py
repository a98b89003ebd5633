"""A decision as the record that a plan is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oallama.core.errors import UsageError
from oallama.core.types import ModelInfo, Operator, OperatorPlacement, PlanRecord, Workload
from oallama.place.baselines import Placed
from oallama.place.budget import ledger
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


def placed_as_named(
    model: ModelInfo, operators: Sequence[Operator], on_device: Iterable[str], gpu_layers: int
) -> Placed:
    """The placement with these operators on the device and the last gpu_layers layers' norms and KV with them.

    Raises UsageError for unknown names or an operator in a layer that is not on the device.
    """
    chosen = frozenset(on_device)
    unknown = chosen - {operator.name for operator in operators}
    if unknown:
        raise UsageError(f"{model.path} has no operator {min(unknown)!r}; `oallama inspect` lists them")
    first = model.n_layer + 1 - gpu_layers
    for operator in operators:
        layer = model.n_layer if operator.layer is None else operator.layer
        if operator.name in chosen and layer < first:
            raise UsageError(f"{operator.name} is in a layer that -ngl {gpu_layers} leaves on the host; raise it")
    return Placed(tuple(operator.name in chosen for operator in operators), first, 0, True, 0.0)


def placed_by_plan(n_layer: int, plan: PlanRecord) -> Placed:
    """The placement that a plan of whole operators describes."""
    on_device = tuple(placement.gg == 1 for placement in plan.operators)
    return Placed(on_device, n_layer + 1 - plan.n_gpu_layers, 0, True, 0.0)


def unmeasured_cpu_record(
    model: ModelInfo, operators: Sequence[Operator], load: Workload, weights_host: int
) -> PlanRecord:
    """Everything on the CPU, without a profile: such a plan predicts nothing."""
    nothing = Placed((False,) * len(operators), model.n_layer + 1, 0, True, 0.0)
    return PlanRecord(
        model_path=model.path,
        model_fingerprint=model.fingerprint,
        machine_fingerprint="",
        device="none",
        policy="cpu",
        workload=load,
        operators=placements(operators, nothing),
        n_gpu_layers=0,
        memory=ledger(0, 1.0, 0, weights_host, 0, 0),
        predicted=None,
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
