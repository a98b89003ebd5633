"""Memory that a loaded model holds, beside what its plan says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import MemoryBreakdown
from oallama.core.units import MIB, format_bytes

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.01, MIB  # planned and actual bytes may differ by the larger of the two


@dataclass(frozen=True, slots=True)
class LoadNeeds:
    """Bytes that a no_alloc load found, split operators counted whole on the host. device_free: of a card of its own
    before the load; 0 where it is not known."""

    device_bytes: int
    host_bytes: int
    device_free: int = 0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes. Host memory that maps the model file counts with the mapped range."""

    device_bytes: int
    host_bytes: int
    planned_device_bytes: int
    warning: str  # "" where device_bytes is as planned


def compare_memory(device_bytes: int, host_bytes: int, device: str, memory_breakdown: MemoryBreakdown) -> EngineMemory:
    """Held bytes against the plan's memory breakdown, on the device (on the host, mapped files count differently). The
    staging of plans that were made before it was counted exactly is an upper bound, so there may be less of it."""
    planned = (
        0
        if device == "none"
        else memory_breakdown.weights_gpu + memory_breakdown.kv + memory_breakdown.compute + memory_breakdown.staging
    )
    warning = ""
    tolerance = max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
    if not planned - memory_breakdown.staging - tolerance <= device_bytes <= planned + tolerance:
        warning = (
            f"{device} holds {format_bytes(device_bytes)}, but the plan says {format_bytes(planned)}; "
            "plan again with the options of this run"
        )
    return EngineMemory(device_bytes, host_bytes, planned, warning)


def spill_warning(device_bytes: int, device: str, device_free: int) -> str:
    """A sentence where a card holds more than it had free before the load; else empty. The load has succeeded, so the
    driver keeps the rest in host memory without saying so. Less than that, which other programs' memory may cause
    later, does not show from here. device_free: 0 where the device's memory is the host's, or is not known."""
    excess = device_bytes - device_free
    if device_free <= 0 or excess <= max(TOLERANCE_SHARE * device_bytes, TOLERANCE_BYTES):
        return ""
    return (
        f"{device} had {format_bytes(device_free)} free but got {format_bytes(device_bytes)}: its "
        f"driver keeps {format_bytes(excess)} in host memory, which is many times slower; lower --vram, -ngl or -c"
    )
