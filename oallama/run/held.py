"""Memory that a loaded model holds, compared with its plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import MemoryBreakdown
from oallama.core.units import MIB, format_bytes

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.01, MIB  # planned and actual bytes may differ by the larger of the two


@dataclass(frozen=True, slots=True)
class LoadNeeds:
    """Bytes of a load by a no_alloc load, with split operators whole on the host. device_free: free memory of the card
    before the load; 0: unknown, or the device has no memory of its own."""

    device_bytes: int
    host_bytes: int
    device_free: int = 0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that an engine holds and that its plan predicted. A mapped model file counts with the mapped range.
    warning: "" where device_bytes is as planned; spill: as spill_warning."""

    device_bytes: int
    host_bytes: int
    planned_device_bytes: int
    warning: str
    spill: str


def compare_memory(
    device_bytes: int, host_bytes: int, device: str, memory_breakdown: MemoryBreakdown, device_free: int
) -> EngineMemory:
    """Compare the bytes held on the device with the plan's memory breakdown (on the host mapped files count
    differently). The plan's staging is an upper bound, so less of it is as planned. device_free: as in
    spill_warning."""
    planned, staging = 0, memory_breakdown.staging
    if device != "none":
        planned = memory_breakdown.weights_gpu + memory_breakdown.kv + memory_breakdown.compute + staging
    warning = ""
    tolerance = max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
    if not planned - staging - tolerance <= device_bytes <= planned + tolerance:
        warning = (
            f"{device} holds {format_bytes(device_bytes)}, but the plan says {format_bytes(planned)}; "
            "plan again with the options of this run"
        )
    return EngineMemory(device_bytes, host_bytes, planned, warning, spill_warning(device_bytes, device, device_free))


def spill_warning(device_bytes: int, device: str, device_free: int) -> str:
    """A warning if a card holds more than was free before the load: the driver then silently keeps the rest in host
    memory. Empty otherwise; spills that other programs cause later are not visible here. device_free: 0 if unknown, or
    if the device's memory is the host's."""
    excess = device_bytes - device_free
    if device_free <= 0 or excess <= max(TOLERANCE_SHARE * device_bytes, TOLERANCE_BYTES):
        return ""
    return (
        f"{device} had {format_bytes(device_free)} free but got {format_bytes(device_bytes)}: its "
        f"driver keeps {format_bytes(excess)} in host memory, which is many times slower; lower --vram, -ngl or -c"
    )
