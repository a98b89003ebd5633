"""How much memory this process may use: the machine's, or what its container allows."""

from __future__ import annotations

from pathlib import Path


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of the machine's memory, at most what cgroup v2 allows. root: where /sys is (tests)."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int((root / "sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # not there, or "max"
        return total
