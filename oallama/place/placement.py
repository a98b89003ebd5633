"""A placement: what lies on the device and what is sliced; from and to the record of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from oallama.core.errors import UsageError
from oallama.core.routing import Routing
from oallama.core.types import (
    MemoryLedger,
    ModelInfo,
    Operator,
    OperatorPlacement,
    Predicted,
    StreamSettings,
    Workload,
)
from oallama.cost.blocks import hot_weights, slice_weights
from oallama.cost.experts import expert_use
from oallama.cost.whole import Costs, OperatorCost, placement_seconds
from oallama.model.cut import cut_extent
from oallama.place.memory import ledger
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts

Budget = Callable[[int], int]
"""first_device_layer -> bytes left for operators on the device once KV, compute buffers and the other tensors of those
layers are there; negative: that choice does not fit."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices that the split backend holds, with n_g and the ring. Tuples have one entry for each operator."""

    gg: tuple[int, ...]  # elements on the device
    cg: tuple[int, ...]  # elements that are streamed
    layouts: tuple[str | None, ...]  # of CC; None where the split backend holds none
    weights_bytes: int  # of GG
    staging_bytes: int  # of the device: ring and activations
    settings: StreamSettings | None = None  # None: nothing is streamed
    token_assignment: tuple[tuple[int, int], ...] = ()  # n_g by batch size
    twice_bytes: int = 0  # of the host: second copies of CC
    hot: tuple[tuple[int, ...], ...] = ()  # of each operator: experts on the device that the host has too; or of none
    hot_bytes: int = 0  # of those on the device
    residents: bool = True  # whether blocks live on the device where their neighbours are there

    @property
    def held_bytes(self) -> int:
        """Weights on the device: of GG and of hot experts."""
        return self.weights_bytes + self.hot_bytes

    @property
    def device_bytes(self) -> int:
        """These, and what slices need beside them."""
        return self.held_bytes + self.staging_bytes

    @property
    def streams(self) -> bool:
        return any(self.cg) or bool(self.token_assignment)

    @property
    def use_device(self) -> bool:
        return any(self.gg) or any(self.hot) or self.streams


@dataclass(frozen=True, slots=True)
class Placed:
    """Which operators are on the device, which are sliced, and from which layer on norms and KV are on the device."""

    on_device: tuple[bool, ...]
    first_device_layer: int  # n_layer: only the part behind the last block; n_layer + 1: nothing
    seconds: float = 0.0  # predicted over the passes of a phase
    iterations: int = 0
    converged: bool = True
    slices: Slices | None = None
    # host layout of each operator's part in host memory; None, and of no operator: llama.cpp's choice
    layouts: tuple[str | None, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)  # how it was found, for whoever reads the plan
    n_ubatch: int | None = None  # tokens of a micro-batch that it is for; None: the workload's

    def llama_uses_device(self, n_layer: int) -> bool:
        """Whether llama.cpp has anything on the device, and so streams host weights to it in large batches."""
        return self.first_device_layer <= n_layer

    def uses_device(self, n_layer: int) -> bool:
        """Whether anything is on the device: llama.cpp's part of it, or slices."""
        return self.llama_uses_device(n_layer) or (self.slices is not None and self.slices.use_device)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verified placement, with everything a report or a plan says of it."""

    policy: str
    workload: Workload
    costs: Costs  # over the phase that was asked for
    placed: Placed
    memory: MemoryLedger
    predicted: Predicted
    notes: tuple[str, ...]


def nothing_there(n_operators: int, first_device_layer: int) -> Placed:
    """Every operator on the host, norms and KV of the last layers on the device."""
    return Placed((False,) * n_operators, first_device_layer)


def placed_whole(costs: Costs, on_device: Sequence[bool], first_device_layer: int) -> Placed:
    """Whole operators on their sides, with what that takes over the passes of `costs`."""
    seconds = placement_seconds(costs, on_device, first_device_layer)
    return Placed(tuple(on_device), first_device_layer, seconds, 1)


def whole_bytes(weights: Sequence[Operator | OperatorCost], on_device: Sequence[bool]) -> int:
    """Total bytes of weights on the device."""
    return sum(each.bytes for each, there in zip(weights, on_device, strict=True) if there)


def layers(costs: Costs, budget: Budget, at_least: int = 0) -> Placed:
    """The most whole layers that fit, from the end, KV with them: `-ngl k` for the largest k (llama.cpp counts the
    output layer as one of the k, and takes it first). Layers before `at_least` are not taken."""
    n_layer = costs.graph.n_layer
    layer_of = costs.graph.operator_layer
    first, size = n_layer + 1, 0
    for candidate in range(n_layer, at_least - 1, -1):
        begin, end = costs.graph.layer_operators[candidate]
        size += sum(cost.bytes for cost in costs.operators[begin:end])
        if size > budget(candidate):
            break
        first = candidate
    operators = zip(costs.operators, layer_of, strict=True)
    return placed_whole(costs, [layer >= first and cost.t_gpu_s is not None for cost, layer in operators], first)


def cpu(costs: Costs) -> Placed:
    """Everything on the CPU, KV too."""
    return placed_whole(costs, (False,) * len(costs.operators), costs.graph.n_layer + 1)


def n_gpu_layers(n_layer: int, placed: Placed) -> int:
    """llama.cpp's -ngl: it counts the output as one layer behind the last."""
    return n_layer + 1 - placed.first_device_layer


def placements(operators: Sequence[Operator], placed: Placed) -> tuple[OperatorPlacement, ...]:
    """Where each operator lies, in elements along the axis of its cut."""
    made, slices = [], placed.slices
    for index, operator in enumerate(operators):
        extent, layout = cut_extent(operator), placed.layouts[index] if placed.layouts else None
        gg, cg = (slices.gg[index], slices.cg[index]) if slices else (0, 0)
        hot = slices.hot[index] if slices and slices.hot else ()
        if placed.on_device[index] and not (gg or cg):
            gg, hot = extent, ()
        made.append(OperatorPlacement.of_cut(operator.name, (extent - cg - gg, cg, gg), layout, hot))
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


def placed_by_plan(n_layer: int, operators: Sequence[Operator], plan: Plan) -> Placed:
    """The placement of a plan. Raises PlanError for a cut that cannot be."""
    by_name = {placement.name: placement for placement in plan.operators}
    listed = [(operator, by_name[operator.name]) for operator in operators]
    cuts = [slice_counts(operator, placement) for operator, placement in listed]
    gg = tuple(cut[2] if 0 < p.gg < 1 else 0 for cut, (_, p) in zip(cuts, listed, strict=True))
    cg = tuple(cut[1] for cut in cuts)
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
    model: ModelInfo, operators: Sequence[Operator], workload: Workload, weights_host: int
) -> Plan:
    """Everything on the CPU, without a profile."""
    nothing = nothing_there(len(operators), model.n_layer + 1)
    return unmeasured_record(model, operators, workload, nothing, ledger(0, 1.0, 0, weights_host, 0, 0), "cpu", "none")


def unmeasured_record(
    model: ModelInfo,
    operators: Sequence[Operator],
    workload: Workload,
    placed: Placed,
    memory: MemoryLedger,
    policy: str,
    device: str,
) -> Plan:
    """A placement without a profile: such a plan predicts nothing."""
    return Plan(
        model_path=model.path,
        model_fingerprint=model.fingerprint,
        machine_fingerprint="",
        device=device,
        policy=policy,
        workload=workload,
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
) -> Plan:
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


def with_used_experts(plan: Plan, operators: Sequence[Operator], routing: Routing | None) -> Plan:
    """The plan with as many hot experts, each layer's the most used in decode. A layer of which too little is known
    keeps its own."""
    use = {} if routing is None else expert_use(routing)
    layers = {operator.name: operator.layer for operator in operators}
    placements = tuple(
        replace(p, hot_experts=tuple(sorted(use[layer].order[: len(p.hot_experts)])))
        if p.hot_experts and (layer := layers[p.name]) in use
        else p
        for p in plan.operators
    )
    return plan if placements == plan.operators else replace(plan, operators=placements)
