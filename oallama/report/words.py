"""Words for the places and times of operators: plain ones, and those of the papers, which --verbose asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """times: of an operator on the CPU, on the card, and of its transfers. cut: heading of shares of a weight; means:
    sentence below it."""

    times: tuple[str, str, str]
    cut: str
    means: str


PLAIN = Words(
    ("CPU", "card", "transfers"),
    "CPU/copied/card",
    "CPU/copied/card: how much of a weight is on the CPU, copied to the card when needed, and on the card.",
)
PAPERS = Words(
    ("T_c", "T_g", "T'"), "CC/CG/GG", "CC: computed by the CPU; CG: streamed to the device; GG: on the device."
)
