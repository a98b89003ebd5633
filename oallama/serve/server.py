"""One process that serves: the port, the application on it, llama-server behind it, and how all of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from oallama.core.errors import DeviceError, UsageError
from oallama.core.temporary import temporary_folder
from oallama.device.interrupt import HeldInterrupt, held_interrupt
from oallama.report.placement import Served
from oallama.serve.access import Access, is_local
from oallama.serve.app import answers, application, why_not
from oallama.serve.idle import Idle
from oallama.serve.proxy import Proxy
from oallama.serve.supervisor import PATIENCE, Launch, Patience, Supervisor
from oallama.serve.tuning import Tune, Tuning

MOST_CONNECTIONS = 512
REQUEST_S = 20.0  # that a client may take over the headers of a request
LONGEST_SOCKET_PATH = 100  # bytes that every system takes
SOCKET_FOLDER = "oallama-socket-"
LONGEST_NAME = len(f"/{SOCKET_FOLDER}12345678/llama-server.sock")
GRACE_S = 3.0  # that requests get to end when the server is asked to


@dataclass(frozen=True, slots=True)
class Placements:
    """What is served: as wanted, and on the CPU alone for when its device is lost; None where it has none.

    launch: how to start each, given the path of the socket to listen at. device_lost: as Supervisor. tune: None where
    there is nothing to measure.
    """

    wanted: Served
    on_cpu: Served | None
    launch: Callable[[Served, Path], Launch]
    device_lost: Callable[[], str | None] = lambda: None
    tune: Tune | None = None


def listen(host: str, port: int, key: str | None) -> socket.socket:
    """The server's socket; port 0: any that is free. Raises UsageError for an address that others reach without a key,
    or that is none of this machine; DeviceError where it is in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is no address; give one of this machine, such as 127.0.0.1") from None
    if key is None and not is_local(str(address[0])):
        raise UsageError(
            f"--host {host} lets other machines in; give --api-key KEY (or OALLAMA_API_KEY), which they must send"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise DeviceError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where it is reached from this machine."""
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def serve(
    sock: socket.socket,
    key: str | None,
    placements: Placements,
    talk: Callable[[str], None],
    log: Callable[[bytes], None] = lambda line: None,
    patience: Patience = PATIENCE,
) -> None:
    """Until SIGINT, which the command line takes others for. talk: sentences for people; log: what llama-server writes.

    Raises DeviceError where llama-server does not start, or again and again not, or has no folder for its socket.
    """
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError:  # it has tried to write to each
        raise DeviceError(
            "no temporary folder can be written to, and llama-server needs one for its socket; free some space on the "
            "disk, or name another folder in TMPDIR"
        ) from None
    if len(str(parent)) + LONGEST_NAME > LONGEST_SOCKET_PATH:
        parent = Path("/tmp")
    # held until the loop takes it: Python would warn of a coroutine that is never awaited
    with held_interrupt() as held, temporary_folder(SOCKET_FOLDER, parent) as folder:
        run(_serve(sock, key, placements, folder / "llama-server.sock", talk, log, patience, held))


def run(main: Coroutine[Any, Any, None]) -> None:
    """By uvloop where that is installed: a streamed token takes a third less of the processor."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(
    sock: socket.socket,
    key: str | None,
    placements: Placements,
    path: Path,
    talk: Callable[[str], None],
    log: Callable[[bytes], None],
    patience: Patience,
    held: HeldInterrupt,
) -> None:
    def launch(served: Served) -> Launch:
        made = placements.launch(served, path)

        def fresh() -> None:
            path.unlink(missing_ok=True)  # of one that was killed: nobody could bind to it again

        return Launch(made.command, made.environment, made.uses_device, fresh)

    def why() -> str:
        return why_not(supervisor)

    proxy = Proxy(str(path), why)
    on_cpu = placements.on_cpu
    supervisor = Supervisor(
        launch(placements.wanted),
        None if on_cpu is None else launch(on_cpu),
        answers(proxy),
        placements.device_lost,
        talk,
        log,
        patience,
        lambda: proxy.heard(patience.look_s),
    )

    wanted = [placements.wanted]

    def served() -> Served:
        return on_cpu if on_cpu is not None and supervisor.state.device_lost else wanted[-1]

    tune = placements.tune
    tuning = None if tune is None else Tuning(tune, supervisor, launch, wanted.append, talk)
    app: ASGIApp = application(supervisor, proxy, served, tuning)
    idling = None
    if tune is not None and tuning is not None and tune.idle_s is not None:
        app = idle = Idle(app, supervisor, tuning)
        idling = asyncio.create_task(idle.tune(tune.idle_s))
    server = Server(_config(Access(app, key)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, server.handle_exit, signal.SIGINT, None)
    held.hand_on()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    supervising = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(_say_when_ready(supervisor, url_of(sock), talk))
    try:
        await asyncio.wait({serving, supervising}, return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            supervising.result()
    finally:
        server.should_exit = True
        ready.cancel()
        if idling is not None:
            idling.cancel()
        await asyncio.wait({serving})
        if tuning is not None:
            await tuning.end()
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeviceError):
            await supervising


async def _say_when_ready(supervisor: Supervisor, url: str, talk: Callable[[str], None]) -> None:
    await supervisor.ready.wait()
    talk(f"oallama: serving at {url}/v1, placement at {url}/placement.html; Ctrl-C ends it")


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(GRACE_S),
    )


class Server(uvicorn.Server):
    """uvicorn, whose signals are handled by us: they end llama-server too."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("asyncio").addFilter(unless_nobody_reads)
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def unless_nobody_reads(record: logging.LogRecord) -> bool:
    """Whether a line of asyncio's log is told. Of a client that goes while much is sent to it asyncio warns, with every
    part from the fifth on; it is no fault of ours."""
    return record.msg != "socket.send() raised exception."


class Connection(H11Protocol):
    """One of no more than MOST_CONNECTIONS, closed where it takes longer than REQUEST_S to say what it wants."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        if len(self.connections) > MOST_CONNECTIONS:
            transport.close()
        else:
            self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        self._wait_for_request()
        super().data_received(data)
        if self._is_answering() and self._late is not None:
            self._late.cancel()
            self._late = None

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # uvicorn answers what is no HTTP with a text, even behind the head of a HEAD
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        if self._late is None and not self._is_answering():
            self._late = self.loop.call_later(REQUEST_S, self.transport.close)
