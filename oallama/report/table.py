"""A table as a record (headings and cells of text), and its renderings as plain text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    """Cells are finished text; each row has one per column."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: tuple[str, ...] = ()  # sentences below the table
    width: int | None = None  # in characters, that plain text keeps to where words and numbers let it

    @property
    def widths(self) -> list[int]:
        """Widths of the columns in characters."""
        return [max(map(len, cells)) for cells in zip((c.heading for c in self.columns), *self.rows, strict=True)]

    @property
    def gap(self) -> int:
        """Blanks between columns: two, or one where that is too wide."""
        widths = self.widths
        return 1 if self.width is not None and sum(widths) + 2 * (len(widths) - 1) > self.width else 2

    def lines_of(self, sentence: str) -> list[str]:
        """A sentence above or below the table in lines of its width."""
        return in_lines(sentence, self.width) if self.width else [sentence]


def in_lines(text: str, width: int = WIDTH) -> list[str]:
    """A text in lines of that width, none of whose words is broken; a longer one has a line of its own."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def table(
    title: str, headings: str, rows: Iterable[Sequence[str]], footer: Sequence[str] = (), width: int | None = None
) -> Table:
    """Build a Table; `headings` are words separated by `|`, a leading `>` leans the column right."""
    columns = tuple(
        Column(heading.strip().removeprefix(">"), "right" if heading.strip().startswith(">") else "left")
        for heading in headings.split("|")
    )
    cells = tuple(tuple(row) for row in rows)
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: a row has {len(row)} cells for {len(columns)} columns")
    return Table(title, columns, cells, tuple(footer), width)


def plain(t: Table, style: Callable[[str, bool], str] = lambda text, is_heading: text) -> str:
    """Aligned columns separated by two spaces (one where the table's width asks for it), a line below the headings, no
    trailing blanks. style: changes the look of a cell, not its width; is_heading: of titles and headings."""
    widths, gap = t.widths, " " * t.gap

    def line(cells: Sequence[str], is_heading: bool = False) -> str:
        padded = []
        for cell, width, column in zip(cells, widths, t.columns, strict=True):
            blanks, text = " " * (width - len(cell)), style(cell, is_heading)
            padded.append(blanks + text if column.align == "right" else text + blanks)
        return gap.join(padded).rstrip()

    lines = [style(each, True) for each in t.lines_of(t.title)] if t.title else []
    lines += [line([column.heading for column in t.columns], True), gap.join("-" * width for width in widths)]
    lines += [line(row) for row in t.rows]
    for sentence in t.footer:
        lines += t.lines_of(sentence)
    return "\n".join(lines) + "\n"


def markdown(t: Table) -> str:
    """A GitHub-style table; the title is a heading and the footer a paragraph."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(_markdown_cell(cell) for cell in cells) + " |"

    marks = ("---:" if column.align == "right" else "---" for column in t.columns)
    lines = [f"## {_markdown_cell(t.title)}", ""] if t.title else []
    lines += [line(column.heading for column in t.columns), "| " + " | ".join(marks) + " |"]
    lines += [line(row) for row in t.rows]
    for sentence in t.footer:
        lines += ["", _markdown_cell(sentence)]
    return "\n".join(lines) + "\n"


def comma_separated(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """RFC 4180 CSV with `\\n` line ends; floats with all their digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return out.getvalue()


def _markdown_cell(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*[]|":
        escaped = escaped.replace(mark, "\\" + mark)
    return escaped
