"""Deadline of a measurement, by the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from oallama.core.errors import OutOfTime


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time: `at` seconds of the clock."""

    ends_at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(0.0, self.ends_at - self.clock())

    def check(self) -> None:
        """Raises OutOfTime once it has passed."""
        if not self.left_s:
            raise OutOfTime("there is no time left to measure in")
