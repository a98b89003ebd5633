"""What the CPU, the device and the link leave each other of their speed when they work at the same time, as measured.

`cost/contention.py` has the DRAM that CPU and link share, by the bytes that each reads. Here is whatever else they
share, by batch size: cores, if the device or its driver runs on the host's; a queue, if a device receives and computes
in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from oallama.core.types import Profile, Sharing, Worker

ONE_QUEUE = 0.5
"""Of a copy under way on another stream that a result waits for: from here on all streams are taken as one queue."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Shares of the speed alone that are left, 0..1. one_queue: the device computes nothing while a copy that was asked
    for before is under way, and a wait for the device is one for all copies."""

    cpu_beside_gpu: float = 1.0
    gpu_beside_cpu: float = 1.0
    cpu_beside_copy: float = 1.0
    copy_beside_cpu: float = 1.0
    gpu_beside_copy: float = 1.0
    copy_beside_gpu: float = 1.0
    one_queue: bool = False


ALONE = Beside()

BesideCurve = tuple[tuple[int, Beside], ...]
"""By batch size, ascending; empty: nothing was measured, nobody slows anybody down."""

_FIELDS: Mapping[tuple[Worker, Worker], tuple[str, str]] = {
    ("cpu", "device"): ("cpu_beside_gpu", "gpu_beside_cpu"),
    ("cpu", "link"): ("cpu_beside_copy", "copy_beside_cpu"),
    ("device", "link"): ("gpu_beside_copy", "copy_beside_gpu"),
}


def beside_curve(profile: Profile) -> BesideCurve:
    """What a profile says of work at the same time. A side that was found faster together than alone lost nothing."""
    one_queue = profile.copy_wait is not None and profile.copy_wait >= ONE_QUEUE
    measured: dict[int, dict[str, float]] = {}
    for sharing in profile.sharing:
        names = _FIELDS.get((sharing.first, sharing.second))
        if names is not None:
            measured.setdefault(sharing.n_tokens, {}).update(zip(names, _shares(sharing), strict=True))
    if not measured and one_queue:
        measured[1] = {}
    return tuple((n_tokens, Beside(**shares, one_queue=one_queue)) for n_tokens, shares in sorted(measured.items()))


def _shares(sharing: Sharing) -> tuple[float, float]:
    least = 0.01  # what was starved for as long as it was watched did not stand still for ever
    first = sharing.first_with_second_gb_per_s / sharing.first_alone_gb_per_s
    second = sharing.second_with_first_gb_per_s / sharing.second_alone_gb_per_s
    return max(least, min(1.0, first)), max(least, min(1.0, second))


def beside_at(curve: BesideCurve, n_tokens: int) -> Beside:
    """Between two batch sizes linear, beyond them as at the nearest."""
    if not curve:
        return ALONE
    for (n0, at0), (n1, at1) in pairwise(curve):
        if n_tokens < n1:
            part = max(0.0, (n_tokens - n0) / (n1 - n0))
            names = [name for pair in _FIELDS.values() for name in pair]
            mixed = {name: (1 - part) * getattr(at0, name) + part * getattr(at1, name) for name in names}
            return Beside(**mixed, one_queue=at0.one_queue)
    return curve[-1][1]


def both_seconds(cpu_s: float, launch_s: float, gpu_s: float, beside: Beside) -> float:
    """Until the CPU and the device, which begins launch_s later, are both done; seconds of each as if alone."""
    cpu_share, gpu_share = beside.cpu_beside_gpu, beside.gpu_beside_cpu
    if cpu_s <= launch_s or gpu_s <= 0 or cpu_share == gpu_share == 1.0:
        return max(cpu_s, launch_s + gpu_s)
    left_s = cpu_s - launch_s
    together_s = min(left_s / cpu_share, gpu_s / gpu_share)
    return launch_s + together_s + max(left_s - together_s * cpu_share, gpu_s - together_s * gpu_share)
