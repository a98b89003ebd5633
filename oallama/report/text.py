"""Text helpers of the reports: safe names, shapes, layer ranges, shares, terms for placements and times.

Names and metadata of a model file are untrusted: `printable` is applied before they reach a terminal or a page.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from oallama.core.types import ModelInfo, Shape
from oallama.core.units import format_ranges
from oallama.device.spec import device_texts

# control, format (bidi overrides), surrogates, private and unassigned characters, line and paragraph separators
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def printable(text: str, max_chars: int = 200) -> str:
    """`text` with every character that steers a terminal or hides itself written as an escape, cut to `max_chars`."""
    shown = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in _INVISIBLE else c for c in shown)


def shape_text(shape: Shape) -> str:
    """[K, N, E] as `4096×14336`, with `×8` only where there is a third dimension."""
    return "×".join(str(n) for n in (shape if shape[2] != 1 else shape[:2]))


def ranges_text(numbers: Iterable[int]) -> str:
    """Integers as ranges: 0, 1, 2, 7 -> `0-2, 7`."""
    return format_ranges(numbers, ", ")


def percent(part: float, whole: float) -> str:
    """part / whole as `38%`; `<1%` and `>99%` rather than a 0 or 100 that is not true; `-` of nothing."""
    if whole <= 0:
        return "-"
    share = part / whole
    if 0 < share < 0.01:
        return "<1%"
    if 0.99 < share < 1:
        return ">99%"
    return f"{share:.0%}"


def three_digits(value: float) -> str:
    """About three significant digits without an exponent, thousands apart, so that a column can be compared by eye."""
    return f"{value:,.{_decimals(value)}f}"


def signed(value: float) -> str:
    """Three digits with a sign; zero has none."""
    return f"{value:+,.{_decimals(value)}f}" if value else "0"


def rate_text(seconds: float) -> str:
    """Tokens/s from seconds per token; `-` if unknown."""
    return f"{three_digits(1 / seconds)} tokens/s" if seconds > 0 else "-"


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3


def plural(count: int, noun: str) -> str:
    """`1 layer`, `2 layers`, `1,835 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def device_name(device: str) -> str:
    """A device as requested, or several, without the parameters of emulated devices."""
    return printable(" + ".join(device_text.partition(",")[0] for device_text in device_texts(device)))


def policy_on(policy: str, device: str) -> str:
    """`scheinfer on CUDA0`, llama.cpp's placement, or the CPU alone."""
    if device == "none":
        return "the CPU alone"
    return "llama.cpp's placement" if policy == "fit" else f"{printable(policy)} on {device_name(device)}"


def model_title(model: ModelInfo) -> str:
    """The model's own name, or its file's, as it may be shown."""
    return printable(model.name.strip() or model.path.replace("\\", "/").rsplit("/", 1)[-1], 80)


TIMES = "CPU", "card", "transfers"
"""Headings of an operator's times: on the CPU, on the card, and of its transfers."""

CUT = "CPU/copied/card"
"""Heading of the shares of a weight."""

CUT_MEANS = f"{CUT}: share of a weight on the CPU, copied to the card when needed, and on the card."
