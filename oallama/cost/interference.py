"""What the CPU, the device and the link leave each other of their speed while they work at the same time, as measured.

CPU and link share the DRAM (B_cc + B_cg <= B_dram), so what they leave each other depends on the bytes
that a kernel reads for each token, and is measured by batch size. A device whose driver or memory is the host's takes
from the CPU as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from oallama.core.profile import Profile, Sharing, Worker

ONE_QUEUE = 0.5
"""Of a copy under way on another stream that a result waits for: from here on all streams are taken as one queue."""


@dataclass(frozen=True, slots=True)
class Interference:
    """Shares of the speed alone that are left, 0..1. one_queue: the device computes nothing while a copy that was asked
    for before is under way, and a wait for the device is one for all copies."""

    cpu_with_device: float = 1.0
    device_with_cpu: float = 1.0
    cpu_with_link: float = 1.0
    link_with_cpu: float = 1.0
    device_with_link: float = 1.0
    link_with_device: float = 1.0
    one_queue: bool = False
    speeds: tuple[tuple[float, float, float], ...] = field(init=False, compare=False, repr=False)  # of CPU, link and
    # device, as shares of what each does alone, by those that are busy: 1 the CPU, 2 the link, 4 the device, added up

    def __post_init__(self) -> None:
        busy = ((bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8))
        object.__setattr__(self, "speeds", tuple(self._speeds(*which) for which in busy))

    def _speeds(self, cpu: bool, link: bool, device: bool) -> tuple[float, float, float]:
        cpu_speed = link_speed = device_speed = 1.0
        if cpu and link:
            cpu_speed, link_speed = self.cpu_with_link, self.link_with_cpu
        if cpu and device:
            cpu_speed, device_speed = min(cpu_speed, self.cpu_with_device), self.device_with_cpu
        if link and device:
            link_speed = min(link_speed, self.link_with_device)
            device_speed = min(device_speed, self.device_with_link)
        return cpu_speed, link_speed, device_speed


NO_INTERFERENCE = Interference()

InterferenceCurve = tuple[tuple[int, Interference], ...]
"""By batch size, ascending; empty: nothing was measured, nobody slows anybody down."""

_FIELDS: Mapping[tuple[Worker, Worker], tuple[str, str]] = {
    ("cpu", "device"): ("cpu_with_device", "device_with_cpu"),
    ("cpu", "link"): ("cpu_with_link", "link_with_cpu"),
    ("device", "link"): ("device_with_link", "link_with_device"),
}
_NAMES = tuple(name for pair in _FIELDS.values() for name in pair)


def interference_curve(profile: Profile) -> InterferenceCurve:
    """What a profile says of work at the same time. A side that was found faster together than alone lost nothing."""
    one_queue = profile.copy_wait is not None and profile.copy_wait >= ONE_QUEUE
    measured: dict[int, dict[str, float]] = {}
    for sharing in profile.sharing:
        names = _FIELDS.get((sharing.first, sharing.second))
        if names is not None:
            measured.setdefault(sharing.n_tokens, {}).update(zip(names, _shares(sharing), strict=True))
    if not measured and one_queue:
        measured[1] = {}
    return tuple((n_tokens, Interference(**left, one_queue=one_queue)) for n_tokens, left in sorted(measured.items()))


def _shares(sharing: Sharing) -> tuple[float, float]:
    least = 0.01  # what was starved for as long as it was watched did not stand still for ever
    first = sharing.first_with_second_gb_per_s / sharing.first_alone_gb_per_s
    second = sharing.second_with_first_gb_per_s / sharing.second_alone_gb_per_s
    return max(least, min(1.0, first)), max(least, min(1.0, second))


@cache
def interference_at(curve: InterferenceCurve, n_tokens: int) -> Interference:
    """Between two batch sizes linear, beyond them as at the nearest."""
    if not curve:
        return NO_INTERFERENCE
    for (n0, at0), (n1, at1) in pairwise(curve):
        if n_tokens < n1:
            part = max(0.0, (n_tokens - n0) / (n1 - n0))
            mixed = {name: (1 - part) * getattr(at0, name) + part * getattr(at1, name) for name in _NAMES}
            return Interference(**mixed, one_queue=at0.one_queue)
    return curve[-1][1]
