"""Total and free memory for this process: the machine's, or its container's limit."""

from __future__ import annotations

from pathlib import Path


def host_memory_bytes() -> int:
    """Return the bytes of the machine's memory, or cgroup v2's limit if lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # not there, or "max"
        return total


def host_free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping; the page cache counts as free. root: where /sys is
    (tests)."""
    import psutil

    free = int(psutil.virtual_memory().available)
    folder = root / "sys/fs/cgroup"
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        of_files = sum(int(statistics[name]) for name in ("active_file", "inactive_file"))
    except (OSError, ValueError, KeyError):  # not there, or "max"
        return free
    return max(0, min(free, limit - used + of_files))
