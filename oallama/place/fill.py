"""Filling the device in rank order (OATO Algorithm 1, lines 16-30)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

FillRule = Literal["continue", "full", "paper"]
"""continue: pass over what does not fit, leave on the CPU what gains nothing on the device (the default). full: pass
over what does not fit, and use the device up whether that gains or not. paper: stop at the first that does not fit,
gain or not."""


def fill(order: Sequence[int], sizes: Sequence[int], budget: int, rule: FillRule = "continue") -> frozenset[int]:
    """The items of `order` that go to the device.

    order: item indices, best first; sizes: bytes of every item; budget: bytes that may be used.
    "paper" stops at the first item that does not fit (Algorithm 1, lines 20-21); the others pass over it and try the
    rest.
    """
    placed = []
    used = 0
    for item in order:
        if used + sizes[item] > budget:
            if rule == "paper":
                break
            continue
        used += sizes[item]
        placed.append(item)
    return frozenset(placed)
