"""A local worker: ggml's RPC server over this machine's CPU, in a child process that ends with us."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from oallama.core.errors import DeviceError
from oallama.core.units import format_ranges
from oallama.device.interrupt import held_interrupt
from oallama.device.spec import DeviceSpec

STOPPED_S = 5.0
"""A worker that is stopped (SIGSTOP) for so long counts as lost: nothing else ends the wait for its answer."""


def worker_threads(spec: DeviceSpec) -> int:
    """Threads the worker gets: as asked, else one for each CPU it is pinned to, else one."""
    return spec.threads or max(len(spec.cpus), 1)


class RpcWorker:
    """A running worker. Raises DeviceError where it cannot be started."""

    def __init__(self, spec: DeviceSpec) -> None:
        from ggml_bridge import BridgeError
        from ggml_bridge.rpc import RpcServer

        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(spec.cpus)
        if not set(spec.cpus) <= allowed:
            raise DeviceError(
                f"--device {spec}: this process may run on CPUs {format_ranges(allowed)} only; "
                "pin the worker to some of these"
            )
        try:
            self._server = RpcServer(threads=worker_threads(spec), cpus=spec.cpus or None)
        except (BridgeError, OSError) as error:
            raise DeviceError(f"the worker {spec} did not start: {error}") from None
        self._stopped_since: float | None = None

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def endpoint(self) -> str:
        """host:port it serves at."""
        return self._server.endpoint

    @property
    def warning(self) -> str:
        """Said where others than this process and its descendants are served; "" where not, and on macOS, where that is
        always so."""
        if self._server.guarded or not sys.platform.startswith("linux"):
            return ""
        return "every process of this machine may use the worker and read its memory: /proc does not say who connects"

    def alive(self) -> bool:
        """Whether the worker can still compute: it runs, and has not been stopped for STOPPED_S."""
        with held_interrupt():  # between two lines of Popen.poll it would leave a lock taken for ever
            died = self._server.died()
        if died is not None:
            return False
        status = _status(self.pid)
        if status in _ENDED:
            return False  # its last threads are about to go
        if status not in _STOPPED:
            self._stopped_since = None
            return True
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        return now - self._stopped_since < STOPPED_S

    def kill(self) -> None:
        """End it now, even if it is stopped; nothing it holds is worth keeping."""
        if self._server.died() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._server.close()

    def close(self) -> None:
        """End it. What lives on its device must have been freed."""
        self._server.close()


_ENDED = ("zombie", "dead")  # psutil's names
_STOPPED = ("stopped", "tracing-stop")


def _status(pid: int) -> str:
    import psutil

    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "dead"
