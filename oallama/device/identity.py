"""Identity of the device that a `--device` text means now: its spec, and the properties that identify it.

A child process asks ggml: a process that lists a CUDA device holds some hundred MiB of it from then on, which later
measurements and loads would lack, and a driver that crashes must not end the caller.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oallama.core.errors import BridgeError, DeviceError
from oallama.core.types import DeviceInfo
from oallama.device.child import ask_child
from oallama.device.emulated import parameters_of
from oallama.device.spec import DeviceSpec, parse_device
from oallama.device.user_backend import user_backend

if TYPE_CHECKING:
    from oallama.device.opening import OpenDevice

MODULE = "oallama.device.identity"
TIMEOUT_S = 120.0
MEMORY_STEP = 256 * 2**20
"""Drivers and kernels reserve a few MiB more or less; no two cards differ by less than this."""

_NO_GPU = re.compile(r"libggml-(?:base|cpu|rpc|blas|oallama)\b.*")  # library files
_DRIVER = re.compile(r"lib(?:cuda|nvidia-|vulkan_|GLX_nvidia|amdhip64|hsa-runtime64|ze_intel_gpu|dxcore).*\.so\b.*")


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """spec: the device that `auto`, or a name in other letters, means. identity: the properties that must stay the same
    for timings to hold; None if the spec is enough (only this machine's CPU computes)."""

    spec: DeviceSpec
    identity: Mapping[str, Any] | None = None


def known_device(device: KnownDevice | DeviceSpec | str | None) -> KnownDevice:
    """Return the device that the text means. Starts a process if ggml must be queried, about 0.4 s.

    Raises DeviceError if the device is missing or cannot be queried, UsageError for invalid text, BridgeError.
    """
    if isinstance(device, KnownDevice):
        return device
    spec = device if isinstance(device, DeviceSpec) else parse_device(device)
    if spec.emulated is not None:  # its parameters identify it
        return KnownDevice(spec, {"parameters": hashlib.sha256(parameters_of(spec.emulated).encode()).hexdigest()[:16]})
    if spec.is_none:
        return KnownDevice(spec)
    if spec.kind == "auto":
        return next(iter(found_gpus()), KnownDevice(DeviceSpec("none")))
    return _asked(str(spec))[0]


def found_gpus() -> tuple[KnownDevice, ...]:
    """Return this machine's GPUs (device/opening.py), in ggml's order. Raises DeviceError, BridgeError."""
    return _asked("") if _has_gpu_backend() else ()


_known: dict[tuple[str | None, str], tuple[KnownDevice, ...]] = {}
"""Devices by the user's back end, which may add devices, and by --device text; "": all GPUs."""


def _asked(text: str) -> tuple[KnownDevice, ...]:
    """Return the devices of a text, each local one asked for once: a child process takes 0.4 s, and more for each GPU
    that it opens. What an RPC server has may change."""

    def failed(reason: str) -> DeviceError:
        what = f"device {text}" if text else "GPUs"
        return DeviceError(f"cannot query {what}: {reason}; check with `oallama doctor`, or use --device none")

    backend = user_backend()
    known = _known.get((backend, text.lower()))
    if known is None:
        rows = ask_child(MODULE, {"device": text}, TIMEOUT_S, failed, unexpected=DeviceError)["devices"]
        known = tuple(KnownDevice(parse_device(row["spec"]), row["identity"]) for row in rows)
        if not any(device.spec.is_remote for device in known):
            _known[backend, text.lower()] = known
            _known.update({(backend, str(device.spec).lower()): (device,) for device in known})
    return known


def identity_of(info: DeviceInfo, driver_files: list[str]) -> dict[str, Any]:
    """Return the identity of a device among others of its name, in JSON.

    Leaves out the memory of an integrated GPU, which the firmware or the kernel varies, and rounds that of others.
    """
    memory = None if info.type == "IGPU" else round(info.memory_total / MEMORY_STEP) * MEMORY_STEP
    return {
        "description": info.description,
        "backend": info.backend,
        "type": info.type,
        "memory_bytes": memory,
        "driver_files": driver_files,
    }


def driver_files(maps: str) -> list[str]:
    """Return name and size of every driver library in a process' memory map (/proc/self/maps).

    The kernel module's version does not change if only the libraries that compile and queue kernels are updated.
    """
    paths = {Path(line.split(None, 5)[5]) for line in maps.splitlines() if len(line.split(None, 5)) == 6}
    return sorted(f"{path.name} {_size(path)}" for path in paths if _DRIVER.fullmatch(path.name))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _has_gpu_backend() -> bool:
    """Whether llama.cpp has a back end for GPUs, by the names of its libraries: loading them would take longer than the
    rest of a call that reads a cached profile."""
    import ggml_bridge
    from ggml_bridge.library import library_folder

    try:
        files = library_folder().glob("libggml-*")
    except ggml_bridge.BridgeError as error:
        raise BridgeError(str(error)) from None
    return user_backend() is not None or not all(_NO_GPU.fullmatch(file.name) for file in files)


#
# the child's side
#


def known_of(device: OpenDevice, maps: str) -> KnownDevice:
    """Return an open device as a KnownDevice. maps: the process' memory map."""
    if device.info is None:
        return KnownDevice(DeviceSpec("none"))
    named = device.spec.kind in ("auto", "ggml")
    spec = DeviceSpec("ggml", name=device.info.name) if named else device.spec
    return KnownDevice(spec, identity_of(device.info, [] if spec.is_remote else driver_files(maps)))


def _ask(request: dict[str, Any], progress: Any) -> dict[str, Any]:
    from oallama.device.opening import list_devices, local_gpus, open_device

    rows = []
    for text in [request["device"]] if request["device"] else [gpu.name for gpu in local_gpus(list_devices())]:
        with open_device(text) as opened:
            known = known_of(opened, _memory_map())
        rows.append({"spec": str(known.spec), "identity": known.identity})
    return {"devices": rows}


def _memory_map() -> str:
    """Return this process' memory map; empty on systems without one."""
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    from ggml_bridge.child import child_main
    from ggml_bridge.library import import_interface_only

    child_main(_ask, import_interface_only)
