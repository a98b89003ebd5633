"""A placement: what lies on the device and what is sliced; from and to the record of a plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
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
"""first_device_layer -> bytes left for operators on the device once KV, compute buffers and the other tensors of those
layers are there; negative: that choice does not fit."""


def first_that_fits(n_layer: int, budget: OperatorBudget) -> int:
    """The first layer from which on norms and KV fit the device, with no operator there; n_layer + 1: none does."""
    return next((first for first in range(n_layer + 1) if budget(first) >= 0), n_layer + 1)


class Assignment(NamedTuple):
    """The place of an operator: its cut in elements along its axis, the host layout of CC (None: llama.cpp's choice),
    and the experts that the device has besides, whole."""

    cut: Cut
    layout: str | None = None
    hot_experts: tuple[int, ...] = ()

    @property
    def is_device(self) -> bool:
        """Whether llama.cpp has all of it on the device."""
        return self.cut.cc == self.cut.cg == 0

    @property
    def is_split(self) -> bool:
        """Whether the split back end computes some of it on the device."""
        return is_split(*self.cut[:3], len(self.hot_experts))


ON_HOST, ON_DEVICE = Assignment(Cut(1, 0, 0)), Assignment(Cut(0, 0, 1))
"""A whole operator on either side: one element, of which it has all."""


@dataclass(frozen=True, slots=True)
class DeviceSplits:
    """Bytes and settings of the split back end beside one device."""

    gg_bytes: int = 0  # of split operators' weights on the device
    hot_bytes: int = 0  # of experts that the device has besides
    staging_bytes: int = 0  # of the device: ring and activations
    twice_bytes: int = 0  # of the host: second copies of CC
    settings: SplitSettings = field(default_factory=SplitSettings)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights that the split back end has on the device."""
        return self.gg_bytes + self.hot_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that the split back end has: weights, activations and the ring."""
        return self.held_bytes + self.staging_bytes

    @property
    def is_sliced(self) -> bool:
        """Whether the split back end computes anything there."""
        return bool(self.held_bytes or self.staging_bytes or self.settings.token_assignment)


@dataclass(frozen=True)
class Placement:
    """The place of each operator, from which layer on norms and KV are on the device, and what the split back end needs
    there."""

    assignments: tuple[Assignment, ...]
    first_device_layer: int  # n_layer: only the part behind the last block; n_layer + 1: nothing
    seconds: float = 0.0  # predicted over the passes of a phase
    iterations: int = 0  # of Algorithm 1
    converged: bool = True
    splits: tuple[DeviceSplits, ...] = (DeviceSplits(),)  # beside each device; fewer where the last ones have none
    n_ubatch: int | None = None  # tokens of a micro-batch that it is for; None: the workload's
    stock: StockOptions | None = None  # of stock llama.cpp's own configuration, which chooses the host's layouts
    device_layers: tuple[int, ...] = ()  # of several devices, how many layers each has, from first_device_layer on; the
    # output counts as one behind the last; (): there is one device
    notes: tuple[str, ...] = field(default=(), compare=False)  # how it was found, for whoever reads the plan

    @classmethod
    def whole(
        cls, on_device: Sequence[bool], first_device_layer: int, seconds: float = 0.0, iterations: int = 0,
        converged: bool = True,
    ) -> Placement:  # fmt: skip
        """A placement that cuts no operator. on_device: by operator."""
        return cls(whole_assignments(on_device), first_device_layer, seconds, iterations, converged)

    @cached_property
    def on_device(self) -> tuple[bool, ...]:
        """Which operators llama.cpp has whole on the device."""
        return tuple(assignment.is_device for assignment in self.assignments)

    @property
    def split(self) -> DeviceSplits:
        """Bytes and settings of the split back end beside the first device."""
        return self.splits[0]

    @property
    def split_settings(self) -> tuple[SplitSettings, ...]:
        """Settings of the split back end for each device."""
        return tuple(beside.settings for beside in self.splits)

    @property
    def device_splits(self) -> tuple[DeviceSplits, ...]:
        """Bytes and settings of the split back end beside each device."""
        return (*self.splits, *(DeviceSplits() for _ in range(len(self.device_layers) - len(self.splits))))

    @property
    def cache_bytes(self) -> int:
        """Bytes of stock llama.cpp's expert cache on the device."""
        return self.stock.moe_cache_bytes if self.stock is not None else 0

    def device_of(self, layer: int) -> int:
        """The number of the device that has this layer; of the host's layers, the first that is used."""
        ends = accumulate(self.device_layers, initial=self.first_device_layer)
        if not self.device_layers or layer < self.first_device_layer:
            return next(iter(self.devices_used), 0)
        return bisect_right(list(ends), layer) - 1

    @property
    def devices_used(self) -> tuple[int, ...]:
        """The numbers of those of several devices that have layers or slices."""
        layers = zip(self.device_layers, self.device_splits, strict=False)  # of one device none are counted
        return tuple(i for i, (n_layers, beside) in enumerate(layers) if n_layers or beside.is_sliced)

    @property
    def streams(self) -> bool:
        return self.has_n_g or any(assignment.cut.cg for assignment in self.assignments)

    @cached_property
    def is_sliced(self) -> bool:
        """Whether the split back end computes anything."""
        return self.has_n_g or any(assignment.is_split for assignment in self.assignments)

    @property
    def has_n_g(self) -> bool:
        """Whether a device computes some tokens of what the host has."""
        return bool(devices_with_n_g(self.split_settings))

    def llama_uses_device(self, n_layer: int) -> bool:
        """Whether llama.cpp has anything on the device, or is told of it as stock is, and so streams host weights to it
        in large batches."""
        return self.first_device_layer <= n_layer or self.stock is not None

    def uses_device(self, n_layer: int) -> bool:
        """Whether anything is on the device: llama.cpp's part of it, or slices."""
        return self.llama_uses_device(n_layer) or self.is_sliced


NOTHING = Placement((), 0, inf)
"""In place of a placement where there is none."""


def whole_assignments(on_device: Sequence[bool]) -> tuple[Assignment, ...]:
    return tuple(map((ON_HOST, ON_DEVICE).__getitem__, on_device))


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """A verified placement, with everything a report or a plan says of it."""

    policy: str
    workload: Workload
    placement: Placement
    memory: MemoryBreakdown
    predicted: Predicted
    notes: tuple[str, ...]
    flash_attn: FlashAttention = "auto"  # that it was decided for


def operators_on_cpu(n_operators: int, first_device_layer: int) -> Placement:
    """The placement with every operator on the host, and norms and KV of the layers from first_device_layer on the
    device."""
    return Placement.whole((False,) * n_operators, first_device_layer)


def placed_whole(costs: Costs, on_device: Sequence[bool], first_device_layer: int) -> Placement:
    """Whole operators on their sides, with what that takes over the passes of `costs`."""
    seconds = placement_seconds(costs, on_device, first_device_layer)
    return Placement.whole(on_device, first_device_layer, seconds, 1)


def whole_bytes(weights: Sequence[Operator | OperatorCost], on_device: Sequence[bool]) -> int:
    """Total bytes of weights on the device."""
    return sum(weight.bytes for weight, is_device in zip(weights, on_device, strict=True) if is_device)


def layers(costs: Costs, budget: OperatorBudget) -> Placement:
    """The most whole layers that fit, from the end, KV with them: `-ngl k` for the largest k (llama.cpp counts the
    output layer as one of the k, and takes it first)."""
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


def cpu(costs: Costs) -> Placement:
    """The placement with everything on the CPU, KV too."""
    return placed_whole(costs, (False,) * len(costs.operators), costs.graph.n_layer + 1)


def n_gpu_layers(n_layer: int, placement: Placement) -> int:
    """llama.cpp's -ngl: it counts the output as one layer behind the last."""
    return n_layer + 1 - placement.first_device_layer


def operator_rows(operators: Sequence[Operator], placement: Placement) -> tuple[OperatorPlacement, ...]:
    """The plan's row of each operator: where it lies, in elements along the axis of its cut."""
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
    return Placement.whole([operator.name in chosen for operator in operators], first)


def placed_by_plan(n_layer: int, operators: Sequence[Operator], plan: Plan) -> Placement:
    """The placement of a plan. Raises PlanError for an invalid cut."""
    by_name = {row.name: row for row in plan.operators}
    rows = [by_name[operator.name] for operator in operators]
    cuts = [Cut(*slice_counts(operator, row)) for operator, row in zip(operators, rows, strict=True)]
    assignments = tuple(Assignment(cut, row.layout, row.hot_experts) for cut, row in zip(cuts, rows, strict=True))

    def gg_bytes(device: int) -> int:
        own = [row.device == device and not place.is_device for row, place in zip(rows, assignments, strict=True)]
        return slice_weights(operators, [here * place.cut.gg for here, place in zip(own, assignments, strict=True)])

    def hot_bytes_of(device: int) -> int:
        return sum(
            hot_bytes(operator, row) for operator, row in zip(operators, rows, strict=True) if row.device == device
        )

    layers = plan.device_layers(operators, n_layer)
    staging = [memory.staging for memory in plan.memory.devices or (plan.memory,)]
    staging += [0] * (len(layers) - len(staging))
    splits = [
        DeviceSplits(gg_bytes(number), hot_bytes_of(number), n_bytes, 0, settings_of(plan.split_settings, number))
        for number, n_bytes in enumerate(staging)
    ]
    first_device_layer = n_layer + 1 - plan.n_gpu_layers
    return Placement(assignments, first_device_layer, splits=tuple(splits), device_layers=layers, stock=plan.stock)


def unmeasured_cpu_record(
    model: ModelInfo, operators: Sequence[Operator], workload: Workload, weights_host: int
) -> Plan:
    """The plan record with everything on the CPU, without a profile."""
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
    """A placement without a profile: such a plan predicts nothing."""
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
        stock=placement.stock,
    )


def plan_record(decision: VerifiedPlan, model: ModelInfo, operators: Sequence[Operator], device: str) -> Plan:
    placement = decision.placement
    used = device if placement.uses_device(model.n_layer) else "none"
    first, *behind_first = placement.split_settings
    while behind_first and behind_first[-1] == SplitSettings():
        behind_first.pop()
    return replace(
        unmeasured_record(model, operators, decision.workload, placement, decision.memory, decision.policy, used),
        predicted=decision.predicted,
        token_assignment=first.token_assignment,
        streaming=first.streaming,
        notes=decision.notes,
        residents=first.residents,
        behind_first=tuple(behind_first),
    )


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
