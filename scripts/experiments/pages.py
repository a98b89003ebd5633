"""Tables and pages of a report, as Markdown and as self-contained HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oallama.report.page import environment, policy_of

TEMPLATE = Path(__file__).with_name("page.html")
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
    "figure{margin:1.5rem 0}svg{max-width:100%;height:auto}"
)


def html_page(title: str, paragraphs: Sequence[str], sections: Sequence[Section], pictures: Sequence[str]) -> str:
    """The same with pictures, each an SVG. Everything is in the page; it loads nothing and runs nothing."""
    template = environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    policy = policy_of(_CSS, "")
    return template.render(
        title=title, paragraphs=paragraphs, sections=sections, pictures=pictures, css=_CSS, policy=policy
    )


def ms(seconds: float | None, digits: str = ".3g") -> str:
    """`1.52`; "" for None."""
    return "" if seconds is None else f"{1e3 * seconds:{digits}}"
