"""A plan's split operators in this process: the plan text for the split back end, and the plan as it was loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from oallama.core.errors import BridgeError, DeviceError, PlanError
from oallama.core.types import SPLIT_LAYOUT, MemoryBreakdown, Operator, OperatorPlacement
from oallama.core.units import format_bytes
from oallama.device.load_params import load_bridge
from oallama.device.opening import OpenDevice
from oallama.model.memory import BufferBytes
from oallama.plan.patterns import split_names
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text
from oallama.plan.split import hot_bytes, slice_counts

if TYPE_CHECKING:
    from ggml_bridge.split import SliceInfo, SplitBackend, SplitPlan


class LoadedSplit:
    """A plan in the split back end, for one model. Methods talk to this process only, never to a device."""

    def __init__(self, backend: SplitBackend, plan: SplitPlan, device: OpenDevice, beside: Mapping[str, int]) -> None:
        """beside: of each split operator, which of the devices it is split beside."""
        self._backend, self.plan, self._before = backend, plan, backend.memory()
        self._device, self._beside = device, beside
        self._computing_before = self._computing()

    def failure(self) -> str:
        """Why what was loaded cannot compute; "" if it can."""
        usable, sentences = self.plan.problems()
        return "" if usable else "; ".join(sentences)

    def corrected(self, plan: Plan, operators: Sequence[Operator]) -> tuple[Plan, tuple[str, ...]]:
        """The plan as loaded, and a sentence for each deviation from the requested one. Raises DeviceError if it cannot
        compute."""
        usable, sentences = self.plan.problems()
        if not usable:
            raise DeviceError(f"the model cannot be loaded as planned: {'; '.join(sentences)}; {SMALLER}")
        slices = self.plan.slices()
        device_bytes = sum(s.device_bytes for s in slices)
        if device_bytes and self._backend.memory().n_programs <= self._before.n_programs:
            raise DeviceError(
                f"{self._device.with_free} has no room for compute buffers of the split operators beside "
                f"{format_bytes(device_bytes)} of their weights; use a smaller -ub, or plan with a smaller --vram"
            )
        return corrected_plan(plan, operators, slices), tuple(sentences)

    def buffers(self) -> tuple[BufferBytes, ...]:
        """Bytes of this model's slices and compute buffers, on the host and on each device. Call it right after the
        load: the back end counts per process, so the compute buffers are the growth since this object was made."""
        slices = self.plan.slices()
        host_compute = max(0, self._backend.memory().host_compute - self._before.host_compute)
        buffers = [BufferBytes(SPLIT_LAYOUT, "", True, sum(s.host_bytes for s in slices), 0, host_compute)]
        labels = self._device.names if len(self._device.names) > 1 else (self._device.label,)
        pairs = zip(self._computing(), self._computing_before, strict=True)
        for number, (label, (bytes_now, bytes_before)) in enumerate(zip(labels, pairs, strict=True)):
            weights = sum(s.device_bytes for s in slices if self._beside[s.name] == number)
            buffers.append(BufferBytes(SPLIT_LAYOUT, label, False, weights, 0, max(0, bytes_now - bytes_before)))
        return tuple(buffers)

    def _computing(self) -> list[int]:
        """Bytes that all contexts of the process compute in, on each device."""
        return [self._backend.device_compute(name) for name in self._device.names]


SMALLER = "use a smaller model or context, or put more of it on the device (--vram)"


def open_split(
    plan: Plan,
    rows: Sequence[OperatorPlacement],
    operators: Sequence[Operator],
    n_layer: int,
    device: OpenDevice,
) -> LoadedSplit | None:
    """Hand the plan to the split back end, which is loaded for it; None for a plan that splits nothing.

    rows: the plan's, with layouts that this CPU has. Raises PlanError for what the backend refuses,
    DeviceError, BridgeError.
    """
    usable = replace(plan, operators=tuple(rows))
    if not split_names(usable, operators):
        return None
    import ggml_bridge

    text = plugin_text(usable, operators, n_layer, device.names)
    try:
        backend = load_bridge().split()
        return LoadedSplit(backend, backend.plan(text), device, {row.name: row.device for row in usable.operators})
    except (ValueError, ggml_bridge.Unsupported) as error:
        raise PlanError(f"the split back end refuses the plan: {error}") from None
    except ggml_bridge.OutOfMemory as error:
        raise DeviceError(f"cannot use the plan's device: {error}; {SMALLER}") from None
    except ggml_bridge.BridgeError as error:
        raise BridgeError(str(error)) from None


def corrected_plan(plan: Plan, operators: Sequence[Operator], slices: Sequence[SliceInfo]) -> Plan:
    """The plan with the fractions and layouts of what was loaded; the same plan where nothing differs.

    Its memory breakdown follows the slices' bytes. Where a cut moved, it predicts nothing: its times were those of
    another one.
    """
    by_name = {operator.name: operator for operator in operators}
    loads = {s.name: s for s in slices if s.loaded}
    rows = tuple(_loaded(by_name[p.name], p, loads[p.name]) if p.name in loads else p for p in plan.operators)
    if rows == plan.operators:
        return plan
    moves = [(by_name[planned.name], planned, row) for planned, row in zip(plan.operators, rows, strict=True)]
    loaded = replace(plan, operators=rows)
    for device in sorted({row.device for row in rows}):
        on_device = [move for move in moves if move[1].device == device]
        moved_bytes = sum(round((planned.gg - row.gg) * operator.bytes) for operator, planned, row in on_device)
        cold_bytes = sum(
            hot_bytes(operator, planned) - hot_bytes(operator, row) for operator, planned, row in on_device
        )
        if moved_bytes or cold_bytes:
            loaded = replace(loaded, memory=_moved(loaded.memory, moved_bytes, cold_bytes, device), predicted=None)
    return loaded


def _loaded(operator: Operator, planned: OperatorPlacement, slice: SliceInfo) -> OperatorPlacement:
    """The row as loaded; the planned row itself if nothing differs. A layout that the plan leaves open stays open."""
    layout = None if planned.layout is None else slice.layout
    cut, hot_experts = (slice.cc, slice.cg, slice.gg), planned.hot_experts[: slice.n_hot]
    loaded = replace(OperatorPlacement.of_cut(slice.name, cut, layout, hot_experts), device=planned.device)
    same_cut = cut == slice_counts(operator, planned) and hot_experts == planned.hot_experts
    return planned if same_cut and loaded.layout == planned.layout else loaded


def _moved(memory_breakdown: MemoryBreakdown, n_bytes: int, n_cold: int, device: int) -> MemoryBreakdown:
    """The memory breakdown with so many bytes of weights on the host that were to be on the device, and n_cold fewer
    there of experts, which the host has anyway. device: of several devices, which one."""
    return replace(
        memory_breakdown,
        weights_gpu=memory_breakdown.weights_gpu - n_bytes - n_cold,
        weights_host=memory_breakdown.weights_host + n_bytes,
        spare=memory_breakdown.spare + n_bytes + n_cold,
        devices=tuple(
            replace(_moved(breakdown, n_bytes, n_cold, 0), weights_host=0) if number == device else breakdown
            for number, breakdown in enumerate(memory_breakdown.devices)
        ),
    )
