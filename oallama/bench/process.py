"""The parent's side of an arm: a process that holds one model, answers one request at a time, and idles in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from oallama.bench.child import FD_VARIABLE, MODULE
from oallama.bench.records import ArmSpec, BenchTest, LoadReport, Sample
from oallama.core.errors import (
    BridgeError,
    DeviceError,
    ModelFileError,
    OallamaError,
    PlanError,
    ProfileError,
    UsageError,
)

PLUGIN_VARIABLES = ("GGML_BACKEND_PATH", "OALLAMA_PLAN")
"""What would load a backend into llama.cpp behind its back; taken out of every arm's environment."""

_PATIENCE_S = 5.0
_TAIL_LINES = 40


_ERRORS: dict[str, type[OallamaError]] = {
    kind.__name__: kind for kind in (ModelFileError, ProfileError, PlanError, UsageError, DeviceError, BridgeError)
}


class ArmProcess:
    """Loads on `load`, ends on `close`. Methods raise what the arm's process raised, as the same error of ours, or
    DeviceError where the process died."""

    def __init__(self, spec: ArmSpec) -> None:
        self.spec = spec
        read_fd, write_fd = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in PLUGIN_VARIABLES}
        environment |= {FD_VARIABLE: str(write_fd), "GGML_BRIDGE_PARENT_PID": str(os.getpid())}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(write_fd,),
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C comes to us, and we end it
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._answers = os.fdopen(read_fd, encoding="utf-8")
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._family: list[Any] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, operators: Sequence[str]) -> LoadReport:
        """Load the model; what it read back."""
        report = LoadReport.from_json(self._ask("load", spec=asdict(self.spec), operators=list(operators)))
        self._family = _family(self.pid)
        return report

    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]:
        """Run every test once; bytes held afterwards on the device and in host memory."""
        held = self._ask("warm_up", tests=[asdict(test) for test in tests])
        return int(held["device_bytes"]), int(held["host_bytes"])

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        """One sample of each test."""
        samples = self._ask("measure", tests=[asdict(test) for test in tests])["samples"]
        return {test: Sample(**sample) for test, sample in zip(tests, samples, strict=True)}

    def cpu_seconds(self) -> float:
        """CPU time that the process and its children (a worker) have used so far."""
        import psutil

        total = 0.0
        for process in self._family:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End it; may be called twice."""
        if self._process.poll() is None:
            with suppress(OSError, ValueError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._answers.close()
        self._reader.join(1.0)

    def kill(self) -> None:
        """End it now, in the middle of whatever it does; its worker notices and ends."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.close()

    def _ask(self, do: str, **request: Any) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._death() from None
        line = self._answers.readline()
        if not line:
            raise self._death()
        answer = json.loads(line)
        if (error := answer.get("error")) is not None:
            kind = _ERRORS.get(error["type"])
            message = error["message"] if kind else f"{error['type']}: {error['message']}"
            raise (kind or OallamaError)(f"arm {self.spec.name}: {message}")
        result: Mapping[str, Any] = answer["result"]
        return result

    def _death(self) -> DeviceError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._reader.join(1.0)
        code = self._process.returncode
        if code is None:
            how = "stopped answering"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        last = next((line.strip() for line in reversed(self._tail) if line.strip()), "it said nothing")
        return DeviceError(f"the process of arm {self.spec.name} {how}: {last}")

    def _collect(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError):  # closed
            for line in self._process.stderr:
                self._tail.append(line)


def _family(pid: int) -> list[Any]:
    """psutil's records of a process and its children."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
