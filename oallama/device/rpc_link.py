"""This process's connection to an RPC server, held from opening the device to closing it.

ggml connects anew whenever no object of the device is in use. A held connection keeps the server, which serves one
client at a time. It also has a time limit, so that a server that hangs is lost like a server that ends: ggml's client
aborts, and native_abort.py ends the process. The device is in ggml's registry only while it is connected, because
llama.cpp asks every registered device for its memory, and an RPC device asks its server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import ggml_bridge
from ggml_bridge.library import soname
from oallama.core.errors import DeviceError
from oallama.core.types import DeviceInfo
from oallama.device.load_params import load_bridge
from oallama.device.native_abort import RPC_SILENCE_S, Watchdog, exit_at_abort
from oallama.device.spec import DeviceSpec

if TYPE_CHECKING:
    from ggml_bridge.bridge import Bridge, Device

_lock = threading.RLock()  # guards ggml's registry, which has no lock, and _links; a finalizer may close in any thread
_links: list[RpcLink] = []


class RpcLink:
    """A held connection. info: the device. registry: its ggml_backend_reg_t. Made by `connect`."""

    info: DeviceInfo

    def __init__(self, registry: int, backend: int) -> None:
        self.registry = registry
        self._backend = backend

    def close(self) -> None:
        """Remove the device from ggml's registry and close the connection; sends nothing. Free the device's objects
        first. May be called twice, and in a finalizer."""
        with _lock:
            if self in _links:
                client = _Client(load_bridge())
                client.unload(self.registry)
                _links.remove(self)
                _register_links(client)
                client.free(self._backend)


def connect(endpoint: str) -> RpcLink:
    """Connect to the server at host:port and register its device. Raises DeviceError if no server answers; a server
    that is lost while connecting ends the process."""
    bridge = load_bridge()
    exit_at_abort()
    client = _Client(bridge)
    with _lock, Watchdog(f"rpc://{endpoint}", RPC_SILENCE_S):
        try:
            name = bridge.rpc_add(endpoint)[0]
        except ggml_bridge.BridgeError as error:
            raise DeviceError(str(error)) from None
        with _no_signals():
            backend = client.init(endpoint.encode(), 0)
        limit_silence(endpoint)
        client.buffer_type(endpoint.encode(), 0)  # asks the server once; the answer is kept
        link = RpcLink(client.registry(endpoint.encode()), backend)
        _links.append(link)
        _register_links(client)
        link.info = device_info(bridge.device(name))
    return link


def lost_server(spec: DeviceSpec) -> str | None:
    """Return why an RPC server among these devices, none of them connected, counts as lost; None if all answer."""
    from ggml_bridge.rpc import probe

    for server in spec.servers:
        try:
            probe(server.endpoint)
        except ggml_bridge.BridgeError as error:
            return str(error)
    return None


def limit_silence(endpoint: str, seconds: float = RPC_SILENCE_S) -> None:
    """Set a time limit for reads and writes on this process's sockets to host:port: ggml sets none."""
    import psutil

    host, _, port = endpoint.rpartition(":")
    to = (socket.gethostbyname(host), int(port))
    limit = struct.pack("ll", int(seconds), 0)  # struct timeval
    for connection in psutil.Process().net_connections("tcp4"):
        if connection.raddr == to and connection.fd >= 0:
            with socket.socket(fileno=os.dup(connection.fd)) as shared:
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """Block signals in threads that start in the block. A signal in ggml's thread would end a read with a time limit,
    and with it the process."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _register_links(client: _Client) -> None:
    """Keep the devices of open connections in ggml's registry, and no other RPC device.

    ggml removes devices by registry, and all RPC devices share a registry. So it is removed, and the remaining devices
    are registered again.
    """
    for link in _links:
        client.unload(link.registry)
    client.unload(client.all_rpc())
    client.register(client.all_rpc())
    for link in _links:
        client.register(link.registry)


def device_info(device: Device) -> DeviceInfo:
    """Convert the bridge's record of a device."""
    return DeviceInfo(**{field.name: getattr(device, field.name) for field in fields(DeviceInfo)})


class _Client:
    """Functions of ggml's RPC client and registry that the bridge lacks. For a connected endpoint, only `buffer_type`
    waits for the server."""

    def __init__(self, bridge: Bridge) -> None:
        folder, registry = bridge.libraries.folder, bridge.libraries.llama_cpp.llama_cpp._lib
        rpc = folder / soname("ggml-rpc")  # libggml is linked with it; else libggml loads the name without a version
        client = ctypes.CDLL(str(rpc if rpc.is_file() else rpc.with_suffix("")))
        text, number, pointer = ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p

        def function(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            library = client if "_rpc_" in name else registry
            symbol = library[name]  # a function object of our own: llama_cpp's are not changed
            symbol.argtypes, symbol.restype = list(arguments), result
            typed: Callable[..., int] = symbol
            return typed

        self.registry = function("ggml_backend_rpc_add_server", pointer, text)
        self.all_rpc = function("ggml_backend_rpc_reg", pointer)
        self.init = function("ggml_backend_rpc_init", pointer, text, number)
        self.buffer_type = function("ggml_backend_rpc_buffer_type", pointer, text, number)
        self.free = function("ggml_backend_free", None, pointer)
        self.register = function("ggml_backend_register", None, pointer)
        self.unload = function("ggml_backend_unload", None, pointer)
