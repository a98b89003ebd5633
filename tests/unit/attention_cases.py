"""Profiles of the rest of a layer, with flash attention and without it."""

from __future__ import annotations

from dataclasses import replace

from oallama.core.profile import Profile, RestCase, RestShape
from oallama.profile.merge import empty

SHAPE = RestShape(64, 2, 1, 32, 32, 128, True)

PER_POSITION = {"on": 1e-6, "off": 0.6e-6}
"""Of one token in decode, as CPUs are: without flash attention all that is shown costs less."""


def rest(device: str, way: str, scale: float = 1.0) -> tuple[RestCase, ...]:
    """Cases of a device where a token's time is PER_POSITION * scale."""
    shape = replace(SHAPE, flash_attn=way == "on")
    shown = {n_kv: n_kv if way == "on" else max(256, n_kv) for n_kv in (32, 512, 2048)}
    seconds = {n_kv: scale * PER_POSITION[way] * n for n_kv, n in shown.items()}
    return tuple(RestCase(device, 1, n_kv, s, (s,), shape) for n_kv, s in seconds.items())


def profile(*cases: tuple[RestCase, ...], device: str = "CPU") -> Profile:
    return replace(empty({}), device=device, rest=sum(cases, ()))


CPU = profile(rest("CPU", "on"), rest("CPU", "off"))
