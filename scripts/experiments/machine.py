"""Description of the measuring machine: processor, memory, cards, versions; nothing that names it."""

from __future__ import annotations

import subprocess
from typing import Any

CARD_FACTS = "name,driver_version,memory.total,compute_cap,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm"


def backend_of(device: str) -> str:
    """`CUDA` for CUDA0, `Vulkan` for Vulkan0, `RPC` for a worker, else the text itself."""
    name = device.split(":")[0].rstrip("0123456789")
    return "RPC" if name.lower().startswith("rpc") else name


def describe(threads: int, device: str) -> dict[str, Any]:
    """The fingerprint of a profile without what is private, and what nvidia-smi says of cards."""
    from oallama.profile.export import exported_fingerprint
    from oallama.profile.machine import fingerprint

    return {"fingerprint": exported_fingerprint(fingerprint(threads, device)), "cards": nvidia_cards()}


def nvidia_cards() -> list[dict[str, str]]:
    """CARD_FACTS of each; [] where no driver answers."""
    query = ["nvidia-smi", f"--query-gpu={CARD_FACTS}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [dict(zip(CARD_FACTS.split(","), line.split(", "), strict=False)) for line in listed.splitlines()]
