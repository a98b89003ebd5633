"""A profile to share: the measurements and the kind of machine, without personal data.

Only the fields listed below are exported; all others, also future ones, are left out, as is free text (warnings,
reasons for skipped cases), which may name anything. The result is a profile that `--profile FILE` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oallama.core.codec import to_json
from oallama.core.profile import Profile

HIDDEN = "…"

_ENDPOINT = re.compile(r"\S+:\d+")


def exported(profile: Profile) -> dict[str, Any]:
    """The profile as JSON without personal data."""
    fingerprint = profile.fingerprint
    shared = replace(
        profile,
        fingerprint={name: fingerprint[name] for name in _UNCHANGED if fingerprint.get(name) is not None}
        | {name: form(fingerprint[name]) for name, form in _FORMS.items() if fingerprint.get(name) is not None},
        warnings=(),
        skipped=tuple(replace(case, reason=HIDDEN) for case in profile.skipped),
    )
    return {**to_json(shared), "exported": True}


def _version(value: Any) -> str:
    """The name and the number, without what a distribution or an owner appended: `Linux 6.18.44`."""
    match = re.match(r"[A-Za-z]*\s*\d+(?:\.\d+)*", str(value))
    return match[0] if match else ""


def _description(value: Any) -> str:
    """A device's own description; an RPC device's is its server's host:port, so it is hidden."""
    return HIDDEN if _ENDPOINT.fullmatch(str(value)) else str(value)


_UNCHANGED = (
    "oallama", "cpu", "cpu_features", "cpu_layouts", "cpu_kernels", "cores_physical", "cores_logical", "cores_allowed",
    "n_threads", "llc_bytes", "memory_bytes", "numa_nodes", "governor", "energy_preference",
    "power_source", "platform_profile", "ggml_version", "ggml_commit", "ggml_cpu_build", "llama_build", "device_name",
    "device_backend", "device_type", "device_memory_bytes", "device_host_buffer", "device_asynchronous", "device_pins",
    "device_takes_residents",
)  # fmt: skip
_FORMS: dict[str, Callable[[Any], Any]] = {
    "system": _version,
    "llama_cpp_python": _version,
    "device_spec": lambda value: str(value).partition(":")[0],  # what follows is a host, or threads and cores
    "device_description": _description,
    "measured_at": lambda value: str(value)[:10],
}
"""Field of a fingerprint -> the form in which it may leave."""
