"""The parent's side of an arm: a process that holds one model, answers one request at a time, and idles in between."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from ggml_bridge import BridgeError, ChildDied, ChildTimeout
from ggml_bridge.child import Child, ChildError
from oallama.bench.records import ArmSpec, BenchTest, LoadReport, Sample
from oallama.core.codec import from_json
from oallama.core.errors import DeviceError, OutOfTime, named_error
from oallama.device.user_backend import VARIABLE, user_backend

MODULE = "oallama.bench.child"

PLUGIN_VARIABLES = (VARIABLE, "OALLAMA_PLAN")
"""Variables that load our plugin into llama.cpp; removed from every arm's environment. A back end of the user stays, as
every arm may use its device."""


class ArmProcess:
    """An arm's process, which loads on `load` and ends on `close`. Methods raise the error that the process raised,
    DeviceError if it died, or OutOfTime if the deadline passed before it answered; then close it."""

    def __init__(self, spec: ArmSpec, deadline: Deadline | None = None) -> None:
        self.spec = spec
        self._deadline = deadline
        self._child = Child(MODULE, env={**dict.fromkeys(PLUGIN_VARIABLES), VARIABLE: user_backend()})
        self._family: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        return self._child.pid

    def load(self, operators: Sequence[str]) -> LoadReport:
        """Load the model; returns what it read back."""
        document = self._ask("load", spec=asdict(self.spec), operators=list(operators))
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            self._family = [process, *process.children(recursive=True)]
        return from_json(LoadReport, document, f"the report of arm {self.spec.name}")

    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]:
        """Run every test once; returns the bytes held afterwards on the device and in host memory."""
        held = self._ask("warm_up", tests=[asdict(test) for test in tests])
        return int(held["device_bytes"]), int(held["host_bytes"])

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        samples = self._ask("measure", tests=[asdict(test) for test in tests])["samples"]
        return {test: Sample(**sample) for test, sample in zip(tests, samples, strict=True)}

    def cpu_seconds(self) -> float:
        """CPU time that the process and its children (a worker) have used so far."""
        total = 0.0
        for process in self._family:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End it at once, whatever it is doing; its worker notices and ends. May be called twice."""
        self._child.end(signal.SIGKILL)

    def _ask(self, do: str, **request: Any) -> Mapping[str, Any]:
        arm = f"arm {self.spec.name}"
        left_s = self._deadline.left_s if self._deadline else None
        try:
            return self._child.ask({"do": do, **request}, timeout_s=left_s)
        except ChildTimeout:
            raise OutOfTime(f"{arm} did not answer in time") from None
        except ChildDied as error:
            how = f"ended with exit code {error.exit_code}"
            if error.signal is not None:
                how = f"was killed by {signal.Signals(error.signal).name}"
            raise DeviceError(f"the process of {arm} {how}: {error.last_words or 'it said nothing'}") from None
        except ChildError as error:
            raise named_error(error.type_name, f"{arm}: {error}") from None
        except (BridgeError, ValueError) as error:
            raise named_error("BridgeError", f"{arm}: {error}") from None


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time: `at` seconds of the clock."""

    ends_at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        """Seconds left; 0 afterwards."""
        return max(0.0, self.ends_at - self.clock())

    def check(self) -> None:
        """Raises OutOfTime after the deadline."""
        if not self.left_s:
            raise OutOfTime("no time left to measure")
