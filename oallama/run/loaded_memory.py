"""What a loaded model really holds, beside what its plan said."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import MemoryLedger
from oallama.core.units import MIB, format_bytes
from oallama.device.opening import NO_DEVICE
from oallama.model.memory import BufferBytes

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.01, MIB  # planned and actual bytes may differ by the larger of the two


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes. Host memory that maps the model file counts with the mapped range."""

    buffers: tuple[BufferBytes, ...]
    device_bytes: int
    host_bytes: int
    planned_device_bytes: int
    warning: str  # "" where device_bytes is as planned


def compare_memory(buffers: tuple[BufferBytes, ...], device: str, ledger: MemoryLedger) -> EngineMemory:
    """The live buffers against the plan's ledger, on the device (on the host, mapped files count differently). The
    ledger's staging is an upper bound of what split operators compute in, so there may be less of it."""
    device_bytes = sum(b.model + b.context + b.compute for b in buffers if not b.in_host_memory)
    host_bytes = sum(b.model + b.context + b.compute for b in buffers if b.in_host_memory)
    planned = 0 if device == NO_DEVICE else ledger.weights_gpu + ledger.kv + ledger.compute + ledger.staging
    warning = ""
    tolerance = max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
    if not planned - ledger.staging - tolerance <= device_bytes <= planned + tolerance:
        warning = (
            f"{device} holds {format_bytes(device_bytes)} but the plan says {format_bytes(planned)}; "
            "plan again with the options of this run"
        )
    return EngineMemory(buffers, device_bytes, host_bytes, planned, warning)
