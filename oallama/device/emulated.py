"""`--device emulated[:PRESET|:FILE][,KEY=VALUE…]` as a record, and as parameters of libggml-emulated.

A published card is far too fast for the few cores of most machines without a GPU. So its rates are divided by `scale`:
how much slower this CPU is than that of a usual computer with such a card. Device, link and CPU then have the same
proportions as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from oallama.core.errors import UsageError
from oallama.core.files import read_text
from oallama.core.units import parse_bytes
from oallama.device.card import Card
from oallama.device.cards import CARDS, preset

DEFAULT_CARD = "rtx3060-12"
DEVICE_NAME = "Emulated"  # and a number, from 0
FORM = "emulated[:PRESET|:FILE][,KEY=VALUE…]"
PARAMETERS = "emulated-parameters"  # first word of a file that has libggml-emulated's own parameters
_LEAST, _MOST = 1e-6, 1e9  # bounds of a value: products of several stay far inside a float's range


@dataclass(frozen=True, slots=True)
class Emulated:
    """An emulated device, in the units of `--device`. None: the card's own figure, or set when the device is opened.

    source: a preset's name, or the path of a card's profile or of a parameters file.
    scale: (divisor of rates in bytes/s, divisor of rates in flop/s).
    values "real": results are computed, times mean nothing; "drawn": times are the card's, results are noise.
    """

    source: str = DEFAULT_CARD
    vram: int | None = None  # bytes
    link: float | None = None  # GB/s, pinned, before scaling
    gbps: float | None = None  # GB/s of device memory, before scaling
    tflops: float | None = None  # TFLOP/s by quantised weights, before scaling; float rates keep the card's ratio
    latency: float | None = None  # µs of a kernel, before scaling
    scale: tuple[float, float] | None = None
    cpus: int | None = None  # the core that the device keeps busy
    values: Literal["real", "drawn"] | None = None
    seed: int = 0
    routing: str | None = None  # file of recorded experts
    lost_after: int | None = None  # number of graphs after which every graph fails
    fail_alloc: int | None = None  # the allocation that is refused, counted from 1
    pinned: int | None = None  # bytes of host memory that can be pinned; beyond that it is silently plain memory
    buffers: Literal["name", "address"] | None = (
        None  # "address": it accepts only its own buffer type, so that it can hold no whole block
    )

    def __str__(self) -> str:
        """Return the text that parses back into this record."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return ",".join([f"emulated:{self.source}", *(f"{name}={_written(value)}" for name, value in given)])

    @property
    def is_file(self) -> bool:
        return "/" in self.source or self.source.endswith((".json", ".txt"))

    @property
    def timed(self) -> Emulated:
        """Return the device for profiles and comparisons: with drawn values, without settings that change no time."""
        return replace(self, values="drawn", lost_after=None, fail_alloc=None)

    @property
    def measured(self) -> Emulated:
        """Return the device that a profile belongs to: without core and drawn values, which change no time."""
        return replace(self.timed, cpus=None, seed=0, routing=None)


def parse_emulated(text: str) -> Emulated:
    """Parse `emulated…`. Raises UsageError for an unknown preset or key, and for values out of range."""
    head, *rest = text.split(",")
    _, colon, source = head.partition(":")
    if "=" in source:
        rest, source = [source, *rest], ""
    if colon and not source and not rest:
        raise _wrong(text, "missing preset or file after the colon")
    settings: dict[str, Any] = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if key not in _KEYS or not equals:
            raise _wrong(text, f"unknown key {key!r}; choose from {', '.join(_KEYS)}")
        if key in settings:
            raise _wrong(text, f"{key} is given twice")
        try:
            settings[key] = _KEYS[key](value)
        except ValueError as error:
            raise _wrong(text, f"{key}: {error}") from None
    emulated = Emulated(source or DEFAULT_CARD, **settings)
    return emulated if emulated.is_file else replace(emulated, source=preset(emulated.source).name)


def card_of(spec: Emulated) -> Card:
    """Return the preset's card with the spec's changes, scaled. Needs a preset and a scale."""
    card = preset(spec.source)
    float_share = card.flops_float_per_s / card.flops_per_s
    pageable_share = card.pageable_bytes_per_s / card.pinned_bytes_per_s
    tflops = card.flops_per_s if spec.tflops is None else 1e12 * spec.tflops
    link = card.pinned_bytes_per_s if spec.link is None else 1e9 * spec.link
    changed = replace(
        card,
        memory_bytes=spec.vram or card.memory_bytes,
        bytes_per_s=card.bytes_per_s if spec.gbps is None else 1e9 * spec.gbps,
        flops_per_s=tflops,
        flops_float_per_s=tflops * float_share,
        kernel_s=card.kernel_s if spec.latency is None else 1e-6 * spec.latency,
        pinned_bytes_per_s=link,
        pageable_bytes_per_s=link * pageable_share,
    )
    return changed.slower(*(spec.scale or (1.0, 1.0)))


def parameters_of(spec: Emulated) -> str:
    """Parameters of libggml-emulated that describe the device. Raises UsageError for an unreadable file."""
    if not spec.is_file:
        return card_parameters(card_of(spec))
    try:
        return read_text(spec.source)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"--device {spec}: cannot read {spec.source}: {why}") from None


def card_parameters(card: Card) -> str:
    names = [field.name for field in fields(Card) if field.name.endswith("_s")]
    lines = [f"description {' '.join(card.description.split())}, emulated", f"memory_bytes {card.memory_bytes}"]
    return "\n".join(lines + [f"{name} {getattr(card, name)!r}" for name in names]) + "\n"


def all_parameters(specs: Sequence[Emulated]) -> str:
    """Parameters of libggml-emulated for devices that are used together, named in their order. Raises UsageError for an
    unreadable file."""
    texts = (parameters_of(spec) + use_parameters(spec, number) for number, spec in enumerate(specs))
    return "---\n".join(texts)


def use_parameters(spec: Emulated, number: int = 0) -> str:
    """Return libggml-emulated's parameters for the device's use. Later lines take precedence."""
    lines = {
        "name": f"{DEVICE_NAME}{number}",
        "values": spec.values or "real",
        "seed": spec.seed,
        "cpu": -1 if spec.cpus is None else spec.cpus,
        "memory_bytes": spec.vram,
        "pinned_bytes": spec.pinned,
        "knows_buffers_by": spec.buffers,
        "routing": spec.routing,
        "lost_after": spec.lost_after,
        "fail_alloc": spec.fail_alloc,
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items() if value is not None)


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f"--device {text!r}: {why}; write {FORM}; presets are {', '.join(CARDS)}")


def _written(value: Any) -> str:
    """Return the text that parses as this value of a key."""
    if isinstance(value, tuple):
        return "/".join(dict.fromkeys(map(_written, value)))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


#
# readers of a key's value: each raises ValueError
#


def _rate(text: str) -> float:
    return _number(text.removesuffix("GB/s").removesuffix("GBps"))


def _latency(text: str) -> float:
    return _number(text.removesuffix("us").removesuffix("µs"), least=0.0)


def _number(text: str, least: float = _LEAST) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= _MOST:
        raise ValueError(f"{text!r} is not a number within {least:g} to {_MOST:g}")
    return number


def _scale(text: str) -> tuple[float, float] | None:
    if text == "auto":
        return None
    by_bytes, slash, by_flops = text.partition("/")
    return _number(by_bytes), _number(by_flops) if slash else _number(by_bytes)


def _cpu(text: str) -> int | None:
    return None if text == "auto" else _count(text, 4, "a core number")


def _count(text: str, most_digits: int = 15, what: str = "a whole number") -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > most_digits:
        raise ValueError(f"{text!r} is not {what}")
    return int(text)


def _one_of(first: str, second: str, text: str) -> str:
    if text not in (first, second):
        raise ValueError(f"{text!r} is neither {first} nor {second}")
    return text


def _vram(text: str) -> int:
    size = parse_bytes(text)
    if size <= 0:
        raise ValueError("the memory must be above 0")
    return size


def _file(text: str) -> str:
    if not text:
        raise ValueError("missing file")
    return text


_KEYS: dict[str, Callable[[str], Any]] = {
    "vram": _vram,
    "link": _rate,
    "gbps": _rate,
    "tflops": _number,
    "latency": _latency,
    "scale": _scale,
    "cpus": _cpu,
    "values": partial(_one_of, "real", "drawn"),
    "seed": _count,
    "routing": _file,
    "lost_after": _count,
    "fail_alloc": _count,
    "pinned": parse_bytes,
    "buffers": partial(_one_of, "name", "address"),
}
"""Reader of each key's value."""
