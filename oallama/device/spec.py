"""Parses `--device` to a record. Pure: opens no device and does not query the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from oallama.core.errors import UsageError
from oallama.core.extensions import test_devices
from oallama.device import emulated
from oallama.device.emulated import Emulated, parse_emulated

DeviceKind = Literal["auto", "none", "ggml", "rpc", "emulated"]

FORMS = f"a ggml device name such as CUDA0, rpc://host:port, {emulated.FORM}, auto or none"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9._\-]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A parsed `--device`. `name` for ggml, `endpoint` ("host:port") for rpc, `emulated` for an emulated device.

    others: further devices in the order of use; the remaining fields describe the first device.
    """

    kind: DeviceKind
    name: str = ""
    endpoint: str = ""
    emulated: Emulated | None = None
    others: tuple[DeviceSpec, ...] = ()

    def __str__(self) -> str:
        """Return the text that parses back into this record."""
        if self.others:
            return ",".join(map(str, self.each))
        if self.kind == "ggml":
            return self.name
        if self.kind == "rpc":
            return f"rpc://{self.endpoint}"
        if self.emulated is not None:
            return str(self.emulated)
        return self.kind

    @property
    def each(self) -> tuple[DeviceSpec, ...]:
        """All devices, each as its own DeviceSpec."""
        return (replace(self, others=()), *self.others)

    @property
    def is_none(self) -> bool:
        return self.kind == "none"

    @property
    def is_emulated(self) -> bool:
        """Whether the device's timing is emulated."""
        return self.kind == "emulated"

    @property
    def is_remote(self) -> bool:
        """Whether a ggml RPC server computes, so that the device can be lost unnoticed by this process."""
        return self.kind == "rpc"

    @property
    def servers(self) -> tuple[DeviceSpec, ...]:
        """The RPC servers among all devices."""
        return tuple(device for device in self.each if device.is_remote)

    @property
    def timed(self) -> DeviceSpec:
        """The devices for timing: an emulated device with drawn values."""
        if self.emulated is None:
            return self
        return replace(self, emulated=self.emulated.timed, others=tuple(other.timed for other in self.others))

    @property
    def measured(self) -> DeviceSpec:
        """The device that a profile belongs to, without settings that change no time."""
        return replace(self, emulated=self.emulated.measured) if self.emulated else self


def parse_device(text: str | None) -> DeviceSpec:
    """Parse a `--device` text; None and "" mean auto, CPU means none. Raises UsageError with the accepted forms."""
    stripped = (text or "auto").strip()
    if not stripped.isprintable():
        raise UsageError(f"--device {stripped!r} is not a device; give {FORMS}")
    first, *others = map(_parse_one, device_texts(stripped))
    if not others:
        return first
    kinds = [device.kind for device in (first, *others)]
    local = [kind for kind in kinds if kind != "rpc"]
    if first.kind not in ("ggml", "emulated") or kinds != [first.kind] * len(local) + ["rpc"] * (
        len(kinds) - len(local)
    ):
        raise UsageError(
            f"--device {stripped!r}: several devices must all be local GPUs, or all be emulated, with RPC servers "
            "behind them"
        )
    names = [device.name.lower() or device.endpoint for device in (first, *others) if device.name or device.endpoint]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--device {stripped!r} names {twice} twice; name each device once")
    return replace(first, others=tuple(others))


def device_texts(text: str) -> list[str]:
    """Split the text of several devices: a part between commas without `=` that begins with a letter is a new
    device."""
    devices: list[str] = []
    for part in text.split(","):
        if devices and ("=" in part or not part.strip()[:1].isalpha()):
            devices[-1] += f",{part}"
        else:
            devices.append(part.strip())
    return devices


def _parse_one(stripped: str) -> DeviceSpec:
    if stripped.lower() == "cpu":  # ggml lists the CPU as a device
        return DeviceSpec("none")
    if stripped in ("auto", "none"):
        return DeviceSpec(stripped)  # type: ignore[arg-type]
    if stripped.startswith("rpc://"):
        return DeviceSpec("rpc", endpoint=_endpoint(stripped))
    head = stripped.split(":")[0]
    if head in test_devices():
        return _parse_one(test_devices()[head](stripped))
    if re.split("[:,]", stripped)[0] == "emulated":
        return DeviceSpec("emulated", emulated=parse_emulated(stripped))
    if not _NAME.fullmatch(stripped):
        raise UsageError(f"--device {stripped!r} is not a device; give {FORMS}")
    return DeviceSpec("ggml", name=stripped)


def device_for_plan(requested: str | None, planned: str) -> str:
    """Return the `--device` text that a plan runs with: the requested one, else the plan's, also if the plan uses only
    some of the requested devices. Raises UsageError if only the plan names an RPC server, which would get weights and
    prompts because of a file; and for fewer devices than the plan uses."""
    spec = parse_device(planned)
    if not requested and spec.servers:
        raise UsageError(
            f"the plan would send the model's weights and your prompts to {spec.servers[0]}; "
            f"if you trust that server, add --device {spec}"
        )
    if not requested:
        return planned
    n_asked, n_planned = len(parse_device(requested).each), len(spec.each)
    if n_asked < n_planned and requested != "none":
        raise UsageError(
            f"the plan uses {n_planned} devices, but --device names {n_asked}; name as many, or plan again"
        )
    return planned if n_planned < n_asked else requested


def _endpoint(text: str) -> str:
    match = _ENDPOINT.fullmatch(text.removeprefix("rpc://").rstrip("/"))
    if not match or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"--device {text!r} is not an RPC endpoint; write e.g. rpc://192.168.0.5:50052")
    return f"{match['host']}:{int(match['port'])}"
