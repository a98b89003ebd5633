"""Our application on a port over the stand-in for llama-server, in a thread of its own, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import placement_records as records
from processes import PATIENCE_S
from serving import Stub

from oallama.serve import server as server_module
from oallama.serve.access import Access
from oallama.serve.app import application
from oallama.serve.proxy import Proxy
from oallama.serve.server import listen


@dataclass
class Running:
    url: str
    host: str
    port: int
    stub: Stub
    proxy: Proxy


@contextlib.contextmanager
def running(
    stub: Stub,
    key: str | None = None,
    device: str = "none",
    wait: bool = True,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[Running]:
    """wait: until the stand-in is ready."""
    sock = listen("127.0.0.1", 0, key)
    host, port = sock.getsockname()
    begun, loop = threading.Event(), new_loop()
    failures: list[BaseException] = []
    supervisor = stub.supervisor(device)
    wanted = records.served()
    if device == "none":
        wanted = records.on_cpu(wanted)

    def served():
        return wanted if supervisor.state.on_device or device == "none" else records.on_cpu(wanted)

    server = server_module.Server(server_module._config(Access(application(supervisor, stub.proxy, served), key)))

    async def run() -> None:
        supervising = asyncio.create_task(supervisor.run())
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started or (wait and not supervisor.ready.is_set()):
            await asyncio.sleep(0.01)
        begun.set()
        await serving
        supervising.cancel()
        await asyncio.wait({supervising})

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run())
        except BaseException as error:
            failures.append(error)
        finally:
            begun.set()
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S) and not failures, failures
        yield Running(f"http://{host}:{port}", host, port, stub, stub.proxy)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
