"""The records that pass between rooms. Frozen; bytes are int, times are float seconds, shapes are ggml's (ne[0] first).

Who fills what: model/ makes ModelInfo and Operator, profile/ makes Profile, place/ makes Affinity and Placement,
plan/ makes Plan out of them, run/ consumes a Plan. Nobody changes a record it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Shape = tuple[int, int, int]  # [K, N, E]: ne[0], ne[1], ne[2] of a weight
Backend = Literal["GPU", "CPU"]
Phase = Literal["decode", "prefill", "mixed"]

CPU_DEVICE = "CPU"
"""Name of ggml's CPU device, and of the side that computes CC."""

SPLIT_LAYOUT = "OALLAMA_Split"
"""The split backend's buffer type: a weight in it lies partly in host memory, partly on the device."""

DEVICE_LAYOUT = "device"
"""`layout` of a case measured on a device: the device's own default buffer type."""


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
    paths: tuple[str, ...]  # every part, in order; (path,) where the file is not split
    fingerprint: str  # sha256 over metadata and tensor headers, not over weights


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


@dataclass(frozen=True, slots=True)
class ProfileCase:
    """One distinct mul-mat, timed on one device in one layout. `seconds` is the median of `samples`."""

    device: str
    layout: str  # CPU, CPU_REPACK, AMX on the CPU; "device" on a device
    type: str
    shape: Shape
    n_expert_used: int
    n_tokens: int
    seconds: float
    samples: tuple[float, ...]  # seconds of one mul-mat each
    gb_per_s: float  # weight bytes read / seconds / 1e9 (active experts only)
    gflops: float
    working_set_bytes: int = 0  # the weights the runs rotated through; beyond the cache where the model is
    op: str = "MUL_MAT"  # MUL_MAT_ID: routed to n_expert_used of E experts; MUL_MAT with E > 1: all E matrices are used


@dataclass(frozen=True, slots=True)
class LinearFit:
    """t = alpha_s + beta_s_per_byte * bytes (ScheInfer Eq. 3), least squares; r2 of the fit; the points behind it."""

    alpha_s: float
    beta_s_per_byte: float
    r2: float
    points: tuple[tuple[int, float], ...] = ()  # (bytes, median seconds)

    def seconds(self, n_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * n_bytes


@dataclass(frozen=True, slots=True)
class RestShape:
    """What the cost of a layer's rest depends on besides the batch and the KV depth."""

    n_embd: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_ff: int
    flash_attn: bool
    type_k: str = "f16"  # of the KV cache, as llama.cpp's -ctk names it
    type_v: str = "f16"


@dataclass(frozen=True, slots=True)
class RestCase:
    """What one transformer layer does beside its weight-bearing mul-mats (norms, rope, KV write, attention, GLU, adds)
    for this model's head shape, timed on one device at one batch size and KV depth."""

    device: str
    n_tokens: int
    n_kv: int
    seconds: float
    samples: tuple[float, ...]
    shape: RestShape | None = None  # None: not stated


@dataclass(frozen=True, slots=True)
class SkippedCase:
    """A case that was left out on purpose, and why: unsupported there, too slow to matter, or it crashed."""

    device: str
    layout: str
    type: str
    shape: Shape
    n_expert_used: int
    n_tokens: int
    working_set_bytes: int
    reason: str
    op: str = "MUL_MAT"


@dataclass(frozen=True, slots=True)
class Contention:
    """DRAM shared by the CPU kernel and the link (anchors 2.2), GB/s = 1e9 bytes per second."""

    cpu_alone_gb_per_s: float
    link_alone_gb_per_s: float
    cpu_with_link_gb_per_s: float
    link_with_cpu_gb_per_s: float


Worker = Literal["cpu", "device", "link"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Two kinds of work at the same time: the CPU's mul-mats, the device's, copies to the device. GB/s = 1e9 bytes per
    second of weights multiplied or of bytes copied."""

    first: Worker
    second: Worker
    n_tokens: int  # of the mul-mats
    first_alone_gb_per_s: float
    second_alone_gb_per_s: float
    first_with_second_gb_per_s: float
    second_with_first_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured experiment: what was timed, on what, and every raw sample. As JSON: profile/store.py."""

    version: int
    fingerprint: dict[str, Any]  # CPU, threads, device, driver, ggml version, power state, ...
    device: str  # name of the device, CPU_DEVICE if there is none
    cases: tuple[ProfileCase, ...]
    rest: tuple[RestCase, ...]
    link: dict[str, LinearFit]  # h2d_pinned, h2d_pageable, d2h: of one copy; issue_pinned, issue_pageable: for how long
    # an asynchronous h2d holds up its caller; empty without a device
    boundary: (
        LinearFit | None
    )  # one CPU -> device -> CPU excursion of a graph in ggml's scheduler, by bytes carried each way
    contention: Contention | None
    launch_s: float  # one graph launch + synchronise on the device
    warnings: tuple[str, ...]
    skipped: tuple[SkippedCase, ...] = ()
    sharing: tuple[Sharing, ...] = ()
    copy_wait: float | None = None  # share of a copy on one stream that a result of another waits for; None: not known
    launch_issue_s: float | None = None  # that queueing a graph takes of its caller's time; None: not known

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
    backend: Backend


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted times of a plan for its workload, seconds."""

    ttft_s: float
    tpot_s: float
    total_s: float


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


@dataclass(frozen=True, slots=True)
class OperatorPlacement:
    """Fractions of one operator's weight; gg + cg + cc == 1 (DESIGN 1)."""

    name: str
    gg: float
    cg: float
    cc: float
    layout: str | None = None  # CPU buffer type of the cc part; None: llama.cpp's own choice


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

    n_prompt: int
    n_gen: int
    n_ctx: int
    n_ubatch: int = 512


FlashAttention = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Attention:
    """How attention runs in a llama_context, and the types of its KV cache. flash_attn "auto": llama.cpp decides, which
    turns it on where every device has it."""

    flash_attn: FlashAttention = "auto"
    type_k: str = "f16"  # as llama.cpp's -ctk names it
    type_v: str = "f16"


PrefetchMode = Literal["ahead", "layer"]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a plan's streamed slices (cg > 0, n_g > 0) are held and copied."""

    n_slots: int = 2  # of the ring of blocks in device memory that copies go to
    prefetch: PrefetchMode = "ahead"  # copy as soon as a slot is free, or only within a layer (ScheInfer's pipeline)
    kept_twice: bool = False  # CC lies in its layout, and a second time in plain memory, which is streamed for n_g


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The plan (contract: `oallama plan`). plan/plan.py adds reading, writing and checks."""

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
