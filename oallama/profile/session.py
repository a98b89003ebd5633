"""What the measuring side of a profile shares: where it measures, what is wanted, and what a task is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from oallama.core.types import CPU_DEVICE, Profile
from oallama.profile.cases import PLAIN_LAYOUT
from oallama.profile.merge import has_device
from oallama.profile.timing import Clock, Policy, Timing, measure
from oallama.profile.wanted import Wanted

if TYPE_CHECKING:
    from ggml_bridge import Bridge

Fragment = dict[str, Any]  # a part of the profile's JSON (merge.merged)


class TimerLike(Protocol):
    """A native timer, as ggml_bridge makes them."""

    def run(self, n: int = 1) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure. `weight` is a guess of its seconds; `device` and `layout` tell who is to blame for a
    crash, and `kind` with which sort of mul-mat."""

    label: str
    weight: float
    device: str
    layout: str
    run: Callable[[], Fragment]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """One process measuring for one model."""

    bridge: Bridge
    ggml_device: str  # ggml's name of the device; CPU_DEVICE if there is none, or if it is a second CPU backend
    profile: Profile  # what is known already; its `device` is the name that cases are stored under
    want: Wanted
    n_threads: int
    policy: Policy
    clock: Clock

    @property
    def devices(self) -> list[str]:
        """Names that cases are stored under: the CPU, and the device if there is one."""
        return [CPU_DEVICE, self.profile.device] if has_device(self.profile) else [CPU_DEVICE]

    def ggml_name(self, device: str) -> str:
        """ggml's name of one of `devices`."""
        return CPU_DEVICE if device == CPU_DEVICE else self.ggml_device

    def timed(self, timer: TimerLike, policy: Policy) -> Timing:
        """Measure with a timer and free it."""
        try:
            return measure(timer.run, self.clock, policy)
        finally:
            timer.close()

    def task(self, label: str, caps: float, device: str, run: Callable[[], Fragment]) -> Task:
        """A task that takes about so many time caps and uses the plain layout, if any."""
        return Task(label, caps * self.policy.time_cap_s, device, PLAIN_LAYOUT, run)
