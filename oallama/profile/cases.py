"""One mul-mat to measure, and the arithmetic of its bytes and flops. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.core.types import ProfileCase, Shape, SkippedCase

PLAIN_LAYOUT = "CPU"

CACHE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
               "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32}  # fmt: skip
"""Of one element of the KV cache, by type."""


@dataclass(frozen=True, slots=True)
class Signature:
    """All operators with one signature take the same time."""

    op: Literal["MUL_MAT", "MUL_MAT_ID"]
    type: str
    shape: Shape
    n_expert_used: int  # 1 for MUL_MAT
    bytes: int  # of the whole weight

    @property
    def matrices_per_token(self) -> int:
        """[K, N] matrices that one token is multiplied with."""
        return self.n_expert_used if self.op == "MUL_MAT_ID" else self.shape[2]


def kind(signature: Signature) -> str:
    """The sort of kernel: MUL_MAT, MUL_MAT of 3-D weights, or MUL_MAT_ID. A layout may be sound for one only."""
    return "3-D MUL_MAT" if signature.op == "MUL_MAT" and signature.shape[2] > 1 else signature.op


def flops(signature: Signature, n_tokens: int) -> int:
    """Multiplications and additions of one mul-mat."""
    k, n, _ = signature.shape
    return 2 * k * n * signature.matrices_per_token * n_tokens


def bytes_read(signature: Signature, n_tokens: int) -> float:
    """Weight bytes of one mul-mat. Of E experts each token uses n at random, so n_tokens tokens touch
    E * (1 - (1 - n/E)^n_tokens) of them on average."""
    if signature.op == "MUL_MAT":
        return float(signature.bytes)
    untouched = (1 - signature.n_expert_used / signature.shape[2]) ** n_tokens
    return signature.bytes * (1 - untouched)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: a signature at a batch size, on a device, in a layout."""

    device: str
    layout: str
    signature: Signature
    n_tokens: int
    working_set_bytes: int

    @property
    def key(self) -> CaseKey:
        """What identifies it in a store."""
        signature = self.signature
        return CaseKey(
            self.device, self.layout, signature.op, signature.type, signature.shape, signature.n_expert_used,
            self.n_tokens, self.working_set_bytes,
        )  # fmt: skip

    def measured(self, samples: Sequence[float], seconds: float) -> ProfileCase:
        """The record of this case once it is timed."""
        signature = self.signature
        return ProfileCase(
            device=self.device,
            layout=self.layout,
            type=signature.type,
            shape=signature.shape,
            n_expert_used=signature.n_expert_used,
            n_tokens=self.n_tokens,
            seconds=seconds,
            samples=tuple(samples),
            gb_per_s=bytes_read(signature, self.n_tokens) / seconds / 1e9,
            gflops=flops(signature, self.n_tokens) / seconds / 1e9,
            working_set_bytes=self.working_set_bytes,
            op=signature.op,
        )

    def skipped(self, reason: str) -> SkippedCase:
        """The record of this case when it is left out."""
        signature = self.signature
        return SkippedCase(
            self.device, self.layout, signature.type, signature.shape, signature.n_expert_used, self.n_tokens,
            self.working_set_bytes, reason, signature.op,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CaseKey:
    """What identifies a case in a store."""

    device: str
    layout: str
    op: str
    type: str
    shape: Shape
    n_expert_used: int
    n_tokens: int
    working_set_bytes: int


def key_of(case: ProfileCase | SkippedCase) -> CaseKey:
    """The key of a stored case."""
    return CaseKey(
        case.device, case.layout, case.op, case.type, case.shape, case.n_expert_used, case.n_tokens,
        case.working_set_bytes,
    )  # fmt: skip


def case_of(record: ProfileCase) -> Case:
    """The case that a stored record is of."""
    op: Literal["MUL_MAT", "MUL_MAT_ID"] = "MUL_MAT_ID" if record.op == "MUL_MAT_ID" else "MUL_MAT"
    of_one_byte = Signature(op, record.type, record.shape, record.n_expert_used, bytes=1)
    share = bytes_read(of_one_byte, record.n_tokens)
    n_bytes = round(record.gb_per_s * 1e9 * record.seconds / share)
    signature = Signature(op, record.type, record.shape, record.n_expert_used, n_bytes)
    return Case(record.device, record.layout, signature, record.n_tokens, record.working_set_bytes)
