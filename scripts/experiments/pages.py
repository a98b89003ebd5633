"""Tables and pages of a report, as Markdown and as self-contained HTML. Pure."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass

Row = Sequence[object]


@dataclass(frozen=True)
class Section:
    """A heading and its table."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Row]


def table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """A table as lines of Markdown, an empty one behind it; [] without rows."""
    if not rows:
        return []
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines] + [""]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def markdown(title: str, paragraphs: Sequence[str], sections: Sequence[Section]) -> str:
    """A page; sections without rows are left out."""
    lines = [f"# {title}"]
    for paragraph in paragraphs:
        lines += ["", paragraph]
    for section in sections:
        if section.rows:
            lines += ["", f"## {section.heading}", "", *table(section.columns, section.rows)[:-1]]
    return "\n".join(lines) + "\n"


_CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #d6dde5;text-align:left}"
    "figure{margin:1.5rem 0}img{max-width:100%}figcaption{color:#5b6b7f}"
)


def html_page(
    title: str, paragraphs: Sequence[str], sections: Sequence[Section], pictures: Sequence[tuple[str, bytes]]
) -> str:
    """The same with pictures (caption, svg). Everything is in the page; it loads nothing and runs nothing."""
    parts = [f"<h1>{_escaped(title)}</h1>", *(f"<p>{_escaped(paragraph)}</p>" for paragraph in paragraphs)]
    for caption, svg in pictures:
        source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
        alt = _escaped(caption)
        parts.append(f'<figure><img alt="{alt}" src="{source}"><figcaption>{alt}</figcaption></figure>')
    for section in sections:
        if section.rows:
            head = "".join(f"<th>{_escaped(column)}</th>" for column in section.columns)
            body = "".join(
                "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in section.rows
            )
            parts.append(
                f"<h2>{_escaped(section.heading)}</h2>"
                f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            )
    digest = base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{_escaped(title)}</title><style>{_CSS}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _escaped(value: object) -> str:
    return html.escape(str(value), quote=True)


def ms(seconds: float | None, digits: str = ".3g") -> str:
    """`1.52`; "" for None."""
    return "" if seconds is None else f"{1e3 * seconds:{digits}}"
