"""The records of a profile: cases, devices, and all raw samples. Frozen; times are float seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from oallama.core.codec import Count, Mark, NotNegative, Positive, Size
from oallama.core.ggml_types import bytes_per_element
from oallama.core.types import MulMat

Samples = Annotated[tuple[Positive, ...], Mark.NOT_EMPTY]
"""Seconds of single runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case to measure: a mul-mat at a batch size, on a device, in a layout."""

    device: str
    layout: str  # CPU, CPU_REPACK, AMX on the CPU; "device" on a device
    mul_mat: Annotated[MulMat, Mark.FLAT]
    n_tokens: Size
    working_set_bytes: Count  # weights through which the runs rotate; larger than the cache if the model is

    @property
    def key(self) -> Case:
        """The case without its result."""
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

    JSON_KEYS: ClassVar[tuple[str, ...]] = (
        "device", "layout", "type", "shape", "n_expert_used", "n_tokens", "seconds", "samples", "gb_per_s", "gflops",
        "working_set_bytes", "op", "input_f32",
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
    """A skipped case, and why: unsupported, too slow to matter, or crashed."""

    reason: str

    JSON_KEYS: ClassVar[tuple[str, ...]] = (
        "device", "layout", "type", "shape", "n_expert_used", "n_tokens", "working_set_bytes", "reason", "op",
        "input_f32",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearFit:
    """t = alpha_s + beta_s_per_byte * bytes (ScheInfer Eq. 3), least squares; r2 of the fit; the points behind it."""

    alpha_s: NotNegative
    beta_s_per_byte: NotNegative
    r2: float  # below 0 where the line fits worse than a constant
    # (bytes, median seconds); a difference of two times may be negative
    points: Annotated[tuple[tuple[int, float], ...], Mark.REQUIRED] = ()

    def seconds(self, n_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * n_bytes


@dataclass(frozen=True, slots=True)
class NonMatmulShape:
    """The shape of a layer's heads, on which the time of its non-matmul work depends, besides batch and KV depth."""

    n_embd: Count
    n_head: Count
    n_head_kv: Count
    n_embd_head_k: Count
    n_embd_head_v: Count
    n_ff: Count
    flash_attn: bool
    type_k: Annotated[str, Mark.OMIT_DEFAULT] = "f16"  # of the KV cache, as llama.cpp's -ctk names it
    type_v: Annotated[str, Mark.OMIT_DEFAULT] = "f16"

    def cache_bytes(self, n_kv: int = 1) -> tuple[float, float]:
        """Bytes of keys and of values of n_kv positions in one layer's KV cache."""
        keys = n_kv * self.n_head_kv * self.n_embd_head_k * bytes_per_element(self.type_k)
        return keys, n_kv * self.n_head_kv * self.n_embd_head_v * bytes_per_element(self.type_v)


@dataclass(frozen=True, slots=True)
class NonMatmulCase:
    """A layer's non-matmul work, timed on one device at one batch size and KV depth: all work except its weight-bearing
    mul-mats (norms, rope, KV write, attention, GLU, adds), for this model's head shape."""

    device: str
    n_tokens: Size
    n_kv: Count
    seconds: Positive
    shape: Annotated[NonMatmulShape, Mark.FLAT]
    samples: Samples

    @property
    def key(self) -> tuple[str, int, int, NonMatmulShape]:
        return self.device, self.n_tokens, self.n_kv, self.shape


Worker = Literal["cpu", "device", "link"]


@dataclass(frozen=True, slots=True)
class Contention:
    """Two kinds of work alone and at the same time: mul-mats of the CPU, of the device, copies to the device. GB/s: 1e9
    bytes of multiplied weights or of copies per second."""

    first: Worker
    second: Worker
    n_tokens: Size  # of the mul-mats
    first_alone_gb_per_s: Positive
    second_alone_gb_per_s: Positive
    first_with_second_gb_per_s: NotNegative
    second_with_first_gb_per_s: NotNegative

    @property
    def key(self) -> tuple[Worker, Worker, int]:
        return self.first, self.second, self.n_tokens


@dataclass(frozen=True, slots=True)
class Profile:
    """A measurement of a machine: cases, device, and all raw samples. As JSON: profile/store.py."""

    version: int
    fingerprint: dict[str, Any]  # CPU, threads, device, driver, ggml version, power state, ...
    device: str  # name of the device, CPU_DEVICE if there is none
    cases: tuple[ProfileCase, ...]
    rest: tuple[NonMatmulCase, ...]
    link: dict[str, LinearFit]  # h2d_pinned, h2d_pageable, d2h_pinned, d2h (pageable): of one copy; issue_pinned,
    # issue_pageable: for how long an asynchronous h2d holds up its caller; empty without a device
    boundary: LinearFit | None  # one CPU -> device -> CPU excursion of a graph in ggml's scheduler, by bytes each way;
    # to pinned memory where there is a d2h_pinned, else (older files) to pageable memory
    launch_s: NotNegative  # one graph launch + synchronise on the device
    warnings: tuple[str, ...]
    skipped: Annotated[tuple[SkippedCase, ...], Mark.REQUIRED] = ()
    sharing: Annotated[tuple[Contention, ...], Mark.OMIT_DEFAULT] = ()
    # share of a copy on one stream that a result of another waits for; None: not known
    copy_wait: Annotated[float | None, Mark.NOT_NEGATIVE, Mark.OMIT_DEFAULT] = None
    # that queueing a graph takes of its caller's time; None: not known
    launch_issue_s: Annotated[float | None, Mark.NOT_NEGATIVE, Mark.OMIT_DEFAULT] = None

    JSON_KEYS: ClassVar[tuple[str, ...]] = (
        "version", "fingerprint", "device", "cases", "rest", "link", "boundary", "contention", "launch_s", "warnings",
        "skipped", "sharing", "copy_wait", "launch_issue_s",
    )  # fmt: skip

    @property
    def contention(self) -> dict[str, float] | None:
        """CPU and link working concurrently on the shared DRAM, at the smallest batch size."""
        pairs = [row for row in self.sharing if (row.first, row.second) == ("cpu", "link")]
        if not pairs:
            return None
        row = min(pairs, key=lambda row: row.n_tokens)
        return {
            "cpu_alone_gb_per_s": row.first_alone_gb_per_s,
            "link_alone_gb_per_s": row.second_alone_gb_per_s,
            "cpu_with_link_gb_per_s": row.first_with_second_gb_per_s,
            "link_with_cpu_gb_per_s": row.second_with_first_gb_per_s,
        }

    @property
    def has_host_buffer(self) -> bool:
        """Whether the device has a buffer type for pinned host memory; assumed if the device was not queried."""
        return bool(self.fingerprint.get("device_host_buffer", True))

    @property
    def is_pinned(self) -> bool:
        """Whether that buffer type gave pinned memory when tried: CUDA's falls back to plain memory."""
        return self.has_host_buffer and bool(self.fingerprint.get("device_pins", True))

    @property
    def broken_layouts(self) -> tuple[str, ...]:
        """CPU layouts that crashed while they were measured, so that nothing uses them."""
        return tuple(self.fingerprint.get("broken_layouts") or ())

    @property
    def is_remote(self) -> bool:
        """Whether the device is behind an RPC server."""
        return self.fingerprint.get("device_backend") == "RPC"

    @property
    def takes_residents(self) -> bool:
        """Whether blocks of the split back end can live on the device; assumed if the device was not queried."""
        return bool(self.fingerprint.get("device_takes_residents", True))

    @property
    def is_blocking(self) -> bool:
        """Whether device calls are synchronous: the CPU waits for each copy and each computation."""
        return self.fingerprint.get("device_asynchronous") is False
