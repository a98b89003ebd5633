"""How many CPU threads computing should use: the physical cores this process may really run on."""

from __future__ import annotations

import math
import os
from pathlib import Path


def default_threads(root: Path = Path("/")) -> int:
    """Physical cores within the CPU affinity and the container's CPU quota, at least 1.

    One spinning thread too many makes decoding ten times slower (all threads wait for the one that was descheduled),
    so hyper-threads, other processes' cores and quota beyond them are not counted. root: where /sys is (tests).
    """
    allowed = allowed_cpus()
    cores = {_core(root, cpu) for cpu in allowed}
    quota = _cgroup_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def allowed_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core(root: Path, cpu: int) -> str:
    """A name that hyper-threads of one core share."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota(root: Path) -> float | None:
    """CPUs' worth of time that cgroup v2 allows; None: unlimited or unknown."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
