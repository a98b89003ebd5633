"""This process' connection to an RPC server, held from opening the device to closing it.

Holding it matters twice. ggml connects whenever nothing of the device is in use, and a failing connect leaves a lock of
its client taken for good; while a connection is held, nothing connects again. And a server has one client at a time:
nobody takes our place between two calls. The device is in ggml's registry for as long only, because whoever asks ggml
for a device's memory asks its server, and waits for ever or aborts the process when that one is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from oallama.core.errors import DeviceError
from oallama.core.types import DeviceInfo
from oallama.device.guard import Guard
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import load_bridge
from oallama.device.spec import DeviceSpec

if TYPE_CHECKING:
    from ggml_bridge import Bridge, Device

RPC = "RPC"  # registry name of ggml's RPC devices
CONNECT_S = 20.0  # a server that greeted must have told its devices after so long

_lock = threading.Lock()  # of ggml's registry and of what follows
_links: list[RpcLink] = []  # whose devices are registered
_closing: list[tuple[RpcLink, int]] = []  # with the connection that is to be freed
_stuck = ""  # why this process can connect no more
_lost: set[str] = (
    set()
)  # host:port of servers that were given up: ggml takes its broken connection for one to a new server


class RpcLink:
    """A held connection to the server of a device, at `endpoint` (host:port). registry: its ggml_backend_reg_t. Made by
    `connect`."""

    def __init__(self, endpoint: str, device: Device, registry: int, backend: int, alive: Callable[[], bool]) -> None:
        self.endpoint = endpoint
        self.device = device
        self.registry = registry
        self.alive = alive
        self._backend: int | None = backend

    @property
    def info(self) -> DeviceInfo:
        return device_info(self.device)

    def abandon(self) -> None:
        """The server is lost: take its devices out of ggml's registry, and leave the connection as it is, since ggml's
        thread may be parked on it."""
        self._backend = None
        with _locked():
            _lost.add(self.endpoint)
            _unregister(self)

    def close(self) -> None:
        """Take the devices out of ggml's registry and let go of the connection; sends nothing. What lives on the device
        must have been freed before. May be called twice, and in a finalizer: where the registry is in use, whoever uses
        it does this at the end."""
        backend, self._backend = self._backend, None
        if backend is not None:
            _closing.append((self, backend))
            _close_all()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Alone with ggml's registry. The collector may close connections in the midst of it, in any thread, and must not
    wait: they are closed at the end."""
    try:
        with _lock:
            _close_these()
            yield
    finally:
        _close_all()


def _close_all() -> None:
    """Close what is to be closed, unless whoever has the lock will do so."""
    while _closing and _lock.acquire(blocking=False):
        try:
            _close_these()
        finally:
            _lock.release()


def _close_these() -> None:
    while _closing:
        link, backend = _closing.pop()
        _unregister(link)
        _Client(load_bridge()).free(backend)


def was_lost(endpoint: str) -> bool:
    """Whether a server at host:port was given up in this process, which can never connect there again."""
    return endpoint in _lost


def linked_pointer(name: str) -> int | None:
    """ggml_backend_dev_t of a connected device, without asking its server; None where no such one is connected."""
    with _locked():
        return next((link.device.pointer for link in _links if link.device.name.lower() == name.lower()), None)


def list_with_links(bridge: Bridge) -> list[Device]:
    """Every device; those connected as they were when they were. Asks no server, which might be gone."""
    _forget_dead()
    with _locked():
        connected = {link.device.name: link.device for link in _links}
    found = bridge.devices(ask_servers=False)
    return [connected.get(device.name, device) for device in found if device.backend != RPC or device.name in connected]


def _forget_dead() -> None:
    """Take the devices of servers that are known to be gone out of ggml's registry."""
    with _locked():
        for link in list(_links):
            if not link.alive():
                _unregister(link)


def _unregister(link: RpcLink) -> None:
    if link in _links:
        _links.remove(link)
        _Client(load_bridge()).unload(link.registry)
        _register_links()


def _register_links() -> None:
    """Have the devices of these links in ggml's registry, and of no other server.

    ggml drops devices by registry, and files all RPC devices under one. So that one is taken out, and what stays is put
    back. Nothing is sent, and no lock is taken that a failed connect may hold."""
    client = _Client(load_bridge())
    for link in _links:
        client.unload(link.registry)
    client.unload(client.all_rpc())
    client.register(client.all_rpc())
    for link in _links:
        client.register(link.registry)


def connection_broke(endpoint: str) -> bool:
    """Whether a connection of this process to "host:port" was closed by the other side. Sends nothing."""
    import psutil

    host, _, port = endpoint.rpartition(":")
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, int(port), socket.AF_INET)}
        connections = psutil.Process().net_connections("tcp4")
    except (OSError, psutil.Error):
        return False
    return any(
        c.status == psutil.CONN_CLOSE_WAIT and c.raddr and c.raddr.port == int(port) and c.raddr.ip in addresses
        for c in connections
    )


def connect(spec: DeviceSpec, endpoint: str, alive: Callable[[], bool]) -> RpcLink:
    """Connect to the server at host:port and register its devices. Raises DeviceError.

    Guarded, because the server may go right after its greeting. Then ggml's client stays locked, and this process
    cannot connect again, which later calls say.
    """
    made: list[RpcLink] = []
    try:
        _connect(spec, endpoint, alive, made)
        return made[0]
    except BaseException:
        for link in made:  # interrupted when it was there: a server has no other client as long as it is
            link.close()
        raise


def _connect(spec: DeviceSpec, endpoint: str, alive: Callable[[], bool], made: list[RpcLink]) -> None:
    """made: gets the connection as soon as it is there."""
    global _stuck
    import ggml_bridge

    bridge = load_bridge()
    _forget_dead()

    def make() -> None:
        try:
            names = bridge.rpc_add(endpoint)
        except ggml_bridge.BridgeError as error:
            raise DeviceError(str(error)) from None
        client = _Client(bridge)
        client.buffer_type(endpoint.encode(), 0)  # asks the server once; the answer is kept
        backend = client.init(endpoint.encode(), 0)
        made.append(RpcLink(endpoint, bridge.device(names[0]), client.registry(endpoint.encode()), backend, alive))
        _links.extend(made)

    with _locked():
        if _stuck or was_lost(endpoint):
            raise DeviceError(
                f"cannot connect to {spec}: "
                + (_stuck or f"this process lost a server at {endpoint}; start oallama again")
            )
        guard = Guard(str(spec), alive, stall_s=CONNECT_S)
        try:
            guard.call(make)
        except DeviceError:
            if guard.lost:
                _stuck = f"the server at {endpoint} went while this process connected to it; start oallama again"
            raise
        finally:
            with held_interrupt():
                _register_links()
                guard.close(lambda: None)


def device_info(device: Device) -> DeviceInfo:
    """The bridge's record of a device as ours."""
    return DeviceInfo(
        name=device.name,
        description=device.description,
        backend=device.backend,
        type=device.type,
        memory_total=device.memory_total,
        memory_free=device.memory_free,
        asynchronous=device.asynchronous,
        host_buffer=device.host_buffer,
        events=device.events,
    )


class _Client:
    """The functions of ggml's RPC client and registry that the bridge has no need of. For an endpoint that is
    connected, none of them waits for the server."""

    def __init__(self, bridge: Bridge) -> None:
        library = bridge.libraries.llama_cpp.llama_cpp._lib
        text, number, pointer = ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p

        def function(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            found = library[name]  # a function object of our own: llama_cpp's are not changed
            found.argtypes, found.restype = list(arguments), result
            made: Callable[..., int] = found
            return made

        self.registry = function("ggml_backend_rpc_add_server", pointer, text)
        self.all_rpc = function("ggml_backend_rpc_reg", pointer)
        self.init = function("ggml_backend_rpc_init", pointer, text, number)
        self.buffer_type = function("ggml_backend_rpc_buffer_type", pointer, text, number)
        self.free = function("ggml_backend_free", None, pointer)
        self.register = function("ggml_backend_register", None, pointer)
        self.unload = function("ggml_backend_unload", None, pointer)
