"""Where a vision projector lies: whole on the device where there is room beside a plan, else whole on the CPU. Pure."""

from __future__ import annotations

import math

from oallama.core.errors import DoesNotFit
from oallama.core.types import MemoryLedger


def fits_beside(memory: MemoryLedger, n_bytes: int, asked: bool | None) -> bool:
    """Whether a projector goes to the device of a plan. asked: None: where it fits into what the plan leaves."""
    return memory.spare >= n_bytes if asked is None else asked


def vram_beside(limit: int, fill: float, n_bytes: int, device: str) -> int:
    """The capacity to plan with, so that so many bytes of the limit are kept free. Raises DoesNotFit where nothing is
    left."""
    if n_bytes >= limit:
        raise DoesNotFit(
            n_bytes, limit, device, "the vision projector", remedy="leave it on the CPU (--no-mmproj-offload)"
        )
    return math.floor((limit - n_bytes) / fill)
