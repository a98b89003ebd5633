"""CPU use of other programs, beside which timings are not representative.

Measured only before a task, while our own processes are idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import median

from oallama.core.errors import UsageError
from oallama.core.profile import Profile

BUSY_VARIABLE = "OALLAMA_BUSY_PERCENT"
BUSY_PERCENT = 20.0  # of all cores
LOOK_S = 0.2
EVERY_S = 5.0  # so that looking is 4 % of a measurement

OTHERS_PERCENT = "others_cpu_percent"  # key of a profile's fingerprint


def busy_percent(environment: Mapping[str, str] = os.environ) -> float:
    """Share of the CPU from which a machine is busy: `$OALLAMA_BUSY_PERCENT`, else BUSY_PERCENT; others alone never
    reach 100. Raises UsageError if the variable is not a number from 0 to 100."""
    said = environment.get(BUSY_VARIABLE)
    try:
        percent = float(said) if said else BUSY_PERCENT
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise UsageError(f"{BUSY_VARIABLE} must be a number from 0 to 100, not {said!r}")
    return percent


def others_percent() -> float:
    """Measure for LOOK_S the CPU use of other processes, in percent of all cores."""
    import psutil

    process = psutil.Process()
    process_before_s = sum(process.cpu_times()[:2])
    used_percent = float(psutil.cpu_percent(interval=LOOK_S))
    process_s: float = sum(process.cpu_times()[:2]) - process_before_s
    return max(0.0, used_percent - 100.0 * process_s / (LOOK_S * (psutil.cpu_count() or 1)))


def was_busy(profile: Profile) -> bool:
    """Whether other programs used the CPU while the profile was measured. Raises as busy_percent does."""
    percent = profile.fingerprint.get(OTHERS_PERCENT)  # of a file that anybody may have written
    return isinstance(percent, (int, float)) and busy_percent() < percent <= 100


def doubt(profile: Profile) -> str:
    """Return a sentence on why times from a profile are doubtful; "" if they are not."""
    if not was_busy(profile):
        return ""
    reason = f"other programs used {profile.fingerprint[OTHERS_PERCENT]:.0f} % of the CPU"
    return (
        f"predicted times may be far off: the profile is from a busy machine ({reason}); "
        "it is measured again once they end"
    )


def caveat(profile: Profile) -> str:
    """Return the caveat for a time from a profile; "" for a profile of a calm machine."""
    return "measured while other programs ran, so it may be far off" if was_busy(profile) else ""


class Others:
    """CPU use of other programs while something is measured: the median of looks, EVERY_S apart."""

    def __init__(self, look: Callable[[], float] = others_percent, clock: Callable[[], float] = time.monotonic) -> None:
        self._look, self._clock = look, clock
        self._looks: list[float] = []
        self._next_s = -float("inf")

    def looked(self) -> float | None:
        """The median up to now, in percent of all cores, where it was time to look again; else None."""
        if self._clock() < self._next_s:
            return None
        self._looks.append(self._look())
        self._next_s = self._clock() + EVERY_S
        return median(self._looks)
