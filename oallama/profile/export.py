"""A profile to share: the measurements and the kind of machine, without personal data.

What leaves is named here, field by field; whatever else a fingerprint holds, now or later, stays. So do sentences,
which may name anything: warnings, and why a case was left out. The result is a profile that `--profile FILE` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oallama.core.codec import to_json
from oallama.core.profile import Profile

HIDDEN = "…"

_PCI_ADDRESS = re.compile(r"^[0-9a-fA-F:]+\.[0-7]\s+")
_ENDPOINT = re.compile(r"\S+:\d+")


def exported(profile: Profile) -> dict[str, Any]:
    """The profile as JSON without personal data."""
    fingerprint = profile.fingerprint
    shared = replace(
        profile,
        fingerprint={
            name: form(fingerprint[name]) for name, form in _FORMS.items() if fingerprint.get(name) is not None
        },
        warnings=(),
        skipped=tuple(replace(case, reason=HIDDEN) for case in profile.skipped),
    )
    return {**to_json(shared), "exported": True}


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else None


def _words(value: Any) -> list[str]:
    return [str(word) for word in value if re.fullmatch(r"[\w.+-]{1,40}", str(word))] if isinstance(value, list) else []


def _version(value: Any) -> str:
    """The name and the number, without what a distribution or an owner appended: `Linux 6.18.44`."""
    match = re.match(r"[A-Za-z]*\s*\d+(?:\.\d+)*", str(value))
    return match[0] if match else ""


def _device_spec(value: Any) -> str:
    return str(value).partition(":")[0]  # what follows is a host, or threads and cores


def _gpus(value: Any) -> list[str]:
    return [_PCI_ADDRESS.sub("", str(gpu)) for gpu in value] if isinstance(value, list) else []


def _description(value: Any) -> str:
    """A device's own description; an RPC device's is its server's host:port, so it is hidden."""
    return HIDDEN if _ENDPOINT.fullmatch(str(value)) else str(value)


def _policy(value: Any) -> dict[str, Any]:
    numbers = value.items() if isinstance(value, dict) else ()
    return {str(key): number for key, number in numbers if isinstance(number, (int, float))}


_FORMS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("cpu", "llc_source", "governor", "energy_preference", "power_source", "platform_profile"), str),
    **dict.fromkeys(("cores_physical", "cores_logical", "cores_allowed", "n_threads", "llc_bytes"), _number),
    **dict.fromkeys(("memory_bytes", "numa_nodes", "device_memory_bytes"), _number),
    **dict.fromkeys(("device_host_buffer", "device_asynchronous", "device_pins", "device_takes_residents"), bool),
    **dict.fromkeys(("cpu_features", "cpu_layouts", "cpu_kernels"), _words),
    **dict.fromkeys(("system", "gpu_driver", "llama_cpp_python", "ggml_version", "oallama"), _version),
    **dict.fromkeys(
        ("ggml_cpu_build", "llama_build", "ggml_commit", "device_name", "device_backend", "device_type"), str
    ),
    "device_spec": _device_spec,
    "device_description": _description,
    "gpus": _gpus,
    "gpu_environment": lambda value: {str(name): HIDDEN for name in value} if isinstance(value, dict) else {},
    "measured_at": lambda value: str(value)[:10],
    "policy": _policy,
}
"""Field of a fingerprint -> the form in which it may leave."""
