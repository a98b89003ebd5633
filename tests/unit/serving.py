"""The stand-in for llama-server, kept running by a supervisor in a thread, for tests."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from processes import PATIENCE_S, until

from oallama.serve.address import free_address, listens
from oallama.serve.supervisor import Launch, Patience, Supervisor

STUB = Path(__file__).resolve().parents[1] / "stub_llama_server.py"
HEALTH_S = 1.0
QUICK = Patience(first_s=0.05, longest_s=0.2, start_s=120.0, look_s=0.05, answer_s=60.0, end_s=5.0, n_starts=3)


class Stub:
    """The stand-in at a port of its own: how to start it, and its orders in a folder."""

    def __init__(self, folder: Path) -> None:
        self.address = free_address("127.0.0.1", 0, None)
        self.orders = folder / "orders"
        self.orders.touch()
        self.said: list[str] = []
        self.logged: list[bytes] = []

    def order(self, words: str) -> None:
        self.orders.write_text(words, encoding="utf-8")

    def healthy(self) -> bool:
        return self.address.get("/health", HEALTH_S) is not None

    def launch(self, device: str = "none") -> Launch:
        where = ("--host", self.address.host, "--port", str(self.address.port))
        environment = {"STUB_ORDERS": str(self.orders), "PYTHONPATH": str(STUB.parents[1])}
        return Launch((sys.executable, str(STUB), *where, "--device", device), environment, device != "none")

    def supervisor(
        self,
        device: str = "none",
        patience: Patience = QUICK,
        device_lost: Callable[[], str | None] = lambda: None,
    ) -> Supervisor:
        return Supervisor(
            self.launch(device),
            None if device == "none" else self.launch(),
            self.healthy,
            partial(listens, port=self.address.port),
            device_lost,
            talk=self.said.append,
            log=self.logged.append,
            patience=patience,
        )


class Run:
    """A supervisor that runs in a thread; error: what ended it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.supervisor.run()
        except BaseException as error:
            self.error = error

    def until(self, condition: Callable[[], bool]) -> None:
        until(lambda: self.thread.is_alive() is False or condition())
        assert self.thread.is_alive(), self.error

    def until_ready(self, restarts: int = 0) -> None:
        state = self.supervisor.state
        self.until(lambda: state.phase == "ready" and state.restarts >= restarts)

    def end(self) -> BaseException | None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.error


@contextlib.contextmanager
def running(supervisor: Supervisor) -> Iterator[Run]:
    """Ready at the beginning of the block, ended behind it."""
    run = Run(supervisor)
    try:
        run.until_ready()
        yield run
    finally:
        supervisor.stop()
        run.end()
