"""A profile to give away: what was measured and on what kind of machine, and nothing that says whose machine it is.

What leaves is named here, field by field; whatever else a fingerprint holds, now or later, stays. In sentences (why a
case was left out, warnings) paths, addresses, files and the given words become `…`. The result is a profile that
`--profile FILE` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from oallama.core.profile import Profile
from oallama.profile.store import profile_to_json

HIDDEN = "…"

_PERSONAL = re.compile(
    r"(?<!\w)[~/]\S+"  # a path from the root or from home
    r"|\b[A-Za-z]:[\\/]\S+|\S*\\\S+"  # a path as Windows writes it
    r"|\S+/\S+/\S+|\S+\.(?:gguf|json|so|py)\b\S*"  # a relative path, a file
    r"|\S+://\S*|\S+@\S+"  # an address
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?"  # IP, with its port
    r"|\b[\w.-]+:\d{2,5}\b"  # host:port
    r"|\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b|\bGPU-[0-9a-fA-F-]+"  # MAC, the number of a card
)
_PCI_ADDRESS = re.compile(r"^[0-9a-fA-F:]+\.[0-7]\s+")


def exported(profile: Profile, personal: Collection[str] = ()) -> dict[str, Any]:
    """The profile as JSON without personal data. personal: words to hide in sentences: the names of user and host."""
    shared = replace(
        profile,
        fingerprint=exported_fingerprint(profile.fingerprint, personal),
        warnings=tuple(without_personal(warning, personal) for warning in profile.warnings),
        skipped=tuple(replace(case, reason=without_personal(case.reason, personal)) for case in profile.skipped),
    )
    return {**profile_to_json(shared), "exported": True}


def exported_fingerprint(fingerprint: dict[str, Any], personal: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a fingerprint that may leave, each in the form in which it may."""
    found = {}
    for name, form in _FORMS.items():
        if fingerprint.get(name) is not None:
            value = form(fingerprint[name])
            found[name] = without_personal(value, personal) if isinstance(value, str) else value
    return found


def without_personal(text: str, personal: Collection[str] = ()) -> str:
    """A sentence with HIDDEN in place of what may name a person, a machine or a file."""
    words = [re.escape(word) for word in personal if len(word) > 1]
    found = _PERSONAL.sub(HIDDEN, text)
    return re.sub(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", HIDDEN, found, flags=re.IGNORECASE) if words else found


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
    """What a device calls itself; an RPC device says where its server is."""
    return HIDDEN if "127.0.0.1" in str(value) or "worker on" in str(value) else str(value)


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
    **dict.fromkeys(("ggml_cpu_build", "ggml_commit", "device_name", "device_backend", "device_type"), str),
    "device_spec": _device_spec,
    "device_description": _description,
    "gpus": _gpus,
    "gpu_environment": lambda value: {str(name): HIDDEN for name in value} if isinstance(value, dict) else {},
    "measured_at": lambda value: str(value)[:10],
    "policy": _policy,
}
"""Field of a fingerprint -> the form in which it may leave."""
