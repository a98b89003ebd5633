"""A server of ours in a thread's event loop over the stand-in for llama-server, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from oallama.serve.app import answers
from oallama.serve.proxy import Proxy
from oallama.serve.supervisor import Launch, Patience, Supervisor

STUB = Path(__file__).resolve().parents[1] / "stub_llama_server.py"
QUICK = Patience(first_s=0.05, longest_s=0.2, start_s=120.0, look_s=0.05, answer_s=60.0, end_s=5.0, n_starts=3)


class Stub:
    """The stand-in in a folder: how to start it, and its orders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "s.sock"
        self.orders = folder / "orders"
        self.orders.touch()
        self.said: list[str] = []
        self.logged: list[bytes] = []
        self.proxy = Proxy(str(self.socket), lambda: "it is being started again")

    def order(self, words: str) -> None:
        self.orders.write_text(words, encoding="utf-8")

    def launch(self, device: str = "none") -> Launch:
        command = (sys.executable, str(STUB), "--host", str(self.socket), "--device", device, "--alias", "stub")
        environment = {"STUB_ORDERS": str(self.orders), "PYTHONPATH": str(STUB.parents[1])}
        return Launch(command, environment, device != "none", lambda: self.socket.unlink(missing_ok=True))

    def supervisor(self, device: str = "none", patience: Patience = QUICK, **changes) -> Supervisor:
        on_cpu = None if device == "none" else self.launch()
        return Supervisor(
            self.launch(device),
            on_cpu,
            answers(self.proxy),
            talk=self.said.append,
            log=self.logged.append,
            patience=patience,
            **changes,
        )


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor):
    """Until the end of the block; ready at its beginning."""
    task = asyncio.create_task(supervisor.run())
    try:
        await ready(supervisor, task)
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def ready(supervisor: Supervisor, task: asyncio.Task, seconds: float = 60.0) -> None:
    waiting = asyncio.create_task(supervisor.ready.wait())
    await asyncio.wait({waiting, task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    assert waiting.done(), f"not ready after {seconds} s: {supervisor.state}"


async def until(condition, seconds: float = 60.0) -> None:
    for _ in range(round(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not so after {seconds} s")
