"""Opens a `--device` in this process for the duration of a `with` block, and returns its name in ggml."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from oallama.core.errors import UnknownDevice
from oallama.core.types import DeviceInfo
from oallama.core.units import format_bytes
from oallama.device.emulated_link import EMULATED_BACKEND, open_emulated
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import load_bridge
from oallama.device.rpc_link import RpcLink, connect, device_info
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
    """Return the ggml_backend_dev_t of devices by name. Raises DeviceError with the known names."""
    return [_pointer(name) for name in names]


def _pointer(name: str) -> int:
    devices = load_bridge().devices(ask_servers=False)
    for device in devices:
        if device.name.lower() == name.lower():
            return device.pointer
    raise UnknownDevice(f"unknown device {name!r}; choose from {', '.join(device.name for device in devices)}")


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
    if spec.others and spec.servers:
        return _open_beside_servers(spec)
    if spec.kind == "rpc":
        link = connect(spec.endpoint)
        return OpenDevice(link.info.name, link.info, spec, link.close)
    if spec.emulated is not None:
        (info, *others), close_emulated = open_emulated([device.emulated for device in spec.each if device.emulated])
        return OpenDevice(info.name, info, spec, close=close_emulated, others=tuple(others))
    if spec.is_none:
        return OpenDevice(NO_DEVICE, None, spec)
    devices = list_devices()
    if spec.kind == "auto":
        chosen = first_gpu(devices)
        name = chosen.name if chosen else NO_DEVICE
        return OpenDevice(name, chosen, spec)
    info, *others = (_named(device, devices) for device in spec.each)
    return OpenDevice(info.name, info, spec, others=tuple(others))


def _open_beside_servers(spec: DeviceSpec) -> OpenDevice:
    """Open local devices and the RPC servers after them."""
    local = open_now(replace(spec, others=tuple(device for device in spec.others if device.kind != "rpc")))
    links: list[RpcLink] = []

    def close() -> None:
        for link in reversed(links):
            link.close()
        local.close()

    try:
        links += (connect(device.endpoint) for device in spec.servers)
    except BaseException:
        close()
        raise
    return replace(local, spec=spec, close=close, others=(*local.others, *(link.info for link in links)))


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
