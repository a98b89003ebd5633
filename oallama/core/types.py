"""The records that packages exchange: models and operators, devices, plans. Frozen; bytes are int, times are float
seconds, shapes are ggml's (ne[0] first).

Who fills what: model/ makes ModelInfo and Operator, profile/ makes Profile (core/profile.py), planner/ makes a Plan
(plan/plan.py) and Affinity (core/affinity_report.py), run/ consumes a Plan. Nobody changes a record it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from oallama.core.codec import Count, Count32, Line, Mark, Size, Size32
from oallama.core.ggml_types import GGML_TYPES_BY_NAME

Shape = tuple[int, int, int]  # [K, N, E]: ne[0], ne[1], ne[2] of a weight
Backend = Literal["GPU", "CPU", "split"]
Phase = Literal["decode", "prefill", "mixed"]

FIRST_ROLES = ("per_layer_model_proj", "altup_proj")
"""Roles of operators outside layers that run before the first layer, over all tokens of a batch."""

CPU_DEVICE = "CPU"
"""Name of ggml's CPU device, and of the side that computes CC."""

SPLIT_LAYOUT = "OALLAMA_Split"
"""The split back end's buffer type, for weights that are partly in host memory, partly on the device."""

DEVICE_LAYOUT = "device"
"""`layout` of a case measured on a device: the device's own default buffer type."""

PLAIN_LAYOUT = "CPU"
"""`layout` of weights in ggml's CPU buffer type, not repacked."""

PLAIN_BUFT = "OALLAMA_CPU"
"""The split back end's name for plain host memory; in stock llama.cpp's -ot `CPU` means any CPU layout."""

FORCED_PLAIN_LAYOUT = "CPU_Mapped"
"""ggml's second buffer type for plain memory. An override to it forces plain memory; with one to PLAIN_LAYOUT llama.cpp
may choose another CPU layout."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model, with its size and time when it was read."""

    path: str
    n_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Hyperparameters as in the GGUF; for per-layer lists their maximum."""

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
    files: tuple[ModelFile, ...] = ()  # all parts in order, as they were when checked
    has_vocabulary: bool = True
    chat_template: str | None = field(default=None, repr=False)


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
    input_f32: bool = False  # llama.cpp requires an F32 input, for which many devices lack a MUL_MAT_ID kernel
    by_sequence: bool = False  # x is [K, n_tokens, n_sequences]
    unnormed: bool = False  # attention of the layer's input as it is: the layer has no weights of a norm before it
    adjoins: bool = False  # of attention, or an FFN of the layer's input: nothing is computed since the one before

    @property
    def routed(self) -> bool:
        """Whether each token is multiplied with some of its matrices, experts, that a router chooses."""
        return self.op == "MUL_MAT_ID"

    @property
    def is_last(self) -> bool:
        """Whether it runs after the last layer, over the tokens whose logits are wanted (the output)."""
        return self.layer is None and self.role not in FIRST_ROLES

    def layer_in(self, n_layer: int) -> int:
        """The layer that it is placed with: its own; 0 if it runs before the layers; n_layer if after them."""
        return self.layer if self.layer is not None else n_layer if self.is_last else 0

    @property
    def mul_mat(self) -> MulMat:
        """The properties that its time depends on."""
        return MulMat(self.op, self.type, self.shape, self.n_expert_used if self.routed else 1, self.input_f32)


def n_layer_of(operators: Iterable[Operator]) -> int:
    """The number of layers of these operators."""
    return max((operator.layer + 1 for operator in operators if operator.layer is not None), default=0)


LEAST_SPREAD, SPREAD_EXPERTS = 0.25, 32
"""Shape of the distribution in MulMat.use_spread: 0.25 for 128 experts and more, fitted to published runs
(docs/real-card.md; 512 tokens then need 90 of 128, and ggml-org/llama.cpp pull request 15346 shows 72 to 95). There are
no data for fewer experts, except that 8 are used almost equally."""


@dataclass(frozen=True, slots=True)
class MulMat:
    """w [K, N, E] of a ggml type times activations. Operators with equal MulMats take the same time."""

    op: str  # MUL_MAT: all E matrices are used; MUL_MAT_ID: each token is routed to n_expert_used of them
    type: str
    shape: tuple[Size, Size, Size]
    n_expert_used: Count = 1
    input_f32: Annotated[bool, Mark.OMIT_DEFAULT] = False

    @property
    def routed(self) -> bool:
        return self.op == "MUL_MAT_ID"

    @property
    def n_routed(self) -> int:
        """Number of experts that each token is routed to; 0 for MUL_MAT."""
        return self.n_expert_used if self.routed else 0

    @property
    def bytes(self) -> int:
        """Bytes of the whole weight. Raises KeyError for a type that ggml does not have."""
        k, n, e = self.shape
        return GGML_TYPES_BY_NAME[self.type].n_bytes(k * n * e)

    @property
    def matrices_per_token(self) -> int:
        """Number of [K, N] matrices that one token is multiplied with."""
        return self.n_routed or self.shape[2]

    def share_read(self, n_tokens: int) -> float:
        """Share of the weight that n_tokens independent tokens read. Each uses n of E experts at random, so together
        they use 1 - (1 - n/E)^n_tokens of them on average."""
        if not self.routed:
            return 1.0
        return 1.0 - max(0.0, 1 - self.n_expert_used / self.shape[2]) ** n_tokens

    def share_routed(self, n_tokens: int) -> float:
        """Share of the weight that n_tokens tokens of a prompt read. Some experts are used far more than others, so it
        is less than share_read. Uses are assumed to follow a gamma distribution."""
        if not self.routed:
            return 1.0
        share, spread = self.n_expert_used / self.shape[2], self.use_spread
        idle: float = (1.0 + n_tokens * share / spread) ** -spread
        return max(share, 1.0 - idle)

    @property
    def use_spread(self) -> float:
        """Shape of the gamma distribution that uses of experts follow."""
        return max(LEAST_SPREAD, SPREAD_EXPERTS / self.shape[2])

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


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted times of a plan for its workload, seconds."""

    ttft_s: float
    tpot_s: float
    total_s: float

    @classmethod
    def of(cls, ttft_s: float, tpot_s: float, n_gen: int) -> Predicted:
        """From the seconds of the prompt and of a token, for n_gen tokens."""
        return cls(ttft_s, tpot_s, ttft_s + n_gen * tpot_s)

    @classmethod
    def with_drafts(cls, prompt_s: float, token_s: float, workload: Workload) -> Predicted:
        """From the model's seconds for the prompt and per token that decode steps yield; adds those of a draft
        model."""
        step = workload.step
        return cls.of(prompt_s + step.draft_prompt_s, token_s + step.draft_s / step.n_yielded, workload.n_gen)

    def over(self, phase: Phase) -> float:
        """Seconds of the passes of a phase: one token, the prompt, or the whole run."""
        return {"decode": self.tpot_s, "prefill": self.ttft_s, "mixed": self.total_s}[phase]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A relative speed (above 1: faster) with its confidence interval."""

    value: float
    low: float
    high: float
    n_pairs: int


def is_split(cc: float, cg: float, gg: float, n_hot: int) -> bool:
    """Whether a weight is split: streamed, computed on both sides, or with hot experts. n_hot: number of hot
    experts."""
    return bool(cg or n_hot or (cc and gg))


@dataclass(frozen=True, slots=True)
class OperatorPlacement:
    """Fractions of one operator's weight; gg + cg + cc == 1."""

    name: Line
    gg: float
    cg: float
    cc: float
    # CPU buffer type of the cc part; None: llama.cpp's choice
    layout: Annotated[Line | None, Mark.OMIT_DEFAULT] = None
    # experts that the device holds whole and computes, ascending; the host keeps all experts, so cc is 1
    hot_experts: Annotated[tuple[Count, ...], Mark.OMIT_DEFAULT] = ()
    # (cc, cg, gg) in elements along the axis of the cut (model/cut.py); None: only fractions are known
    cut: Annotated[tuple[Count, Count, Count] | None, Mark.OMIT_DEFAULT] = field(default=None, compare=False)
    # number of the plan's device, from 0, that has its layer (norms, KV cache), and this operator's cg and gg
    device: Annotated[Count, Mark.OMIT_DEFAULT] = 0

    @classmethod
    def of_cut(
        cls, name: str, cut: tuple[int, int, int], layout: str | None = None, hot_experts: tuple[int, ...] = ()
    ) -> OperatorPlacement:
        """The row of a cut: (cc, cg, gg) in elements."""
        cc, cg, gg = (n / sum(cut) for n in cut)
        return cls(name, gg, cg, cc, layout if cut[0] else None, hot_experts, cut)

    @property
    def backend(self) -> Backend:
        """The side that computes it."""
        if is_split(self.cc, self.cg, self.gg, len(self.hot_experts)):
            return "split"
        return "GPU" if self.gg else "CPU"


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes that the device will hold. limit = min(fill * capacity, capacity - runtime); spare = limit - weights_gpu -
    kv - compute - staging. runtime: taken by instances of the device's back end, outside the limit. devices: one record
    for each of several devices, in their order, without weights_host; this record is their sum."""

    capacity: int
    fill: float
    limit: int
    weights_gpu: int
    weights_host: int
    kv: int
    compute: int
    staging: int
    spare: int
    runtime: Annotated[int, Mark.OMIT_DEFAULT] = 0
    devices: Annotated[tuple[MemoryBreakdown, ...], Mark.OMIT_DEFAULT] = ()

    @property
    def fits(self) -> bool:
        """Whether no device has negative spare memory."""
        return all(device.spare >= 0 for device in self.devices or (self,))


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The tokens that the model computes together in one decode step: for each request in flight its last token and
    n_draft drafts, of which `accepted` are expected to be kept. n_slots: requests that the server has room for, each
    with a recurrent state. mtp: the model's MTP layer makes the drafts; then each slot keeps a snapshot of that
    state for each draft."""

    n_parallel: Annotated[Size32, Mark.REQUIRED] = 1  # requests in flight
    n_draft: Annotated[Count32, Mark.REQUIRED] = 0  # for each request
    accepted: Annotated[float, Mark.REQUIRED] = 0.0
    draft_s: Annotated[float, Mark.REQUIRED] = 0.0  # seconds of the draft model per step
    draft_prompt_s: Annotated[float, Mark.REQUIRED] = 0.0  # seconds in which the draft model reads the prompt
    n_slots: Annotated[Size32, Mark.OMIT_DEFAULT] = 1
    mtp: Annotated[bool, Mark.OMIT_DEFAULT] = False
    # each draft also takes the model's output, which draft_s does not count
    shares_output: Annotated[bool, Mark.OMIT_DEFAULT] = False

    @property
    def n_tokens(self) -> int:
        return self.n_parallel * (self.n_draft + 1)

    @property
    def n_yielded(self) -> float:
        """Tokens that a step is expected to add to each answer."""
        return self.accepted + 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The run that a plan is made for, in tokens."""

    n_prompt: Count32
    n_gen: Count32
    n_ctx: Count32
    n_ubatch: Size32 = 512
    n_past: Annotated[Count32, Mark.OMIT_DEFAULT] = 0  # in the KV cache before the prompt
    step: Annotated[DecodeStep, Mark.OMIT_DEFAULT] = DecodeStep()
    # tokens of each request whose logits are wanted at once; 0: all tokens of a batch, e.g. for embeddings
    n_outputs: Annotated[Count32, Mark.OMIT_DEFAULT] = 1

    @property
    def n_outputs_max(self) -> int:
        """Tokens of a batch for whose logits llama-server reserves memory: for each slot its drafts and one more; 0:
        all (b11549, server-context.cpp, server_output_limits)."""
        return self.step.n_slots * max(self.n_outputs, self.step.n_draft + 1) if self.n_outputs else 0

    @property
    def largest_batch(self) -> int:
        """Tokens of the largest micro-batch: never longer than the context."""
        return min(self.n_ubatch, self.n_ctx)


FlashAttention = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class Attention:
    """How attention runs in a llama_context, and the types of its KV cache. flash_attn "auto": llama.cpp turns it on if
    every device supports it."""

    flash_attn: Annotated[FlashAttention, Mark.REQUIRED] = "auto"
    type_k: Annotated[str, Mark.REQUIRED] = "f16"  # as llama.cpp's -ctk names it
    type_v: Annotated[str, Mark.REQUIRED] = "f16"


@dataclass(frozen=True, slots=True)
class StockOptions:
    """Options of a stock llama.cpp configuration besides -ngl and -ot. A plan that has them is one."""

    # --no-host: host weights are in the CPU's layouts, not in the device's pinned memory
    no_host: Annotated[bool, Mark.REQUIRED] = False
    moe_cache_bytes: Annotated[Count, Mark.REQUIRED] = 0  # --moe-cache-mib: device memory for recently used experts
    n_cpu_moe: Annotated[Count, Mark.REQUIRED] = 0  # -ncmoe: number of first layers whose experts are on the host


@dataclass(frozen=True, slots=True)
class Draft:
    """How llama-server makes drafts, at most n_draft per request and decode step. device_bytes, host_bytes: memory of a
    draft model; that of draft-mtp is part of the plan's memory. accepted: the share of steps in which the first, the
    second, … draft is expected to be kept."""

    # --spec-type: a draft model, the model's MTP layer, or repeated text
    kind: Annotated[Literal["draft-simple", "draft-mtp", "ngram-simple"], Mark.REQUIRED]
    n_draft: Annotated[Size32, Mark.REQUIRED]
    model_path: Annotated[str, Mark.OMIT_DEFAULT] = ""  # of the draft model; "": none
    on_device: Annotated[bool, Mark.OMIT_DEFAULT] = False  # whether the whole draft model is on the device
    device_bytes: Annotated[Count, Mark.OMIT_DEFAULT] = 0
    host_bytes: Annotated[Count, Mark.OMIT_DEFAULT] = 0
    accepted: Annotated[tuple[float, ...], Mark.OMIT_DEFAULT] = ()


NGRAM = Draft("ngram-simple", 48)
"""Drafts of repeated text, as many as llama.cpp makes by default."""


PrefetchMode = Literal["ahead", "layer"]
ExchangeMode = Literal["off", "idle", "eager"]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of the ring that holds streamed slices (cg > 0, n_g > 0), and of the copies to it."""

    n_slots: Annotated[int, Mark.REQUIRED] = 2  # of the ring
    # copy as soon as a slot is free, or only within a layer (ScheInfer's pipeline)
    prefetch: Annotated[PrefetchMode, Mark.REQUIRED] = "ahead"
    # CC is kept in its layout and a second time in plain memory, which is streamed for n_g, or exchanged
    kept_twice: Annotated[bool, Mark.REQUIRED] = False
    piece_bytes: Count = 0  # most bytes of a request, so that other copies pass between; 0: no limit
    link_bytes_per_s: Count = 0  # speed of the link, which limits requests ahead; 0: no limit
    ring_bytes: Count = 0  # 0: n_slots times the largest block
    # idle: hot experts follow the conversation while the link is idle, and missed ones are fetched if that is faster
    # than computing them; eager: also while the link is busy, for experiments
    exchange: Annotated[ExchangeMode, Mark.OMIT_DEFAULT] = "off"


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """Settings of the split back end for one device. token_assignment: n_g by batch size; streaming None: defaults;
    residents: whether split blocks live on the device if their neighbours are there."""

    token_assignment: tuple[tuple[Count, Count], ...] = ()
    streaming: Annotated[StreamSettings | None, Mark.OMIT_DEFAULT] = None
    residents: Annotated[bool, Mark.OMIT_DEFAULT] = True


def settings_of(settings: Sequence[SplitSettings], device: int) -> SplitSettings:
    """The settings of one device; the defaults if the list is shorter."""
    return settings[device] if device < len(settings) else SplitSettings()


def devices_with_n_g(settings: Sequence[SplitSettings]) -> frozenset[int]:
    """The devices that compute CC for some tokens of a batch (n_g)."""
    return frozenset(device for device, device_settings in enumerate(settings) if device_settings.token_assignment)
