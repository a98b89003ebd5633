"""A user's llama-server flags as an arm: those that decide placement and speed; any other is refused by name. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from oallama.bench.expected import EXPERTS, expert_overrides
from oallama.bench.records import Setting, StockPlacement
from oallama.core.errors import UsageError

_SPELLINGS = {
    "-ngl": "n_gpu_layers", "--gpu-layers": "n_gpu_layers", "--n-gpu-layers": "n_gpu_layers",
    "-ot": "override", "--override-tensor": "override",
    "-ncmoe": "n_cpu_moe", "--n-cpu-moe": "n_cpu_moe",
    "-cmoe": "cpu_moe", "--cpu-moe": "cpu_moe",
    "-fa": "flash_attn", "--flash-attn": "flash_attn",
    "-ctk": "type_k", "--cache-type-k": "type_k",
    "-ctv": "type_v", "--cache-type-v": "type_v",
    "-t": "n_threads", "--threads": "n_threads",
    "-b": "n_batch", "--batch-size": "n_batch",
    "-ub": "n_ubatch", "--ubatch-size": "n_ubatch",
}  # fmt: skip
KNOWN = tuple(flag for flag in _SPELLINGS if not flag.startswith("--"))
_ALL_LAYERS = ("all", "auto", "-1")
_FLASH = ("auto", "on", "off")


def parse_stock_args(text: str, setting: Setting) -> tuple[StockPlacement, Setting]:
    """What `--stock-args "…"` asks for, on top of the setting that all arms share.

    Without -ngl every layer goes to the device, which is llama.cpp's default with --fit off. Raises UsageError naming
    the flag that is unknown, lacks its value or has a wrong one.
    """
    n_gpu_layers, n_cpu_moe = -1, 0
    overrides: list[tuple[str, str]] = []
    changes: dict[str, Any] = {}
    for name, flag, value in _flags(text):
        if name == "n_gpu_layers":
            n_gpu_layers = -1 if value in _ALL_LAYERS else _whole(flag, value, 0)
        elif name == "n_cpu_moe":
            n_cpu_moe = _whole(flag, value, 0)
            overrides += expert_overrides(n_cpu_moe)
        elif name == "cpu_moe":
            overrides.append((EXPERTS, "CPU"))
        elif name == "override":
            overrides += _overrides(value)
        elif name == "flash_attn":
            if value not in _FLASH:
                raise UsageError(f"--stock-args: {flag} takes {', '.join(_FLASH)}, not {value!r}")
            changes[name] = value
        elif name in ("type_k", "type_v"):
            changes[name] = value
        else:
            changes[name] = _whole(flag, value, 1)
    return StockPlacement(n_gpu_layers, tuple(overrides), n_cpu_moe), replace(setting, **changes)


def _flags(text: str) -> Iterator[tuple[str, str, str]]:
    """(meaning, flag as written, value) of each; -cmoe has no value, and -fa may have none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--stock-args {text!r} cannot be read: {error}") from None
    while words:
        flag = words.pop(0)
        name = _SPELLINGS.get(flag)
        if name is None:
            raise UsageError(
                f"--stock-args: {flag} is not understood; given can be {', '.join(KNOWN)}, and everything else is the "
                "same for all arms"
            )
        if name == "cpu_moe" or (name == "flash_attn" and (not words or words[0] not in _FLASH)):
            yield name, flag, "on"
        elif not words:
            raise UsageError(f"--stock-args: {flag} lacks its value")
        else:
            yield name, flag, words.pop(0)


def _whole(flag: str, value: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
        raise UsageError(f"--stock-args: {flag} takes a whole number from {least} on, not {value!r}")
    return int(value)


def _overrides(value: str) -> list[tuple[str, str]]:
    """`pattern=CPU,pattern=CUDA0`: a buffer type other than CPU means the device."""
    found = []
    for item in value.split(","):
        pattern, equals, where = item.rpartition("=")
        if not equals or not pattern or not where:
            raise UsageError(f"--stock-args: -ot {item!r} is no pattern=buffer")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"--stock-args: -ot {pattern!r} is no regular expression: {error}") from None
        found.append((pattern, "CPU" if where == "CPU" else "device"))
    return found
