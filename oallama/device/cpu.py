"""Number of CPU threads to compute with: the physical cores this process may really run on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

SAME_KIND = 0.8  # share of the fastest core's speed: clocks of one kind differ by less, of two kinds by more
MOST_CPUS = 1 << 16
MOST_LETTERS = 4096  # of a list of CPUs
_CPU_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def default_threads(root: Path = Path("/")) -> int:
    """Physical cores within the CPU affinity and the container's CPU quota, at least 1.

    One spinning thread too many makes decoding ten times slower (all threads wait for the one that was descheduled),
    so hyper-threads and cores beyond the affinity or the quota do not count. root: where /sys is (tests).
    """
    allowed = allowed_cpus()
    cores = {_core(root, cpu) for cpu in allowed}
    return max(1, int(min(len(cores), most_cpus(root))))


def thread_counts(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> tuple[int, ...]:
    """Return thread counts worth trying: the physical cores of the fastest kind, then of the two fastest kinds, and so
    on, within the container's quota. One count if all cores are alike. allowed: as allowed_cpus returns it."""
    counts, n, most = [], 0, most_cpus(root)
    for kind in core_kinds(root, allowed_cpus() if allowed is None else allowed):
        n += len({_core(root, cpu) for cpu in kind})
        counts.append(n)
    return tuple(sorted({int(min(count, most)) for count in counts}))


def core_kinds(root: Path, allowed: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Group logical CPUs by core speed, the fastest first: by the kernel's lists of Intel's performance and efficiency
    cores, else by capacity, else by highest clock. Within a group no core is slower than SAME_KIND of the fastest one.
    One group if the kernel lacks the figure of one CPU."""
    cpus = sorted(allowed)
    speeds = _listed_speeds(root, cpus)
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = speeds or _kernel_speeds(root, cpus, name)
    if not speeds:
        return (tuple(cpus),) if cpus else ()
    kinds: list[list[int]] = []
    fastest = 0.0
    for cpu in sorted(cpus, key=lambda cpu: (-speeds[cpu], cpu)):
        if not kinds or speeds[cpu] < SAME_KIND * fastest:
            kinds.append([])
            fastest = speeds[cpu]
        kinds[-1].append(cpu)
    return tuple(tuple(sorted(kind)) for kind in kinds)


def _listed_speeds(root: Path, cpus: Sequence[int]) -> dict[int, float]:
    """Return 2 for a performance core, 1 for an efficiency core; empty without both kinds."""
    fast, slow = (_read_cpus(root / f"sys/devices/{name}/cpus") for name in ("cpu_core", "cpu_atom"))
    if not fast or not slow or not fast | slow >= set(cpus):
        return {}
    return {cpu: 2.0 if cpu in fast else 1.0 for cpu in cpus}


def _kernel_speeds(root: Path, cpus: Sequence[int], name: str) -> dict[int, float]:
    """Read the kernel's number of this name for each CPU; empty if one CPU lacks it."""
    try:
        speeds = {cpu: float((root / f"sys/devices/system/cpu/cpu{cpu}/{name}").read_text()) for cpu in cpus}
    except (OSError, ValueError):
        return {}
    return speeds if all(0 < speed < math.inf for speed in speeds.values()) else {}


def _read_cpus(path: Path) -> set[int]:
    """Return the CPUs in one of the kernel's lists; empty without the file."""
    try:
        return set(parse_cpus(path.read_text()))
    except (OSError, ValueError):
        return set()


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a CPU list in taskset's form (`0,2-3`) to sorted distinct numbers. Raises ValueError on anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        if not match or len(text) > MOST_LETTERS:
            raise ValueError(f"{text[:100]!r} is not a CPU list; write e.g. 0,2-3")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < MOST_CPUS:
            raise ValueError(f"{part.strip()!r} is not a CPU range; write e.g. 2-3")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def allowed_cpus() -> set[int]:
    """Logical CPUs that this process may use."""
    return set(os.sched_getaffinity(0))


def _core(root: Path, cpu: int) -> str:
    """Return a name that the hyper-threads of a core share."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def most_cpus(root: Path) -> float:
    """Return how many CPUs of time cgroup v2 allows, rounded up, at least 1; inf: unlimited or unknown."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
