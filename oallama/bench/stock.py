"""Stock llama.cpp's options: a user's flags read, and where they put operators. Pure.

Where options put an operator is what an arm *says*; what it *did* is read back after the load (verify.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oallama.bench.records import Place, Setting, StockPlacement
from oallama.core.errors import UsageError
from oallama.core.types import Operator
from oallama.model.gguf_types import LLAMA_MAX_LAYERS

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of expert tensors, as llama.cpp's -ncmoe knows them."""


def expert_overrides(n_layers: int) -> tuple[tuple[str, str], ...]:
    """-ncmoe: the expert tensors of the first n_layers layers stay on the CPU. More layers than a model can have are
    written by many who mean all of them."""
    return tuple((rf"blk\.{layer}{EXPERTS}", "CPU") for layer in range(min(n_layers, LLAMA_MAX_LAYERS)))


def expected_places(operators: Sequence[Operator], n_layer: int, placement: StockPlacement) -> dict[str, Place]:
    """Operator -> where -ngl and -ot put it: the last layers on the device, the output being one behind the last; the
    first override that matches goes before that. n_gpu_layers below 0: all. Raises re.error for a bad pattern."""
    compiled = [(re.compile(pattern), where) for pattern, where in placement.overrides]
    first = 0 if placement.n_gpu_layers < 0 else n_layer + 1 - placement.n_gpu_layers
    places: dict[str, Place] = {}
    for operator in operators:
        place: Place = "device" if operator.layer_in(n_layer) >= first else "host"
        for pattern, where in compiled:
            if pattern.search(operator.name):
                place = "host" if where == "CPU" else "device"
                break
        places[operator.name] = place
    return places


def operator_bytes_on_device(operators: Sequence[Operator], n_layer: int, placement: StockPlacement) -> int:
    """Bytes of operators' weights that the options put on the device."""
    return bytes_at(operators, expected_places(operators, n_layer, placement), {})


def bytes_at(operators: Sequence[Operator], places: Mapping[str, Place], device_share: Mapping[str, float]) -> int:
    """Bytes of operators' weights on the device; of a split one, its share."""
    share = {"device": 1.0, "host": 0.0}
    return round(
        sum(o.bytes * share.get(places[o.name], device_share.get(o.name, 0.0)) for o in operators if o.name in places)
    )


#
# a user's flags
#

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
    attention: dict[str, Any] = {}
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
            attention[name] = value
        elif name in ("type_k", "type_v"):
            attention[name] = value
        else:
            changes[name] = _whole(flag, value, 1)
    changes["attention"] = replace(setting.load.attention, **attention)
    return StockPlacement(n_gpu_layers, tuple(overrides), n_cpu_moe), setting.changed(**changes)


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
            shown = flag if flag.isprintable() else repr(flag)
            raise UsageError(
                f"--stock-args: {shown} is not understood; given can be {', '.join(KNOWN)}, and everything else is the "
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
