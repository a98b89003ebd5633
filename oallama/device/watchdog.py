"""A time limit for native calls, which cannot be left once they wait for a device."""

from __future__ import annotations

import threading

from ggml_bridge.threads import Thread
from oallama.device.native_abort import LOST, end_process

WATCH_S = 0.5


class Watchdog:
    """Ends this process in one sentence when a `with` block makes no progress for stall_s. The time in which the
    process is stopped does not count. device: its name in the sentence."""

    def __init__(self, device: str, stall_s: float) -> None:
        self._device = device
        self._stall_s = stall_s
        self._silent_s = 0.0  # since the last beat
        self._over = threading.Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def beat(self) -> None:
        """Note progress."""
        self._silent_s = 0.0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            self._silent_s += WATCH_S
            if self._silent_s > self._stall_s:
                end_process(f"{LOST}: {self._device} did not answer for {self._stall_s:.0f} s")
