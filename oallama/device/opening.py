"""Opening a device: from `--device` to a name ggml knows, in this process, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oallama.core.errors import DeviceError
from oallama.core.types import CPU_DEVICE, DeviceInfo
from oallama.device.load_params import load_bridge
from oallama.device.rpc_worker import RpcWorker
from oallama.device.spec import DeviceSpec, parse_device

if TYPE_CHECKING:
    from ggml_bridge import Bridge, Device

NO_DEVICE = "none"
CPU_PAIR = "cpu-pair"


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device this process may compute on until `close`.

    name: its ggml name, "none" without one. info: None without one. For cpu-pair both are of the CPU, whose second
    backend instance plays the device; `is_pair` tells it apart.
    """

    name: str
    info: DeviceInfo | None
    spec: DeviceSpec
    alive: Callable[[], bool]  # whether it can still compute; always true for what this process holds itself
    kill: Callable[[], None]  # end a worker of ours at once
    close: Callable[[], None]
    pid: int | None = None  # of a local worker

    @property
    def is_pair(self) -> bool:
        return self.spec.kind == CPU_PAIR


def list_devices() -> list[DeviceInfo]:
    """Every device ggml found in this process, the CPU included, in ggml's order. Raises BridgeError."""
    return [_info(device) for device in load_bridge().devices()]


@contextlib.contextmanager
def open_device(spec: DeviceSpec | str | None) -> Iterator[OpenDevice]:
    """Open a device for the block; a worker is started before it and ended after it.

    A process should open one RPC device at a time: llama.cpp numbers them as they come.
    Raises DeviceError where it is unknown, cannot be reached or does not start, UsageError for wrong text, BridgeError.
    """
    device = open_now(spec if isinstance(spec, DeviceSpec) else parse_device(spec))
    try:
        yield device
    finally:
        device.close()


def open_now(spec: DeviceSpec) -> OpenDevice:
    """Like open_device, for a caller that closes it. Raises the same."""
    if spec.kind == "rpc-worker":
        return _open_worker(spec)
    if spec.kind == "rpc":
        info = _connect(spec.endpoint)
        return OpenDevice(info.name, info, spec, _always, _nothing, lambda: _forget(spec.endpoint))
    if spec.kind == "none":
        return OpenDevice(NO_DEVICE, None, spec, _always, _nothing, _nothing)
    devices = list_devices()
    if spec.kind == "auto":
        chosen = first_gpu(devices)
        name = chosen.name if chosen else NO_DEVICE
        return OpenDevice(name, chosen, spec, _always, _nothing, _nothing)
    wanted = CPU_DEVICE if spec.kind == CPU_PAIR else spec.name
    for info in devices:
        if info.name.lower() == wanted.lower() and (spec.kind == CPU_PAIR or info.type != "CPU"):
            return OpenDevice(info.name, info, spec, _always, _nothing, _nothing)
    known = ", ".join([info.name for info in devices if info.type != "CPU"] + ["rpc-worker", "cpu-pair", NO_DEVICE])
    raise DeviceError(f"there is no device {spec.name!r} here; known are: {known}, and rpc://host:port")


def first_gpu(devices: list[DeviceInfo]) -> DeviceInfo | None:
    """The first discrete GPU, else the first integrated one, else None."""
    for kind in ("GPU", "IGPU"):
        for device in devices:
            if device.type == kind and device.backend != "RPC":
                return device
    return None


def _open_worker(spec: DeviceSpec) -> OpenDevice:
    load_bridge()  # so that what is missing here is said before a process starts
    worker = RpcWorker(spec)
    try:
        info = _connect(worker.endpoint)
    except BaseException:
        worker.close()
        raise

    def close() -> None:
        _forget(worker.endpoint)
        worker.close()

    info = replace(info, description=f"worker on {worker.endpoint}")
    return OpenDevice(info.name, info, spec, worker.alive, worker.kill, close, worker.pid)


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


def _info(device: Device) -> DeviceInfo:
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


#
# ggml's registry: an RPC device is there only while it is open, because whoever lists devices asks its server, and
# ggml aborts the process when that one is gone
#

_registry_lock = threading.Lock()
_connected: list[str] = []  # endpoints


def _connect(endpoint: str) -> DeviceInfo:
    import ggml_bridge

    bridge = load_bridge()
    with _registry_lock:
        try:
            names = bridge.rpc_add(endpoint)
        except ggml_bridge.BridgeError as error:
            raise DeviceError(str(error)) from None
        _connected.append(endpoint)
        return _info(bridge.device(names[0]))


def _forget(endpoint: str) -> None:
    """Take the endpoint's devices out of ggml's registry. ggml drops devices by registry, and files all RPC devices
    under one, so that one is taken out and everything still connected is put back. Nothing is sent."""
    libraries = _Registry(load_bridge())
    with _registry_lock:
        if endpoint not in _connected:
            return
        _connected.remove(endpoint)
        libraries.unload(libraries.endpoint(endpoint))
        libraries.unload(libraries.rpc())
        libraries.register(libraries.rpc())
        for other in _connected:
            libraries.unload(libraries.endpoint(other))
            libraries.register(libraries.endpoint(other))


class _Registry:
    """The five functions of ggml's registry that `_forget` needs; none of them does I/O for a known endpoint."""

    def __init__(self, bridge: Bridge) -> None:
        library = bridge.libraries.llama_cpp.llama_cpp._lib
        self._endpoint = library.ggml_backend_rpc_add_server
        self._endpoint.argtypes, self._endpoint.restype = [ctypes.c_char_p], ctypes.c_void_p
        self.rpc = library.ggml_backend_rpc_reg
        self.rpc.argtypes, self.rpc.restype = [], ctypes.c_void_p
        self.register = library.ggml_backend_register
        self.register.argtypes, self.register.restype = [ctypes.c_void_p], None
        self.unload = library.ggml_backend_unload
        self.unload.argtypes, self.unload.restype = [ctypes.c_void_p], None

    def endpoint(self, endpoint: str) -> int:
        registry: int = self._endpoint(endpoint.encode())
        return registry
