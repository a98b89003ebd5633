"""A table as a record (headings and cells of text), and its rendering as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

Align = Literal["left", "right"]

WIDTH = 80
"""Characters of a line of text."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and the side its cells lean to; numbers lean right."""

    heading: str
    align: Align = "left"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are finished text; each row has one per column. As plain text it keeps to WIDTH where words and numbers let
    it: long cells wrap."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: tuple[str, ...] = ()  # sentences below the table

    @property
    def layout(self) -> tuple[int, list[int]]:
        """(blanks between columns, column widths). If the table is too wide, one blank instead of two; if it still is,
        the widest text columns shrink, to their longest word at least."""
        cells = [(column.heading, *texts) for column, *texts in zip(self.columns, *self.rows, strict=True)]
        widths = [max(map(len, texts)) for texts in cells]
        gaps = len(widths) - 1
        if sum(widths) + 2 * gaps <= WIDTH:
            return 2, widths
        least = [
            max(len(word) for text in texts for word in (column.heading, *text.split()))
            if column.align == "left" else width
            for column, texts, width in zip(self.columns, cells, widths, strict=True)
        ]  # fmt: skip
        while sum(widths) + gaps > WIDTH:
            room, index = max((w if w > low else 0, i) for i, (w, low) in enumerate(zip(widths, least, strict=True)))
            if not room:
                break
            widths[index] -= 1
        return 1, widths


def in_lines(text: str, width: int = WIDTH) -> list[str]:
    """Wrap text at this width without breaking words; a longer word gets its own line."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def table(title: str, headings: str, rows: Iterable[Sequence[str]], footer: Sequence[str] = ()) -> Table:
    """Build a Table; `headings` are words separated by `|`, a leading `>` leans the column right."""
    columns = tuple(
        Column(heading.strip().removeprefix(">"), "right" if heading.strip().startswith(">") else "left")
        for heading in headings.split("|")
    )
    cells = tuple(tuple(row) for row in rows)
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: a row has {len(row)} cells for {len(columns)} columns")
    return Table(title, columns, cells, tuple(footer))


def plain(t: Table, style: Callable[[str, bool], str] = lambda text, is_heading: text) -> str:
    """Aligned columns in the table's layout, a line below the headings, no trailing blanks. style: changes the look of
    a cell, not its width; is_heading: of titles and headings."""
    blanks, widths = t.layout
    gap = " " * blanks

    def line(cells: Sequence[str], is_heading: bool = False) -> str:
        padded = []
        for cell, width, column in zip(cells, widths, t.columns, strict=True):
            blanks, text = " " * (width - len(cell)), style(cell, is_heading)
            padded.append(blanks + text if column.align == "right" else text + blanks)
        return gap.join(padded).rstrip()

    lines = [style(title_line, True) for title_line in in_lines(t.title)] if t.title else []
    lines += [line([column.heading for column in t.columns], True), gap.join("-" * width for width in widths)]
    for row in t.rows:
        wrapped = (
            in_lines(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)
        )
        lines += [line(cells) for cells in zip_longest(*wrapped, fillvalue="")]
    for sentence in t.footer:
        lines += in_lines(sentence)
    return "\n".join(lines) + "\n"
