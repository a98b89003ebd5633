"""Parses `--device` to a record. Pure: opens no device and does not query the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from oallama.core.errors import UsageError
from oallama.core.units import format_ranges
from oallama.device import emulated
from oallama.device.emulated import Emulated, parse_emulated

DeviceKind = Literal["auto", "none", "ggml", "rpc", "rpc-worker", "cpu-pair", "emulated"]

FORMS = f"a ggml device name such as CUDA0, rpc://host:port, {emulated.FORM}, auto or none"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9._\-]+):(?P<port>\d{1,5})")
_CPUS_TEXT = 4096  # characters of a CPU list
_CPU_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A parsed `--device`. `name` for ggml, `endpoint` ("host:port") for rpc, `threads` and `cpus` for rpc-worker,
    `emulated` for an emulated device.

    `threads` None: chosen when the worker starts; `cpus` empty: the worker is not pinned. others: further devices in
    the order of use; the remaining fields describe the first device.
    """

    kind: DeviceKind
    name: str = ""
    endpoint: str = ""
    threads: int | None = None
    cpus: tuple[int, ...] = ()
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
        if self.is_worker and (self.threads is not None or self.cpus):
            threads = "" if self.threads is None else str(self.threads)
            return f"rpc-worker:{threads}" + (f":{format_ranges(self.cpus)}" if self.cpus else "")
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
    def is_pair(self) -> bool:
        """Whether a second back end on this machine's CPU plays the device."""
        return self.kind == "cpu-pair"

    @property
    def is_worker(self) -> bool:
        """Whether the device is a worker process that ends with this process."""
        return self.kind == "rpc-worker"

    @property
    def is_emulated(self) -> bool:
        """Whether the device's timing is emulated."""
        return self.kind == "emulated"

    @property
    def is_remote(self) -> bool:
        """Whether a ggml RPC server computes, so that the device can be lost unnoticed by this process."""
        return self.kind in ("rpc", "rpc-worker")

    @property
    def servers(self) -> tuple[DeviceSpec, ...]:
        """The RPC servers among all devices that the user started."""
        return tuple(one for one in self.each if one.kind == "rpc")

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

    @property
    def says_all(self) -> bool:
        """Whether the device is known without asking ggml: only this machine's CPU computes."""
        return self.kind in ("none", "cpu-pair", "rpc-worker")


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
    if stripped in ("auto", "none", "cpu-pair"):
        return DeviceSpec(stripped)  # type: ignore[arg-type]
    if stripped.startswith("rpc://"):
        return DeviceSpec("rpc", endpoint=_endpoint(stripped))
    head, *rest = stripped.split(":")
    if head == "rpc-worker":
        return _worker(stripped, rest)
    if re.split("[:,]", stripped)[0] == "emulated":
        return DeviceSpec("emulated", emulated=parse_emulated(stripped))
    if not _NAME.fullmatch(stripped):
        raise UsageError(f"--device {stripped!r} is not a device; give {FORMS}")
    return DeviceSpec("ggml", name=stripped)


def device_for_plan(asked: str | None, planned: str) -> str:
    """Return the `--device` text that a plan runs with: the requested one, else the plan's, also if the plan uses only
    some of the requested devices. Raises UsageError if only the plan names an RPC server, which would get weights and
    prompts because of a file; and for fewer devices than the plan uses."""
    spec = parse_device(planned)
    if not asked and spec.servers:
        raise UsageError(
            f"the plan would send the model's weights and your prompts to {spec.servers[0]}; "
            f"if you trust that server, add --device {spec}"
        )
    if not asked:
        return planned
    n_asked, n_planned = len(parse_device(asked).each), len(spec.each)
    if n_asked < n_planned and asked != "none":
        raise UsageError(
            f"the plan uses {n_planned} devices, but --device names {n_asked}; name as many, or plan again"
        )
    return planned if n_planned < n_asked else asked


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a CPU list in taskset's form (`0,2-3`) to sorted distinct numbers. Raises ValueError on anything else."""
    cpus: set[int] = set()
    if len(text) > _CPUS_TEXT:
        raise ValueError(f"a CPU list of {len(text)} characters is too long; write e.g. 0,2-3")
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        if not match:
            raise ValueError(f"{text!r} is not a CPU list; write e.g. 0,2-3")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first or last - first >= 4096:
            raise ValueError(f"{part.strip()!r} is not a CPU range; write e.g. 2-3")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def _endpoint(text: str) -> str:
    match = _ENDPOINT.fullmatch(text.removeprefix("rpc://").rstrip("/"))
    if not match or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"--device {text!r} is not an RPC endpoint; write e.g. rpc://192.168.0.5:50052")
    return f"{match['host']}:{int(match['port'])}"


def _worker(text: str, rest: list[str]) -> DeviceSpec:
    wrong = f"--device {text!r} is not a worker; write e.g. rpc-worker, rpc-worker:2 or rpc-worker:1:1"
    if len(rest) > 2:
        raise UsageError(wrong)
    threads_text = rest[0] if rest else ""
    if threads_text and not (re.fullmatch(r"[0-9]{1,4}", threads_text) and 0 < int(threads_text) <= 1024):
        raise UsageError(wrong)
    try:
        cpus = parse_cpus(rest[1]) if len(rest) == 2 else ()
    except ValueError as error:
        raise UsageError(f"--device {text!r}: {error}") from None
    return DeviceSpec("rpc-worker", threads=int(threads_text) if threads_text else None, cpus=cpus)
