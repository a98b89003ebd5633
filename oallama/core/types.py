"""The records that pass between rooms. Frozen; bytes are int, times are float seconds, shapes are ggml's (ne[0] first).

Who fills what: model/ makes ModelInfo and Operator, profile/ makes Profile, place/ makes Affinity and Placement,
plan/ makes Plan out of them, run/ consumes a Plan. Nobody changes a record it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from oallama.core.codec import Count, Count32, Expect, Line, Mark, NotNegative, Positive, Size, Size32
from oallama.core.ggml_types import GGML_TYPES_BY_NAME

Shape = tuple[int, int, int]  # [K, N, E]: ne[0], ne[1], ne[2] of a weight
Backend = Literal["GPU", "CPU", "split"]
Phase = Literal["decode", "prefill", "mixed"]

CPU_DEVICE = "CPU"
"""Name of ggml's CPU device, and of the side that computes CC."""

SPLIT_LAYOUT = "OALLAMA_Split"
"""The split backend's buffer type: a weight in it lies partly in host memory, partly on the device."""

DEVICE_LAYOUT = "device"
"""`layout` of a case measured on a device: the device's own default buffer type."""

PLAIN_LAYOUT = "CPU"
"""`layout` of weights in ggml's CPU buffer type, not repacked."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model and what it looked like when it was read."""

    path: str
    n_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Hyperparameters as the GGUF states them; of per-layer lists, their maximum."""

    path: str
    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int  # width of one key head
    n_embd_head_v: int  # width of one value head
    n_expert: int  # 0: dense
    n_expert_used: int  # experts per token, 0: dense
    n_vocab: int
    n_ctx_train: int
    file_bytes: int  # all parts of a split file together
    fingerprint: str  # sha256 over metadata and tensor headers, not over weights
    files: tuple[ModelFile, ...] = ()  # every part, in order, as it was when it was checked


@dataclass(frozen=True, slots=True)
class Operator:
    """One weight-bearing mul-mat of the graph: w [K, N, E] times x [K, n_tokens] -> [N, n_tokens]."""

    name: str  # GGUF tensor name
    layer: int | None  # None outside blocks
    role: str  # the tensor's base name: attn_q, ffn_down, ffn_gate_exps, output, ...
    op: Literal["MUL_MAT", "MUL_MAT_ID"]
    type: str  # ggml type in capitals: F16, Q4_0, Q4_K, ...
    shape: Shape
    bytes: int
    active_fraction: float  # experts used / experts for MUL_MAT_ID, else 1.0
    n_expert_used: int = 1  # experts each token is routed to (MUL_MAT_ID), else 1
    gate_up: bool = False  # one weight for both: rows 0..N/2 are the gate, the others up
    biased: bool = False  # a bias or a scale of its own follows the mul-mat

    @property
    def mul_mat(self) -> MulMat:
        """The part of an operator that its time depends on."""
        return MulMat(self.op, self.type, self.shape, self.n_expert_used if self.op == "MUL_MAT_ID" else 1)


@dataclass(frozen=True, slots=True)
class MulMat:
    """w [K, N, E] of a ggml type times activations. Operators with equal MulMats take the same time."""

    op: str  # MUL_MAT: all E matrices are used; MUL_MAT_ID: each token is routed to n_expert_used of them
    type: str
    shape: Annotated[tuple[Size, Size, Size], Expect("must be three sizes above 0")]
    n_expert_used: Count = 1

    @property
    def bytes(self) -> int:
        """Of the whole weight. Raises KeyError for a type that ggml does not have."""
        k, n, e = self.shape
        return GGML_TYPES_BY_NAME[self.type].n_bytes(k * n * e)

    @property
    def matrices_per_token(self) -> int:
        """[K, N] matrices that one token is multiplied with."""
        return self.n_expert_used if self.op == "MUL_MAT_ID" else self.shape[2]

    def share_read(self, n_tokens: int) -> float:
        """Share of the weight that n_tokens tokens need. Each token uses n of E experts at random, so together they
        need 1 - (1 - n/E)^n_tokens of them on average."""
        if self.op != "MUL_MAT_ID":
            return 1.0
        return 1.0 - max(0.0, 1 - self.n_expert_used / self.shape[2]) ** n_tokens

    def bytes_read(self, n_tokens: int) -> float:
        """Weight bytes of one mul-mat."""
        return self.bytes * self.share_read(n_tokens)

    def flops(self, n_tokens: int) -> int:
        """Multiplications and additions of one mul-mat."""
        k, n, _ = self.shape
        return 2 * k * n * self.matrices_per_token * n_tokens


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One ggml device."""

    name: str  # CUDA0, Vulkan0, RPC0, CPU, ...
    description: str
    backend: str  # registry name: CUDA, Vulkan, RPC, CPU
    type: str  # CPU, GPU, IGPU, ACCEL
    memory_total: int
    memory_free: int
    asynchronous: bool
    host_buffer: bool
    events: bool


Samples = Annotated[tuple[Positive, ...], Mark.NOT_EMPTY]
"""Seconds of single runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: a mul-mat at a batch size, on a device, in a layout."""

    device: str
    layout: str  # CPU, CPU_REPACK, AMX on the CPU; "device" on a device
    mul_mat: Annotated[MulMat, Mark.FLAT]
    n_tokens: Count
    working_set_bytes: Count  # the weights the runs rotate through; beyond the cache where the model is

    @property
    def key(self) -> Case:
        """The case alone, without what was found of it."""
        return Case(self.device, self.layout, self.mul_mat, self.n_tokens, self.working_set_bytes)

    def measured(self, samples: Sequence[float], seconds: float) -> ProfileCase:
        return ProfileCase(
            self.device, self.layout, self.mul_mat, self.n_tokens, self.working_set_bytes, seconds, tuple(samples)
        )

    def skipped(self, reason: str) -> SkippedCase:
        return SkippedCase(self.device, self.layout, self.mul_mat, self.n_tokens, self.working_set_bytes, reason)


@dataclass(frozen=True, slots=True)
class ProfileCase(Case):
    """A case that was timed. `seconds` is the median of `samples`, of one mul-mat each."""

    seconds: Positive
    samples: Samples

    JSON_KEYS: ClassVar = (
        "device", "layout", "type", "shape", "n_expert_used", "n_tokens", "seconds", "samples", "gb_per_s", "gflops",
        "working_set_bytes", "op",
    )  # fmt: skip

    @property
    def gb_per_s(self) -> float:
        """Weight bytes read (active experts only) / seconds / 1e9."""
        return self.mul_mat.bytes_read(self.n_tokens) / self.seconds / 1e9

    @property
    def gflops(self) -> float:
        return self.mul_mat.flops(self.n_tokens) / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class SkippedCase(Case):
    """A case that was left out on purpose, and why: unsupported there, too slow to matter, or it crashed."""

    reason: str

    JSON_KEYS: ClassVar = (
        "device", "layout", "type", "shape", "n_expert_used", "n_tokens", "working_set_bytes", "reason", "op",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearFit:
    """t = alpha_s + beta_s_per_byte * bytes (ScheInfer Eq. 3), least squares; r2 of the fit; the points behind it."""

    alpha_s: NotNegative
    beta_s_per_byte: NotNegative
    r2: float  # below 0 where the line fits worse than a constant
    points: Annotated[  # (bytes, median seconds); a difference of two times may be negative
        tuple[tuple[int, float], ...], Mark.REQUIRED, Expect("must be pairs [bytes, seconds]")
    ] = ()

    def seconds(self, n_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * n_bytes


@dataclass(frozen=True, slots=True)
class RestShape:
    """What the cost of a layer's rest depends on besides the batch and the KV depth."""

    n_embd: Count
    n_head: Count
    n_head_kv: Count
    n_embd_head_k: Count
    n_embd_head_v: Count
    n_ff: Count
    flash_attn: bool
    type_k: Annotated[str, Mark.OMIT_DEFAULT] = "f16"  # of the KV cache, as llama.cpp's -ctk names it
    type_v: Annotated[str, Mark.OMIT_DEFAULT] = "f16"


@dataclass(frozen=True, slots=True)
class RestCase:
    """What one transformer layer does beside its weight-bearing mul-mats (norms, rope, KV write, attention, GLU, adds)
    for this model's head shape, timed on one device at one batch size and KV depth."""

    device: str
    n_tokens: Count
    n_kv: Count
    seconds: Positive
    samples: Samples
    shape: Annotated[RestShape | None, Mark.FLAT] = None  # None: not stated

    JSON_KEYS: ClassVar = (
        "device", "n_tokens", "n_kv", "seconds", "n_embd", "n_head", "n_head_kv", "n_embd_head_k", "n_embd_head_v",
        "n_ff", "flash_attn", "type_k", "type_v", "samples",
    )  # fmt: skip

    @property
    def key(self) -> tuple[str, int, int, RestShape | None]:
        """What identifies it in a profile."""
        return self.device, self.n_tokens, self.n_kv, self.shape


Worker = Literal["cpu", "device", "link"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Two kinds of work at the same time: the CPU's mul-mats, the device's, copies to the device. GB/s = 1e9 bytes per
    second of weights multiplied or of bytes copied."""

    first: Worker
    second: Worker
    n_tokens: Count  # of the mul-mats
    first_alone_gb_per_s: Positive
    second_alone_gb_per_s: Positive
    first_with_second_gb_per_s: NotNegative
    second_with_first_gb_per_s: NotNegative
    assumed: Annotated[bool, Mark.OMIT_DEFAULT] = False  # made from the `contention` of an old file (profile/store.py)

    @property
    def key(self) -> tuple[Worker, Worker, int]:
        """What identifies it in a profile."""
        return self.first, self.second, self.n_tokens


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured experiment: what was timed, on what, and every raw sample. As JSON: profile/store.py."""

    version: int
    fingerprint: dict[str, Any]  # CPU, threads, device, driver, ggml version, power state, ...
    device: str  # name of the device, CPU_DEVICE if there is none
    cases: tuple[ProfileCase, ...]
    rest: tuple[RestCase, ...]
    link: dict[str, LinearFit]  # h2d_pinned, h2d_pageable, d2h_pinned, d2h (pageable): of one copy; issue_pinned,
    # issue_pageable: for how long an asynchronous h2d holds up its caller; empty without a device
    boundary: LinearFit | None  # one CPU -> device -> CPU excursion of a graph in ggml's scheduler, by bytes each way;
    # to pinned memory where there is a d2h_pinned, else (older files) to pageable memory
    launch_s: NotNegative  # one graph launch + synchronise on the device
    warnings: tuple[str, ...]
    skipped: Annotated[tuple[SkippedCase, ...], Mark.REQUIRED] = ()
    sharing: Annotated[tuple[Sharing, ...], Mark.OMIT_DEFAULT] = ()
    # share of a copy on one stream that a result of another waits for; None: not known
    copy_wait: Annotated[float | None, Mark.NOT_NEGATIVE, Mark.OMIT_DEFAULT] = None
    # that queueing a graph takes of its caller's time; None: not known
    launch_issue_s: Annotated[float | None, Mark.NOT_NEGATIVE, Mark.OMIT_DEFAULT] = None

    @property
    def contention(self) -> Sharing | None:
        """CPU and link at the same time, which share the DRAM, at the smallest batch size."""
        pairs = [one for one in self.sharing if (one.first, one.second) == ("cpu", "link")]
        return min(pairs, key=lambda one: one.n_tokens, default=None)

    @property
    def is_pinned(self) -> bool:
        """Whether the device takes copies from pinned host memory; so it is assumed of one that was not asked."""
        return bool(self.fingerprint.get("device_host_buffer", True))

    @property
    def is_blocking(self) -> bool:
        """Whether the CPU waits for every copy to the device, and for all that it computes."""
        return self.fingerprint.get("device_asynchronous") is False


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
    benefit_s_per_byte: float | None  # B = (T_c - T_g - T') / M
    affinity: float  # G: B min-max normalised to 0..1
    rank: int  # 1 is placed first
    backend: Backend  # split: it lies on both, or is streamed
    gg: float = 0.0  # fractions of the weight, as in OperatorPlacement
    cg: float = 0.0
    cc: float = 1.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted times of a plan for its workload, seconds."""

    ttft_s: float
    tpot_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a plan is held against, priced by the same cost model."""

    name: str  # "stock --fit", "all CPU"
    predicted: Predicted


@dataclass(frozen=True, slots=True)
class Measured:
    """What a report's times were measured on, and when; empty where the profile does not say."""

    cpu: str
    device: str  # as ggml describes it
    at: str  # ISO 8601, UTC


@dataclass(frozen=True, slots=True)
class AffinityReport:
    """`oallama affinity-report`: every operator's affinity and place, how the iteration went, and the ledger."""

    model: ModelInfo
    device: str
    phase: Phase
    iterations: int
    converged: bool  # False: a cycle was detected and the best plan of it was kept
    operators: tuple[Affinity, ...]  # in rank order
    memory: MemoryLedger
    predicted: Predicted
    notes: tuple[str, ...] = ()  # what was lowered or left out to make it fit, in sentences
    workload: Workload | None = None  # of predicted and baselines
    baselines: tuple[Baseline, ...] = ()
    measured: Measured | None = None
    policy: str = "oato"  # that says where operators are
    of_plan: bool = False  # as a plan has them; else as OATO's search for the phase
    token_assignment: tuple[tuple[int, int], ...] = ()  # as in PlanRecord
    streaming: StreamSettings | None = None


@dataclass(frozen=True, slots=True)
class OperatorPlacement:
    """Fractions of one operator's weight; gg + cg + cc == 1."""

    name: Line
    gg: float
    cg: float
    cc: float
    # CPU buffer type of the cc part; None: llama.cpp's own choice
    layout: Annotated[Line | None, Mark.OMIT_DEFAULT] = None


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """What the device will hold, bytes. limit = fill * capacity; spare = limit - everything placed there."""

    capacity: int
    fill: float
    limit: int
    weights_gpu: int
    weights_host: int
    kv: int
    compute: int
    staging: int
    spare: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What a plan is made for, in tokens."""

    n_prompt: Count32
    n_gen: Count32
    n_ctx: Count32
    n_ubatch: Size32 = 512


FlashAttention = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Attention:
    """How attention runs in a llama_context, and the types of its KV cache. flash_attn "auto": llama.cpp decides, which
    turns it on where every device has it."""

    flash_attn: Annotated[FlashAttention, Mark.REQUIRED] = "auto"
    type_k: Annotated[str, Mark.REQUIRED] = "f16"  # as llama.cpp's -ctk names it
    type_v: Annotated[str, Mark.REQUIRED] = "f16"


PrefetchMode = Literal["ahead", "layer"]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a plan's streamed slices (cg > 0, n_g > 0) are held and copied."""

    n_slots: Annotated[int, Mark.REQUIRED] = 2  # of the ring of blocks in device memory that copies go to
    # copy as soon as a slot is free, or only within a layer (ScheInfer's pipeline)
    prefetch: Annotated[PrefetchMode, Mark.REQUIRED] = "ahead"
    # CC lies in its layout, and a second time in plain memory, which is streamed for n_g
    kept_twice: Annotated[bool, Mark.REQUIRED] = False
    piece_bytes: Count = 0  # asked for at once at most, so that other copies get through; 0: any number
    link_bytes_per_s: Count = 0  # no more is asked for ahead than the link copies meanwhile; 0: no limit


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The plan. plan/plan.py adds reading, writing and checks."""

    model_path: str
    model_fingerprint: str
    machine_fingerprint: str
    device: str  # a ggml device name or the --device spec that makes it; "none"
    policy: str
    workload: Workload
    operators: tuple[OperatorPlacement, ...]
    n_gpu_layers: int
    memory: MemoryLedger
    predicted: Predicted | None  # None: made without a profile
    token_assignment: tuple[tuple[int, int], ...] = ()  # (n_tokens, n_g)
    streaming: StreamSettings | None = None  # None: nothing was said of it, the defaults hold
    attention: Attention | None = None  # that it was made for; None: nothing was said of it
    notes: tuple[str, ...] = ()  # of the planner: what was lowered or left out to make it fit, in sentences
    version: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
