"""The records of the affinity report: each operator's affinity and placement, and the plan's baselines."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import (
    Backend,
    MemoryBreakdown,
    ModelInfo,
    OperatorPlacement,
    Phase,
    Predicted,
    Shape,
    StreamSettings,
    Workload,
)


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
    backend: Backend  # split: it lies on both, or is streamed
    gg: float = 0.0  # fractions of the weight, as in OperatorPlacement
    cg: float = 0.0
    cc: float = 1.0
    n_hot: int = 0  # experts that the device has whole, and the host too


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


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan that `oallama run` uses. measured: it won against stock llama.cpp here; else it was predicted to."""

    policy: str
    measured: bool
    predicted: Predicted
    memory: MemoryBreakdown
    operators: tuple[OperatorPlacement, ...]
    token_assignment: tuple[tuple[int, int], ...] = ()
    streaming: StreamSettings | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AffinityReport:
    """`oallama affinity-report`: each operator's affinity and placement, the iteration, and the memory breakdown."""

    model: ModelInfo
    device: str
    phase: Phase
    iterations: int
    converged: bool  # False: a cycle was detected and the best plan of it was kept
    operators: tuple[Affinity, ...]  # in rank order
    memory: MemoryBreakdown
    predicted: Predicted
    notes: tuple[str, ...] = ()  # what was lowered or left out to make it fit, in sentences
    workload: Workload | None = None  # of predicted and baselines
    baselines: tuple[Baseline, ...] = ()
    measured: MeasuredOn | None = None
    policy: str = "oato"  # that says where operators are
    of_plan: bool = False  # as a plan has them; else as OATO's search for the phase
    token_assignment: tuple[tuple[int, int], ...] = ()  # as in Plan
    streaming: StreamSettings | None = None
    run: RunPlan | None = None  # None: not asked for
