"""Opens a `--device` in this process for the duration of a `with` block, and returns its name in ggml."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from oallama.core.errors import UnknownDevice
from oallama.core.types import DeviceInfo
from oallama.core.units import format_bytes
from oallama.device.emulated_link import EMULATED_BACKEND, open_emulated
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import load_bridge
from oallama.device.rpc_link import connect, device_info
from oallama.device.spec import DeviceSpec, parse_device

NO_DEVICE = "none"
SPLIT_BACKEND = "OALLAMA"  # registry name of libggml-oallama


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device for this process to compute on until `close`.

    name: its ggml name, "none" without a device. info: None without a device. others: further devices after the first,
    closed with it.
    """

    name: str
    info: DeviceInfo | None
    spec: DeviceSpec
    close: Callable[[], None] = lambda: None
    others: tuple[DeviceInfo, ...] = ()

    @property
    def infos(self) -> tuple[DeviceInfo, ...]:
        """Return the records of all devices; empty without a device."""
        return () if self.info is None else (self.info, *self.others)

    @property
    def names(self) -> tuple[str, ...]:
        """ggml's names of all devices."""
        return tuple(info.name for info in self.infos)

    @property
    def label(self) -> str:
        """The display name."""
        return ",".join(self.names) or self.name

    @property
    def with_free(self) -> str:
        """The display name with the bytes that were free at the opening, if known."""
        free = self.info.memory_free if self.info is not None else 0
        return f"{self.label} ({format_bytes(free)} were free)" if free > 0 else self.label

    @property
    def own_free(self) -> int:
        """Bytes that were free on a card with dedicated memory; 0 for host memory, unknown memory and several cards."""
        info = self.info
        if info is None or info.type != "GPU" or self.spec.is_remote or self.spec.is_emulated or self.others:
            return 0
        return info.memory_free


def list_devices() -> list[DeviceInfo]:
    """Return every ggml device of this process, the CPU included, in ggml's order. Asks no RPC server: the memory of an
    RPC device is 0. Raises BridgeError."""
    return [device_info(device) for device in load_bridge().devices(ask_servers=False)]


def device_pointers(names: Sequence[str]) -> list[int]:
    """Return the ggml_backend_dev_t of open devices by name: of several back ends' devices of a name the first, as
    open_device opens it."""
    pointers = {device.name: device.pointer for device in reversed(load_bridge().devices(ask_servers=False))}
    return [pointers[name] for name in names]


@contextlib.contextmanager
def open_device(spec: DeviceSpec | str | None) -> Iterator[OpenDevice]:
    """Open a device for the block.

    llama.cpp numbers RPC devices in the order of opening.
    Raises DeviceError if it is unknown or cannot be reached, UsageError for wrong text, BridgeError.
    """
    opened: list[OpenDevice] = []
    try:
        with held_interrupt():
            opened.append(open_now(spec if isinstance(spec, DeviceSpec) else parse_device(spec)))
        yield opened[0]
    finally:
        with held_interrupt():
            for device in opened:
                device.close()


def open_now(spec: DeviceSpec) -> OpenDevice:
    """Like open_device, but the caller closes the device, and defers a Ctrl-C that the process survives until then.
    Raises the same."""
    local = tuple(device for device in spec.each if not device.is_remote)
    with contextlib.ExitStack() as opened:
        infos: list[DeviceInfo] = []
        if spec.kind == "auto":
            gpu = first_gpu(list_devices())
            infos = [gpu] if gpu else []
        elif spec.is_emulated:
            infos, close = open_emulated([device.emulated for device in local if device.emulated])
            opened.callback(close)
        elif local and not spec.is_none:
            devices = list_devices()
            infos = [_named(device, devices) for device in local]
        for server in spec.servers:
            link = connect(server.endpoint)
            opened.callback(link.close)
            infos.append(link.info)
        name, first = (infos[0].name, infos[0]) if infos else (NO_DEVICE, None)
        return OpenDevice(name, first, spec, opened.pop_all().close, tuple(infos[1:]))


def _named(spec: DeviceSpec, devices: list[DeviceInfo]) -> DeviceInfo:
    for info in devices:
        if info.name.lower() == spec.name.lower() and _holds_weights(info):
            return info
    known = ", ".join([info.name for info in devices if _holds_weights(info)] + ["emulated", NO_DEVICE])
    raise UnknownDevice(f"unknown device {spec.name!r}; choose from {known}, rpc://host:port")


def first_gpu(devices: list[DeviceInfo]) -> DeviceInfo | None:
    """Return the first discrete GPU, else the first integrated GPU, else None."""
    for kind in ("GPU", "IGPU"):
        for device in devices:
            if device.type == kind and device.backend not in ("RPC", EMULATED_BACKEND):
                return device
    return None


def local_gpus(devices: list[DeviceInfo]) -> list[DeviceInfo]:
    """Return all discrete GPUs of the first GPU's back end, as two back ends may list the same card; else the first
    integrated GPU, which uses the CPU's memory."""
    first = first_gpu(devices)
    if first is None or first.type != "GPU":
        return [first] if first else []
    return [device for device in devices if (device.type, device.backend) == (first.type, first.backend)]


def _holds_weights(info: DeviceInfo) -> bool:
    """Whether a plan may name the device: not the CPU, nor the split back end, which computes on the CPU and a
    device."""
    return info.type != "CPU" and info.backend != SPLIT_BACKEND
