"""The rows of the affinity report: each operator's affinity and placement, and the plan's baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oallama.core.types import Backend, MemoryBreakdown, OperatorPlacement, Predicted, Shape


@dataclass(frozen=True, slots=True)
class Affinity:
    """One row of the affinity report (OATO section 3.3)."""

    name: str
    layer: int | None
    role: str
    type: str
    shape: Shape
    bytes: int
    t_cpu_s: float  # T_c
    t_gpu_s: float | None  # T_g; None: the device cannot compute this operator, so it has no benefit and affinity 0
    t_transfer_s: float  # T': marginal transfer cost given the other operators' final places; may be negative
    saved_s: float | None  # T_c - T_g - T'; None as T_g
    benefit_s_per_byte: float | None  # B = saved_s / M
    affinity: float  # G: B min-max normalised to 0..1
    rank: int  # 1 is placed first
    placement: OperatorPlacement

    @property
    def backend(self) -> Backend:
        return self.placement.backend


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """One of several devices: its layers and memory in a plan, and the affinity of each operator to it."""

    device: str
    layers: tuple[int, int]  # from the first to before the last, the output being one behind the last; equal: none
    memory: MemoryBreakdown | None  # None: the plan leaves the device out
    rows: Mapping[str, Affinity]  # of all operators, by name, as if they were on this device


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline placement, priced by the same cost model."""

    name: str  # "stock --fit", "all CPU", "physical bound"
    predicted: Predicted


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """The machine and time of a report's measurements; empty if the profile has none."""

    cpu: str
    device: str  # as ggml describes it
    at: str  # ISO 8601, UTC
