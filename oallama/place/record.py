"""A decision as the record that a plan is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from oallama.core.errors import UsageError
from oallama.core.types import MemoryLedger, ModelInfo, Operator, OperatorPlacement, PlanRecord, Workload
from oallama.cost.blocks import hot_weights, slice_weights
from oallama.model.cut import cut_extent
from oallama.place.budget import ledger
from oallama.place.placed import Placed, Slices, nothing_there
from oallama.place.problem import Decision


def n_gpu_layers(n_layer: int, placed: Placed) -> int:
    """llama.cpp's -ngl: it counts the output as one layer behind the last."""
    return n_layer + 1 - placed.first_device_layer


def placements(operators: Sequence[Operator], placed: Placed) -> tuple[OperatorPlacement, ...]:
    """gg = 1 on the device, cc = 1 on the host, fractions of the cut's extent where an operator is split."""
    made = []
    slices = placed.slices
    for index, operator in enumerate(operators):
        gg, cg = (slices.gg[index], slices.cg[index]) if slices else (0, 0)
        layout = placed.layouts[index] if placed.layouts else None
        hot = slices.hot[index] if slices and slices.hot else ()
        if gg or cg:
            extent = cut_extent(operator)
            cc = extent - cg - gg
            made.append(
                OperatorPlacement(
                    operator.name, gg / extent, cg / extent, cc / extent, layout if cc else None,
                )
            )  # fmt: skip
        elif placed.on_device[index]:
            made.append(OperatorPlacement(operator.name, 1.0, 0.0, 0.0))
        else:
            made.append(OperatorPlacement(operator.name, 0.0, 0.0, 1.0, layout, hot))
    return tuple(made)


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
        if operator.name in chosen and operator.layer_in(model.n_layer) < first:
            raise UsageError(f"{operator.name} is in a layer that -ngl {gpu_layers} leaves on the host; raise it")
    return Placed(tuple(operator.name in chosen for operator in operators), first)


def placed_by_plan(n_layer: int, operators: Sequence[Operator], plan: PlanRecord) -> Placed:
    by_name = {placement.name: placement for placement in plan.operators}
    listed = [(operator, by_name[operator.name]) for operator in operators]
    gg = tuple(round(p.gg * cut_extent(o)) if 0 < p.gg < 1 else 0 for o, p in listed)
    cg = tuple(round(p.cg * cut_extent(o)) for o, p in listed)
    on_device = tuple(p.gg == 1 for _, p in listed)
    layouts = tuple(p.layout for _, p in listed)
    slices = None
    hot = tuple(p.hot_experts for _, p in listed)
    if any(gg) or any(cg) or any(hot) or plan.token_assignment:
        weights, whole = slice_weights(operators, gg), hot_weights(operators, hot)
        staging, streaming = plan.memory.staging, plan.streaming
        kept = hot if any(hot) else ()
        slices = Slices(
            gg, cg, layouts, weights, staging, streaming, plan.token_assignment,
            hot=kept, hot_bytes=whole, residents=plan.residents,
        )  # fmt: skip
    return Placed(on_device, n_layer + 1 - plan.n_gpu_layers, slices=slices, layouts=layouts)


def unmeasured_cpu_record(
    model: ModelInfo, operators: Sequence[Operator], load: Workload, weights_host: int
) -> PlanRecord:
    """Everything on the CPU, without a profile."""
    nothing = nothing_there(len(operators), model.n_layer + 1)
    return unmeasured_record(model, operators, load, nothing, ledger(0, 1.0, 0, weights_host, 0, 0), "cpu", "none")


def unmeasured_record(
    model: ModelInfo,
    operators: Sequence[Operator],
    load: Workload,
    placed: Placed,
    memory: MemoryLedger,
    policy: str,
    device: str,
) -> PlanRecord:
    """A placement without a profile: such a plan predicts nothing."""
    return PlanRecord(
        model_path=model.path,
        model_fingerprint=model.fingerprint,
        machine_fingerprint="",
        device=device,
        policy=policy,
        workload=load,
        operators=placements(operators, placed),
        n_gpu_layers=n_gpu_layers(model.n_layer, placed),
        memory=memory,
        predicted=None,
    )


def plan_record(
    decision: Decision,
    model: ModelInfo,
    operators: Sequence[Operator],
    device: str,
    machine_fingerprint: str,
) -> PlanRecord:
    placed = decision.placed
    used = device if placed.uses_device(model.n_layer) else "none"
    slices, memory = placed.slices, decision.memory
    return replace(
        unmeasured_record(model, operators, decision.workload, placed, memory, decision.policy, used),
        machine_fingerprint=machine_fingerprint,
        predicted=decision.predicted,
        token_assignment=slices.token_assignment if slices else (),
        streaming=slices.settings if slices else None,
        notes=decision.notes,
        residents=slices.residents if slices else True,
    )
