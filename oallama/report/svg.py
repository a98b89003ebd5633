"""A self-contained SVG picture of bars and text on white."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, GREY = "#1c2733", "#5b6875"
WIDTH, MARGIN = 920, 24  # pixels


def svg(height: float, title: str, subtitle: str, shapes: Iterable[str], label: str | None = None) -> str:
    """A picture of these shapes. label: what a screen reader says; None: the title."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" font-family="system-ui, sans-serif" role="img" aria-label="{escape(label or title)}">',
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
        text(MARGIN, 32, title, 18),
        text(MARGIN, 52, subtitle, 12, GREY),
    )
    return "\n".join([*head, *shapes, "</svg>"]) + "\n"


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>'


def text(x: float, y: float, words: str, size: int = 13, colour: str = INK, ends_at_x: bool = False) -> str:
    """Text that begins, or ends, at x; y is its baseline."""
    anchor = ' text-anchor="end"' if ends_at_x else ""
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" fill="{colour}"{anchor}>{escape(words)}</text>'
