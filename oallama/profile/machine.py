"""What a profile belongs to: CPU, threads, libraries, device, power state. Reads files only; loads no native library.
What ggml says of the device is asked elsewhere (device/identity.py) and handed in.

`fingerprint` describes; `fingerprint_key` names the parts that must agree before a stored profile may be used again.
The rest (memory, power state, what the device said about itself) is recorded to be read and compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ggml_bridge.errors import BridgeError
from ggml_bridge.library import library_folder
from oallama.device.cpu import allowed_cpus

KEY_PARTS = (
    "cpu",
    "cpu_features",
    "cores_allowed",
    "llc_bytes",
    "numa_nodes",
    "n_threads",
    "llama_cpp_python",
    "ggml_version",
    "ggml_cpu_build",
    "llama_build",
    "device_spec",
    "device_identity",
)
"""Fields of a fingerprint that must agree."""

POWER_PARTS = ("governor", "energy_preference", "power_source", "platform_profile")
"""Fields whose change makes a stored profile doubtful but not wrong."""

DEFAULT_LLC_BYTES = 32 * 1024 * 1024
_FEATURES = re.compile(r"sse4_2|ssse3|avx.*|amx.*|f16c|fma|bmi2|asimd.*|sve.*|sme[0-9]*|i8mm|bf16|fphp|vsx", re.ASCII)


def fingerprint(
    n_threads: int, device_spec: str, root: Path = Path("/"), identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Facts about this machine that timings may depend on; None if unreadable.

    n_threads: CPU threads of the measured kernels. device_spec: the --device text ("none" without a device), and
    identity what ggml said of that device (KnownDevice). root: where /proc and /sys are (tests).
    """
    import psutil

    libraries = _library_folder()
    return {
        "cpu": _cpu_name(root),
        "cpu_features": _cpu_features(root),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": os.cpu_count(),
        "cores_allowed": len(allowed_cpus()),
        "n_threads": n_threads,
        "llc_bytes": last_level_cache(root, n_threads),
        "memory_bytes": int(psutil.virtual_memory().total),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "governor": _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "energy_preference": _read(root / "sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference"),
        "power_source": _power_source(),
        "platform_profile": _read(root / "sys/firmware/acpi/platform_profile"),
        "system": f"{platform.system()} {platform.release()}",
        "llama_cpp_python": _package_version("llama_cpp_python"),
        "ggml_version": _ggml_version(libraries),
        "ggml_cpu_build": _hash_of(_cpu_libraries(libraries)),
        "llama_build": _hash_of(_library_files(libraries, "libllama")[:1]),
        "device_spec": device_spec,
        **({"device_identity": dict(identity)} if identity is not None else {}),
    }


def fingerprint_key(fingerprint: dict[str, Any]) -> str:
    """16 hex digits over KEY_PARTS; equal keys mean that timings may be reused."""
    parts = {name: fingerprint.get(name) for name in KEY_PARTS}
    if parts["device_identity"] is None:
        del parts["device_identity"]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def power_changes(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences on how the power state differs from when a profile was measured."""
    return [
        f"measured with {name.replace('_', ' ')} {stored.get(name)!r}, which is now {now.get(name)!r}; "
        "use --refresh to measure again"
        for name in POWER_PARTS
        if stored.get(name) != now.get(name)
    ]


def last_level_cache(root: Path, n_threads: int) -> int:
    """Bytes of last-level cache that n_threads can use; DEFAULT_LLC_BYTES if unreadable. A CPU may have several
    last-level caches; n_threads fill at most as many of them."""
    caches: dict[int, dict[str, int]] = {}  # level -> shared CPU list -> bytes
    for index in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*")):
        level, kind, size = _read(index / "level"), _read(index / "type"), _read(index / "size")
        if level and size and level.isdigit() and kind != "Instruction":
            caches.setdefault(int(level), {})[_read(index / "shared_cpu_list") or str(index)] = _cache_size(size)
    sizes = sorted(caches[max(caches)].values(), reverse=True) if caches else []
    return sum(sizes[: max(1, n_threads)]) or DEFAULT_LLC_BYTES


def _library_folder() -> Path | None:
    try:
        return library_folder()
    except BridgeError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _cache_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]] if match else 0


def _cpuinfo(root: Path, *names: str) -> str | None:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names and value.strip():
            return value.strip()
    return None


def _cpu_name(root: Path) -> str:
    return _cpuinfo(root, "model name", "cpu model", "Model") or platform.processor() or platform.machine()


def _cpu_features(root: Path) -> list[str]:
    flags = (_cpuinfo(root, "flags", "Features", "isa") or "").split()
    return sorted({flag for flag in flags if _FEATURES.fullmatch(flag)})


def _power_source() -> str | None:
    """`mains` or `battery`; None for a machine without a battery."""
    import psutil

    battery = psutil.sensors_battery()
    return None if battery is None else "mains" if battery.power_plugged else "battery"


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _library_files(folder: Path | None, stem: str) -> list[Path]:
    if folder is None:
        return []
    return sorted(folder.glob(f"{stem}.so*"))


def _ggml_version(folder: Path | None) -> str | None:
    """Read the version in the name of the versioned library file, such as libggml-base.so.0.25.3."""
    versions = (re.search(r"(\d+\.\d+\.\d+)", path.name) for path in _library_files(folder, "libggml-base"))
    return max((match[1] for match in versions if match), key=len, default=None)


def _cpu_libraries(folder: Path | None) -> list[Path]:
    """The library of CPU kernels, or those of a build for many CPUs."""
    return _library_files(folder, "libggml-cpu")[:1] or _library_files(folder, "libggml-cpu-*")


def _hash_of(files: Iterable[Path]) -> str | None:
    """One hash of libraries: what calls itself the same version was built from other commits and with other flags."""
    contents = [file.read_bytes() for file in files]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16] if contents else None
