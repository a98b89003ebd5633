"""A placement: which operators are on the device, and how others are sliced; from and to a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from oallama.core.errors import UsageError
from oallama.core.routing import Routing
from oallama.core.types import (
    FlashAttention,
    MemoryBreakdown,
    ModelInfo,
    Operator,
    OperatorPlacement,
    Predicted,
    SplitSettings,
    StockOptions,
    Workload,
    devices_with_n_g,
    is_split,
    settings_of,
)
from oallama.cost.blocks import slice_weights
from oallama.cost.experts import expert_use
from oallama.cost.slices import Cut
from oallama.cost.whole import Costs, OperatorCost, placement_seconds
from oallama.model.cut import cut_extent
from oallama.plan.plan import Plan
from oallama.plan.split import hot_bytes, slice_counts
from oallama.planner.memory import memory_breakdown

OperatorBudget = Callable[[int], int]
"""first_device_layer -> bytes for operators on the device, beside KV, compute buffers and the other tensors of the
layers from there on; negative: these do not fit."""


class Assignment(NamedTuple):
    """Where an operator is stored and computed: its cut in elements along its axis, the host layout of CC (None:
    llama.cpp's choice), and its hot experts, which the device holds whole in addition."""

    cut: Cut
    layout: str | None = None
    hot_experts: tuple[int, ...] = ()

    @property
    def is_device(self) -> bool:
        """Whether llama.cpp keeps the whole operator on the device."""
        return self.cut.cc == self.cut.cg == 0

    @property
    def is_split(self) -> bool:
        """Whether the split back end computes a part of it on the device."""
        return is_split(*self.cut[:3], len(self.hot_experts))


ON_HOST, ON_DEVICE = Assignment(Cut(1, 0, 0)), Assignment(Cut(0, 0, 1))
"""A whole operator on either side, as a cut of one element."""


@dataclass(frozen=True, slots=True)
class DeviceSlices:
    """Bytes and settings of the split back end beside one device."""

    gg_bytes: int = 0  # of split operators' weights on the device
    hot_bytes: int = 0  # of hot experts
    staging_bytes: int = 0  # of the device: ring and activations
    twice_bytes: int = 0  # of the host: second copies of CC
    settings: SplitSettings = field(default_factory=SplitSettings)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights that the split back end holds on the device."""
        return self.gg_bytes + self.hot_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that the split back end takes on the device: weights, activations and the ring."""
        return self.held_bytes + self.staging_bytes

    @property
    def is_sliced(self) -> bool:
        """Whether the split back end computes anything on this device."""
        return bool(self.held_bytes or self.staging_bytes or self.settings.token_assignment)


@dataclass(frozen=True)
class Placement:
    """The assignment of each operator, the first layer whose norms and KV are on the device, and what the split back
    end takes there."""

    assignments: tuple[Assignment, ...]
    first_device_layer: int  # n_layer: only the output's layer is on the device; n_layer + 1: no layer
    seconds: float = 0.0  # predicted over the passes of a phase
    iterations: int = 0  # of Algorithm 1
    converged: bool = True
    slices: tuple[DeviceSlices, ...] = (DeviceSlices(),)  # for each device; may end before devices without any
    n_ubatch: int | None = None  # micro-batch that it was made for; None: the workload's
    stock: StockOptions | None = None  # of a configuration of stock llama.cpp, which chooses the host's layouts
    device_layers: tuple[int, ...] = ()  # of several devices: number of layers of each, from first_device_layer on, the
    # output counted as one layer; (): one device
    notes: tuple[str, ...] = field(default=(), compare=False)  # how it was found; shown with the plan

    @classmethod
    def whole(
        cls, on_device: Sequence[bool], first_device_layer: int, seconds: float = 0.0, iterations: int = 0,
        converged: bool = True,
    ) -> Placement:  # fmt: skip
        """A placement that cuts no operator. on_device: by operator."""
        return cls(whole_assignments(on_device), first_device_layer, seconds, iterations, converged)

    @cached_property
    def on_device(self) -> tuple[bool, ...]:
        """Which operators llama.cpp keeps whole on the device."""
        return tuple(assignment.is_device for assignment in self.assignments)

    @property
    def first_slices(self) -> DeviceSlices:
        """Bytes and settings of the split back end beside the first device."""
        return self.slices[0]

    @property
    def split_settings(self) -> tuple[SplitSettings, ...]:
        """Settings of the split back end for each device."""
        return tuple(slices.settings for slices in self.slices)

    @property
    def device_slices(self) -> tuple[DeviceSlices, ...]:
        """Bytes and settings of the split back end beside each device."""
        return (*self.slices, *(DeviceSlices() for _ in range(len(self.device_layers) - len(self.slices))))

    @property
    def cache_bytes(self) -> int:
        """Bytes of stock llama.cpp's expert cache on the device."""
        return self.stock.moe_cache_bytes if self.stock is not None else 0

    def device_of(self, layer: int) -> int:
        """The number of the device that has this layer; for layers on the host, that of the first device used."""
        first_used = next(iter(self.devices_used), 0)
        return next((i for i, (begin, end) in enumerate(self.device_ranges) if begin <= layer < end), first_used)

    @property
    def device_ranges(self) -> tuple[tuple[int, int], ...]:
        """The layers [begin, end) of each of several devices, the output counted as one layer after the last."""
        return tuple(pairwise(accumulate(self.device_layers, initial=self.first_device_layer)))

    @property
    def devices_used(self) -> tuple[int, ...]:
        """The numbers of the devices (of several) that have layers or slices."""
        layers = zip(self.device_layers, self.device_slices, strict=False)  # of one device none are counted
        return tuple(i for i, (n_layers, slices) in enumerate(layers) if n_layers or slices.is_sliced)

    @property
    def streams(self) -> bool:
        return self.has_n_g or any(assignment.cut.cg for assignment in self.assignments)

    @cached_property
    def is_sliced(self) -> bool:
        """Whether the split back end computes anything."""
        return self.has_n_g or any(assignment.is_split for assignment in self.assignments)

    @property
    def has_n_g(self) -> bool:
        """Whether a device computes CC for some tokens of a prompt (n_g)."""
        return bool(devices_with_n_g(self.split_settings))

    def llama_uses_device(self, n_layer: int) -> bool:
        """Whether llama.cpp is given the device: it keeps layers there, or is stock. It then streams host weights to
        the device in large batches."""
        return self.first_device_layer <= n_layer or self.stock is not None

    def uses_device(self, n_layer: int) -> bool:
        """Whether llama.cpp or the split back end uses the device."""
        return self.llama_uses_device(n_layer) or self.is_sliced


NO_PLACEMENT = Placement((), 0, inf)
"""Stands for a missing placement: no operators, infinite seconds."""


def whole_assignments(on_device: Sequence[bool]) -> tuple[Assignment, ...]:
    return tuple(map((ON_HOST, ON_DEVICE).__getitem__, on_device))


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """A verified placement with its memory, its price and its notes."""

    policy: str
    workload: Workload
    placement: Placement
    memory: MemoryBreakdown
    predicted: Predicted
    notes: tuple[str, ...]
    flash_attn: FlashAttention = "auto"  # the attention mode that it was searched in


def operators_on_cpu(n_operators: int, first_device_layer: int) -> Placement:
    """The placement with every operator on the host, and norms and KV of the layers from first_device_layer on the
    device."""
    return Placement.whole((False,) * n_operators, first_device_layer)


def placed_whole(costs: Costs, on_device: Sequence[bool], first_device_layer: int) -> Placement:
    """A placement of whole operators, with its seconds over the passes of `costs`."""
    seconds = placement_seconds(costs, on_device, first_device_layer)
    return Placement.whole(on_device, first_device_layer, seconds, 1)


def whole_bytes(weights: Sequence[Operator | OperatorCost], on_device: Sequence[bool]) -> int:
    """Total bytes of weights on the device."""
    return sum(weight.bytes for weight, is_device in zip(weights, on_device, strict=True) if is_device)


def last_layers(costs: Costs, budget: OperatorBudget) -> Placement:
    """`-ngl k` for the largest k that fits: the last whole layers with their KV. llama.cpp counts the output as a layer
    and takes it first."""
    n_layer = costs.graph.n_layer
    layer_of = costs.graph.operator_layer
    first, size = n_layer + 1, 0
    for candidate in range(n_layer, -1, -1):
        begin, end = costs.graph.layer_operators[candidate]
        size += sum(cost.bytes for cost in costs.operators[begin:end])
        if size > budget(candidate):
            break
        first = candidate
    operators = zip(costs.operators, layer_of, strict=True)
    return placed_whole(costs, [layer >= first and cost.t_gpu_s is not None for cost, layer in operators], first)


def all_on_cpu(costs: Costs) -> Placement:
    """The placement with everything on the CPU, KV too."""
    return placed_whole(costs, (False,) * len(costs.operators), costs.graph.n_layer + 1)


def n_gpu_layers(n_layer: int, placement: Placement) -> int:
    """The value of llama.cpp's -ngl, which counts the output as one layer after the last."""
    return n_layer + 1 - placement.first_device_layer


def operator_rows(operators: Sequence[Operator], placement: Placement) -> tuple[OperatorPlacement, ...]:
    """A plan's row for each operator, with its cut in elements along its axis."""
    n_layer, rows = placement.first_device_layer + sum(placement.device_layers) - 1, []
    for operator, assignment in zip(operators, placement.assignments, strict=True):
        extent, cut = cut_extent(operator), assignment.cut
        if not assignment.is_split:
            cut = Cut(0, 0, extent) if assignment.is_device else Cut(extent, 0, 0)
        row = OperatorPlacement.of_cut(operator.name, cut[:3], assignment.layout, assignment.hot_experts)
        device = placement.device_of(operator.layer_in(n_layer))
        rows.append(replace(row, device=device) if device else row)
    return tuple(rows)


def placed_as_named(
    model: ModelInfo, operators: Sequence[Operator], on_device: Iterable[str], gpu_layers: int
) -> Placement:
    """The placement with these operators, and norms and KV of the last gpu_layers layers, on the device.

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
    return Placement.whole([operator.name in chosen for operator in operators], first)


def placed_by_plan(n_layer: int, operators: Sequence[Operator], plan: Plan) -> Placement:
    """The placement of a plan. Raises PlanError for an invalid cut, and for another model's plan."""
    pairs = plan.pairs(operators)
    assignments = tuple(
        Assignment(Cut(*slice_counts(operator, row)), row.layout, row.hot_experts) for operator, row in pairs
    )
    layers = plan.device_layers(operators, n_layer)
    staging_of = dict(enumerate(memory.staging for memory in plan.memory.devices or (plan.memory,)))

    def slices_of(device: int) -> DeviceSlices:
        gg = [
            assignment.cut.gg if row.device == device and not assignment.is_device else 0
            for (_, row), assignment in zip(pairs, assignments, strict=True)
        ]
        hot = sum(hot_bytes(operator, row) for operator, row in pairs if row.device == device)
        settings = settings_of(plan.split_settings, device)
        return DeviceSlices(slice_weights(operators, gg), hot, staging_of.get(device, 0), 0, settings)

    slices = tuple(map(slices_of, range(len(layers) or 1)))
    first_device_layer = n_layer + 1 - plan.n_gpu_layers
    return Placement(assignments, first_device_layer, slices=slices, device_layers=layers, stock=plan.stock)


def unmeasured_cpu_record(
    model: ModelInfo, operators: Sequence[Operator], workload: Workload, weights_host: int
) -> Plan:
    """A plan with everything on the CPU, made without a profile."""
    nothing = operators_on_cpu(len(operators), model.n_layer + 1)
    return unmeasured_record(
        model, operators, workload, nothing, memory_breakdown(0, 1.0, 0, weights_host, 0, 0), "cpu", "none"
    )


def unmeasured_record(
    model: ModelInfo,
    operators: Sequence[Operator],
    workload: Workload,
    placement: Placement,
    memory: MemoryBreakdown,
    policy: str,
    device: str,
) -> Plan:
    """A plan of a placement, made without a profile: it predicts nothing."""
    first, *behind_first = placement.split_settings
    while behind_first and behind_first[-1] == SplitSettings():
        behind_first.pop()
    return Plan(
        model_path=model.path,
        model_fingerprint=model.fingerprint,
        machine_fingerprint="",
        device=device,
        policy=policy,
        workload=workload,
        operators=operator_rows(operators, placement),
        n_gpu_layers=n_gpu_layers(model.n_layer, placement),
        memory=memory,
        predicted=None,
        token_assignment=first.token_assignment,
        streaming=first.streaming,
        residents=first.residents,
        behind_first=tuple(behind_first),
        stock=placement.stock,
    )


def plan_record(verified: VerifiedPlan, model: ModelInfo, operators: Sequence[Operator], device: str) -> Plan:
    placement = verified.placement
    used = device if placement.uses_device(model.n_layer) else "none"
    record = unmeasured_record(model, operators, verified.workload, placement, verified.memory, verified.policy, used)
    return replace(record, predicted=verified.predicted, notes=verified.notes)


def with_used_experts(plan: Plan, operators: Sequence[Operator], routing: Routing | None) -> Plan:
    """The plan with as many hot experts, each layer's the most used in decode. A layer of which too little is known
    keeps its own."""
    use = {} if routing is None else expert_use(routing)
    layers = {operator.name: operator.layer for operator in operators}
    rows = tuple(
        replace(p, hot_experts=tuple(sorted(use[layer].order[: len(p.hot_experts)])))
        if p.hot_experts and (layer := layers[p.name]) in use
        else p
        for p in plan.operators
    )
    return plan if rows == plan.operators else replace(plan, operators=rows)
